"""What the page of bench.algorithms tells: scores of each algorithm over the seeds, and gains over SFT and PPO."""

import statistics
from collections.abc import Sequence

import numpy as np

from bench.records import table
from r3lite.evaluation.comparisons import RESAMPLES
from r3lite.evaluation.intervals import interval, resampled_sums

BASE = "ppo"
SCORES = {"f1": "F1", "format_adherence": "format", "retrieval_recall": "recall", "mean_searches": "searches"}
ABOUT = """`python -m bench.algorithms`: the tiny model on the sample world's 300 test questions, greedy, with real
retrieval. Each run starts from its seed's SFT adapter of hasty trajectories, with the tiny preset's settings and what
its algorithm brings, a constant rate after one round of warm-up, and ends after a whole round at about the budget of
generated tokens: each run's are in the second table. Intervals are of 95 %, by bootstrap over the questions, in pairs,
each with its answers of all seeds; they say nothing of how other seeds would differ, so every seed is shown, and they
are not corrected for the number of algorithms: of twenty that are equal to PPO, one is expected outside of its
interval."""


def page(runs: Sequence[dict]) -> str:
    """All runs, by budget and precision: only those are compared."""
    parts = ["# Algorithms on the sample world", ABOUT]
    for budget, precision in dict.fromkeys((run["budget"], run["precision"]) for run in runs):
        some = [run for run in runs if (run["budget"], run["precision"]) == (budget, precision)]
        parts += [f"## {budget:,} generated tokens, {precision}", summary(some), verdict(some), table(each(some))]
    return "\n\n".join(parts) + "\n"


def of_variants(runs: Sequence[dict]) -> dict[str, dict[int, dict]]:
    """By variant and seed."""
    return {
        name: {r["seed"]: r for r in runs if r["section"] == name} for name in dict.fromkeys(r["section"] for r in runs)
    }


def summary(runs: Sequence[dict]) -> str:
    by_name = of_variants(runs)
    first = {run["seed"]: run["sft"] for run in runs}
    rows = [{"algorithm": "SFT only"} | scores(first)]
    for name, by_seed in by_name.items():
        found = {seed: run["rl"] for seed, run in by_seed.items()}
        row = {"algorithm": f"`{name}`"} | scores(found)
        row |= {"tokens": mean_of(found, "tokens", 0), "minutes": mean_of(found, "minutes", 1)}
        row["EM over SFT"] = gain(found, first)
        if name != BASE and (base := {seed: run["rl"] for seed, run in by_name.get(BASE, {}).items()}):
            row["EM over PPO"] = gain(found, base)
            row["F1 over PPO"] = gain(found, base, "each_f1")
        rows.append(row)
    return table(rows)


def scores(found: dict[int, dict]) -> dict:
    """Exact match of each seed and in the mean; the means of the others."""
    row = {"EM of seeds": " / ".join(f"{found[seed]['em']:.3f}" for seed in sorted(found))}
    row["EM"] = mean_of(found, "em")
    return row | {title: mean_of(found, name) for name, title in SCORES.items()}


def mean_of(found: dict[int, dict], name: str, places: int = 3) -> str:
    return f"{statistics.fmean(run[name] for run in found.values()):,.{places}f}"


def difference(found: dict[int, dict], base: dict[int, dict], name: str = "each_em") -> tuple[float, float, float]:
    """The mean difference over the questions of the seeds that both have, and its interval."""
    both = sorted(found.keys() & base.keys())
    a, b = (np.array([[float(x) for x in runs[seed][name]] for seed in both]) for runs in (found, base))
    of_questions = (a - b).mean(0)  # a question is drawn with its answers of all seeds, which are not independent
    means = resampled_sums(of_questions[None, :, None], 0, RESAMPLES)[:, 0, 0] / len(of_questions)
    spread = interval(means)
    return spread["value"], spread["low"], spread["high"]


def gain(found: dict[int, dict], base: dict[int, dict], name: str = "each_em") -> str:
    if not found.keys() & base.keys():
        return ""
    value, low, high = difference(found, base, name)
    return f"{value:+.3f} ({low:+.3f} to {high:+.3f})"


def verdict(runs: Sequence[dict]) -> str:
    """Which algorithms are better or worse than PPO: beyond the interval, and with every seed."""
    by_name = of_variants(runs)
    base = {seed: run["rl"] for seed, run in by_name.pop(BASE, {}).items()}
    parts = []
    for better in (True, False):
        names = [name for name, by_seed in by_name.items() if beats(by_seed, base, better)]
        word = "higher" if better else "lower"
        listed = ", ".join(f"`{name}`" for name in names) or "none"
        parts.append(
            f"Exact match {word} than PPO's beyond the interval, and with every seed of at least two: {listed}."
        )
    return "\n".join(parts)


def beats(by_seed: dict[int, dict], base: dict[int, dict], better: bool) -> bool:
    sign = 1 if better else -1
    found = {seed: run["rl"] for seed, run in by_seed.items()}
    both = found.keys() & base.keys()
    if len(both) < 2 or any(sign * (found[seed]["em"] - base[seed]["em"]) <= 0 for seed in both):
        return False
    _, low, high = difference(found, base)
    return low > 0 if better else high < 0


def each(runs: Sequence[dict]) -> list[dict]:
    """A row for every run."""
    return [
        {"algorithm": f"`{r['section']}`", "seed": r["seed"], "EM": r["rl"]["em"]}
        | {title: r["rl"][name] for name, title in SCORES.items()}
        | {"tokens": r["rl"]["tokens"], "rounds": r["rl"]["rounds"], "minutes": r["rl"]["minutes"]}
        | {"flags": f"`{r['flags']}`", "commit": r["commit"][:7], "processor": r["processor"], "threads": r["threads"]}
        for r in runs
    ]
