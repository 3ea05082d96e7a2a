"""Scores of evaluations: charts with intervals, a table of all metrics, and errors by kind with examples."""

from collections.abc import Sequence

from r3lite.core.records import Record
from r3lite.core.titles import TITLES
from r3lite.reports.chart import Bar, Bars, Chart
from r3lite.reports.run import Run

OVERVIEW = {"em": "exact match", "f1": "F1", "retrieval_recall": "recall", "format_adherence": "format"}
OMITTED = {"sp_em", "sp_precision", "joint_em"}  # left out, because sp_f1 and joint_f1 stand for them
REMAINING = {name: title for name, title in TITLES.items() if name not in OVERVIEW.keys() | OMITTED}
METRICS = OVERVIEW | REMAINING
GROUPS = {"by_hops": "hops", "by_type": "type of question"}
EXAMPLES = 2  # how many of each kind of error are shown
RIGHT = "right"
FAILED = "the retriever failed"  # such a question counts in no score


def evaluated(runs: Sequence[Run]) -> list[Run]:
    """Returns the runs that have scores."""
    return [run for run in runs if run.scores]


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Returns the main scores of each evaluation, and exact match by hops and by type of question."""
    runs = evaluated(runs)
    if not runs:
        return []
    main_scores = Bars(
        name="scores",
        title="Scores, with 95 % intervals",
        unit="",
        groups=list(OVERVIEW.values()),
        series={run.name: [_bar(run.scores, name) for name in OVERVIEW] for run in runs},
    )
    grouped = [_grouped(runs, key, title) for key, title in GROUPS.items()]
    return [main_scores, *(chart for chart in grouped if len(chart.groups) > 1)]


def _grouped(runs: Sequence[Run], key: str, title: str) -> Bars:
    """Returns exact match by the groups of questions that are under `key` in scores.json."""
    runs_with_groups = [run for run in runs if key in run.scores]
    groups: set[str] = set()
    for run in runs_with_groups:
        groups |= run.scores[key].keys()
    sorted_groups = sorted(groups, key=_sort_key)
    by_run = {}
    for run in runs_with_groups:
        scores_by_group = run.scores[key]
        by_run[run.name] = [_bar(scores_by_group.get(group, {}), "em") for group in sorted_groups]
    return Bars(
        name=key.replace("_", "-"),
        title=f"Exact match by {title}",
        unit="",
        groups=sorted_groups,
        series=by_run,
    )


def _sort_key(group: str) -> tuple[int, str]:
    """Returns the sort key of a group: numbers of hops by their size, types by their names."""
    hops = 0
    if group.isdecimal():
        hops = int(group)
    return hops, group


def _bar(scores: dict, name: str) -> Bar | None:
    entry = scores.get(name) or {}
    if entry.get("value") is None:
        return None
    return Bar(entry["value"], entry["low"], entry["high"])


def _cell(bar: Bar | None) -> str:
    if bar is None:
        return "-"
    return f"{bar.value:.3f} ({bar.low:.3f} to {bar.high:.3f})"


def _difference_cell(difference: dict | None) -> str:
    if difference is None:
        return "-"
    return f"{difference['difference']:+.3f} ({difference['low']:+.3f} to {difference['high']:+.3f})"


def table(runs: Sequence[Run]) -> list[list[str]]:
    """Returns all metrics that any evaluation has, a row each, with 95 % intervals; the first row is the head."""
    runs = evaluated(runs)
    rows = [["", *(run.name for run in runs)]]
    for name, title in METRICS.items():
        bars = [_bar(run.scores, name) for run in runs]
        if any(bars):
            rows.append([title, *map(_cell, bars)])
    counts = [str(run.scores.get("n", "-")) for run in runs]
    return [*rows, ["questions", *counts]]


def difference_rows(differences: dict[str, tuple[str, dict]]) -> list[list[str]]:
    """Returns rows of how much the main scores of evaluations are above those of the first; the first row is the head.

    `differences` is that of page.Report.
    """
    rows = [["", *OVERVIEW.values()]]
    for name, (first_name, by_metric) in differences.items():
        cells = [_difference_cell(by_metric.get(metric)) for metric in OVERVIEW]
        rows.append([f"{name} minus {first_name}", *cells])
    return rows


def kinds(run: Run) -> dict[str, list[Record]]:
    """Returns the predictions of an evaluation by `kind_of`, the commonest kind first."""
    by_kind: dict[str, list[Record]] = {}
    for line in run.predictions:
        by_kind.setdefault(kind_of(line), []).append(line)
    return dict(sorted(by_kind.items(), key=lambda pair: -len(pair[1])))


def kind_rows(kinds: dict[str, list[Record]]) -> list[list[str]]:
    """Returns rows of each kind, its number of answers, and their share of the questions that count in the scores.

    The first row is the head.
    """
    counted = sum(len(lines) for kind, lines in kinds.items() if kind != FAILED)
    rows = [["", "answers", "share"]]
    for kind, lines in kinds.items():
        share = "-"
        if kind != FAILED:
            share = f"{len(lines) / counted:.1%}"
        rows.append([kind, str(len(lines)), share])
    return rows


def kind_of(line: Record) -> str:
    """Returns how the answer in a line of predictions.jsonl turned out, in words."""
    if "failure" in line:
        return FAILED
    if line.number("em") == 1:
        return RIGHT
    finish = line.text("finish")
    if finish == "cut_off":
        return "cut off before an answer"
    if finish != "answered":
        return finish
    recall = line.number("recall", None)
    if recall is None:
        return "wrong"
    if recall == 1:
        return "wrong, although all gold paragraphs were found"
    if recall:
        return "wrong, with some gold paragraphs found"
    return "wrong, without a gold paragraph"
