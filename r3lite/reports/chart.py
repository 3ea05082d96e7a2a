"""Charts as data, and as SVG that stands in a page: lines over steps, and bars with intervals.

Series differ by colour, and also by another sign, since a chart may be printed in black: lines by dash or marker, bars
by their places. Most colours are Okabe and Ito's, which the colour-blind can tell apart.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import groupby, pairwise

WIDTH = 460
HEIGHT = 250
# Margins of the plot within the picture.
LEFT = 58
RIGHT = 12
TOP = 12
BOTTOM = 34
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a7a7a", "#b59f00")
DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 2", "10 4")
# Circle, square, triangle, diamond, triangle upside down and plus, as paths around the point (0, 0).
MARKERS = (
    "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0Z",
    "M-2.7-2.7h5.4v5.4h-5.4Z",
    "M0-3.6L3.6 2.6H-3.6Z",
    "M0-3.8L3.8 0L0 3.8L-3.8 0Z",
    "M0 3.6L3.6-2.6H-3.6Z",
    "M-3.4-1.1h2.3v-2.3h2.2v2.3h2.3v2.2h-2.3v2.3h-2.2v-2.3h-2.3Z",
)
MAX_MARKERS = 6  # of a stretch of a line
MAX_POINTS = 400  # of a line; longer ones are drawn as means of neighbours


def colour(number: int) -> str:
    """Returns the colour of a series by its number."""
    return COLOURS[number % len(COLOURS)]


@dataclass(frozen=True)
class Line:
    """Values over steps; None leaves a gap, where no value is known.

    `colour`, `dash` and `marker` are numbers of styles; without a `marker`, the points have no markers.
    """

    label: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    colour: int = 0
    dash: int = 0
    marker: int | None = None

    @property
    def values(self) -> list[float]:
        """The values without the gaps."""
        return [y for y in self.ys if y is not None]

    @property
    def stroke(self) -> str:
        """The line's colour and dash as SVG attributes."""
        return f'stroke="{colour(self.colour)}" stroke-dasharray="{DASHES[self.dash % len(DASHES)]}"'

    def marker_at(self, x: str, y: str) -> str:
        """Returns the line's marker as SVG; empty if it has none."""
        if self.marker is None:
            return ""
        shape = MARKERS[self.marker % len(MARKERS)]
        return f'<path d="{shape}" transform="translate({x} {y})" fill="{colour(self.colour)}"/>'

    def marked(self, count: int) -> range:
        """Returns the indices of the points with a marker in a stretch of `count` points.

        Lines with different markers have them at different points, so that they do not hide one another.
        """
        if self.marker is None:
            return range(0)
        distance = -(-count // MAX_MARKERS)
        first = distance * (self.marker % len(MARKERS)) // len(MARKERS)
        return range(first, count, distance)


@dataclass(frozen=True)
class Bar:
    """A value with its interval, if it is known."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Lines:
    """A chart of lines over steps. `log`: the values are shown on a logarithmic scale if all of them are above 0."""

    name: str
    title: str
    unit: str
    lines: Sequence[Line]
    log: bool = False

    @property
    def is_logarithmic(self) -> bool:
        """Whether the scale is logarithmic."""
        lowest = [min(line.values, default=1.0) for line in self.lines]
        return self.log and min(lowest, default=1.0) > 0

    @property
    def legend(self) -> list[tuple[str, str]]:
        """The label of each line, and a sample of the line in SVG."""
        sample = '<line x1="0" x2="26" y1="5" y2="5" stroke-width="2.2" {}/>'
        return [(line.label, sample.format(line.stroke) + line.marker_at("13", "5")) for line in self.lines]


@dataclass(frozen=True)
class Bars:
    """A chart of bars: each series has a bar for each group, or None if the value is not known."""

    name: str
    title: str
    unit: str
    groups: Sequence[str]
    series: dict[str, Sequence[Bar | None]] = field(default_factory=dict)

    @property
    def legend(self) -> list[tuple[str, str]]:
        """The label of each series, and a sample of its bars in SVG."""
        samples = []
        for i, label in enumerate(self.series):
            samples.append((label, f'<rect width="14" height="10" x="4" fill="{colour(i)}"/>'))
        return samples


Chart = Lines | Bars


def thinned(line: Line) -> Line:
    """Returns a line of at most MAX_POINTS points: means of equally many neighbours, where gaps do not count."""
    size = -(-len(line.xs) // MAX_POINTS)
    if size <= 1:
        return line
    starts = range(0, len(line.xs), size)
    xs = [_mean(line.xs[start : start + size]) for start in starts]
    ys = [_mean(line.ys[start : start + size]) for start in starts]
    return replace(line, xs=xs, ys=ys)


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    return sum(numbers) / len(numbers)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Returns about `count` round numbers, 1, 2 or 5 times a power of ten apart, from `low` up to `high`."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    least_step = rough * (1 - 1e-9)  # 1e-9 here and below allows for rounding errors
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= least_step)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def number(value: float) -> str:
    """Returns a value as axes and tables show it."""
    if value == 0:
        return "0"
    size = abs(value)
    if size < 0.001 or size >= 10_000_000:
        return f"{value:.3g}"
    if size >= 1_000:
        return f"{value:,.0f}"
    return f"{value:,.4g}"


def tick_labels(values: Sequence[float]) -> list[str]:
    """Returns ticks as text: by `number`, or with as many decimals as needed if `number` would round one of them."""
    labels = [number(value) for value in values]
    step = min((after - before for before, after in pairwise(values)), default=math.inf)
    shown_values = [float(label.replace(",", "")) for label in labels]
    if all(abs(shown - value) < step / 100 for shown, value in zip(shown_values, values, strict=True)):
        return labels
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{value:,.{decimals}f}" for value in values]


@dataclass(frozen=True)
class Scale:
    """Maps values to places in the picture: `low` to `start`, and `high` to `end`."""

    low: float  # of values, or of their decimal logarithms if `log`
    high: float
    start: float
    end: float
    log: bool = False

    @staticmethod
    def over(
        values: Sequence[float],
        start: float,
        end: float,
        log: bool = False,
        zero: bool = False,
    ) -> "Scale":
        """Returns a scale that holds all values, with a margin; with `zero` it holds 0, too, without a margin there."""
        low = min(values, default=0.0)
        high = max(values, default=1.0)
        if zero:
            low = min(low, 0.0)
            high = max(high, 0.0)
        if log and low > 0:
            return Scale(
                low=math.log10(low) - 0.05,
                high=math.log10(high) + 0.05,
                start=start,
                end=end,
                log=True,
            )
        margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        below = margin
        if zero and low == 0:
            below = 0
        above = margin
        if zero and low < 0 and high == 0:
            above = 0
        return Scale(low=low - below, high=high + above, start=start, end=end)

    def __call__(self, value: float) -> float:
        """Returns the place of a value."""
        if self.log:
            value = math.log10(value)
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Returns round values of the scale."""
        if not self.log:
            return ticks(self.low, self.high)
        powers = range(math.ceil(self.low), math.floor(self.high) + 1)
        if len(powers) >= 2:
            return [10.0**p for p in powers]
        return [t for t in ticks(10**self.low, 10**self.high) if t > 0]


def svg(chart: Chart) -> str:
    """Returns the chart as an SVG element, with its numbers in words for those who cannot see it."""
    if isinstance(chart, Lines):
        drawn, in_words = _lines(chart)
    else:
        drawn, in_words = _bars(chart)
    label = escape(f"{chart.title}. {in_words}", quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{drawn}</svg>'


def _axis(scale: Scale) -> str:
    """Returns horizontal lines at round values of a vertical scale."""
    drawn = []
    values = scale.ticks()
    for tick, label in zip(values, tick_labels(values), strict=True):
        y = f"{scale(tick):.1f}"
        drawn.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        drawn.append(f'<text class="tick" x="{LEFT - 6}" y="{y}" text-anchor="end" dy=".32em">{label}</text>')
    return "".join(drawn)


def _below(x: float, text: str, y: float = HEIGHT - BOTTOM + 15) -> str:
    """Returns a label below the plot, by default that of a tick."""
    return f'<text class="tick" x="{x:.1f}" y="{y}" text-anchor="middle">{escape(text)}</text>'


def _lines(chart: Lines) -> tuple[str, str]:
    """Returns a chart's lines as SVG, and their first and last values in words."""
    lines = [thinned(line) for line in chart.lines]
    values = [y for line in lines for y in line.values]
    steps = [x for line in lines for x in line.xs]
    across = Scale.over(steps, LEFT, WIDTH - RIGHT)
    up = Scale.over(
        values,
        start=HEIGHT - BOTTOM,
        end=TOP,
        log=chart.is_logarithmic,
        zero=chart.unit == "share",
    )
    drawn = [_axis(up)]
    for tick in ticks(across.low, across.high, 6):
        if tick == int(tick) and tick >= 0:
            drawn.append(_below(across(tick), f"{tick:,.0f}"))
    drawn.append(_below((LEFT + WIDTH - RIGHT) / 2, "step", HEIGHT - 4))
    in_words = []
    for line in lines:
        for part in stretches(line):
            places = [(f"{across(x):.1f}", f"{up(y):.1f}") for x, y in part]
            points = " ".join(f"{x},{y}" for x, y in places)
            drawn.append(f'<polyline class="line" {line.stroke} points="{points}"/>')
            for i in line.marked(len(places)):
                drawn.append(line.marker_at(*places[i]))
            if len(places) == 1 and line.marker is None:
                x, y = places[0]
                drawn.append(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour(line.colour)}"/>')
        if line.values:
            in_words.append(f"{line.label}: from {number(line.values[0])} to {number(line.values[-1])}")
    return "".join(drawn), "; ".join(in_words)


def stretches(line: Line) -> list[list[tuple[float, float]]]:
    """Returns the stretches of a line between its gaps, each a list of points (x, y).

    A line with values at fewer than half of its steps, such as a validation's, is one stretch.
    """
    points = list(zip(line.xs, line.ys, strict=True))
    with_value = [(x, y) for x, y in points if y is not None]
    if len(with_value) * 2 < len(points):
        if not with_value:
            return []
        return [with_value]
    stretches = groupby(points, key=lambda point: point[1] is not None)
    return [list(stretch) for has_value, stretch in stretches if has_value]


def _bars(chart: Bars) -> tuple[str, str]:
    """Returns a chart's bars as SVG, and their values in words."""
    bars = [bar for series in chart.series.values() for bar in series if bar is not None]
    ends = []
    for bar in bars:
        ends += [end for end in (bar.value, bar.low, bar.high) if end is not None]
    up = Scale.over(ends, HEIGHT - BOTTOM, TOP, zero=True)
    drawn = [_axis(up)]
    in_words = []
    group_width = (WIDTH - LEFT - RIGHT) / max(1, len(chart.groups))
    width = group_width * 0.8 / max(1, len(chart.series))
    for i, group in enumerate(chart.groups):
        middle = LEFT + (i + 0.5) * group_width
        drawn.append(_below(middle, group))
        for k, (label, series) in enumerate(chart.series.items()):
            bar = series[i]
            if bar is None:
                continue
            text = f"{label}, {group}: {number(bar.value)}"
            x = middle + (k - len(chart.series) / 2) * width
            drawn.append(_bar(bar, up, x=x, width=width, fill=colour(k), text=text))
            in_words.append(text)
    return "".join(drawn), "; ".join(in_words)


def _bar(bar: Bar, up: Scale, x: float, width: float, fill: str, text: str) -> str:
    """Returns one bar, whose left side is at `x`, with its interval as SVG; `text` is its tooltip."""
    top, bottom = sorted((up(bar.value), up(0)))
    drawn = (
        f'<rect x="{x + width * 0.06:.1f}" y="{top:.1f}" width="{width * 0.88:.1f}" '
        f'height="{max(0.8, bottom - top):.1f}" fill="{fill}"><title>{escape(text)}</title></rect>'
    )
    if bar.low is None or bar.high is None:
        return drawn
    centre = f"{x + width / 2:.1f}"
    ends = f'y1="{up(bar.low):.1f}" y2="{up(bar.high):.1f}"'
    return f'{drawn}<line class="whisker" x1="{centre}" x2="{centre}" {ends}/>'
