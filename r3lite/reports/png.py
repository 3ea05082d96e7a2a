"""Charts as PNG files for papers, by matplotlib (extra `plots`)."""

from collections.abc import Sequence
from pathlib import Path

from r3lite.core.errors import extra
from r3lite.reports.chart import Bars, Chart, Lines, colour, stretches

DASHES = ("-", "--", ":", "-.", (0, (1, 2)), (0, (8, 3)))
MARKERS = ("o", "s", "^", "D", "v", "P")  # those of `chart.MARKERS`
DPI = 200


def check() -> None:
    """Raises R3LiteError if matplotlib is not there."""
    with extra("plots", "--png"):
        import matplotlib  # noqa: F401


def write(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """Writes each chart as <name>.png with DPI dots an inch, and returns the paths."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for chart in charts:
        figure = Figure(figsize=(5, 3.2), layout="constrained")
        axes = figure.add_subplot()
        if isinstance(chart, Lines):
            _lines(chart, axes)
        else:
            _bars(chart, axes)
        axes.set_title(chart.title, fontsize=10)
        axes.set_ylabel(chart.unit)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize=7)
        paths.append(folder / f"{chart.name}.png")
        figure.savefig(paths[-1], dpi=DPI)
    return paths


def _lines(chart: Lines, axes) -> None:
    for line in chart.lines:
        label = line.label
        for points in stretches(line):
            marker = ""
            if line.marker is not None:
                marker = MARKERS[line.marker % len(MARKERS)]
            elif len(points) == 1:  # a point alone makes no line
                marker = "o"
            xs = [x for x, _ in points]
            ys = [y for _, y in points]
            axes.plot(
                xs,
                ys,
                label=label,
                linewidth=1.3,
                color=colour(line.colour),
                linestyle=DASHES[line.dash % len(DASHES)],
                marker=marker,
                markersize=4,
                markevery=list(line.marked(len(points))) or None,
            )
            label = None  # the legend has one entry for all stretches
    if chart.is_logarithmic:
        axes.set_yscale("log")
    axes.set_xlabel("step")


def _bars(chart: Bars, axes) -> None:
    width = 0.8 / len(chart.series)
    for k, (label, series) in enumerate(chart.series.items()):
        offset = (k + 0.5) * width - 0.4
        bars = [(i + offset, bar) for i, bar in enumerate(series) if bar is not None]
        places = [x for x, _ in bars]
        heights = [bar.value for _, bar in bars]
        axes.bar(places, heights, width * 0.9, label=label, color=colour(k))
        for x, bar in bars:
            if bar.low is not None and bar.high is not None:
                axes.plot([x, x], [bar.low, bar.high], color="black", linewidth=0.8)
    axes.set_xticks(range(len(chart.groups)), chart.groups, fontsize=8)
