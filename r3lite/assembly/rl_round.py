"""The episodes of a round: draws questions, samples their episodes and scores them.

Some settings add to that: off-policy episodes (`rl_guidance`), other ends of failed episodes, and further groups in
place of those without variance.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Protocol

from r3lite.assembly.rl_guidance import Guidance
from r3lite.core.episode import CUT_OFF, Question, Retrieve
from r3lite.core.grant import Grant
from r3lite.core.spans import Stopwatch
from r3lite.datasets.order import QuestionOrder
from r3lite.datasets.sources import build_mixture
from r3lite.devices.ranks import ALONE, Ranks
from r3lite.retrieval.query_cache import QueryCache
from r3lite.rewards.judge import Judge
from r3lite.rewards.registry import changing_weights, settings_of_round
from r3lite.rewards.reward import Scored, score_all
from r3lite.rewards.rounds import episode_records, mixed_groups, round_metrics
from r3lite.rl.batch import Rollout
from r3lite.rl.refill import Rewards, has_variance, refill
from r3lite.rollout.sequence import Sequence
from r3lite.settings import PpoConfig


@dataclass(frozen=True)
class Expansion:
    """An episode that shares its first steps with another one of its round, its origin."""

    origin: int  # index of the other episode
    steps: int  # number of steps that they share


@dataclass(frozen=True)
class Round:
    """The episodes of a round, in lists of one length.

    Expanded episodes and those of a refill stand behind the episodes that were drawn first.
    """

    sequences: list[Sequence]
    scored: list[Scored | None]  # rewards; None: the reward is missing
    groups: list[int]  # the episodes of one question have the same
    expanded: dict[int, Expansion] = field(default_factory=dict)  # by the index of the expanded episode
    learned_groups: set[int] | None = None  # groups that are learned from; None: all
    extra_metrics: dict[str, float] = field(default_factory=dict)  # of the stages that made the round
    off_policy: list[Rollout] = field(default_factory=list)  # further episodes of the groups, not sampled here

    def extended(self, new: "Round") -> "Round":
        """Returns the round with the episodes of another one after its own."""
        return replace(
            self,
            sequences=[*self.sequences, *new.sequences],
            scored=[*self.scored, *new.scored],
            groups=[*self.groups, *new.groups],
        )

    def with_metrics(self, metrics: dict[str, float]) -> "Round":
        """Returns the round with further metrics of the stages that made it."""
        return replace(self, extra_metrics=self.extra_metrics | metrics)

    @property
    def token_count(self) -> int:
        """The number of tokens of all episodes, of prompts and documents too."""
        return sum(len(sequence.tokens) for sequence in self.sequences)

    def rewards(self) -> Rewards:
        """Returns what tells the episodes of each group apart (Scored.signal), in the order of the groups' numbers."""
        signals: dict[int, list[float | None]] = {}
        for group, scored in zip(self.groups, self.scored, strict=True):
            signal = None if scored is None else scored.signal
            signals.setdefault(group, []).append(signal)
        return [signals[group] for group in sorted(signals)]

    def metrics(self) -> dict[str, float | None]:
        """Returns means over the episodes without the expanded ones, which were selected by their rewards."""
        drawn = [i for i in range(len(self.sequences)) if i not in self.expanded]
        sequences = [self.sequences[i] for i in drawn]
        scored = [self.scored[i] for i in drawn]
        groups = [self.groups[i] for i in drawn]
        metrics = round_metrics(
            [sequence.episode() for sequence in sequences],
            scored,
            turns=[sampled_turns(sequence) for sequence in sequences],
            logprobs=[sequence.logprobs for sequence in sequences],
        )
        metrics |= mixed_groups(scored, groups)
        return metrics | self.extra_metrics

    def records(self, number: int) -> list[dict]:
        """Returns the lines of episodes.jsonl."""
        episodes = [sequence.episode() for sequence in self.sequences]
        learned = None
        if self.learned_groups is not None:
            learned = [group in self.learned_groups for group in self.groups]
        records = episode_records(number, episodes, self.scored, learned=learned)
        for i, expansion in self.expanded.items():
            records[i]["expanded"] = {"from": expansion.origin, "steps": expansion.steps}
        return records

    @property
    def questions(self) -> dict[int, str]:
        """The id of each group's question."""
        ids = [sequence.question.id for sequence in self.sequences]
        return dict(zip(self.groups, ids, strict=True))

    def rollouts(self, failed_below: float | None = None) -> list[Rollout]:
        """Returns the episodes to learn from as numbers, the off-policy ones behind all others.

        Those without a reward are left out: a missing reward is not 0. `failed_below`: see Scored.failed.
        """
        rollouts = []
        for sequence, scored, group in zip(self.sequences, self.scored, self.groups, strict=True):
            is_learned = self.learned_groups is None or group in self.learned_groups
            if scored is not None and is_learned:
                rollout = to_rollout(sequence, scored, group=group, failed_below=failed_below)
                rollouts.append(rollout)
        groups = {rollout.group for rollout in rollouts}
        off_policy = [rollout for rollout in self.off_policy if rollout.group in groups]
        return rollouts + off_policy


