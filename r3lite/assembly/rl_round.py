"""The episodes of a round: draws questions, samples their episodes and scores them.

Some settings add to that: off-policy episodes (`rl_guidance`), expansions, and refills.

The episodes of one question are a group, and advantages compare them. Each episode has a *signal*: the reward of its
answer, or the total if the run has no reward for answers (`EpisodeReward.signal`). A group whose signals differ has
*variance*: only such a group teaches which of its answers are better. A *refill* samples further groups in place of
those without variance. An *expansion* is another continuation of the first steps of an episode whose answer is wrong.
"""

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
from r3lite.rewards.registry import metrics_of_weights, settings_of_round
from r3lite.rewards.reward import EpisodeReward, score_all
from r3lite.rewards.rounds import episode_records, mixed_groups, round_metrics
from r3lite.rl.batch import Rollout
from r3lite.rl.expansion import Expansion, NearMiss, choose_expansions
from r3lite.rl.refill import Signals, groups_with_variance
from r3lite.rollout.sequence import Sequence
from r3lite.settings import PpoConfig


@dataclass(frozen=True)
class Round:
    """The episodes of a round. `sequences`, `rewards` and `groups` have one entry for each episode.

    The new episodes of expansions and refills come after those that were sampled first.
    """

    sequences: list[Sequence]
    rewards: list[EpisodeReward | None]  # None: the reward is missing, see `rewards.reward.score`
    groups: list[int]  # number of the group, from 0 without gaps; a group has the episodes of one question
    expansions: dict[int, Expansion] = field(default_factory=dict)  # by the index of the new episode
    learned_groups: set[int] | None = None  # the groups to learn from; None: all
    extra_metrics: dict[str, float] = field(default_factory=dict)  # metrics of the stages that made the round
    # Episodes of a teacher or of earlier rounds. They are not in the lists above; `Rollout.group` is the group of each.
    off_policy: list[Rollout] = field(default_factory=list)

    def appended(self, new: "Round") -> "Round":
        """Returns the round with the episodes of `new` after its own."""
        return replace(
            self,
            sequences=[*self.sequences, *new.sequences],
            rewards=[*self.rewards, *new.rewards],
            groups=[*self.groups, *new.groups],
        )

    def with_metrics(self, metrics: dict[str, float]) -> "Round":
        """Returns the round with further metrics of the stages that made it."""
        return replace(self, extra_metrics=self.extra_metrics | metrics)

    @property
    def token_count(self) -> int:
        """The number of tokens of all sampled episodes, with their prompts and documents."""
        return sum(len(sequence.tokens) for sequence in self.sequences)

    def signals(self) -> Signals:
        """Returns the signals of each group's episodes: those of group i at index i; None for a missing reward."""
        by_group: dict[int, list[float | None]] = {}
        for group, reward in zip(self.groups, self.rewards, strict=True):
            signal = None if reward is None else reward.signal
            by_group.setdefault(group, []).append(signal)
        return [by_group[group] for group in sorted(by_group)]

    def near_misses(self) -> list[NearMiss]:
        """Returns the wrong episodes that retrieved a gold paragraph, each with its last step that found a new one."""
        near_misses = []
        for i, reward in enumerate(self.rewards):
            new_gold = self.sequences[i].episode().new_gold()
            useful_steps = [number for number, paragraphs in enumerate(new_gold, 1) if paragraphs]
            if useful_steps and reward is not None and not reward.right:
                near_miss = NearMiss(
                    index=i,
                    group=self.groups[i],
                    gold_count=sum(map(len, new_gold)),
                    last_useful_step=useful_steps[-1],
                )
                near_misses.append(near_miss)
        return near_misses

    def metrics(self) -> dict[str, float | None]:
        """Returns the metrics of the round: means over its episodes, and `extra_metrics`.

        Expansions are left out of the means. Their origins were selected by their rewards, which would bias the means.
        """
        indices = [i for i in range(len(self.sequences)) if i not in self.expansions]
        sequences = [self.sequences[i] for i in indices]
        rewards = [self.rewards[i] for i in indices]
        groups = [self.groups[i] for i in indices]
        metrics = round_metrics(
            [sequence.episode() for sequence in sequences],
            rewards,
            turns=[sampled_turns(sequence) for sequence in sequences],
            logprobs=[sequence.logprobs for sequence in sequences],
        )
        return metrics | mixed_groups(rewards, groups) | self.extra_metrics

    def records(self, number: int) -> list[dict]:
        """Returns the lines that round `number` adds to episodes.jsonl."""
        episodes = [sequence.episode() for sequence in self.sequences]
        learned = None  # all episodes are learned from
        if self.learned_groups is not None:
            learned = [group in self.learned_groups for group in self.groups]
        records = episode_records(number, episodes, self.rewards, learned=learned)
        for i, expansion in self.expansions.items():
            records[i]["expanded"] = {"from": expansion.origin, "steps": expansion.steps}
        return records

    @property
    def question_ids(self) -> dict[int, str]:
        """The id of the question of each group, by the group's number; all episodes of a group have one question."""
        ids = [sequence.question.id for sequence in self.sequences]
        return dict(zip(self.groups, ids, strict=True))

    def rewarded_rollouts(self, failed_below: float | None = None) -> list[tuple[Rollout, EpisodeReward]]:
        """Returns the sampled episodes to learn from, as `Rollout`s, with their rewards.

        Episodes without a reward are left out: a missing reward is not 0. For `failed_below` see EpisodeReward.failed.
        """
        rewarded = []
        for sequence, reward, group in zip(self.sequences, self.rewards, self.groups, strict=True):
            is_learned = self.learned_groups is None or group in self.learned_groups
            if reward is not None and is_learned:
                rollout = to_rollout(sequence, reward, group=group, failed_below=failed_below)
                rewarded.append((rollout, reward))
        return rewarded

    def rollouts(self, failed_below: float | None = None) -> list[Rollout]:
        """Returns the sampled episodes to learn from, followed by the off-policy episodes of the same groups."""
        rollouts = [rollout for rollout, _ in self.rewarded_rollouts(failed_below)]
        groups = {rollout.group for rollout in rollouts}
        off_policy = [rollout for rollout in self.off_policy if rollout.group in groups]
        return rollouts + off_policy


