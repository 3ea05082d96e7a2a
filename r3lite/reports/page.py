"""The page: charts, tables and episodes as one HTML file without scripts that needs no other file.

page.html is its template.
"""

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

    The keys of `differences` are names of evaluations. A value has the name of the first evaluation on the same
    questions, and what evaluation.comparisons.compare returns for the two.
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
    """Returns the page. `date_line` says when it was written; browsers reload it every `reload_seconds`, if given."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["anchor"] = lambda name: re.sub(r"[\W_]", "-", name.lower())
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    runs = report.runs
    charts = report.charts
    names = [run_or_file.name for run_or_file in (*runs, *report.data)]
    answers = _answers(runs)
    episodes = _episodes(runs)
    settings = _settings(runs)
    sections = list(charts)  # the headings of the page
    if answers:
        sections.append(ANSWERS)
    sections += episodes
    if settings:
        sections.append("Settings")
    title = f"{len(names)} runs"
    if len(names) == 1:
        title = names[0]
    which_settings = "settings that differ"
    if len(runs) == 1:
        which_settings = "all settings"
    notes = []
    for run in runs:
        notes += [f"{run.name}: {note}" for note in (*run.notes, *_alarms(run))]
    return template.render(
        title=title,
        date_line=date_line,
        reload_seconds=reload_seconds,
        overview=_overview(report),
        notes=notes,
        sections=sections,
        charts=charts,
        svg=svg,
        scores=evaluations.table(runs),
        differences=evaluations.difference_rows(report.differences),
        ANSWERS=ANSWERS,
        answers=answers,
        episodes=episodes,
        settings=settings,
        which_settings=which_settings,
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
    if figure is None:
        return "-"
    return f"{figure:,.0f}"


def _alarms(run: Run) -> list[str]:
    """Returns warnings: that the collapse guard raised alarms, that losses were not finite, that nothing was logged."""
    alarms = [f"{row['guard/alarm']} (step {row['step']})" for row in run.metrics if row.get("guard/alarm")]
    steps_without_loss = [row["step"] for row in run.metrics if "loss" in row and row["loss"] is None]
    warnings = []
    if alarms:
        warnings.append(f"the collapse guard raised an alarm: {', '.join(alarms)}")
    if steps_without_loss:
        warnings.append(f"no finite loss in {len(steps_without_loss)} steps, such as step {steps_without_loss[0]}")
    if not run.metrics and not run.scores:
        warnings.append("nothing logged yet")
    return warnings


def _answers(runs: Sequence[Run]) -> list[tuple[str, list[list[str]], list[dict]]]:
    """Returns for each evaluation its name, a table of the kinds of its answers, and examples of wrong answers."""
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
    """Returns the episodes of each run's first and newest round, by the heading of the section, then by round."""
    by_section = {}
    for run in runs:
        # `run.episodes` has the first round and, if there were several, the newest.
        rounds = zip(("first round", "latest round"), run.episodes.values())
        episodes = {round_name: list(map(_episode, lines)) for round_name, lines in rounds}
        section = f"Episodes of {run.name}"
        if len(runs) == 1:
            section = "Episodes"
        if episodes:
            by_section[section] = episodes
    return by_section


def _settings(runs: Sequence[Run]) -> list[list[str]]:
    """Returns rows of the settings: of a single run all, of several runs those that differ. The first row is the head.

    Returns [] if there are none to show.
    """
    names = dict.fromkeys(name for run in runs for name in run.settings)
    if not names:
        return []
    rows = [["setting", *(run.name for run in runs)]]
    for name in names:
        values = [str(run.settings.get(name, "-")) for run in runs]
        if len(runs) == 1 or len(set(values)) > 1:
            rows.append([name, *values])
    if len(rows) == 1:
        return []
    return rows


def _episode(line: Record, prefix: str = "") -> dict:
    """Returns what the page shows of an episode or a prediction, such as its steps and its rewards.

    `prefix` begins the question. `gold` has the ids of the documents that are marked as gold.
    """
    rewards = line.values.get("rewards") or {}
    em = rewards.get("em", line.values.get("em"))
    mark = None
    if em is not None:
        mark = "wrong"
        if em == 1:
            mark = "right"
    prediction = line.text("prediction", "", blank=True)
    outcome = f"no answer ({line.text('finish', 'unknown')})"
    if prediction:
        outcome = f"prediction: {prediction}"
    numbers = [f"{name} {number(value)}" for name, value in rewards.items() if isinstance(value, (int, float))]
    return {
        "question": prefix + line.text("question", "", blank=True),
        "mark": mark,
        "prediction": outcome,
        "answers": " or ".join(line.texts("answers", ())),
        "rewards": ", ".join(numbers),
        "steps": [Step.from_json(step) for step in line.records("steps", ())],
        "gold": set(line.texts("gold_found", ())),
    }
