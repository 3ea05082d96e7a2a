"""The page: charts, tables and episodes as one HTML file that needs no other, and no script."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from r3lite.core.episode import Step
from r3lite.core.records import Record
from r3lite.reports import data, evaluations, learning
from r3lite.reports.chart import COLOURS, DASHES, Bars, Chart, Lines, number, svg
from r3lite.reports.data import DataFile
from r3lite.reports.run import Run

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #62666d; --rule: #d9dce1; --paper: #fff; --card: #fafbfc;
  --mark: #e3f4ec; --edge: #009e73 }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e9eb; --soft: #a0a5ad; --rule: #383c43; --paper: #16181b;
  --card: #1d2024; --mark: #17362b } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 90rem; padding: 1.5rem clamp(1rem, 3vw, 2.5rem) 4rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0 0 .25rem } h2 { font-size: 1.1rem; margin: 2.5rem 0 .75rem;
  border-bottom: 1px solid var(--rule); padding-bottom: .25rem } h3 { font-size: .92rem; margin: 0 0 .25rem }
h3 span, .soft { color: var(--soft); font-weight: normal }
nav { margin-top: .75rem } nav a { margin-right: 1rem } a { color: inherit }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 25rem), 1fr)); gap: 1rem }
figure { margin: 0; padding: .8rem .8rem .5rem; background: var(--card); border: 1px solid var(--rule);
  border-radius: 6px; break-inside: avoid }
svg { width: 100%; height: auto; display: block }
line.grid { stroke: var(--rule) } .tick { fill: var(--soft); font: 11px system-ui, sans-serif }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round } .whisker { stroke: var(--ink); stroke-width: 1.2 }
.legend { display: flex; flex-wrap: wrap; gap: .1rem .9rem; font-size: .8rem; color: var(--soft); margin-top: .25rem }
.legend svg { width: 1.6rem; display: inline; vertical-align: middle; margin-right: .3rem }
.scroll { overflow-x: auto; margin: .6rem 0 1.2rem } h3:not(figure h3) { margin-top: 1.2rem }
 table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem }
th, td { text-align: left; padding: .25rem 1.2rem .25rem 0; border-bottom: 1px solid var(--rule); vertical-align: top }
details { border: 1px solid var(--rule); border-radius: 6px; margin: .4rem 0; background: var(--card) }
summary { cursor: pointer; padding: .45rem .8rem } details > div { padding: 0 .8rem .8rem; overflow-wrap: anywhere }
.step { border-left: 3px solid var(--rule); padding-left: .8rem; margin: .7rem 0; white-space: pre-line }
.document { font-size: .85rem; margin: .35rem 0 0; padding: .3rem .6rem; border: 1px solid var(--rule);
  border-radius: 4px; color: var(--soft); white-space: normal }
.gold { background: var(--mark); border-color: var(--edge); color: var(--ink) }
.right::before { content: "✓ "; color: #009e73 } .wrong::before { content: "✗ "; color: #d55e00 }
.note { border-left: 3px solid #e69f00; padding: .2rem .8rem; margin: .5rem 0 }
@media print { body { padding: 0; font-size: 11px } nav, .screen { display: none }
  .grid { grid-template-columns: 1fr 1fr } details { break-inside: avoid } }
"""


