"""Charts of training: metrics over steps, of one run or of several side by side."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from r3lite.reports.chart import Chart, Line, Lines
from r3lite.reports.run import Run

MOST_FAULTS = 6  # the most that can be distinguished
EVERY = "*"  # in a metric's name: any one word, which becomes the label


@dataclass(frozen=True)
class Panel:
    """A chart: metrics by name, and what each is called in it. It is left out if no run has any of them."""

    name: str
    title: str
    metrics: dict[str, str]
    unit: str = ""
    log: bool = False


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
              {"frac_reward_zero_std": "equal rewards", "groups/mixed": "right and wrong"}, unit="share"),
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
    """The charts by section, those of each command apart: a loss of SFT is not one of reinforcement learning.

    One run has a colour for each metric; several have one for each run, and dashes.
    """
    trained = [run for run in runs if run.metrics]
    commands = list(dict.fromkeys(run.command for run in trained))
    found: dict[str, list[Chart]] = {}
    for command in commands:
        some = [run for run in trained if run.command == command]
        for section, panels in PANELS.items():
            made = [_chart(panel, some) for panel in panels]
            made += [_faults(some)] if section == "Outputs" else []
            if len(commands) > 1:
                section = f"{command}: {section[0].lower()}{section[1:]}"
                made = [replace(chart, name=f"{command}-{chart.name}") for chart in made]
            found[section] = [chart for chart in made if chart.lines]
    return found


def _chart(panel: Panel, runs: Sequence[Run]) -> Lines:
    metrics = _named(panel, runs)
    lines = []
    for i, run in enumerate(runs):
        for k, (name, label) in enumerate(metrics.items()):
            rows = [row for row in run.metrics if name in row]
            ys = [row[name] if isinstance(row[name], (int, float)) else None for row in rows]
            if any(y is not None for y in ys):  # the run has it, not just another one
                lines.append(_line(run, i, label, k, [row["step"] for row in rows], ys, runs, len(metrics)))
        if panel.name == "memory" and (planned := run.summary.get("planned_memory_mib")):
            ends = [run.metrics[0]["step"], run.metrics[-1]["step"]]
            lines.append(_line(run, i, "planned", 1, ends, [planned] * 2, runs, 2))
    return Lines(panel.name, panel.title, panel.unit, lines, log=panel.log)


def _line(run: Run, i: int, label: str, k: int, xs: list, ys: list, runs: Sequence[Run], metrics: int) -> Line:
    if len(runs) == 1:
        return Line(label, xs, ys, colour=k, dash=k)
    return Line(run.name if metrics == 1 else f"{run.name}: {label}", xs, ys, colour=i, dash=k)


def _named(panel: Panel, runs: Sequence[Run]) -> dict[str, str]:
    """The metrics of a panel that some run has, those with a * by all names there are."""
    known = dict.fromkeys(name for run in runs for row in run.metrics for name in row if row[name] is not None)
    found = {}
    for pattern, label in panel.metrics.items():
        for name in known:
            if match := re.fullmatch(pattern.replace(EVERY, "([^/]*)"), name):
                found[name] = label or match[1].replace("_", " ")
    return found


def _faults(runs: Sequence[Run]) -> Lines:
    """The share of steps with each of the commonest faults, by round."""
    counted = sum((count for run in runs for count in run.faults.values()), Counter())
    kinds = [kind for kind, _ in counted.most_common(MOST_FAULTS)]
    lines = []
    for i, run in enumerate(runs):
        rounds = [number for number in sorted(run.faults) if run.steps[number]]
        for k, kind in enumerate(kinds):
            ys = [run.faults[number][kind] / run.steps[number] for number in rounds]
            if any(ys):
                lines.append(_line(run, i, kind.replace("_", " "), k, rounds, ys, runs, len(kinds) + 1))
    return Lines("faults", "Steps with a fault", "share", lines)
