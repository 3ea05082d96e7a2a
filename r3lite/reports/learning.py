"""Charts of training: metrics over steps, of one run or of several side by side."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from r3lite.reports.chart import Chart, Line, Lines
from r3lite.reports.run import Run

MAX_FAULTS = 6  # kinds of faults in one chart; more lines could not be distinguished
ANY_WORD = "*"  # in the name of a metric: any text without a slash; it becomes the label


@dataclass(frozen=True)
class Panel:
    """A chart of metrics. It is left out if no run has any of them."""

    name: str
    title: str
    metrics: dict[str, str]  # names, in which ANY_WORD may stand, and labels; a blank label: what ANY_WORD stands for
    unit: str = ""
    log: bool = False  # whether the scale is logarithmic if all values are above 0


PANELS = {
    "Results": (
        Panel("reward", "Reward of an episode", {"reward": "mean", "reward_std": "standard deviation"}),
        Panel("reward-by-source", "Reward by source", {"reward/*": ""}),
        Panel("reward-parts", "Reward by part", {"rewards/*/mean": ""}),
        Panel("validation", "Validation",
              {"eval/f1": "F1", "eval/em": "exact match", "eval/retrieval_recall": "recall"}),
        Panel("loss", "Loss", {"loss": "training", "eval_loss": "validation"}),
        Panel("loss-by-source", "Loss by source", {"loss/*": ""}),
        Panel("perplexity", "Perplexity", {"perplexity": "training", "eval_perplexity": "validation"}, log=True),
        Panel("value-loss", "Loss of the critic", {"value_loss": "value loss"}),
        Panel("explained-variance", "Explained variance of the critic", {"explained_variance": "share"}),
    ),
    "Training curves": (
        Panel("kl", "KL divergence from the reference", {"kl": "KL"}, unit="nats per token"),
        Panel("entropy", "Entropy", {"entropy": "entropy"}, unit="nats per token"),
        Panel("clip", "Tokens whose ratio is clipped",
              {"clip_ratio/low_mean": "below", "clip_ratio/high_mean": "above"}, unit="share"),
        Panel("right", "Likelihood of correct answers", {"logps/right": "log-probability"}, unit="nats per token"),
        Panel("groups", "Groups by the rewards of their answers",
              {"frac_reward_zero_std": "equal rewards", "contexts/zero_std": "contexts with equal rewards",
               "groups/mixed": "right and wrong"}, unit="share"),
        Panel("mismatch", "Log-probability: sampler against trainer",
              {"sampling/sampling_logp_difference/mean": "mean", "sampling/sampling_logp_difference/max": "largest"},
              unit="nats", log=True),
        Panel("grad-norm", "Gradient norm, before clipping", {"grad_norm": "norm"}, log=True),
        Panel("learning-rate", "Learning rate", {"learning_rate": "rate"}),
        Panel("off-policy", "Off-policy episodes", {"off_policy/traces": "traces", "off_policy/replays": "replays"}),
        Panel("teacher", "Teacher of failures", {"teacher/failed": "failed", "teacher/guided": "guided"}),
    ),
    "Outputs": (
        Panel("length", "Sampled tokens of an episode", {"completions/mean_length": "mean"}, unit="tokens"),
        Panel("searches", "Searches of an episode", {"searches": "mean"}),
        Panel("form", "Form",
              {"format_adherence": "well-formed steps", "malformed_ratio": "malformed episodes",
               "completions/clipped_ratio": "cut-off episodes"}, unit="share"),
        Panel("repetition", "Repetition",
              {"queries/blank_ratio": "episodes with a blank query", "queries/repeated_ratio": "with a repeated query",
               "completions/repeated_ngrams": "repeated 4-grams"}, unit="share"),
    ),
    "Time and memory": (
        Panel("time", "Time of a step, by part", {"time/*": ""}, unit="s"),
        Panel("cache", "Cached queries", {"queries/cached_ratio": "queries"}, unit="share"),
        Panel("speed", "Throughput", {"tokens_per_second": "tokens"}, unit="tokens/s"),
        Panel("memory", "Peak memory so far", {"peak_memory_mib": "measured"}, unit="MiB"),
    ),
}  # fmt: skip


def charts(runs: Sequence[Run]) -> dict[str, list[Chart]]:
    """Returns the charts by section. Each command has charts of its own: a loss of SFT is not a loss of RL.

    With a single run, each metric has a colour and a dash. With several runs, each run has a colour and a marker, and
    each metric a dash.
    """
    trained = [run for run in runs if run.metrics]
    commands = list(dict.fromkeys(run.command for run in trained))
    by_section: dict[str, list[Chart]] = {}
    for command in commands:
        of_command = [run for run in trained if run.command == command]
        for section, panels in PANELS.items():
            drawn = [_chart(panel, of_command) for panel in panels]
            if section == "Outputs":
                drawn.append(_faults(of_command))
            if len(commands) > 1:
                section = f"{command}: {section[0].lower()}{section[1:]}"
                drawn = [replace(chart, name=f"{command}-{chart.name}") for chart in drawn]
            by_section[section] = [chart for chart in drawn if chart.lines]
    return by_section


def _chart(panel: Panel, runs: Sequence[Run]) -> Lines:
    """Returns the chart of a panel, which may have no lines; the chart of the memory also has the planned memory."""
    metrics = _metrics_of(panel, runs)
    lines = []
    for i, run in enumerate(runs):
        style = _Style(
            run_number=i,
            run_name=run.name,
            is_only_run=len(runs) == 1,
            is_only_metric=len(metrics) == 1,
        )
        for k, (name, label) in enumerate(metrics.items()):
            rows = [row for row in run.metrics if name in row]
            steps = [row["step"] for row in rows]
            ys = [_number(row[name]) for row in rows]
            if any(y is not None for y in ys):  # else only other runs have the metric
                lines.append(style.line(k, label, xs=steps, ys=ys))
        planned = run.summary.get("planned_memory_mib")
        if panel.name == "memory" and planned:
            ends = [run.metrics[0]["step"], run.metrics[-1]["step"]]
            style_of_two = replace(style, is_only_metric=False)
            lines.append(style_of_two.line(1, "planned", xs=ends, ys=[planned, planned]))
    return Lines(panel.name, panel.title, unit=panel.unit, lines=lines, log=panel.log)


def _number(value: object) -> float | None:
    if isinstance(value, (int, float)):
        return value
    return None


@dataclass(frozen=True)
class _Style:
    """How the lines of one run look and what they are called in a chart."""

    run_number: int
    run_name: str
    is_only_run: bool
    is_only_metric: bool

    def line(self, metric_number: int, label: str, xs: list, ys: list) -> Line:
        """Returns the line of a metric; `label` is the metric's."""
        if self.is_only_run:
            return Line(label, xs, ys, colour=metric_number, dash=metric_number)
        full_label = f"{self.run_name}: {label}"
        if self.is_only_metric:
            full_label = self.run_name
        return Line(full_label, xs, ys, colour=self.run_number, dash=metric_number, marker=self.run_number)


