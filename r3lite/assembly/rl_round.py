"""How the episodes of a round come about: questions are drawn, answered and paid for; episodes that failed halfway are
gone on with another time, and groups that teach nothing are replaced. `ppo` learns from what comes of it.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from itertools import groupby

from r3lite.assembly.rl_guidance import Guidance
from r3lite.core.episode import CUT_OFF, Question, Retrieve
from r3lite.datasets.order import QuestionOrder
from r3lite.datasets.sources import build_mixture
from r3lite.devices.ranks import ALONE, Ranks
from r3lite.retrieval.query_cache import QueryCache
from r3lite.rewards import curriculum
from r3lite.rewards.judge import Judge
from r3lite.rewards.reward import Scored, score_all
from r3lite.rewards.rounds import episode_records, round_metrics
from r3lite.rl.batch import Rollout
from r3lite.rl.refill import Rewards, refill, teaches
from r3lite.rollout.engine import Engine
from r3lite.rollout.sequence import Sequence
from r3lite.settings import PpoConfig
from r3lite.training.metrics import Stopwatch


@dataclass(frozen=True)
class Expansion:
    """Where an expanded episode comes from."""

    place: int  # of the episode that it goes on from, among those of its round
    steps: int  # that the two share


@dataclass(frozen=True)
class Round:
    """The episodes of a round and what each was paid; None: its reward is missing.

    Those that were expanded come after the others of their round, in the groups of the episodes that they go on from.
    """

    sequences: list[Sequence]
    scored: list[Scored | None]
    groups: list[int]  # of each episode: those of one question share it
    expanded: dict[int, Expansion] = field(default_factory=dict)  # by the place of the new episode
    kept: set[int] | None = None  # the groups that are learned from; None: all of them
    told: dict[str, float] = field(default_factory=dict)  # metrics of how they came about
    joined: list[Rollout] = field(default_factory=list)  # off-policy episodes that join the groups

    def extended(self, sequences: list[Sequence], scored: list[Scored | None], groups: list[int]) -> "Round":
        """The round with further episodes after its own."""
        sequences, scored = [*self.sequences, *sequences], [*self.scored, *scored]
        return replace(self, sequences=sequences, scored=scored, groups=[*self.groups, *groups])

    def rewards(self) -> Rewards:
        """Of each group's episodes."""
        order = sorted(range(len(self.groups)), key=self.groups.__getitem__)
        paid = [(self.groups[i], self.scored[i] and self.scored[i].total) for i in order]
        return [[reward for _, reward in group] for _, group in groupby(paid, key=lambda pair: pair[0])]

    def metrics(self) -> dict[str, float | None]:
        """Means over the episodes that the policy sampled from their prompts on; those expanded are told apart."""
        drawn = [i for i in range(len(self.sequences)) if i not in self.expanded]
        sequences, scored = [self.sequences[i] for i in drawn], [self.scored[i] for i in drawn]
        turns = []  # what was sampled; given tokens stand between turns
        for s in sequences:
            runs = groupby(zip(s.tokens, s.action_mask, strict=True), key=lambda pair: pair[1])
            turns.append([[token for token, _ in run] for sampled, run in runs if sampled])
        episodes, logprobs = [s.episode() for s in sequences], [s.logprobs for s in sequences]
        return round_metrics(episodes, scored, turns, logprobs) | self.told

    def records(self, number: int) -> list[dict]:
        """The lines of episodes.jsonl."""
        learned = None if self.kept is None else [group in self.kept for group in self.groups]
        records = episode_records(number, [s.episode() for s in self.sequences], self.scored, learned)
        for place, origin in self.expanded.items():
            records[place]["expanded"] = {"from": origin.place, "steps": origin.steps}
        return records

    @property
    def questions(self) -> dict[int, str]:
        """The id of each group's question."""
        return {group: s.question.id for s, group in zip(self.sequences, self.groups, strict=True)}

    def rollouts(self, failed_below: float | None = None) -> list[Rollout]:
        """The episodes that are learned from, in numbers; the off-policy ones behind all others.

        One whose judge failed is left out: a missing reward is not a zero, and teaches nothing. `failed_below` tells
        which have failed, see Scored.failed.
        """
        own = []
        for s, scored, group in zip(self.sequences, self.scored, self.groups, strict=True):
            if scored is not None and (self.kept is None or group in self.kept):
                rewards, cut_off = list(zip(s.step_ends, scored.steps)), s.finish == CUT_OFF
                rollout = Rollout(s.tokens, s.action_mask, s.logprobs, s.values, rewards, group, cut_off)
                own.append(replace(rollout, failed=scored.failed(failed_below)))
        groups = {rollout.group for rollout in own}
        return own + [rollout for rollout in self.joined if rollout.group in groups]