def sampled_turns(sequence: Sequence) -> list[list[int]]:
    """Returns the sampled tokens of an episode, turn by turn: observations, which are no actions, divide the turns."""
    turns = []
    pairs = zip(sequence.tokens, sequence.action_mask, strict=True)
    for is_action, stretch in groupby(pairs, key=lambda pair: pair[1]):
        if is_action:
            turns.append([token for token, _ in stretch])
    return turns


def to_rollout(
    sequence: Sequence,
    reward: EpisodeReward,
    group: int,
    failed_below: float | None,
) -> Rollout:
    """Returns an episode with the reward of each step at the step's last token."""
    token_rewards = []
    for step_end, step_reward in zip(sequence.step_ends, reward.by_step, strict=True):
        # With --learn answer only the last turn is sampled anew. The earlier steps, which several episodes then share,
        # have no action tokens (`Sequence.reopened`) and get no reward.
        if sequence.action_mask[step_end]:
            token_rewards.append((step_end, step_reward))
    return Rollout(
        record=sequence,
        token_rewards=token_rewards,
        group=group,
        cut_off=sequence.finish == CUT_OFF,
        failed=reward.failed(failed_below),
        signal=reward.signal,
    )


class RolloutEngine(Protocol):
    """Samples the episodes of rounds.

    It is a `rollout.engine.Engine` on this machine, or a `rollout.remote.RemoteEngine` on others.
    """

    grant: Grant

    def begin_round(self, number: int, retrieve: Retrieve) -> None:
        """Prepares the engine for a round. Its episodes are sampled with the policy's present weights.

        With --max-staleness 1 they may have been sampled before the last update, with the weights of that time.
        """

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
        """Samples another continuation for each start: (finished sequence, number of its first steps that are kept)."""

    def end_round(self, number: int, retrieve: Retrieve) -> dict[str, float]:
        """Ends a round, before it is learned from; returns metrics of its sampling.

        A remote engine may begin to sample the next round here, with `retrieve`, while this one is learned from.
        """

    def close(self) -> None:
        """Breaks off the requests to other machines that are under way, if any."""


