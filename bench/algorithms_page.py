"""The page of bench.algorithms: the scores of each algorithm over the seeds, and its gains over SFT and PPO."""

import statistics
from collections.abc import Sequence

import numpy as np

from bench.records import table
from r3lite.evaluation.comparisons import RESAMPLES
from r3lite.evaluation.intervals import interval, resampled_sums

BASE = "ppo"  # the variant that all others are compared with
MIN_SEEDS = 2  # a verdict needs results of at least this many seeds
SCORES = {"f1": "F1", "format_adherence": "format", "retrieval_recall": "recall", "mean_searches": "searches"}
ABOUT = """`python -m bench.algorithms`: the tiny model on the sample world's 300 test questions, greedy, with real
retrieval. Each run starts from its seed's SFT adapter of hasty trajectories, with the tiny preset's settings and what
its algorithm brings, a constant rate after one round of warm-up, and ends after a whole round at about the budget of
generated tokens: each run's are in the second table. Intervals are of 95 %, by bootstrap over the questions, in pairs,
each with its answers of all seeds; they say nothing of how other seeds would differ, so every seed is shown, and they
are not corrected for the number of algorithms: of twenty that are equal to PPO, one is expected outside of its
interval."""


def page(runs: Sequence[dict]) -> str:
    """Returns the page, with a section for each token budget and precision: only runs equal in both are compared."""
    parts = ["# Algorithms on the sample world", ABOUT]
    for budget, precision in dict.fromkeys((run["budget"], run["precision"]) for run in runs):
        section_runs = [run for run in runs if (run["budget"], run["precision"]) == (budget, precision)]
        parts += [f"## {budget:,} generated tokens, {precision}", summary(section_runs)]
        parts += [verdict(section_runs), table(run_rows(section_runs))]
    return "\n\n".join(parts) + "\n"


def by_variant(runs: Sequence[dict]) -> dict[str, dict[int, dict]]:
    """Returns the runs by the name of their variant, then by seed."""
    return {
        name: {r["seed"]: r for r in runs if r["section"] == name} for name in dict.fromkeys(r["section"] for r in runs)
    }


def summary(runs: Sequence[dict]) -> str:
    """Returns the table with a row for SFT and for each variant: scores over the seeds, and gains."""
    by_name = by_variant(runs)
    sft = {run["seed"]: run["sft"] for run in reversed(runs)}  # of each seed's first run
    rows = [{"algorithm": "SFT only"} | scores(sft)]
    for name, by_seed in by_name.items():
        results = {seed: run["rl"] for seed, run in by_seed.items()}
        row = {"algorithm": f"`{name}`"} | scores(results)
        row |= {"tokens": mean_of(results, "tokens", 0), "minutes": mean_of(results, "minutes", 1)}
        # A run on another processor began from another adapter of its seed.
        row["EM over SFT"] = gain(results, {seed: run["sft"] for seed, run in by_seed.items()})
        if name != BASE and (base := {seed: run["rl"] for seed, run in by_name.get(BASE, {}).items()}):
            row["EM over PPO"] = gain(results, base)
            row["F1 over PPO"] = gain(results, base, "each_f1")
        rows.append(row)
    return table(rows)


def scores(results: dict[int, dict]) -> dict:
    """Returns cells: exact match of each seed, and the means over the seeds of it and of the other scores.

    `results` has the scores of one variant by seed.
    """
    row = {"EM of seeds": " / ".join(f"{results[seed]['em']:.3f}" for seed in sorted(results))}
    row["EM"] = mean_of(results, "em")
    return row | {title: mean_of(results, name) for name, title in SCORES.items()}


def mean_of(results: dict[int, dict], name: str, places: int = 3) -> str:
    """Returns the mean of a figure over the seeds, with `places` decimal places."""
    return f"{statistics.fmean(run[name] for run in results.values()):,.{places}f}"


def difference(results: dict[int, dict], base: dict[int, dict], name: str = "each_em") -> tuple[float, float, float]:
    """Returns the mean of `results` - `base` over the questions, and the lower and upper end of its 95 % interval.

    Only seeds that both have count. `name` is the score of each question: each_em or each_f1.
    """
    seeds = sorted(results.keys() & base.keys())
    ours, theirs = (
        np.array([[float(score) for score in runs[seed][name]] for seed in seeds]) for runs in (results, base)
    )  # [seeds, questions]
    # The answers of the seeds to one question are not independent, so a question is resampled with all of them.
    by_question = (ours - theirs).mean(0)
    means = resampled_sums(by_question[None, :, None], 0, RESAMPLES)[:, 0, 0] / len(by_question)
    bounds = interval(means)
    return bounds["value"], bounds["low"], bounds["high"]


def gain(results: dict[int, dict], base: dict[int, dict], name: str = "each_em") -> str:
    """Returns a cell with `difference` and its interval; empty if no seed is common to both."""
    if not results.keys() & base.keys():
        return ""
    value, low, high = difference(results, base, name)
    return f"{value:+.3f} ({low:+.3f} to {high:+.3f})"


def verdict(runs: Sequence[dict]) -> str:
    """Returns a sentence on the algorithms that are better than PPO, and one on those that are worse (see `beats`)."""
    by_name = by_variant(runs)
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
    """Returns whether a variant's exact match is higher than that of `base`, or lower if `better` is False.

    It must be so with every common seed, of which there must be at least MIN_SEEDS, and the interval must leave out 0.
    """
    sign = 1 if better else -1
    results = {seed: run["rl"] for seed, run in by_seed.items()}
    seeds = results.keys() & base.keys()
    if len(seeds) < MIN_SEEDS or any(sign * (results[seed]["em"] - base[seed]["em"]) <= 0 for seed in seeds):
        return False
    _, low, high = difference(results, base)
    return low > 0 if better else high < 0


def run_rows(runs: Sequence[dict]) -> list[dict]:
    """Returns the rows of the second table: one for every run."""
    return [
        {"algorithm": f"`{r['section']}`", "seed": r["seed"], "EM": r["rl"]["em"]}
        | {title: r["rl"][name] for name, title in SCORES.items()}
        | {"tokens": r["rl"]["tokens"], "rounds": r["rl"]["rounds"], "minutes": r["rl"]["minutes"]}
        | {"flags": f"`{r['flags']}`", "commit": r["commit"][:7], "processor": r["processor"], "threads": r["threads"]}
        for r in runs
    ]
