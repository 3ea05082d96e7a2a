"""The replay buffer of ExGRPO (arXiv 2510.02245): successes of earlier rounds, as they were sampled.

Knows tokens, their recorded log-probabilities and rewards; questions are ids.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from r3lite.core.records import Record, Source
from r3lite.rl.batch import Batch, Rollout

CENTRE, WIDTH = 0.5, 1.0  # of the Gaussian over success rates
ARRAYS = ("tokens", "action_mask", "logprobs")


@dataclass(frozen=True)
class Success:
    """A successful episode, in arrays, which take a fraction of the memory of lists: 10,000 are kept."""

    tokens: np.ndarray  # [T] int32
    action_mask: np.ndarray  # [T] bool
    logprobs: np.ndarray  # [N] float32, of the action tokens, as the sampler recorded them
    reward: float
    round: int  # in which it was sampled
    signal: float | None = None  # see Rollout

    @staticmethod
    def of(rollout: Rollout, number: int) -> "Success":
        return Success(
            np.array(rollout.tokens, np.int32), np.array(rollout.action_mask), np.array(rollout.logprobs, np.float32),
            rollout.total, number, rollout.signal,
        )  # fmt: skip

    def rollout(self, group: int) -> Rollout:
        """An off-policy rollout of a group, whose whole reward is at its last action token."""
        tokens, action_mask, logprobs = (getattr(self, name).tolist() for name in ARRAYS)
        made = Rollout.with_final_reward(tokens, action_mask, logprobs, self.reward, group)
        return replace(made, off_policy=True, signal=self.signal)


@dataclass(frozen=True)
class Experience:
    """What is kept of a question."""

    rate: float  # share of successes in its newest group
    successes: tuple[Success, ...]  # oldest first


class ReplayBuffer:
    """At most `size` successes, and at most `generations` of one question. Checkpoints keep it."""

    def __init__(self, size: int, generations: int, start: float):
        """Nothing is chosen before a round in which the share `start` of the episodes succeeded."""
        self.size, self.generations, self.start = size, generations, start
        self.questions: dict[str, Experience] = {}
        self.retired: set[str] = set()  # questions all of whose episodes in a round succeeded
        self.started = False

    def choose(self, count: int, seed: str) -> list[str]:
        """At most `count` questions to replay: draws a success rate by the Gaussian, then one of its questions."""
        if not self.started:
            return []
        stream, left, chosen = random.Random(seed), dict(self.questions), []
        while left and len(chosen) < count:
            rates = sorted({kept.rate for kept in left.values()})
            weights = [math.exp(-(((rate - CENTRE) / WIDTH) ** 2) / 2) for rate in rates]
            rate = stream.choices(rates, weights)[0]
            chosen.append(stream.choice([question for question, kept in left.items() if kept.rate == rate]))
            del left[chosen[-1]]
        return chosen

    def of_lowest_entropy(self, questions: list[str], mean_entropies: Callable[[Batch], Tensor]) -> dict[str, Success]:
        """The success of each question on which the current policy's mean entropy is lowest."""
        pairs = [(question, success) for question in questions for success in self.questions[question].successes]
        if not pairs:
            return {}
        found: dict[str, tuple[float, Success]] = {}
        entropies = mean_entropies(Batch.of([success.rollout(0) for _, success in pairs])).tolist()
        for (question, success), entropy in zip(pairs, entropies, strict=True):
            if question not in found or entropy < found[question][0]:
                found[question] = entropy, success
        return {question: success for question, (_, success) in found.items()}

    def add(self, number: int, groups: dict[str, Sequence[tuple[Rollout, bool]]]) -> None:
        """Adds round `number`: the episodes of each question that have a reward, and whether each succeeded.

        A question has more episodes than a group if it was drawn more than once.
        """
        outcomes = [succeeded for group in groups.values() for _, succeeded in group]
        self.started = self.started or (bool(outcomes) and sum(outcomes) / len(outcomes) >= self.start)
        for question, group in groups.items():
            new = tuple(Success.of(rollout, number) for rollout, succeeded in group if succeeded)
            if not group:  # all rewards are missing
                continue
            if len(new) == len(group) >= self.generations:
                self.retired.add(question)
                self.questions.pop(question, None)
            elif question not in self.retired:
                kept = self.questions.pop(question, Experience(0.0, ())).successes
                if kept or new:
                    self.questions[question] = Experience(len(new) / len(group), (kept + new)[-self.generations :])
        # The oldest successes are dropped first.
        ages = [(s.round, name) for name, kept in self.questions.items() for s in kept.successes]
        for _, question in sorted(ages, key=lambda age: age[0])[: max(0, len(ages) - self.size)]:
            kept = self.questions[question]
            if len(kept.successes) == 1:
                del self.questions[question]
            else:
                self.questions[question] = Experience(kept.rate, kept.successes[1:])

    @property
    def count(self) -> int:
        return sum(len(kept.successes) for kept in self.questions.values())

    def metrics(self) -> dict[str, float]:
        return {
            "replay/size": self.count,
            "replay/questions": len(self.questions),
            "replay/retired": len(self.retired),
        }

    def state_dict(self) -> dict:
        """As JSON but for `tensors`, which share memory with what is kept: this is called before every round."""
        questions, tensors = [], {}
        for place, (question, kept) in enumerate(self.questions.items()):
            parts = [{"reward": s.reward, "round": s.round, "signal": s.signal} for s in kept.successes]
            questions.append({"id": question, "rate": kept.rate, "successes": parts})
            for i, success in enumerate(kept.successes):
                tensors |= {f"{place}.{i}.{name}": torch.from_numpy(getattr(success, name)) for name in ARRAYS}
        return {
            "started": self.started, "retired": sorted(self.retired), "questions": questions, "tensors": tensors,
        }  # fmt: skip

    def load_state_dict(self, state: dict) -> None:
        record = Record(state, Source("the checkpoint's replay buffer", "Pass another checkpoint."))
        tensors: dict[str, Tensor] = record.record("tensors").values
        questions = {}
        for place, kept in enumerate(record.records("questions")):
            successes = []
            for i, fields in enumerate(kept.records("successes")):
                names = [f"{place}.{i}.{name}" for name in ARRAYS]
                if missing := [name for name in names if name not in tensors]:
                    raise record.error(f"{missing[0]} is missing")
                arrays = [tensors[name].numpy() for name in names]
                signal = fields.number("signal", None)  # checkpoints of earlier versions have none
                successes.append(Success(*arrays, fields.number("reward"), fields.whole("round"), signal))
            questions[kept.text("id")] = Experience(kept.number("rate", low=0, high=1), tuple(successes))
        self.questions, self.retired = questions, set(record.texts("retired"))
        self.started = record.flag("started")
