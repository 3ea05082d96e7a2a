"""How the episodes of a round come about: questions are drawn, answered and paid for, and groups that teach nothing
are replaced. `ppo` learns from what comes of it.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from r3lite.datasets.order import questions_of_refill, questions_of_round
from r3lite.episode import CUT_OFF, Episode, Question, Retrieve
from r3lite.rewards.judge import Judge
from r3lite.rewards.reward import Scored, score
from r3lite.rewards.rounds import episode_records, round_metrics, turns_of
from r3lite.rl.batch import Rollout
from r3lite.rl.refill import refill
from r3lite.rollout.engine import Engine
from r3lite.rollout.sequence import Sequence
from r3lite.settings import PpoConfig
from r3lite.training.metrics import Stopwatch


@dataclass(frozen=True)
class Round:
    """The episodes of a round, group after group, and what each was paid; None: its reward is missing."""

    sequences: list[Sequence]
    scored: list[Scored | None]
    generations: int  # episodes of a group
    kept: set[int] | None = None  # the groups that are learned from, by their place; None: all of them
    told: dict[str, float] = field(default_factory=dict)  # metrics of how they came about

    @property
    def episodes(self) -> list[Episode]:
        return [sequence.episode() for sequence in self.sequences]

    @property
    def tokens(self) -> int:
        return sum(len(s.tokens) for s in self.sequences)

    def metrics(self) -> dict[str, float | None]:
        turns = [turns_of(s.tokens, s.action_mask) for s in self.sequences]
        return round_metrics(self.episodes, self.scored, turns) | self.told

    def records(self, number: int) -> list[dict]:
        """The lines of episodes.jsonl."""
        return episode_records(number, self.episodes, self.scored, self.kept, self.generations)

    @property
    def questions(self) -> list[str]:
        """The ids of the questions, one a group."""
        return [s.question.id for s in self.sequences[:: self.generations]]

    def rollouts(self, failed_below: float | None = None) -> list[Rollout]:
        """The episodes that are learned from, in numbers; `failed_below` tells which have failed, see Scored.failed.

        One whose judge failed is left out: a missing reward is not a zero, and teaches nothing.
        """
        return [
            Rollout(
                s.tokens, s.action_mask, s.logprobs, s.values, list(zip(s.step_ends, paid.steps)),
                group=i // self.generations, cut_off=s.finish == CUT_OFF, failed=paid.failed(failed_below),
            )
            for i, (s, paid) in enumerate(zip(self.sequences, self.scored, strict=True))
            if paid is not None and (self.kept is None or i // self.generations in self.kept)
        ]  # fmt: skip


class RoundSampler:
    """Samples rounds with the model as it is. A round follows from the seed and its number alone."""

    def __init__(
        self, config: PpoConfig, questions: list[Question], engine: Engine, retrieve: Retrieve, judge: Judge | None
    ):
        self.config, self.questions, self.engine, self.retrieve = config, questions, engine, retrieve
        self.judge = judge

    def sample(self, number: int, watch: Stopwatch) -> Round:
        """Round 1, 2, ...; `watch` takes the time of each stage."""
        rl, seed = self.config.rl, self.config.common.seed
        drawn = questions_of_round(self.questions, number, rl.batch_size, rl.num_generations, seed)
        sequences = self._run(drawn)
        watch.lap("rollout")
        sampled = Round(sequences, self.score(sequences), rl.num_generations)
        watch.lap("score")
        if rl.refill_limit:
            sampled = self._refilled(number, sampled)
            watch.lap("refill")
        return sampled

    def score(self, sequences: Many[Sequence]) -> list[Scored | None]:
        """What each episode is paid; None, a missing reward, if a judge was needed and failed."""
        episodes = [sequence.episode() for sequence in sequences]
        verdicts = self.judge.verdicts(episodes) if self.judge else [None] * len(episodes)
        return [score(e, self.config.reward, v) for e, v in zip(episodes, verdicts, strict=True)]

    def _run(self, drawn: tuple[list[Question], list[str]]) -> list[Sequence]:
        questions, seeds = drawn
        return self.engine.grant.attempt("sample", self.engine.run, questions, seeds, self.retrieve)

    def _refilled(self, number: int, first: Round) -> Round:
        """The round with further groups in place of those without variance."""
        rl, seed, used = self.config.rl, self.config.common.seed, {s.question.id for s in first.sequences}

        def paid(sequences: list[Sequence], scored: list[Scored | None]):
            return [((s, p), p and p.total) for s, p in zip(sequences, scored, strict=True)]

        def more(attempt: int, groups: int):
            drawn = questions_of_refill(self.questions, number, attempt, groups, rl.num_generations, seed, used)
            sequences = self._run(drawn)
            used.update(s.question.id for s in sequences)
            return paid(sequences, self.score(sequences))

        done = refill(paid(first.sequences, first.scored), more, rl.num_generations, rl.refill_limit)
        sequences, scored = map(list, zip(*done.episodes, strict=True))
        return Round(sequences, scored, rl.num_generations, done.kept, done.metrics)
