"""The replay buffer of ExGRPO (arXiv 2510.02245): successes of earlier rounds, as they were sampled.

Knows tokens, their recorded log-probabilities and rewards, but no text. `question` is the id of a question, except in
`load_state_dict`.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from r3lite.core.records import Record, Source
from r3lite.core.token_record import TokenRecord
from r3lite.rl.batch import Batch, Rollout

RATE_MEAN = 0.5  # of the Gaussian over success rates
RATE_STD = 1.0  # of the same Gaussian
ARRAYS = ("tokens", "action_mask", "logprobs")  # the fields of a TokenRecord that the buffer stores
Outcomes = Sequence[tuple[Rollout, bool]]  # the episodes of a question, each with whether it succeeded


@dataclass(frozen=True)
class Success:
    """A successful episode.

    Its record has NumPy arrays instead of lists: they take less memory, and the buffer may have 10,000 successes.
    """

    record: TokenRecord  # tokens in int32, mask in bool, log-probabilities in float32; no values
    reward: float
    round: int  # the round in which it was sampled
    signal: float | None = None  # see Rollout.signal

    @staticmethod
    def of(rollout: Rollout, round_number: int) -> "Success":
        """Copies a rollout that was sampled in a round."""
        record = TokenRecord(
            tokens=np.array(rollout.record.tokens, np.int32),
            action_mask=np.array(rollout.record.action_mask),
            logprobs=np.array(rollout.record.logprobs, np.float32),
        )
        return Success(record, reward=rollout.total, round=round_number, signal=rollout.signal)

    def rollout(self, group: int) -> Rollout:
        """Returns the success as an off-policy rollout of a group, with the whole reward at the last action token."""
        lists = {name: getattr(self.record, name).tolist() for name in ARRAYS}
        rollout = Rollout.with_final_reward(TokenRecord(**lists), reward=self.reward, group=group)
        return replace(rollout, off_policy=True, signal=self.signal)


@dataclass(frozen=True)
class Experience:
    """The successes of a question, and its success rate."""

    rate: float  # share of successes among the episodes of the question's newest round
    successes: tuple[Success, ...]  # oldest first


def _weight(rate: float) -> float:
    """The weight with which a success rate is drawn."""
    distance = (rate - RATE_MEAN) / RATE_STD
    return math.exp(-(distance**2) / 2)


class ReplayBuffer:
    """At most `size` successes, and at most `generations` of one question. It is part of checkpoints."""

    def __init__(self, size: int, generations: int, start: float):
        """`generations` is the number of episodes in a group.

        Replay starts after the first round in which at least the share `start` of the episodes has succeeded.
        """
        self.size = size
        self.generations = generations
        self.start = start
        self.questions: dict[str, Experience] = {}  # by the id of the question
        self.retired: set[str] = set()  # questions that had a round in which all their episodes succeeded
        self.started = False

    def choose(self, count: int, seed: str) -> list[str]:
        """Draws at most `count` questions to replay; none before the start.

        For each, first a success rate is drawn, weighted by the Gaussian, then one of the questions with this rate.
        """
        if not self.started:
            return []
        stream = random.Random(seed)
        candidates = dict(self.questions)
        questions: list[str] = []
        while candidates and len(questions) < count:
            rates = sorted({experience.rate for experience in candidates.values()})
            weights = [_weight(rate) for rate in rates]
            rate = stream.choices(rates, weights)[0]
            with_rate = [question for question, experience in candidates.items() if experience.rate == rate]
            question = stream.choice(with_rate)
            questions.append(question)
            del candidates[question]
        return questions

    def of_lowest_entropy(
        self,
        questions: list[str],
        mean_entropies: Callable[[Batch], Tensor],
    ) -> dict[str, Success]:
        """Returns, by question, the success with the lowest mean entropy of the current policy over its action tokens.

        `mean_entropies` returns the mean entropy [B] of each row of a batch.
        """
        pairs: list[tuple[str, Success]] = []  # each success with its question
        for question in questions:
            pairs += [(question, success) for success in self.questions[question].successes]
        if not pairs:
            return {}
        batch = Batch.of([success.rollout(group=0) for _, success in pairs])
        entropies = mean_entropies(batch).tolist()
        lowest: dict[str, float] = {}
        successes: dict[str, Success] = {}
        for (question, success), entropy in zip(pairs, entropies, strict=True):
            if question not in lowest or entropy < lowest[question]:
                lowest[question] = entropy
                successes[question] = success
        return successes

    def add(
        self,
        round_number: int,
        groups: dict[str, Outcomes],
        draws: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Adds those episodes of a round that have a reward. `groups` has them by question.

        `draws` says how often each question was drawn in the round; one that it lacks was drawn once. A question that
        was drawn twice has the episodes of two groups.
        """
        outcomes = [succeeded for group in groups.values() for _, succeeded in group]
        if outcomes and sum(outcomes) / len(outcomes) >= self.start:
            self.started = True
        for question, group in groups.items():
            if group:  # else all rewards are missing
                episode_count = self.generations * draws.get(question, 1)
                self._add_group(round_number, question, group, is_complete=len(group) >= episode_count)
        self._drop_oldest()

    def _add_group(self, round_number: int, question: str, group: Outcomes, is_complete: bool) -> None:
        """Adds the successes of a question's episodes, or retires the question if all of them succeeded.

        A question some of whose episodes have no reward (`is_complete` is False) is not retired, and a retired question
        is never added again.
        """
        successes = tuple(Success.of(rollout, round_number) for rollout, succeeded in group if succeeded)
        if is_complete and len(successes) == len(group):
            self.retired.add(question)
            self.questions.pop(question, None)
        elif question not in self.retired:
            if question in self.questions:
                successes = self.questions.pop(question).successes + successes
            if successes:
                rate = sum(succeeded for _, succeeded in group) / len(group)
                self.questions[question] = Experience(rate, successes[-self.generations :])

    def _drop_oldest(self) -> None:
        """Drops the oldest successes until there are at most `size`."""
        rounds = []  # (round, question) of each success
        for question, experience in self.questions.items():
            rounds += [(success.round, question) for success in experience.successes]
        excess = max(0, len(rounds) - self.size)
        oldest = sorted(rounds, key=lambda pair: pair[0])[:excess]
        for _, question in oldest:
            experience = self.questions[question]
            remaining = experience.successes[1:]  # without its oldest
            if remaining:
                self.questions[question] = Experience(experience.rate, remaining)
            else:
                del self.questions[question]

    @property
    def count(self) -> int:
        """The number of successes of all questions."""
        return sum(len(experience.successes) for experience in self.questions.values())

    def metrics(self) -> dict[str, float]:
        """Returns the numbers of successes, of their questions and of retired questions."""
        return {
            "replay/size": self.count,
            "replay/questions": len(self.questions),
            "replay/retired": len(self.retired),
        }

    def state_dict(self) -> dict:
        """Returns the state as JSON values, except `tensors`: each array, by "<question index>.<success index>.<name>".

        The tensors share the buffer's memory. A copy would be slow, as this is called before every round.
        """
        questions = []
        tensors = {}
        for question_index, (question, experience) in enumerate(self.questions.items()):
            successes = []
            for i, success in enumerate(experience.successes):
                fields = {"reward": success.reward, "round": success.round, "signal": success.signal}
                successes.append(fields)
                for name in ARRAYS:
                    tensors[f"{question_index}.{i}.{name}"] = torch.from_numpy(getattr(success.record, name))
            questions.append({"id": question, "rate": experience.rate, "successes": successes})
        return {
            "started": self.started,
            "retired": sorted(self.retired),
            "questions": questions,
            "tensors": tensors,
        }

    def load_state_dict(self, state: dict) -> None:
        """Restores the state that `state_dict` returned.

        Raises R3LiteError, and changes nothing, if `state` is no such state.
        """
        record = Record(state, Source("the checkpoint's replay buffer", "Pass another checkpoint."))
        tensors: dict[str, Tensor] = record.record("tensors").values
        questions = {}
        for question_index, question in enumerate(record.records("questions")):
            successes = []
            for i, success in enumerate(question.records("successes")):
                arrays = {}
                for name in ARRAYS:
                    key = f"{question_index}.{i}.{name}"
                    if key not in tensors:
                        raise record.error(f"{key} is missing")
                    arrays[name] = tensors[key].numpy()
                signal = success.number("signal", None)  # checkpoints of earlier versions have none
                reward = success.number("reward")
                round_number = success.whole("round")
                token_record = TokenRecord(**arrays)
                successes.append(Success(token_record, reward=reward, round=round_number, signal=signal))
            rate = question.number("rate", low=0, high=1)
            questions[question.text("id")] = Experience(rate, tuple(successes))
        retired = set(record.texts("retired"))
        started = record.flag("started")
        self.questions = questions
        self.retired = retired
        self.started = started
