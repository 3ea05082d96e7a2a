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
    """The content of a page: runs, files of data, and how evaluations differ.

    `differences` has, by the name of an evaluation, the name of the first evaluation on the same questions, and what
    evaluation.comparisons.compare tells of the two.
    """

    runs: Sequence[Run]
    data: Sequence[DataFile] = ()
    differences: dict[str, tuple[str, dict]] = field(default_factory=dict)

    @property
    def charts(self) -> dict[str, list[Chart]]:
        """All charts, by section."""
        sections = {"Scores": evaluations.charts(self.runs)}
        sections |= learning.charts(self.runs)
        sections |= data.charts(self.data)
        return {name: charts for name, charts in sections.items() if charts}


def html(report: Report, date_line: str, reload_seconds: int | None = None) -> str:
    """Returns the page; `date_line` tells when it was made. With `reload_seconds`, browsers reload it after so many."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["anchor"] = lambda name: re.sub(r"[\W_]", "-", name.lower())
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    runs = report.runs
    charts = report.charts
    names = [run_or_file.name for run_or_file in (*runs, *report.data)]
    answers = _answers(runs)
    episodes = _episodes(runs)
    settings = _settings(runs)
    sections = [*charts]
    if answers:
        sections.append(ANSWERS)
    sections += episodes
    if settings:
        sections.append("Settings")
    return template.render(
        title=names[0] if len(names) == 1 else f"{len(names)} runs",
        date_line=date_line,
        reload_seconds=reload_seconds,
        overview=_overview(report),
        notes=[f"{run.name}: {note}" for run in runs for note in (*run.notes, *_alarms(run))],
        sections=sections,
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
    """Returns what each run and each file is; the first row is the head."""
    rows = [["run", "what", "seconds", "tokens"]]
    for run in report.runs:
        seconds = _count(run.summary.get("seconds"))
        tokens = _count(run.summary.get("num_tokens"))
        rows.append([run.name, run.label, seconds, tokens])
    for file in report.data:
        rows.append([file.name, file.label, "-", "-"])
    return rows


def _count(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:,.0f}"


def _alarms(run: Run) -> list[str]:
    """Returns warnings of alarms of the collapse guard, of steps without a finite loss, and of an empty log."""
    alarms = [f"{row['guard/alarm']} (step {row['step']})" for row in run.metrics if row.get("guard/alarm")]
    blank_steps = [row["step"] for row in run.metrics if "loss" in row and row["loss"] is None]
    warnings = []
    if alarms:
        warnings.append(f"the collapse guard raised an alarm: {', '.join(alarms)}")
    if blank_steps:
        warnings.append(f"no finite loss in {len(blank_steps)} steps, such as step {blank_steps[0]}")
    if not run.metrics and not run.scores:
        warnings.append("nothing logged yet")
    return warnings


def _answers(runs: Sequence[Run]) -> list[tuple[str, list[list[str]], list[dict]]]:
    """Returns the name of each evaluation, how its answers turned out, and some that are wrong."""
    by_run = []
    for run in runs:
        kinds = evaluations.kinds(run)
        if not kinds:
            continue
        examples = []
        for kind, lines in kinds.items():
            if kind != evaluations.RIGHT:
                examples += [_episode(line, f"{kind}: ") for line in lines[: evaluations.EXAMPLES]]
        by_run.append((run.name, evaluations.kind_rows(kinds), examples))
    return by_run


def _episodes(runs: Sequence[Run]) -> dict[str, dict[str, list[dict]]]:
    """Returns the episodes of each run's first and newest round, by section and round."""
    by_section = {}
    for run in runs:
        rounds = zip(("first round", "latest round"), run.episodes.values())  # a run holds no others
        episodes = {round_name: list(map(_episode, lines)) for round_name, lines in rounds}
        if episodes:
            section = "Episodes" if len(runs) == 1 else f"Episodes of {run.name}"
            by_section[section] = episodes
    return by_section


def _settings(runs: Sequence[Run]) -> list[list[str]]:
    """Returns all settings of one run, of several those that differ; the first row is the head.

    The list is empty if there are none to show.
    """
    names = dict.fromkeys(name for run in runs for name in run.settings)
    if not names:
        return []
    rows = [["setting", *(run.name for run in runs)]]
    for name in names:
        values = [str(run.settings.get(name, "-")) for run in runs]
        if len(runs) == 1 or len(set(values)) > 1:
            rows.append([name, *values])
    return rows if len(rows) > 1 else []


def _episode(line: Record, prefix: str = "") -> dict:
    """Returns what the page shows of an episode or a prediction: its steps, gold documents marked, and its rewards."""
    rewards = line.values.get("rewards") or {}
    em = rewards.get("em", line.values.get("em"))
    mark = None
    if em is not None:
        mark = "right" if em == 1 else "wrong"
    prediction = line.text("prediction", "", blank=True)
    numbers = [f"{name} {number(value)}" for name, value in rewards.items() if isinstance(value, (int, float))]
    return {
        "question": prefix + line.text("question", "", blank=True),
        "mark": mark,
        "prediction": f"prediction: {prediction}" if prediction else f"no answer ({line.text('finish', 'unknown')})",
        "answers": " or ".join(line.texts("answers", ())),
        "rewards": ", ".join(numbers),
        "steps": [Step.from_json(step) for step in line.records("steps", ())],
        "gold": set(line.texts("gold_found", ())),
    }