@dataclass
class RoundSampler:
    """Samples rounds with the model as it is. A round follows from the seed, its number and the replay buffer alone."""

    config: PpoConfig
    questions: list[Question]  # in the order of their sources, if there are several
    engine: Engine
    retrieve: Retrieve
    judge: Judge | None
    guidance: Guidance | None = None
    cache: QueryCache | None = None
    ranks: Ranks = ALONE

    def __post_init__(self):
        seed, many = self.config.common.seed, self.config.rl.num_generations
        mixture = build_mixture(self.config.mixture, self.questions, f"{seed}/rl")
        self.order = QuestionOrder(self.questions, many, seed, mixture)

    def sample(self, number: int, watch: Stopwatch) -> Round:
        """Round 1, 2, ...; `watch` takes the time of each stage."""
        rl = self.config.rl
        questions, seeds = self.order.of_round(number, rl.batch_size)
        replayed = self.guidance.replayed(number) if self.guidance else []
        if self.guidance:
            questions = self.guidance.with_replayed(questions, replayed)
        with watch.stage("rollout"):
            sequences = sample(self.engine, self.ranks, self.engine.run, questions, seeds, self.retrieve)
        groups = [i // rl.num_generations for i in range(len(sequences))]
        with watch.stage("score"):
            told = curriculum.changing_weights(self.config.reward, number)
            sampled = Round(sequences, self.score(number, sequences), groups, told=told)
        if self.guidance:
            ids = [question.id for question in questions[:: rl.num_generations]]
            with watch.stage("guide"):
                paid = zip(sampled.rollouts(), [scored for scored in sampled.scored if scored is not None], strict=True)
                joined, told = self.guidance.join(number, ids, paid, replayed)
            sampled = replace(sampled, joined=joined, told=sampled.told | told)
        if rl.expand_limit:
            with watch.stage("expand"):
                sampled = self._expanded(number, sampled)
        if rl.refill_limit:
            with watch.stage("refill"):
                sampled = self._refilled(number, sampled)
        if self.cache:
            sampled = replace(sampled, told=sampled.told | self.cache.metrics())
        return sampled

    def score(self, number: int, sequences: Many[Sequence]) -> list[Scored | None]:
        """What each episode of round `number` is paid; see `score_all`."""
        settings = curriculum.of_round(self.config.reward, number)
        episodes = [sequence.episode() for sequence in sequences]
        return self.ranks.shared(lambda: score_all(episodes, settings, self.judge))

    def _expanded(self, number: int, first: Round) -> Round:
        """The round with another end for some episodes that failed halfway: grounded expansion (arXiv 2601.21699)."""
        chosen = near_misses(first)[: self.config.rl.expand_limit]
        begun = [(first.sequences[origin.place], origin.steps) for origin in chosen]
        seeds = [f"{self.config.common.seed}/expand {number}/{origin.place}" for origin in chosen]
        added = sample(self.engine, self.ranks, self.engine.run_on, begun, seeds, self.retrieve)
        scored, many = self.score(number, added), len(first.sequences)
        done = first.extended(added, scored, [first.groups[origin.place] for origin in chosen])
        expanded = {many + i: origin for i, origin in enumerate(chosen)}
        kept = sum(sum(s.action_mask[: s.step_ends[steps - 1] + 1]) for s, steps in begun)
        told = {
            "expand/episodes": len(added),
            "expand/solved": sum(paid is not None and paid.right for paid in scored),
            "expand/shared_tokens": kept,  # sampled ones, which were not sampled again
            "expand/new_tokens": sum(sum(s.action_mask) for s in added) - kept,
            "expand/zero_std_before": _without_variance(first.rewards()),
            "expand/zero_std_after": _without_variance(done.rewards()),
        }
        return replace(done, expanded=expanded, told=first.told | told)

    def _refilled(self, number: int, sampled: Round) -> Round:
        """The round with further groups in place of those without variance."""
        rl, used, done = self.config.rl, {s.question.id for s in sampled.sequences}, sampled

        def more(attempt: int, count: int) -> Rewards:
            nonlocal done
            drawn = self.order.of_refill(number, attempt, count, used)
            added = sample(self.engine, self.ranks, self.engine.run, *drawn, self.retrieve)
            used.update(s.question.id for s in added)
            groups = [max(done.groups) + 1 + i // rl.num_generations for i in range(len(added))]
            new = Round(added, self.score(number, added), groups)
            done = done.extended(added, new.scored, groups)
            return new.rewards()

        kept, told = refill(sampled.rewards(), more, rl.refill_limit)
        return replace(done, kept=kept, told=sampled.told | told)


def sample(
    engine: Engine, ranks: Ranks, run: Callable, begun: list, seeds: list[str], retrieve: Retrieve
) -> list[Sequence]:
    """The episodes that `engine.run` or `engine.run_on` makes. Each rank samples a part, and gets all of them."""
    if not seeds:
        return []
    share = slice(*(len(seeds) * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1)))
    mine = engine.grant.attempt("sample", run, begun[share], seeds[share], retrieve)
    return [sequence for part in ranks.gather(mine) for sequence in part]


def near_misses(sampled: Round) -> list[Expansion]:
    """The episodes of a round that are worth another end, best first, and after which of their steps it begins.

    They failed although a query of theirs brought a gold paragraph, and go on from the last step that brought a new
    one. First come groups without variance; of each group, the episode that found most, then those that found less.
    """
    found, rank = [], {i: teaches(rewards) for i, rewards in enumerate(sampled.rewards())}
    for place, (sequence, paid) in enumerate(zip(sampled.sequences, sampled.scored, strict=True)):
        news = sequence.episode().new_gold()
        useful = [k for k, new in enumerate(news, 1) if new]
        if useful and paid is not None and not paid.right:
            found.append((sampled.groups[place], -sum(map(len, news)), place, useful[-1]))
    turn: dict[int, int] = {}  # of each group, how many of its episodes come before
    order = []
    for group, _, place, steps in sorted(found):
        order.append((rank[group], turn.setdefault(group, 0), place, steps))
        turn[group] += 1
    return [Expansion(place, steps) for *_, place, steps in sorted(order)]


def _without_variance(rewards: Rewards) -> float:
    """Share of the groups that teach nothing."""
    return sum(not teaches(group) for group in rewards) / len(rewards)
