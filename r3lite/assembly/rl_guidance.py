"""The off-policy episodes of a round: a teacher's traces, and replayed successes of earlier rounds.

`rl_round` calls this when it draws a round's questions and when the episodes have rewards. The loss of off-policy
tokens is in `rl/algorithms/mixed.py`.
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
from r3lite.rewards.judge import Judge
from r3lite.rewards.registry import changing_weights
from r3lite.rewards.reward import Scored, highest_outcome, outcome_share, score_all
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.rl.batch import Batch, Rollout
from r3lite.rl.replay import ReplayBuffer
from r3lite.settings import PpoConfig


def check(config: PpoConfig) -> None:
    """Raises UsageError if an algorithm with off-policy episodes lacks traces, or rewards that it can compare."""
    rl = config.rl
    algorithm = ALGORITHMS[rl.algorithm]
    if algorithm.has_traces and rl.traces is None:
        raise UsageError(f"--traces is missing: {rl.algorithm} needs a file of a teacher's traces")
    if (algorithm.has_traces or algorithm.has_replay) and changing_weights(config.reward, 1):
        why = f"{rl.algorithm} reuses the rewards of earlier rounds"
        raise UsageError(f"{why}, but a first_weight changes the weights of --rewards: pass --curriculum-rounds 0")
    if (algorithm.has_traces or algorithm.has_replay) and not highest_outcome(config.reward):
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
    """The trace with the highest reward of each question that has one, by the question's id; prints how many are left
    out.

    A trace belongs to the questions with its text, and gets the reward that an episode of theirs would get. Its
    log-probabilities are 0: the teacher's probability is taken to be 1. `group` is yet to be set.
    """
    rl, of_text = config.rl, {}
    for question in questions:
        of_text.setdefault(" ".join(question.text.split()), []).append(question)
    pairs = [(trace, q) for trace in traces for q in of_text.get(" ".join(trace.question.split()), ())]
    rows = [encode_row(replace(trace, question=q.text), layout) for trace, q in pairs]
    fitting = [(trace, q, row) for (trace, q), row in zip(pairs, rows, strict=True) if row is not None]
    scored = score_all([Episode(q, list(trace.steps), ANSWERED) for trace, q, _ in fitting], config.reward, judge)
    found: dict[str, Rollout] = {}
    right, missing = 0, sum(rewards is None for rewards in scored)
    for (_, q, row), rewards in zip(fitting, scored, strict=True):
        if rewards is None or outcome_share(rewards, config.reward) < rl.trace_min_outcome:
            continue
        right += 1
        if q.id not in found or rewards.total > found[q.id].rewards[0][1]:
            made = Rollout.with_final_reward(row.tokens, row.loss_mask, None, rewards.total, 0)
            found[q.id] = replace(made, off_policy=True, signal=rewards.signal)
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
    """Chooses the off-policy episodes of each round. Its only state is the replay buffer."""

    config: PpoConfig
    questions: dict[str, Question]  # by id
    traces: dict[str, Rollout]  # by the id of its question
    replay: ReplayBuffer | None
    mean_entropies: Callable[[Batch], Tensor]  # the current policy's, [B] for a batch

    def replayed(self, number: int) -> list[str]:
        """The ids of the questions that round `number` asks again."""
        if self.replay is None:
            return []
        rl, seed = self.config.rl, self.config.common.seed
        return self.replay.choose(rl.questions_at(rl.replay_share), f"{seed}/replay {number}")

    def with_replayed(self, drawn: list[Question], replayed: list[str]) -> list[Question]:
        """The questions of a round's episodes, group by group, with the `replayed` ones in place of the last groups,
        unless they were drawn anyway."""
        size = self.config.rl.num_generations
        groups = drawn[::size]
        free = [i for i in reversed(range(len(groups))) if groups[i].id not in replayed]
        names = {question.id for question in groups}
        for i, name in zip(free, [name for name in replayed if name not in names], strict=False):
            groups[i] = self.questions[name]
        return [question for question in groups for _ in range(size)]

    def join(
        self, number: int, groups: list[str], rewarded: Iterable[tuple[Rollout, Scored]], replayed: list[str]
    ) -> tuple[list[Rollout], dict[str, float]]:
        """The off-policy episodes of round `number`, and metrics of them; adds the round's successes to the buffer.

        `groups` are the ids of its groups' questions, `rewarded` the sampled episodes that have a reward.
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
            for rollout, scored in rewarded:
                succeeded = outcome_share(scored, self.config.reward) >= rl.replay_min_outcome
                of_question[groups[rollout.group]].append((rollout, succeeded))
            self.replay.add(number, of_question)
            metrics |= self.replay.metrics()
        return joined, metrics