def sampled_turns(sequence: Sequence) -> list[list[int]]:
    """Returns the sampled tokens of an episode, turn by turn: observations stand between turns."""
    turns = []
    pairs = zip(sequence.tokens, sequence.action_mask, strict=True)
    for is_action, run in groupby(pairs, key=lambda pair: pair[1]):
        if is_action:
            turns.append([token for token, _ in run])
    return turns


def to_rollout(
    sequence: Sequence,
    scored: Scored,
    group: int,
    failed_below: float | None,
) -> Rollout:
    """Returns an episode with its rewards as numbers."""
    # The steps before an end that was sampled again are not sampled here, and pay nothing.
    step_rewards = zip(sequence.step_ends, scored.steps)
    rewards = [(end, reward) for end, reward in step_rewards if sequence.action_mask[end]]
    return Rollout(
        record=sequence,
        rewards=rewards,
        group=group,
        cut_off=sequence.finish == CUT_OFF,
        failed=scored.failed(failed_below),
        signal=scored.signal,
    )


class RolloutEngine(Protocol):
    """Samples the episodes of rounds.

    It is a `rollout.engine.Engine` on this machine, or a `rollout.remote.RemoteEngine` on others.
    """

    grant: Grant

    def begin_round(self, number: int, retrieve: Retrieve) -> None:
        """Prepares for the episodes of a round, which are sampled with the weights that the policy now has."""

    def run(
        self,
        questions: list[Question],
        seeds: list[str],
        retrieve: Retrieve,
    ) -> list[Sequence]:
        """Samples one episode per question, each from the random stream of its own seed."""

    def continue_from(
        self,
        starts: list[tuple[Sequence, int]],
        seeds: list[str],
        retrieve: Retrieve,
    ) -> list[Sequence]:
        """Samples another end of each finished sequence after its first `steps` steps, for pairs (sequence, steps)."""

    def end_round(self, number: int, retrieve: Retrieve) -> dict[str, float]:
        """Ends a round, before it is learned from; returns metrics of its sampling."""

    def close(self) -> None:
        """Ends everything that is under way."""