@dataclass(frozen=True)
class Report:
    """What a page tells: of runs, of files of data, and of evaluations how much each differs from the first of the same
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
    """The page; `written` is when. With `again_after`, browsers load it anew after so many seconds."""
    runs, charts = report.runs, report.charts
    named = [*(run.name for run in runs), *(file.name for file in report.data)]
    title = named[0] if len(named) == 1 else f"{len(named)} runs"
    refresh = f'<meta http-equiv="refresh" content="{again_after}">' if again_after else ""
    told = {name: f'<div class="grid">{"".join(map(_figure, some))}</div>' for name, some in charts.items()}
    if "Scores" in told:
        told["Scores"] += _scores(report)
    sections = [*told.items(), *_answers(runs), *_episodes(runs), *_settings(runs)]
    links = "".join(f'<a href="#{_anchor(name)}">{escape(name)}</a>' for name, _ in sections)
    body = "".join(f'<h2 id="{_anchor(name)}">{escape(name)}</h2>{content}' for name, content in sections)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{refresh}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · r3lite</title><style>{STYLE}</style></head><body>"
        f'<h1>{escape(title)}</h1><p class="soft">r3lite, {escape(written)}</p>{_runs(report)}'
        f"<nav>{links}</nav><main>{body}</main></body></html>\n"
    )


def _anchor(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower())


def _runs(report: Report) -> str:
    """What each run and each file is, and what could not be read of it."""
    runs = report.runs
    rows = [["run", "what", "seconds", "tokens"]]
    for run in runs:
        seconds, tokens = run.summary.get("seconds"), run.summary.get("num_tokens")
        rows.append([run.name, run.label, *("-" if x is None else f"{x:,.0f}" for x in (seconds, tokens))])
    rows += [[file.name, file.label, "-", "-"] for file in report.data]
    notes = [f"{run.name}: {note}" for run in runs for note in (*run.notes, *_alarms(run))]
    return _table(rows) + "".join(f'<p class="note">{escape(note)}</p>' for note in notes)


def _alarms(run: Run) -> list[str]:
    """What the guard against a collapse, or a step without a finite loss, has left in the log."""
    alarms = [f"{row['guard/alarm']} (step {row['step']})" for row in run.metrics if row.get("guard/alarm")]
    blank = [row["step"] for row in run.metrics if "loss" in row and row["loss"] is None]
    warnings = [f"the collapse guard raised an alarm: {', '.join(alarms)}"] if alarms else []
    if blank:
        warnings.append(f"no finite loss in {len(blank)} steps, such as step {blank[0]}")
    if not run.metrics and not run.scores:
        warnings.append("nothing was logged yet")
    return warnings


def _scores(report: Report) -> str:
    """The table of all metrics, and how much evaluations of the same questions differ."""
    told = _table(evaluations.table(report.runs))
    rows = evaluations.difference_rows(report.differences)
    if len(rows) > 1:
        told += "<h3>Differences <span>on the same questions, paired bootstrap, 95 % intervals</span></h3>"
        told += _table(rows)
    return told


def _answers(runs: Sequence[Run]) -> Iterable[tuple[str, str]]:
    """How the answers of each evaluation turned out, with some that are wrong."""
    parts = []
    for run in runs:
        if kinds := evaluations.kinds(run):
            rows = [["", "answers", "share"]]
            rows += [[name, str(len(k)), f"{len(k) / len(run.predictions):.1%}"] for name, k in kinds.items()]
            parts.append(f"<h3>{escape(run.name)}</h3>" + _table(rows))
            for name, lines in kinds.items():
                if name != evaluations.RIGHT:
                    parts += [_episode(line, f"{name}: ") for line in lines[: evaluations.EXAMPLES]]
    if parts:
        yield "Answers by outcome", "".join(parts)


def _episodes(runs: Sequence[Run]) -> Iterable[tuple[str, str]]:
    for run in runs:
        parts = [("first round", run.first), ("newest round", run.last)]
        sections = [
            f"<h3>{escape(which)} <span>{len(episodes)} episodes</span></h3>" + "".join(map(_episode, episodes))
            for which, episodes in parts
            if episodes
        ]
        if sections:
            yield "Episodes" if len(runs) == 1 else f"Episodes of {run.name}", "".join(sections)


def _settings(runs: Sequence[Run]) -> Iterable[tuple[str, str]]:
    """All settings of one run; of several those that differ."""
    if not any(run.settings for run in runs):
        return
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    rows = [[name, *(str(run.settings.get(name, "-")) for run in runs)] for name in names]
    if len(runs) > 1:
        rows = [row for row in rows if len(set(row[1:])) > 1]
    shown = _table([["setting", *(run.name for run in runs)], *rows])
    word = "all settings" if len(runs) == 1 else "settings that differ"
    yield "Settings", f"<details><summary>{len(rows)} {word}</summary><div>{shown}</div></details>"


def _figure(chart: Chart) -> str:
    unit = f" <span>{escape(chart.unit)}</span>" if chart.unit else ""
    unit += " <span>(log scale)</span>" if isinstance(chart, Lines) and chart.log else ""
    return f"<figure><h3>{escape(chart.title)}{unit}</h3>{svg(chart)}{_legend(chart)}</figure>"


def _legend(chart: Chart) -> str:
    if isinstance(chart, Bars):
        keys = [(label, i, None) for i, label in enumerate(chart.series)]
    else:
        keys = [(line.label, line.colour, line.dash) for line in chart.lines]
    if len(keys) == 1:  # a single series needs no legend: it is the title
        return ""
    entries = []
    for label, colour, dash in keys:
        fill = COLOURS[colour % len(COLOURS)]
        if dash is None:
            drawn = f'<rect width="14" height="10" x="4" fill="{fill}"/>'
        else:
            stroke = f'stroke="{fill}" stroke-dasharray="{DASHES[dash % len(DASHES)]}"'
            drawn = f'<line x1="0" x2="26" y1="5" y2="5" stroke-width="2.2" {stroke}/>'
        entries.append(f'<span><svg viewBox="0 0 26 10" aria-hidden="true">{drawn}</svg>{escape(label)}</span>')
    return f'<div class="legend">{"".join(entries)}</div>'


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *others = rows
    headings = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in others)
    return f'<div class="scroll"><table><thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table></div>'


def _episode(line: Record, before: str = "") -> str:
    """An episode or a prediction, folded: its steps with documents, gold ones marked, and what it was paid."""
    rewards = line.values.get("rewards") or {}
    em = rewards.get("em", line.values.get("em"))
    mark = "" if em is None else ' class="right"' if em == 1 else ' class="wrong"'
    answers = " or ".join(line.texts("answers", ()))
    gold = set(line.texts("gold_found", ()))
    steps = "".join(_step(i, Step.from_json(step), gold) for i, step in enumerate(line.records("steps", ()), 1))
    paid = ", ".join(f"{name} {number(value)}" for name, value in rewards.items() if isinstance(value, (int, float)))
    prediction = line.text("prediction", "", blank=True)
    said = f"said: {prediction}" if prediction else f"no answer ({line.text('finish', 'unknown')})"
    message = f"<p>{escape(said)}<br>right: {escape(answers)}</p>"
    message += f'<p class="soft">paid: {escape(paid)}</p>' if paid else ""
    question = escape(before + line.text("question", "", blank=True))
    return f"<details><summary{mark}>{question}</summary><div>{message}{steps}</div></details>"


def _step(number: int, step: Step, gold: set[str]) -> str:
    """One step of an episode; `gold` are the ids of the gold paragraphs that its queries brought."""
    parts = [f"<b>{number}</b> {escape(step.analysis)}"]
    for search in step.searches:
        query = search.query + (f" ({search.source})" if search.source else "")
        parts.append(f"\n<b>query</b> {escape(query)}")
    if step.answer is not None:
        parts.append(f"\n<b>answer</b> {escape(step.answer)}")
    if step.faults:
        parts.append(f'\n<span class="soft">faults: {escape(", ".join(step.faults))}</span>')
    for document in step.documents:
        mark = " gold" if document.id in gold else ""
        head = f"<b>{escape(document.title)}</b> [{escape(document.id)}]{mark}"
        parts.append(f'<div class="document{mark}">{head} {escape(document.text)}</div>')
    return f'<div class="step">{"".join(parts)}</div>'
