"""The page: charts, tables and episodes as one HTML file (page.html) that needs no other, and no script."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment  # jinja2 comes with torch

from r3lite.core.episode import Step
from r3lite.core.records import Record
from r3lite.reports import data, evaluations, learning
from r3lite.reports.chart import Chart, number, svg
from r3lite.reports.data import DataFile
from r3lite.reports.run import Run

ANSWERS = "Answers by outcome"  # heading of a section


@dataclass(frozen=True)
class Report:
    """What a page shows: runs, files of data, and of evaluations how much each differs from the first of the same
    questions (by name: that one's name, and what evaluation.comparisons.compare has found)."""

    runs: Sequence[Run]
    data: Sequence[DataFile] = ()
    differences: dict[str, tuple[str, dict]] = field(default_factory=dict)

    @property
    def charts(self) -> dict[str, list[Chart]]:
        """All charts, by section."""
        found = {"Scores": evaluations.charts(self.runs)} | learning.charts(self.runs) | data.charts(self.data)
        return {name: some for name, some in found.items() if some}


def html(report: Report, written: str, again_after: int | None = None) -> str:
    """The page; `written` is when. With `again_after`, browsers reload it after that number of seconds."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["anchor"] = lambda name: re.sub(r"[\W_]", "-", name.lower())
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    runs, charts = report.runs, report.charts
    named = [x.name for x in (*runs, *report.data)]
    answers, episodes, settings = _answers(runs), _episodes(runs), _settings(runs)
    return template.render(
        title=named[0] if len(named) == 1 else f"{len(named)} runs",
        written=written,
        again_after=again_after,
        overview=_overview(report),
        notes=[f"{run.name}: {note}" for run in runs for note in (*run.notes, *_alarms(run))],
        sections=[*charts, *[ANSWERS][: len(answers)], *episodes, *["Settings"][: len(settings)]],
        charts=charts,
        svg=svg,
        scores=evaluations.table(runs),
        differences=evaluations.difference_rows(report.differences),
        ANSWERS=ANSWERS,
        answers=answers,
        episodes=episodes,
        settings=settings,
        which_settings="all settings" if len(runs) == 1 else "settings that differ",
    )


def _overview(report: Report) -> list[list[str]]:
    """What each run and each file is; the first row is the head."""
    rows = [["run", "what", "seconds", "tokens"]]
    for run in report.runs:
        sizes = (run.summary.get("seconds"), run.summary.get("num_tokens"))
        rows.append([run.name, run.label, *("-" if x is None else f"{x:,.0f}" for x in sizes)])
    return rows + [[file.name, file.label, "-", "-"] for file in report.data]


def _alarms(run: Run) -> list[str]:
    """What the guard against a collapse, or a step without a finite loss, has left in the log."""
    alarms = [f"{row['guard/alarm']} (step {row['step']})" for row in run.metrics if row.get("guard/alarm")]
    blank = [row["step"] for row in run.metrics if "loss" in row and row["loss"] is None]
    warnings = [f"the collapse guard raised an alarm: {', '.join(alarms)}"] if alarms else []
    if blank:
        warnings.append(f"no finite loss in {len(blank)} steps, such as step {blank[0]}")
    if not run.metrics and not run.scores:
        warnings.append("nothing logged yet")
    return warnings


def _answers(runs: Sequence[Run]) -> list[tuple[str, list[list[str]], list[dict]]]:
    """Of each evaluation its name, how its answers turned out, and some that are wrong."""
    found = []
    for run in runs:
        if kinds := evaluations.kinds(run):
            wrong = [(name, line) for name, k in kinds.items() for line in k[: evaluations.EXAMPLES]]
            shown = [_episode(line, f"{name}: ") for name, line in wrong if name != evaluations.RIGHT]
            found.append((run.name, evaluations.kind_rows(kinds), shown))
    return found


def _episodes(runs: Sequence[Run]) -> dict[str, dict[str, list[dict]]]:
    """By section the episodes of a run's first and newest round."""
    found = {}
    for run in runs:
        rounds = zip(("first round", "latest round"), run.shown.values())
        if shown := {which: list(map(_episode, lines)) for which, lines in rounds}:
            found["Episodes" if len(runs) == 1 else f"Episodes of {run.name}"] = shown
    return found


def _settings(runs: Sequence[Run]) -> list[list[str]]:
    """All settings of one run; of several those that differ. The first row is the head; no rows without settings."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    rows = [[name, *(str(run.settings.get(name, "-")) for run in runs)] for name in names]
    if len(runs) > 1:
        rows = [row for row in rows if len(set(row[1:])) > 1]
    return [["setting", *(run.name for run in runs)], *rows] if names else []


def _episode(line: Record, before: str = "") -> dict:
    """What the page shows of an episode or a prediction: its steps with documents, gold ones marked, its rewards."""
    rewards = line.values.get("rewards") or {}
    em, prediction = rewards.get("em", line.values.get("em")), line.text("prediction", "", blank=True)
    numbers = {name: value for name, value in rewards.items() if isinstance(value, (int, float))}
    return {
        "question": before + line.text("question", "", blank=True),
        "mark": None if em is None else "right" if em == 1 else "wrong",
        "prediction": f"prediction: {prediction}" if prediction else f"no answer ({line.text('finish', 'unknown')})",
        "answers": " or ".join(line.texts("answers", ())),
        "rewards": ", ".join(f"{name} {number(value)}" for name, value in numbers.items()),
        "steps": [Step.from_json(step) for step in line.records("steps", ())],
        "gold": set(line.texts("gold_found", ())),
    }
