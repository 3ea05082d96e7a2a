"""Charts: round ticks, places by hand, gaps, and SVG that an XML reader takes."""

import xml.etree.ElementTree as ET

import pytest

from r3lite.reports.chart import (
    MARKERS,
    MAX_MARKERS,
    MAX_POINTS,
    Bar,
    Bars,
    Line,
    Lines,
    Scale,
    number,
    svg,
    thinned,
    tick_labels,
    ticks,
)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0.38, 0.81, [0.4, 0.5, 0.6, 0.7, 0.8]),
     (-3, 3, [-2, 0, 2]), (0, 800, [0, 200, 400, 600, 800])],
)  # fmt: skip
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_a_scale_puts_its_ends_and_its_middle_where_they_belong():
    scale = Scale(0, 4, 100, 20)
    assert [scale(0), scale(1), scale(4)] == [100, 80, 20]
    log = Scale.over([0.01, 100], 0, 1, log=True)
    assert log(1) == pytest.approx(0.5)
    assert log.ticks() == pytest.approx([0.01, 0.1, 1, 10, 100])


@pytest.mark.parametrize("values", [[], [5.0], [0.0, 0.0], [-1.0, 2.0]])
def test_a_scale_of_any_values_has_a_length(values):
    for zero in (False, True):
        scale = Scale.over(values, 0, 1, zero=zero)
        assert scale.high > scale.low and len(scale.ticks()) >= 2
        assert all(0 <= scale(value) <= 1 for value in values)


def test_a_value_of_zero_cannot_be_on_a_logarithmic_scale():
    assert not Scale.over([0.0, 1.0], 0, 1, log=True).log


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1267.2, 1267.4, 1267.6, 1267.8], ["1,267.2", "1,267.4", "1,267.6", "1,267.8"]),
        ([1266.5, 1267.0], ["1,266.5", "1,267.0"]),  # labels differed, but 1266.5 was called 1,266
        ([0.99961, 0.99962], ["0.99961", "0.99962"]),
        ([23_450_000.0, 23_500_000.0], ["23,450,000", "23,500,000"]),
        ([0.01, 0.1, 1.0], ["0.01", "0.1", "1"]),
        ([5.0], ["5"]),
    ],
)
def test_labels_have_the_decimals_that_ticks_need(values, expected):
    """A peak of memory that hardly rose had the labels 1,267, 1,267, 1,268 and 1,268."""
    assert tick_labels(values) == expected


def lines_of(drawn: str) -> list[str]:
    return [part.attrib["points"] for part in ET.fromstring(drawn).iter("polyline")]


def test_what_is_not_known_is_a_gap():
    line = Line("loss", [1, 2, 3, 4, 5], [1.0, 2.0, None, 4.0, 5.0])
    parts = lines_of(svg(Lines("x", "Loss", "", [line])))
    assert [len(part.split()) for part in parts] == [2, 2]


def test_what_is_measured_now_and_then_is_joined():
    line = Line("F1", [1, 2, 3, 4, 5, 6], [0.1, None, None, 0.2, None, None])
    assert [len(part.split()) for part in lines_of(svg(Lines("x", "F1", "", [line])))] == [2]


@pytest.mark.parametrize("count", [1, 2, 6, 7, 100])
def test_each_stretch_has_a_few_markers_at_points_of_their_own(count):
    for marker in range(len(MARKERS)):
        line = Line("x", range(count), [1.0] * count, marker=marker)
        assert 1 <= len(line.marked(count)) <= MAX_MARKERS
    assert not Line("x", range(count), [1.0] * count).marked(count)
    if count == 100:
        at = [set(Line("x", [], [], marker=marker).marked(count)) for marker in range(len(MARKERS))]
        assert len(set.union(*at)) == sum(map(len, at))


def test_markers_stand_on_their_line_and_a_single_point_has_one():
    line = Line("run", [1, 2, 3, 4], [1.0, None, 3.0, 4.0], marker=2)
    drawn = ET.fromstring(svg(Lines("x", "Loss", "", [line])))
    points = [tuple(point.split(",")) for part in drawn.iter("polyline") for point in part.attrib["points"].split()]
    shapes = [part for part in drawn.iter("path") if part.attrib["d"] == MARKERS[2]]
    assert len(points) == 3
    assert [f"translate({x} {y})" for x, y in points] == [shape.attrib["transform"] for shape in shapes]
    assert list(drawn.iter("circle")) == []


def test_a_long_line_is_thinned_to_means():
    size = 5 * MAX_POINTS
    line = thinned(Line("x", range(size), [float(i) for i in range(size)]))
    assert len(line.ys) == MAX_POINTS and list(line.ys[:2]) == [2.0, 7.0] and list(line.xs[:2]) == [2.0, 7.0]
    assert thinned(Line("x", range(size), [None] * size)).ys == [None] * MAX_POINTS


def test_bars_stand_on_zero_and_are_told_in_words():
    chart = Bars("x", "Scores", "", ["a<b"], {"run & run": [Bar(0.5, 0.25, 1.0)], "other": [None]})
    root = ET.fromstring(svg(chart))
    (bar,) = root.iter("rect")
    whisker = next(line for line in root.iter("line") if line.attrib["class"] == "whisker")
    # The interval reaches from half the bar's height to twice it.
    top, height = float(bar.attrib["y"]), float(bar.attrib["height"])
    assert float(whisker.attrib["y1"]) == pytest.approx(top + height / 2, abs=0.11)
    assert float(whisker.attrib["y2"]) == pytest.approx(top - height, abs=0.11)
    assert root.attrib["aria-label"] == "Scores. run & run, a<b: 0.5"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (21_500, "21,500"),
        (-20_000.0, "-20,000"),
        (9_999.5, "10,000"),
        (0.00012345, "0.000123"),
        (3e8, "3e+08"),
    ],
)
def test_labels_of_neighbouring_ticks_differ(value, text):
    """20,000 and 20,500 MiB were both 2e+04."""
    assert number(value) == text
