"""Scores of evaluations: charts with intervals, a table of all metrics, and errors by kind with examples."""

from collections.abc import Sequence

from r3lite.core.records import Record
from r3lite.core.titles import TITLES
from r3lite.reports.chart import Bar, Bars, Chart
from r3lite.reports.run import Run

OVERVIEW = {"em": "exact match", "f1": "F1", "retrieval_recall": "recall", "format_adherence": "format"}
LEFT_OUT = {"sp_em", "sp_precision", "joint_em"}  # for which the F1s stand
SHOWN = OVERVIEW | {name: title for name, title in TITLES.items() if name not in OVERVIEW.keys() | LEFT_OUT}
GROUPS = {"by_hops": "hops", "by_type": "type of question"}
EXAMPLES = 2  # of each kind of error that are shown
RIGHT = "right"
FAILED = "the retriever failed"  # such a question counts in no score


def evaluated(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.scores]


def charts(runs: Sequence[Run]) -> list[Chart]:
    """The main scores of each evaluation, and exact match by hops and by type of question."""
    runs = evaluated(runs)
    if not runs:
        return []
    of_runs = {run.name: [_bar(run.scores, name) for name in OVERVIEW] for run in runs}
    found: list[Chart] = [Bars("scores", "Scores, with 95 % intervals", "", list(OVERVIEW.values()), of_runs)]
    for key, title in GROUPS.items():
        groups = sorted({group for run in runs for group in run.scores.get(key, {})})
        if len(groups) > 1:
            grouped = [run for run in runs if key in run.scores]
            by_run = {run.name: [_bar(run.scores[key].get(g, {}), "em") for g in groups] for run in grouped}
            found.append(Bars(key.replace("_", "-"), f"Exact match by {title}", "", groups, by_run))
    return found


def _bar(scores: dict, name: str) -> Bar | None:
    entry = scores.get(name) or {}
    return None if entry.get("value") is None else Bar(entry["value"], entry["low"], entry["high"])


def table(runs: Sequence[Run]) -> list[list[str]]:
    """All metrics that an evaluation has, a row each, with 95 % intervals; the first row is the head."""
    runs = evaluated(runs)
    rows = [["", *(run.name for run in runs)]]
    for name, title in SHOWN.items():
        cells = [_bar(run.scores, name) for run in runs]
        if any(cells):
            shown = ("-" if b is None else f"{b.value:.3f} ({b.low:.3f} to {b.high:.3f})" for b in cells)
            rows.append([title, *shown])
    return [*rows, ["questions", *(str(run.scores.get("n", "-")) for run in runs)]]


def difference_rows(differences: dict[str, tuple[str, dict]]) -> list[list[str]]:
    """Of each evaluation how much its main scores are above those of the first one; the first row is the head."""
    rows = [["", *OVERVIEW.values()]]
    for name, (first, found) in differences.items():
        cells = (found.get(metric) for metric in OVERVIEW)
        shown = ("-" if m is None else f"{m['difference']:+.3f} ({m['low']:+.3f} to {m['high']:+.3f})" for m in cells)
        rows.append([f"{name} minus {first}", *shown])
    return rows


def kinds(run: Run) -> dict[str, list[Record]]:
    """The predictions of an evaluation by how they turned out, the commonest kind first."""
    found: dict[str, list[Record]] = {}
    for line in run.predictions:
        found.setdefault(kind_of(line), []).append(line)
    return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))


def kind_rows(kinds: dict[str, list[Record]]) -> list[list[str]]:
    """How many answers are of each kind, and their share of the questions that count in the scores; the first row is
    the head."""
    whole = sum(len(lines) for kind, lines in kinds.items() if kind != FAILED)
    rows = [["", "answers", "share"]]
    for kind, lines in kinds.items():
        share = "-" if kind == FAILED else f"{len(lines) / whole:.1%}"
        rows.append([kind, str(len(lines)), share])
    return rows


def kind_of(line: Record) -> str:
    """What a line of predictions.jsonl is an example of."""
    if "failure" in line:
        return FAILED
    if line.number("em") == 1:
        return RIGHT
    if (finish := line.text("finish")) != "answered":
        return {"cut_off": "cut off before an answer", "malformed": "malformed"}.get(finish, finish)
    recall = line.number("recall", None)
    if recall is None:
        return "wrong"
    if recall == 1:
        return "wrong, although all gold paragraphs were found"
    return "wrong, with some gold paragraphs found" if recall else "wrong, without a gold paragraph"
