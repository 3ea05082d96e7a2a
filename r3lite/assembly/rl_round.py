"""The episodes of a round: draws questions, samples their episodes and scores them.

Some settings add to that: off-policy episodes (`rl_guidance`), other ends of failed episodes, and further groups in
place of those without variance.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import groupby

from r3lite.assembly.rl_guidance import Guidance
from r3lite.core.episode import CUT_OFF, Question, Retrieve
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
from r3lite.rollout.engine import Engine
from r3lite.rollout.sequence import Sequence
from r3lite.settings import PpoConfig


@dataclass(frozen=True)
class Expansion:
    """An episode that shares its first steps with another one of its round."""

    source: int  # index of that other episode
    steps: int  # number of steps that they share


@dataclass(frozen=True)
class Round:
    """The episodes of a round, in lists of one length.

    Expanded episodes and those of a refill come after the others.
    """

    sequences: list[Sequence]
    scored: list[Scored | None]  # rewards; None: the reward is missing
    groups: list[int]  # the episodes of one question have the same
    expanded: dict[int, Expansion] = field(default_factory=dict)  # by the index of the expanded episode
    kept: set[int] | None = None  # groups that are learned from; None: all
    extra_metrics: dict[str, float] = field(default_factory=dict)  # of the stages that made the round
    off_policy: list[Rollout] = field(default_factory=list)  # further episodes of the groups, not sampled here

    def extended(self, new: "Round") -> "Round":
        """The round with the episodes of another one after its own."""
        return replace(
            self,
            sequences=[*self.sequences, *new.sequences],
            scored=[*self.scored, *new.scored],
            groups=[*self.groups, *new.groups],
        )

    @property
    def token_count(self) -> int:
        """Tokens of all episodes, given ones included."""
        return sum(len(sequence.tokens) for sequence in self.sequences)

    def rewards(self) -> Rewards:
        """What tells the episodes of each group apart (Scored.signal), in the order of the groups' numbers."""
        of_group: dict[int, list[float | None]] = {}
        for group, scored in zip(self.groups, self.scored, strict=True):
            of_group.setdefault(group, []).append(None if scored is None else scored.signal)
        return [of_group[group] for group in sorted(of_group)]

    def metrics(self) -> dict[str, float | None]:
        """Means over the episodes without the expanded ones, which were chosen by their rewards."""
        whole = [i for i in range(len(self.sequences)) if i not in self.expanded]
        sequences, scored = [self.sequences[i] for i in whole], [self.scored[i] for i in whole]
        turns = []  # the sampled tokens of each episode, turn by turn: observations stand between turns
        for s in sequences:
            runs = groupby(zip(s.tokens, s.action_mask, strict=True), key=lambda pair: pair[1])
            turns.append([[token for token, _ in run] for is_action, run in runs if is_action])
        episodes, logprobs = [s.episode() for s in sequences], [s.logprobs for s in sequences]
        mixed = mixed_groups(scored, [self.groups[i] for i in whole])
        return round_metrics(episodes, scored, turns, logprobs) | mixed | self.extra_metrics

    def records(self, number: int) -> list[dict]:
        """The lines of episodes.jsonl."""
        learned = None if self.kept is None else [group in self.kept for group in self.groups]
        records = episode_records(number, [s.episode() for s in self.sequences], self.scored, learned)
        for i, origin in self.expanded.items():
            records[i]["expanded"] = {"from": origin.source, "steps": origin.steps}
        return records

    @property
    def questions(self) -> dict[int, str]:
        """The id of each group's question."""
        return {group: s.question.id for s, group in zip(self.sequences, self.groups, strict=True)}

    def rollouts(self, failed_below: float | None = None) -> list[Rollout]:
        """The episodes to learn from as numbers, the off-policy ones behind all others.

        Those without a reward are left out: a missing reward is not 0. `failed_below`: see Scored.failed.
        """
        rollouts = []
        for s, scored, group in zip(self.sequences, self.scored, self.groups, strict=True):
            if scored is not None and (self.kept is None or group in self.kept):
                # The steps before an end that was sampled again are given, and pay nothing.
                rewards = [(end, reward) for end, reward in zip(s.step_ends, scored.steps) if s.action_mask[end]]
                cut_off = s.finish == CUT_OFF
                rollout = Rollout(s.tokens, s.action_mask, s.logprobs, s.values, rewards, group, cut_off)
                rollouts.append(replace(rollout, failed=scored.failed(failed_below), signal=scored.signal))
        groups = {rollout.group for rollout in rollouts}
        return rollouts + [rollout for rollout in self.off_policy if rollout.group in groups]