def _metrics_of(panel: Panel, runs: Sequence[Run]) -> dict[str, str]:
    """Returns the labels of the metrics of a panel that any run has logged, by the metrics' full names."""
    logged: dict[str, None] = {}  # the names of all metrics, each once, in the order of the logs
    for run in runs:
        for row in run.metrics:
            logged |= dict.fromkeys(name for name, value in row.items() if value is not None)
    labels = {}
    for pattern, label in panel.metrics.items():
        for name in logged:
            match = re.fullmatch(pattern.replace(ANY_WORD, "([^/]*)"), name)
            if match:
                labels[name] = label or match[1].replace("_", " ")
    return labels


def _faults(runs: Sequence[Run]) -> Lines:
    """Returns the share of steps with each of the commonest faults, by round."""
    total: Counter = Counter()
    for run in runs:
        for counts in run.faults.values():
            total += counts
    kinds = [kind for kind, _ in total.most_common(MAX_FAULTS)]
    lines = []
    for i, run in enumerate(runs):
        style = _Style(
            run_number=i,
            run_name=run.name,
            is_only_run=len(runs) == 1,
            is_only_metric=False,
        )
        rounds = [number for number in sorted(run.faults) if run.steps[number]]
        for k, kind in enumerate(kinds):
            shares = [run.faults[number][kind] / run.steps[number] for number in rounds]
            if any(shares):
                lines.append(style.line(k, kind.replace("_", " "), xs=rounds, ys=shares))
    return Lines("faults", "Steps with a fault", unit="share", lines=lines)
