"""The metrics of a round of episodes, and their records in episodes.jsonl."""

import statistics
from collections.abc import Sequence

from r3lite.core.episode import CUT_OFF, MALFORMED, Episode
from r3lite.protocols.base import BLANK_QUERY, REPEATED_QUERY
from r3lite.rewards.reward import EpisodeReward

NGRAM = 4  # tokens of an n-gram


def round_metrics(
    episodes: Sequence[Episode],
    rewards: Sequence[EpisodeReward | None],
    turns: Sequence[Sequence[Sequence[int]]],
    logprobs: Sequence[Sequence[float]],
) -> dict[str, float | None]:
    """Returns the metrics of a round, by the names that TRL gives them, if it has them. Missing rewards (None) are left
    out of the means.

    `turns` has the sampled tokens of each episode, turn by turn, and `logprobs` the log-probabilities of all its
    sampled tokens. The metric `logps/right` is the mean of the log-probabilities in each right episode, averaged over
    the right episodes, as in GRPO's loss. It is None if no episode is right. It falls when a collapse begins (arXiv
    2512.04220).
    """
    present = [reward for reward in rewards if reward is not None]
    totals = [reward.total for reward in present]
    lengths = [sum(map(len, episode_turns)) for episode_turns in turns]
    steps = [step for episode in episodes for step in episode.steps]
    metrics = {
        "reward": statistics.fmean(totals) if totals else None,
        "reward_std": statistics.pstdev(totals) if totals else None,
        "missing_rewards": len(rewards) - len(present),
        "retrieval_failures": sum(episode.failure is not None for episode in episodes),
        "completions/mean_length": statistics.fmean(lengths),
        "completions/total_tokens": sum(lengths),
        "completions/clipped_ratio": _share_finished(episodes, CUT_OFF),
        "completions/repeated_ngrams": statistics.fmean(map(repeated_ngrams, turns)),
        "malformed_ratio": _share_finished(episodes, MALFORMED),
        "format_adherence": statistics.fmean(not step.faults for step in steps),
        "searches": statistics.fmean(episode.search_count for episode in episodes),
        "queries/blank_ratio": _share_with_fault(episodes, BLANK_QUERY),
        "queries/repeated_ratio": _share_with_fault(episodes, REPEATED_QUERY),
    }
    metrics |= _means_of_parts(present)
    metrics |= _means_of_sources(episodes, rewards)
    right_logprobs = []
    for episode_logprobs, reward in zip(logprobs, rewards, strict=True):
        if reward is not None and reward.right:
            right_logprobs.append(statistics.fmean(episode_logprobs))
    metrics["completions/right"] = len(right_logprobs)
    metrics["logps/right"] = statistics.fmean(right_logprobs) if right_logprobs else None
    return metrics


def _share_finished(episodes: Sequence[Episode], finish: str) -> float:
    """Returns the share of the episodes that ended in the way `finish`."""
    return statistics.fmean(episode.finish == finish for episode in episodes)


def _share_with_fault(episodes: Sequence[Episode], fault: str) -> float:
    """Returns the share of the episodes with the fault in at least one step."""
    return statistics.fmean(any(fault in step.faults for step in episode.steps) for episode in episodes)


def _means_of_parts(present: Sequence[EpisodeReward]) -> dict[str, float]:
    """Returns the mean of each part over the rewards that have it (recall, for example, needs gold paragraphs)."""
    by_name: dict[str, list[float]] = {}
    for reward in present:
        for name, value in reward.parts.items():
            if value is not None:
                by_name.setdefault(name, []).append(value)
    return {f"rewards/{name}/mean": statistics.fmean(by_name[name]) for name in sorted(by_name)}


def _means_of_sources(episodes: Sequence[Episode], rewards: Sequence[EpisodeReward | None]) -> dict[str, float]:
    """Returns the mean total reward of each source of questions. Sources without a name or a reward are left out."""
    by_source: dict[str, list[float]] = {}
    for episode, reward in zip(episodes, rewards, strict=True):
        source = episode.question.source
        if source and reward is not None:
            by_source.setdefault(source, []).append(reward.total)
    return {f"reward/{source}": statistics.fmean(by_source[source]) for source in sorted(by_source)}


def mixed_groups(rewards: Sequence[EpisodeReward | None], groups: Sequence[int]) -> dict[str, float]:
    """Returns the metric `groups/mixed`: the share of the groups that have both right and wrong answers.

    `groups` has the number of each episode's group. Groups with fewer than two rewards are left out. If no group
    remains, the result is empty.
    """
    by_group: dict[int, list[bool]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        if reward is not None:
            by_group.setdefault(group, []).append(reward.right)
    is_mixed = [any(rights) and not all(rights) for rights in by_group.values() if len(rights) > 1]
    if not is_mixed:
        return {}
    return {"groups/mixed": statistics.fmean(is_mixed)}


def repeated_ngrams(turns: Sequence[Sequence[int]]) -> float:
    """Returns the share of an episode's n-grams that occur earlier in the same turn; 0 if it has no n-gram.

    The share is near 1 if the model repeats itself.
    """
    total = 0
    distinct = 0
    for turn in turns:
        starts = range(len(turn) - NGRAM + 1)
        ngrams = [tuple(turn[start : start + NGRAM]) for start in starts]
        total += len(ngrams)
        distinct += len(set(ngrams))
    if not total:
        return 0.0
    return 1 - distinct / total


def episode_records(
    number: int,
    episodes: Sequence[Episode],
    rewards: Sequence[EpisodeReward | None],
    learned: Sequence[bool] | None = None,
) -> list[dict]:
    """Returns the lines of episodes.jsonl for round `number`: steps and rewards of each episode.

    `learned` says for each episode whether its group is learned from, and this is added to its line. If `learned` is
    None, all groups are learned from, and nothing is added.
    """
    records = []
    for episode, reward in zip(episodes, rewards, strict=True):
        record: dict = {"step": number}
        if episode.question.source:
            record["source"] = episode.question.source
        record |= episode.to_json()
        record["rewards"] = None if reward is None else reward.parts
        record["step_rewards"] = None if reward is None else reward.by_step
        records.append(record)
    for record, is_learned in zip(records, learned or ()):
        record["learned"] = is_learned
    return records