@dataclass
class RoundSampler:
    """Samples rounds with the current weights. A round depends on them, the seed, its number and the replay buffer."""

    config: PpoConfig
    questions: list[Question]  # in the order of their sources, if there are several
    engine: Engine
    retrieve: Retrieve
    judge: Judge | None
    guidance: Guidance | None = None  # of algorithms with off-policy episodes
    cache: QueryCache | None = None
    ranks: Ranks = ALONE

    def __post_init__(self):
        seed = self.config.common.seed
        mixture = build_mixture(self.config.mixture, self.questions, f"{seed}/rl")
        self.order = QuestionOrder(self.questions, self.config.rl.num_generations, seed, mixture)

    def sample(self, number: int, watch: Stopwatch) -> Round:
        """Round 1, 2, ...; `watch` times its stages."""
        rl = self.config.rl
        questions, seeds = self.order.of_round(number, rl.batch_size)
        replayed = self.guidance.replayed(number) if self.guidance else []
        if self.guidance:
            questions = self.guidance.with_replayed(questions, replayed)
        with watch.stage("rollout"):
            sequences = sample(self.engine, self.ranks, self.engine.run, questions, seeds, self.retrieve)
        with watch.stage("score"):
            made = self.scored(number, sequences, [i // rl.num_generations for i in range(len(sequences))])
            made = replace(made, extra_metrics=changing_weights(self.config.reward, number))
        if self.guidance:
            ids = [question.id for question in questions[:: rl.num_generations]]
            with watch.stage("guide"):
                rewarded = zip(made.rollouts(), [scored for scored in made.scored if scored is not None], strict=True)
                joined, metrics = self.guidance.join(number, ids, rewarded, replayed)
            made = replace(made, off_policy=joined, extra_metrics=made.extra_metrics | metrics)
        if rl.expand_limit:
            with watch.stage("expand"):
                made = self._expanded(number, made)
        if rl.refill_limit:
            with watch.stage("refill"):
                made = self._refilled(number, made)
        if self.cache:
            made = replace(made, extra_metrics=made.extra_metrics | self.cache.metrics())
        return made

    def scored(self, number: int, sequences: list[Sequence], groups: list[int]) -> Round:
        """Episodes with their rewards by the weights of round `number`."""
        settings = settings_of_round(self.config.reward, number)
        episodes = [sequence.episode() for sequence in sequences]
        return Round(sequences, self.ranks.shared(lambda: score_all(episodes, settings, self.judge)), groups)

    def _expanded(self, number: int, first: Round) -> Round:
        """The round with another end for some episodes that failed halfway: grounded expansion (arXiv 2601.21699)."""
        chosen = near_misses(first)[: self.config.rl.expand_limit]
        starts = [(first.sequences[origin.source], origin.steps) for origin in chosen]
        seeds = [f"{self.config.common.seed}/expand {number}/{origin.source}" for origin in chosen]
        sequences = sample(self.engine, self.ranks, self.engine.continue_from, starts, seeds, self.retrieve)
        new = self.scored(number, sequences, [first.groups[origin.source] for origin in chosen])
        extended = first.extended(new)
        shared = sum(sum(s.action_mask[: s.step_ends[steps - 1] + 1]) for s, steps in starts)
        metrics = {
            "expand/episodes": len(sequences),
            "expand/solved": sum(scored is not None and scored.right for scored in new.scored),
            "expand/shared_tokens": shared,  # action tokens that were not sampled again
            "expand/new_tokens": sum(sum(s.action_mask) for s in sequences) - shared,
            "expand/zero_std_before": _without_variance(first.rewards()),
            "expand/zero_std_after": _without_variance(extended.rewards()),
        }
        expanded = {len(first.sequences) + i: origin for i, origin in enumerate(chosen)}
        return replace(extended, expanded=expanded, extra_metrics=first.extra_metrics | metrics)

    def _refilled(self, number: int, made: Round) -> Round:
        """The round with further groups in place of those without variance."""
        rl, used = self.config.rl, {s.question.id for s in made.sequences}

        def more(attempt: int, count: int) -> Rewards:
            nonlocal made
            drawn = self.order.of_refill(number, attempt, count, used)
            sequences = sample(self.engine, self.ranks, self.engine.run, *drawn, self.retrieve)
            used.update(s.question.id for s in sequences)
            next_group = max(made.groups) + 1
            groups = [next_group + i // rl.num_generations for i in range(len(sequences))]
            new = self.scored(number, sequences, groups)
            made = made.extended(new)
            return new.rewards()

        kept, metrics = refill(made.rewards(), more, rl.refill_limit)
        return replace(made, kept=kept, extra_metrics=made.extra_metrics | metrics)


def sample(
    engine: Engine, ranks: Ranks, run: Callable, starts: list, seeds: list[str], retrieve: Retrieve
) -> list[Sequence]:
    """`run(starts, seeds, retrieve)` of an engine, `run` or `continue_from`: each rank samples a part and gets all."""
    if not seeds:
        return []
    share = slice(*(len(seeds) * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1)))
    mine = engine.grant.attempt("sample", run, starts[share], seeds[share], retrieve)
    return [sequence for part in ranks.gather(mine) for sequence in part]


def near_misses(made: Round) -> list[Expansion]:
    """The episodes of a round to sample another end for, best first, each from its last step that found something new.

    They failed although they retrieved a gold paragraph. Groups without variance come first. Within these and within
    the others, first the episode of each group that found most gold paragraphs, then the second of each, and so on.
    """
    candidates, varied = [], {i: has_variance(rewards) for i, rewards in enumerate(made.rewards())}
    for i, (sequence, scored) in enumerate(zip(made.sequences, made.scored, strict=True)):
        news = sequence.episode().new_gold()
        useful = [k for k, new in enumerate(news, 1) if new]
        if useful and scored is not None and not scored.right:
            candidates.append((made.groups[i], -sum(map(len, news)), i, useful[-1]))
    rank_in_group: dict[int, int] = {}
    order = []
    for group, _, i, steps in sorted(candidates):
        order.append((varied[group], rank_in_group.setdefault(group, 0), i, steps))
        rank_in_group[group] += 1
    return [Expansion(i, steps) for *_, i, steps in sorted(order)]


def _without_variance(rewards: Rewards) -> float:
    """Share of the groups whose rewards are all equal."""
    return sum(not has_variance(group) for group in rewards) / len(rewards)
