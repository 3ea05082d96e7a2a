"""What a round learns from and did not sample: a teacher's traces, and replayed successes of earlier rounds.

`rl_round` asks for it when a round's questions are drawn and when its episodes are rewarded. What it means to the loss
is in `rl/algorithms/mixed.py`.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from r3lite.core.config import UsageError
from r3lite.core.episode import ANSWERED, Episode, Question
from r3lite.core.errors import R3LiteError
from r3lite.datasets.trajectories import Trajectory, encode_row, read_traces
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.transcript import Layout
from r3lite.rewards import curriculum
from r3lite.rewards.judge import Judge
from r3lite.rewards.reward import Scored, most_for_answer, outcome_share, score_all
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.rl.batch import Batch, Rollout
from r3lite.rl.replay import ReplayBuffer
from r3lite.settings import PpoConfig


def check(config: PpoConfig) -> None:
    """Raises UsageError if an algorithm is without what it is guided by."""
    rl = config.rl
    algorithm = ALGORITHMS[rl.algorithm]
    if algorithm.has_traces and rl.traces is None:
        raise UsageError(f"--traces is missing: {rl.algorithm} needs a file of a teacher's traces")
    if (algorithm.has_traces or algorithm.has_replay) and curriculum.changing_weights(config.reward, 1):
        why = f"{rl.algorithm} reuses the rewards of earlier rounds"
        raise UsageError(f"{why}, but a first_weight changes the weights of --rewards: pass --curriculum-rounds 0")
    if (algorithm.has_traces or algorithm.has_replay) and not most_for_answer(config.reward):
        why = f"{rl.algorithm} needs a reward for correct answers"
        raise UsageError(f"{why}: pass --outcome-em, --outcome-f1 or --outcome-judge above 0")


def read(config: PpoConfig) -> list[Trajectory]:
    """The rows of --traces; none without it."""
    rl = config.rl
    return read_traces(rl.traces, build_protocol(config.protocol), config.data.skip_bad_rows) if rl.traces else []


def build_buffer(config: PpoConfig) -> ReplayBuffer | None:
    """An empty replay buffer, if the algorithm has one."""
    rl = config.rl
    if not ALGORITHMS[rl.algorithm].has_replay:
        return None
    return ReplayBuffer(rl.replay_size, rl.num_generations, rl.replay_start)


def usable(
    traces: Sequence[Trajectory], config: PpoConfig, questions: Sequence[Question], layout: Layout, judge: Judge | None
) -> dict[str, Rollout]:
    """The trace with the highest reward for each question, by the question's id; group 0. Prints how many are left out.

    A trace belongs to the questions with its text, and is rewarded as an episode of theirs would be. Its
    log-probabilities are 0: the teacher's probability is taken to be 1.
    """
    rl, of_text = config.rl, {}
    for question in questions:
        of_text.setdefault(" ".join(question.text.split()), []).append(question)
    pairs = [(trace, q) for trace in traces for q in of_text.get(" ".join(trace.question.split()), ())]
    rows = [encode_row(replace(trace, question=q.text), layout) for trace, q in pairs]
    fitting = [(trace, q, row) for (trace, q), row in zip(pairs, rows, strict=True) if row is not None]
    paid = score_all([Episode(q, list(trace.steps), ANSWERED) for trace, q, _ in fitting], config.reward, judge)
    found: dict[str, Rollout] = {}
    right, missing = 0, sum(p is None for p in paid)
    for (_, q, row), p in zip(fitting, paid, strict=True):
        if p is None or outcome_share(p, config.reward) < rl.trace_min_outcome:
            continue
        right += 1
        if q.id not in found or p.total > found[q.id].rewards[0][1]:
            made = Rollout.paid_at_end(row.tokens, row.loss_mask, None, p.total, 0)
            found[q.id] = replace(made, off_policy=True)
    strangers = sum(" ".join(trace.question.split()) not in of_text for trace in traces)
    reasons = {
        "have no question in --data": strangers,
        f"are longer than {layout.lengths.max_length} tokens": len(pairs) - len(fitting),
        "have no verdict of the judge, or no value of another reward": missing,
        f"have an answer reward below {rl.trace_min_outcome:g} of the maximum": len(fitting) - missing - right,
        "are not the best of their question": right - len(found),
    }
    message = f"{len(found)} of {len(questions)} questions have a usable trace, of {len(traces)} traces"
    message += "".join(f"; {count} {why}" for why, count in reasons.items() if count)
    if not found:
        raise R3LiteError(f"--traces {rl.traces}: {message}", "Pass traces with correct answers to --data.")
    print(message, file=sys.stderr)
    return found


@dataclass(frozen=True)
class Guidance:
    """Chooses the off-policy episodes of each round. The replay buffer is its one state."""

    config: PpoConfig
    questions: dict[str, Question]  # by id
    traces: dict[str, Rollout]  # by the id of its question
    replay: ReplayBuffer | None
    mean_entropies: Callable[[Batch], Tensor]  # [B], of a batch under the policy of now

    def replayed(self, number: int) -> list[str]:
        """The questions that round `number` asks again."""
        if self.replay is None:
            return []
        rl, seed = self.config.rl, self.config.common.seed
        return self.replay.choose(rl.questions_at(rl.replay_share), f"{seed}/replay {number}")

    def with_replayed(self, drawn: list[Question], replayed: list[str]) -> list[Question]:
        """The questions of a round's episodes, group after group, with those that are asked again in place of the last
        groups. One that was drawn anyway needs no place."""
        size = self.config.rl.num_generations
        groups = drawn[::size]
        free = [i for i in reversed(range(len(groups))) if groups[i].id not in replayed]
        names = {question.id for question in groups}
        for i, name in zip(free, [name for name in replayed if name not in names], strict=False):
            groups[i] = self.questions[name]
        return [question for question in groups for _ in range(size)]

    def join(
        self, number: int, groups: list[str], paid: Iterable[tuple[Rollout, Scored]], replayed: list[str]
    ) -> tuple[list[Rollout], dict[str, float]]:
        """The off-policy episodes of round `number`, with metrics of where they are from; keeps its own successes.

        `groups` are the questions of its groups, `paid` the episodes that have a reward.
        """
        rl = self.config.rl
        asked = list(dict.fromkeys(groups))
        guided = [name for name in asked if name in self.traces][: rl.questions_at(rl.trace_share)]
        joined = [replace(self.traces[name], group=groups.index(name)) for name in guided]
        metrics: dict[str, float] = {"off_policy/traces": len(joined)} if self.traces else {}
        if self.replay is not None:
            found = self.replay.of_lowest_entropy([name for name in replayed if name in asked], self.mean_entropies)
            joined += [success.rollout(groups.index(name)) for name, success in found.items()]
            metrics["off_policy/replays"] = len(found)
            if found:
                metrics["replay/age"] = sum(number - success.round for success in found.values()) / len(found)
            of_question: dict[str, list[tuple[Rollout, bool]]] = {name: [] for name in asked}
            for rollout, scored in paid:
                succeeded = outcome_share(scored, self.config.reward) >= rl.replay_min_outcome
                of_question[groups[rollout.group]].append((rollout, succeeded))
            self.replay.add(number, of_question)
            metrics |= self.replay.metrics()
        return joined, metrics
