"""Progress without a terminal: a line every ten seconds, and none that repeats a bar."""

from types import SimpleNamespace

from tqdm import tqdm

from r3lite.core import bars
from r3lite.devices.ranks import ALONE


class Clock:
    """A clock that is set by hand."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_a_line_every_ten_seconds_even_if_nothing_ends(monkeypatch, capsys):
    """A collection of an hour said nothing in a log."""
    clock = Clock()
    monkeypatch.setattr(bars, "time", clock)
    lines = bars.TimedLines(tqdm(total=1200, initial=40, disable=True), "self", "questions")
    for timestamp, count in ((104, 1), (109.9, 1), (110, 8), (119, 5), (121, 0), (130.9, 0), (131, 1000)):
        clock.now = timestamp
        if count:
            lines.update(count)
        else:
            lines.tick()
    assert capsys.readouterr().err.splitlines() == [
        "self: 50 of 1,200 questions, 10 s",
        "self: 55 of 1,200 questions, 21 s",
        "self: 1,055 of 1,200 questions, 31 s",
    ]


def test_a_bar_on_a_terminal_and_work_without_a_name_have_no_lines(monkeypatch, capsys):
    monkeypatch.setattr(bars, "PERIOD", 0.0)
    drawn = SimpleNamespace(n=0, total=3, disable=False, update=lambda count: None)
    bars.TimedLines(drawn, "evaluate", "episodes").update()
    bars.TimedLines(tqdm(total=3, disable=True), None, "episodes").update()
    assert capsys.readouterr().err == ""
    bars.TimedLines(tqdm(total=3, disable=True), "evaluate", "episodes").update()
    assert capsys.readouterr().err == "evaluate: 1 of 3 episodes, 0 s\n"


def test_a_bar_within_another_leaves_nothing_behind():
    """tqdm's leave=None: only the outermost stays."""
    assert bars.named("evaluate", "answering") == {"desc": "evaluate", "leave": None, "disable": None}
    assert bars.named(None, "answering") == {"desc": "answering", **bars.BRIEF}


def test_passes_of_a_long_step_are_counted_in_lines(monkeypatch, capsys):
    """Nine minutes of a first step went by without a sign of life."""
    clock = Clock()
    monkeypatch.setattr(bars, "time", clock)
    passes = ["a", "b", "c"]
    items = []
    for item in ALONE.with_progress(passes, "learning", "passes"):
        items.append(item)
        clock.now += 6
    assert items == passes
    assert capsys.readouterr().err == "learning: 2 of 3 passes, 12 s\n"
