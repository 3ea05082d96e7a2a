"""The metrics of a round of episodes, and their records in episodes.jsonl."""

import statistics
from collections.abc import Sequence

from r3lite.core.episode import CUT_OFF, MALFORMED, Episode
from r3lite.protocols.base import BLANK_QUERY, REPEATED_QUERY
from r3lite.rewards.reward import Scored

NGRAM = 4  # tokens


def round_metrics(
    episodes: Sequence[Episode],
    scored: Sequence[Scored | None],
    turns: Sequence[Sequence[Sequence[int]]],
    logprobs: Sequence[Sequence[float]],
) -> dict[str, float | None]:
    """Metrics of a round, under TRL's names if it has them. Missing rewards (None) are left out of the means.

    `turns` are the sampled tokens of each episode, turn by turn, `logprobs` [N] their log-probabilities. `logps/right`
    is the mean over each right episode's tokens, then over the right episodes, as in GRPO's loss; None if there are
    none. It falls when a collapse begins (arXiv 2512.04220).
    """
    steps = [step for e in episodes for step in e.steps]
    known = [s for s in scored if s is not None]
    totals = [sum(s.steps) for s in known]
    lengths = [sum(map(len, of_episode)) for of_episode in turns]
    metrics = {
        "reward": statistics.fmean(totals) if totals else None,
        "reward_std": statistics.pstdev(totals) if totals else None,
        "missing_rewards": len(scored) - len(known),
        "retrieval_failures": sum(e.failure is not None for e in episodes),
        "completions/mean_length": statistics.fmean(lengths),
        "completions/total_tokens": sum(lengths),
        "completions/clipped_ratio": statistics.fmean(e.finish == CUT_OFF for e in episodes),
        "completions/repeated_ngrams": statistics.fmean(map(repeated_ngrams, turns)),
        "malformed_ratio": statistics.fmean(e.finish == MALFORMED for e in episodes),
        "format_adherence": statistics.fmean(not step.faults for step in steps),
        "searches": statistics.fmean(e.searches for e in episodes),
    }
    for name, fault in (("blank", BLANK_QUERY), ("repeated", REPEATED_QUERY)):
        share = statistics.fmean(any(fault in step.faults for step in e.steps) for e in episodes)
        metrics[f"queries/{name}_ratio"] = share
    for name in sorted({name for s in known for name in s.parts}):
        values = [s.parts[name] for s in known if s.parts.get(name) is not None]  # no recall without gold paragraphs
        if values:
            metrics[f"rewards/{name}/mean"] = statistics.fmean(values)
    for source in sorted({e.question.source for e in episodes if e.question.source}):
        rewards = [s.total for e, s in zip(episodes, scored, strict=True) if s and e.question.source == source]
        if rewards:
            metrics[f"reward/{source}"] = statistics.fmean(rewards)
    right = [statistics.fmean(each) for each, reward in zip(logprobs, scored, strict=True) if reward and reward.right]
    return metrics | {"completions/right": len(right), "logps/right": statistics.fmean(right) if right else None}


def mixed_groups(scored: Sequence[Scored | None], groups: Sequence[int]) -> dict[str, float]:
    """The metric `groups/mixed`: the share of the groups that have right and wrong answers.

    Groups with fewer than two rewards are left out; without any others there is no such metric.
    """
    of_group: dict[int, list[bool]] = {}
    for reward, group in zip(scored, groups, strict=True):
        if reward is not None:
            of_group.setdefault(group, []).append(reward.right)
    mixed = [len(set(rights)) == 2 for rights in of_group.values() if len(rights) > 1]
    return {"groups/mixed": statistics.fmean(mixed)} if mixed else {}


def repeated_ngrams(turns: Sequence[Sequence[int]]) -> float:
    """Share of an episode's n-grams that occur earlier in the same turn: near 1 if the model repeats itself."""
    total = distinct = 0
    for turn in turns:
        ngrams = [tuple(turn[i : i + NGRAM]) for i in range(len(turn) - NGRAM + 1)]
        total, distinct = total + len(ngrams), distinct + len(set(ngrams))
    return 1 - distinct / total if total else 0.0


def episode_records(
    number: int, episodes: Sequence[Episode], scored: Sequence[Scored | None], learned: Sequence[bool] | None = None
) -> list[dict]:
    """The lines of episodes.jsonl for round `number`: steps and rewards of each episode.

    `learned`: whether each episode's group is learned from; None: all are, and the lines do not say so.
    """
    records = []
    for episode, reward in zip(episodes, scored, strict=True):
        rewards = {"rewards": reward and reward.parts, "step_rewards": reward and reward.steps}
        source = {"source": episode.question.source} if episode.question.source else {}
        records.append({"step": number, **source, **episode.to_json(), **rewards})
    for record, is_learned in zip(records, learned or ()):
        record["learned"] = is_learned
    return records
