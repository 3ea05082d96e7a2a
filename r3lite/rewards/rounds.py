"""What a round of rollouts amounts to: its metrics, and the records of its episodes with what each was paid."""

import statistics
from collections.abc import Collection, Sequence

from r3lite.episode import CUT_OFF, MALFORMED, Episode
from r3lite.rewards.reward import Scored


def round_metrics(
    episodes: Sequence[Episode], scored: Sequence[Scored | None], sampled_tokens: Sequence[int]
) -> dict[str, float | None]:
    """Metrics of a round, under TRL's names if it has them. A missing reward (None) is left out of the means."""
    steps = [step for e in episodes for step in e.steps]
    paid = [p for p in scored if p is not None]
    totals = [sum(p.steps) for p in paid]
    metrics = {
        "reward": statistics.fmean(totals) if totals else None,
        "reward_std": statistics.pstdev(totals) if totals else None,
        "missing_rewards": len(scored) - len(paid),
        "completions/mean_length": statistics.fmean(sampled_tokens),
        "completions/clipped_ratio": statistics.fmean(e.finish == CUT_OFF for e in episodes),
        "malformed_ratio": statistics.fmean(e.finish == MALFORMED for e in episodes),
        "format_adherence": statistics.fmean(not step.faults for step in steps),
        "searches": statistics.fmean(e.searches for e in episodes),
    }
    for name in sorted({name for p in paid for name in p.parts}):
        known = [p.parts[name] for p in paid if p.parts.get(name) is not None]  # no recall without gold paragraphs
        if known:
            metrics[f"rewards/{name}/mean"] = statistics.fmean(known)
    return metrics


def episode_records(
    number: int,
    episodes: Sequence[Episode],
    scored: Sequence[Scored | None],
    kept: Collection[int] | None = None,
    generations: int = 1,
) -> list[dict]:
    """The lines of episodes.jsonl for round `number`: what the model wrote, and what it was paid for it.

    `kept`: the groups of so many episodes that are learned from, if some are not; then each line says so.
    """
    records = []
    for i, (episode, paid) in enumerate(zip(episodes, scored, strict=True)):
        rewards = {"rewards": paid and paid.parts, "step_rewards": paid and paid.steps}
        learned = {} if kept is None else {"learned": i // generations in kept}
        records.append({"step": number, **episode.to_json(), **rewards, **learned})
    return records