@dataclass
class RoundSampler:
    """Samples rounds.

    A round depends on the seed, its number, the replay buffer and the policy's weights (see RolloutEngine.begin_round).
    """

    config: PpoConfig
    questions: list[Question]  # in the order of their sources, if there are several
    engine: RolloutEngine
    retrieve: Retrieve
    judge: Judge | None
    guidance: Guidance | None = None  # for algorithms with off-policy episodes
    cache: QueryCache | None = None
    ranks: Ranks = ALONE
    # Computes the critic's values of episodes that were sampled on a machine without the critic. None: not needed.
    add_values: Callable[[list[Sequence]], None] | None = None

    def __post_init__(self):
        seed = self.config.common.seed
        self.sources = {question.source for question in self.questions}
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
        this_round = self.run_stages(number, watch)
        if self.add_values:
            with watch.stage("values"):
                self.add_values(this_round.sequences)
        metrics = self.engine.end_round(number, self.retrieve)
        return this_round.with_metrics(metrics)

    def run_stages(self, number: int, watch: Stopwatch) -> Round:
        """Runs the stages of round `number` one after the other, with the weights that the engine has."""
        rl = self.config.rl
        # Both have one entry for each episode: num_generations entries in a row for each of batch_size questions.
        questions, seeds = self.order.of_round(number, rl.batch_size)
        replayed_ids: list[str] = []
        if self.guidance:
            replayed_ids = self.guidance.replayed(number)
            # Questions of the replay buffer replace some of the drawn ones.
            questions = self.guidance.with_replayed(questions, replayed_ids)
        with watch.stage("rollout"):
            sequences = self.sample_episodes(self.engine.run, questions, seeds)
        with watch.stage("score"):
            groups = [i // rl.num_generations for i in range(len(sequences))]
            this_round = self.score(number, sequences, groups)
            this_round = this_round.with_metrics(metrics_of_weights(self.config.reward, number))
        if self.guidance:
            with watch.stage("guide"):
                this_round = self.with_off_policy(number, this_round, questions=questions, replayed_ids=replayed_ids)
        if rl.expand_limit:
            with watch.stage("expand"):
                this_round = self.with_expansions(number, this_round)
        if rl.refill_limit:
            with watch.stage("refill"):
                this_round = self.refilled(number, this_round)
        if self.cache:
            this_round = this_round.with_metrics(self.cache.metrics())
        return this_round

    def sample_episodes(self, sample: Callable, starts: list, seeds: list[str]) -> list[Sequence]:
        """Returns the sequences of `sample(starts, seeds, retrieve)`, which the ranks divide; see `sample_on_ranks`."""
        return sample_on_ranks(
            self.engine,
            self.ranks,
            sample=sample,
            starts=starts,
            seeds=seeds,
            retrieve=self.retrieve,
        )

    def score(self, number: int, sequences: list[Sequence], groups: list[int]) -> Round:
        """Returns the episodes with their rewards; the weights of the rewards may depend on the round `number`."""
        settings = settings_of_round(self.config.reward, number)
        episodes = [sequence.episode() for sequence in sequences]
        rewards = self.ranks.from_first(lambda: score_all(episodes, settings, self.judge, run_sources=self.sources))
        return Round(sequences, rewards, groups)

    def with_off_policy(
        self,
        number: int,
        this_round: Round,
        questions: list[Question],
        replayed_ids: list[str],
    ) -> Round:
        """Returns the round with the off-policy episodes of its groups; adds its successes to the replay buffer.

        `questions` has one entry for each episode: each group's question stands there num_generations times in a row.
        """
        group_question_ids = [question.id for question in questions[:: self.config.rl.num_generations]]
        off_policy, metrics = self.guidance.choose_and_store(
            number,
            group_question_ids,
            rewarded=this_round.rewarded_rollouts(),
            replayed=replayed_ids,
        )
        return replace(this_round, off_policy=off_policy).with_metrics(metrics)

    def with_expansions(self, number: int, this_round: Round) -> Round:
        """Returns the round with another continuation of some wrong episodes: grounded expansion (arXiv 2601.21699).

        A new episode begins with the first steps of a wrong one, its origin, and belongs to the same group.
        """
        varied_groups = groups_with_variance(this_round.signals())  # the other groups are expanded first
        expansions = choose_expansions(this_round.near_misses(), varied_groups)[: self.config.rl.expand_limit]
        starts = []
        seeds = []
        groups = []
        copied_tokens = 0  # action tokens that the new episodes share with their origins
        for expansion in expansions:
            origin = this_round.sequences[expansion.origin]
            starts.append((origin, expansion.steps))
            seeds.append(f"{self.config.common.seed}/expand {number}/{expansion.origin}")
            groups.append(this_round.groups[expansion.origin])
            last_end = origin.step_ends[expansion.steps - 1]
            copied_tokens += sum(origin.action_mask[: last_end + 1])
        new_sequences = self.sample_episodes(self.engine.continue_from, starts, seeds)
        new = self.score(number, new_sequences, groups)
        appended = this_round.appended(new)
        action_tokens = sum(sum(sequence.action_mask) for sequence in new_sequences)
        solved = sum(reward is not None and reward.right for reward in new.rewards)
        metrics = {
            "expand/episodes": len(new_sequences),
            "expand/solved": solved,
            "expand/shared_tokens": copied_tokens,
            "expand/new_tokens": action_tokens - copied_tokens,
            "expand/zero_std_before": _share_without_variance(this_round.signals()),
            "expand/zero_std_after": _share_without_variance(appended.signals()),
        }
        expansions_by_index = dict(enumerate(expansions, start=len(this_round.sequences)))
        return replace(appended, expansions=expansions_by_index).with_metrics(metrics)

    def refilled(self, number: int, this_round: Round) -> Round:
        """Returns the round with further groups in place of those without variance (dynamic sampling, rl/refill.py).

        Groups without variance stay in the round, but are not learned from. Each attempt samples as many groups as are
        still missing: the number of groups at first less the number of groups with variance so far. So never more
        groups are learned from than the round had at first.
        """
        rl = self.config.rl
        group_count = len(this_round.signals())
        learned_groups = groups_with_variance(this_round.signals())
        attempt = 0
        while len(learned_groups) < group_count and attempt < rl.refill_limit:
            attempt += 1
            used = {sequence.question.id for sequence in this_round.sequences}
            questions, seeds = self.order.of_refill(number, attempt, size=group_count - len(learned_groups), used=used)
            sequences = self.sample_episodes(self.engine.run, questions, seeds)
            next_group = max(this_round.groups) + 1
            groups = [next_group + i // rl.num_generations for i in range(len(sequences))]
            this_round = this_round.appended(self.score(number, sequences, groups))
            learned_groups = groups_with_variance(this_round.signals())
        metrics = {
            "refill/attempts": attempt,
            "refill/groups": len(this_round.signals()),
            "refill/kept": len(learned_groups),
        }
        return replace(this_round, learned_groups=learned_groups).with_metrics(metrics)


def sample_on_ranks(
    engine: RolloutEngine,
    ranks: Ranks,
    sample: Callable,
    starts: list,
    seeds: list[str],
    retrieve: Retrieve,
) -> list[Sequence]:
    """Returns the sequences of `sample(starts, seeds, retrieve)`: each rank samples a part, and every rank gets all.

    `sample` is a method of the engine: `run`, `continue_from` or, if the engine is in this process, `end_again`.
    `starts` is its first argument: questions for `run`.
    """
    if not seeds:
        return []
    first = len(seeds) * ranks.rank // ranks.size
    stop = len(seeds) * (ranks.rank + 1) // ranks.size
    rank_starts = starts[first:stop]
    rank_seeds = seeds[first:stop]
    # If memory runs out in the phase "sample", fewer episodes are sampled at a time.
    rank_sequences = engine.grant.run_within_memory("sample", sample, rank_starts, rank_seeds, retrieve)
    return [sequence for sequences in ranks.gather(rank_sequences) for sequence in sequences]


def _share_without_variance(signals: Signals) -> float:
    """Returns the share of the groups whose signals are all equal."""
    return (len(signals) - len(groups_with_variance(signals))) / len(signals)