@dataclass
class RoundSampler:
    """Samples rounds with the current weights. A round depends on them, the seed, its number and the replay buffer."""

    config: PpoConfig
    questions: list[Question]  # in the order of their sources, if there are several
    engine: RolloutEngine
    retrieve: Retrieve
    judge: Judge | None
    guidance: Guidance | None = None  # of algorithms with off-policy episodes
    cache: QueryCache | None = None
    ranks: Ranks = ALONE
    add_values: Callable[[list[Sequence]], None] | None = None  # of the critic, to episodes sampled where it is not

    def __post_init__(self):
        seed = self.config.common.seed
        mixture = build_mixture(self.config.mixture, self.questions, f"{seed}/rl")
        self.order = QuestionOrder(
            self.questions,
            generations=self.config.rl.num_generations,
            seed=seed,
            mixture=mixture,
        )

    def sample(self, number: int, watch: Stopwatch) -> Round:
        """Samples and scores round `number`, from 1; `watch` times its stages."""
        self.engine.begin_round(number, self.retrieve)
        sampled = self.sample_round(number, watch)
        if self.add_values:
            with watch.stage("values"):
                self.add_values(sampled.sequences)
        metrics = self.engine.end_round(number, self.retrieve)
        return sampled.with_metrics(metrics)

    def sample_round(self, number: int, watch: Stopwatch) -> Round:
        """Samples and scores a round with the weights that the engine has."""
        rl = self.config.rl
        questions, seeds = self.order.of_round(number, rl.batch_size)
        replayed: list[str] = []
        if self.guidance:
            replayed = self.guidance.replayed(number)
            questions = self.guidance.with_replayed(questions, replayed)
        with watch.stage("rollout"):
            sequences = self.sample_episodes(self.engine.run, questions, seeds)
        with watch.stage("score"):
            groups = [i // rl.num_generations for i in range(len(sequences))]
            sampled = self.scored(number, sequences, groups)
            sampled = sampled.with_metrics(changing_weights(self.config.reward, number))
        if self.guidance:
            with watch.stage("guide"):
                sampled = self._guided(number, sampled, questions=questions, replayed=replayed)
        if rl.expand_limit:
            with watch.stage("expand"):
                sampled = self._expanded(number, sampled)
        if rl.refill_limit:
            with watch.stage("refill"):
                sampled = self._refilled(number, sampled)
        if self.cache:
            sampled = sampled.with_metrics(self.cache.metrics())
        return sampled

    def sample_episodes(self, run: Callable, starts: list, seeds: list[str]) -> list[Sequence]:
        """Returns `run(starts, seeds, retrieve)`, of which each rank samples a part; see `sample`."""
        return sample(
            self.engine,
            self.ranks,
            run=run,
            starts=starts,
            seeds=seeds,
            retrieve=self.retrieve,
        )

    def scored(self, number: int, sequences: list[Sequence], groups: list[int]) -> Round:
        """Returns the episodes with their rewards by the weights of round `number`."""
        settings = settings_of_round(self.config.reward, number)
        episodes = [sequence.episode() for sequence in sequences]
        scored = self.ranks.shared(lambda: score_all(episodes, settings, self.judge))
        return Round(sequences, scored, groups)

    def _guided(
        self,
        number: int,
        sampled: Round,
        questions: list[Question],
        replayed: list[str],
    ) -> Round:
        """Returns the round with the off-policy episodes of its groups."""
        group_questions = [question.id for question in questions[:: self.config.rl.num_generations]]
        rewards = [scored for scored in sampled.scored if scored is not None]
        rewarded = zip(sampled.rollouts(), rewards, strict=True)
        off_policy, metrics = self.guidance.join(
            number,
            group_questions,
            rewarded=rewarded,
            replayed=replayed,
        )
        return replace(sampled, off_policy=off_policy).with_metrics(metrics)

    def _expanded(self, number: int, sampled: Round) -> Round:
        """Returns the round with another end for some episodes that failed halfway.

        This is grounded expansion (arXiv 2601.21699).
        """
        expansions = near_misses(sampled)[: self.config.rl.expand_limit]
        starts = []
        seeds = []
        groups = []
        for expansion in expansions:
            origin = expansion.origin
            starts.append((sampled.sequences[origin], expansion.steps))
            seeds.append(f"{self.config.common.seed}/expand {number}/{origin}")
            groups.append(sampled.groups[origin])
        sequences = self.sample_episodes(self.engine.continue_from, starts, seeds)
        new = self.scored(number, sequences, groups)
        extended = sampled.extended(new)
        shared_tokens = 0
        for sequence, steps in starts:
            last_end = sequence.step_ends[steps - 1]
            shared_tokens += sum(sequence.action_mask[: last_end + 1])
        action_tokens = sum(sum(sequence.action_mask) for sequence in sequences)
        solved = sum(scored is not None and scored.right for scored in new.scored)
        metrics = {
            "expand/episodes": len(sequences),
            "expand/solved": solved,
            "expand/shared_tokens": shared_tokens,  # action tokens that were not sampled again
            "expand/new_tokens": action_tokens - shared_tokens,
            "expand/zero_std_before": _without_variance(sampled.rewards()),
            "expand/zero_std_after": _without_variance(extended.rewards()),
        }
        first_index = len(sampled.sequences)
        expanded = {first_index + i: expansion for i, expansion in enumerate(expansions)}
        return replace(extended, expanded=expanded).with_metrics(metrics)

    def _refilled(self, number: int, sampled: Round) -> Round:
        """Returns the round with further groups in place of those without variance."""
        rl = self.config.rl
        used = {sequence.question.id for sequence in sampled.sequences}

        def sample_groups(attempt: int, count: int) -> Rewards:
            nonlocal sampled
            questions, seeds = self.order.of_refill(number, attempt, size=count, used=used)
            sequences = self.sample_episodes(self.engine.run, questions, seeds)
            used.update(sequence.question.id for sequence in sequences)
            next_group = max(sampled.groups) + 1
            groups = [next_group + i // rl.num_generations for i in range(len(sequences))]
            new = self.scored(number, sequences, groups)
            sampled = sampled.extended(new)
            return new.rewards()

        learned_groups, metrics = refill(sampled.rewards(), sample_groups, rl.refill_limit)
        return replace(sampled, learned_groups=learned_groups).with_metrics(metrics)


def sample(
    engine: RolloutEngine,
    ranks: Ranks,
    run: Callable,
    starts: list,
    seeds: list[str],
    retrieve: Retrieve,
) -> list[Sequence]:
    """Returns `run(starts, seeds, retrieve)`, of which each rank samples a part and gets all.

    `run` is a method of the engine: `run`, `continue_from` or `end_again`.
    """
    if not seeds:
        return []
    first = len(seeds) * ranks.rank // ranks.size
    stop = len(seeds) * (ranks.rank + 1) // ranks.size
    rank_starts = starts[first:stop]
    rank_seeds = seeds[first:stop]
    sampled = engine.grant.attempt("sample", run, rank_starts, rank_seeds, retrieve)
    return [sequence for sequences in ranks.gather(sampled) for sequence in sequences]


def near_misses(sampled: Round) -> list[Expansion]:
    """Returns the episodes of a round to sample another end for, best first, each from its last useful step.

    A step is useful if it retrieved a new gold paragraph. The episodes have one and failed all the same. Groups without
    variance come first. Within these and within the groups with variance, first the episode of each group that
    retrieved most gold paragraphs, then the second of each, and so on.
    """
    has_varied_rewards = [has_variance(rewards) for rewards in sampled.rewards()]
    candidates = []
    for i, scored in enumerate(sampled.scored):
        sequence = sampled.sequences[i]
        new_gold = sequence.episode().new_gold()  # of each step
        useful_steps = [step for step, paragraphs in enumerate(new_gold, 1) if paragraphs]
        if useful_steps and scored is not None and not scored.right:
            gold_count = sum(map(len, new_gold))
            candidates.append((sampled.groups[i], -gold_count, i, useful_steps[-1]))
    episodes_of_group: Counter[int] = Counter()  # so far
    order = []
    for group, _, origin, steps in sorted(candidates):
        rank_in_group = episodes_of_group[group]
        episodes_of_group[group] += 1
        order.append((has_varied_rewards[group], rank_in_group, origin, steps))
    return [Expansion(origin, steps) for _, _, origin, steps in sorted(order)]


def _without_variance(rewards: Rewards) -> float:
    """Returns the share of the groups whose rewards are all equal."""
    count = sum(not has_variance(group) for group in rewards)
    return count / len(rewards)
