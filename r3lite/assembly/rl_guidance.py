"""The off-policy episodes of a round: a teacher's traces, and replayed successes of earlier rounds.

`rl_round.py` calls `Guidance` when it draws the questions of a round and when the sampled episodes have rewards. The
loss of off-policy tokens is in `rl/algorithms/mixed.py`.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from r3lite.core.config import UsageError
from r3lite.core.episode import ANSWERED, Episode, Question
from r3lite.core.errors import R3LiteError
from r3lite.datasets.trajectories import Row, Trajectory, encode_row, read_traces
from r3lite.devices.ranks import Ranks
from r3lite.protocols.layout import Layout
from r3lite.protocols.registry import build_protocol
from r3lite.rewards.judge import Judge
from r3lite.rewards.registry import metrics_of_weights
from r3lite.rewards.reward import EpisodeReward, highest_outcome, outcome_share, score_all
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.rl.batch import Batch, Rollout
from r3lite.rl.replay import ReplayBuffer
from r3lite.settings import PpoConfig


def check(config: PpoConfig) -> None:
    """Raises UsageError if the algorithm lacks what its off-policy episodes need.

    They need a reward for correct answers, and weights of --rewards that stay the same; some algorithms need traces.
    """
    rl = config.rl
    algorithm = ALGORITHMS[rl.algorithm]
    if algorithm.has_traces and rl.traces is None:
        raise UsageError(
            f"--traces is missing: {rl.algorithm} needs a file of a teacher's traces", code="traces-missing"
        )
    if not algorithm.has_traces and not algorithm.has_replay:
        return
    if metrics_of_weights(config.reward, 1):
        cause = f"{rl.algorithm} reuses the rewards of earlier rounds"
        raise UsageError(
            f"{cause}, but a first_weight changes the weights of --rewards: pass --curriculum-rounds 0",
            code="curriculum-weights",
        )
    if not highest_outcome(config.reward):
        cause = f"{rl.algorithm} needs a reward for correct answers"
        raise UsageError(
            f"{cause}: pass --outcome-em, --outcome-f1 or --outcome-judge above 0", code="guidance-unrewarded"
        )


def traces_of(config: PpoConfig) -> list[Trajectory]:
    """Returns the rows of --traces; none without it."""
    if not config.rl.traces:
        return []
    return read_traces(config.rl.traces, build_protocol(config.protocol), config.data.skip_bad_rows)


def build_buffer(config: PpoConfig) -> ReplayBuffer | None:
    """Returns an empty replay buffer; None if the algorithm has none."""
    rl = config.rl
    if not ALGORITHMS[rl.algorithm].has_replay:
        return None
    return ReplayBuffer(rl.replay_size, rl.num_generations, rl.replay_start)


@dataclass(frozen=True)
class MatchedTrace:
    """A trace and a question with the same text. A trace is matched with every such question."""

    trace: Trajectory
    question: Question
    row: Row | None  # the trace in tokens; None if it is too long


def usable_traces(
    traces: Sequence[Trajectory],
    config: PpoConfig,
    questions: Sequence[Question],
    layout: Layout,
    judge: Judge | None,
) -> dict[str, Rollout]:
    """Returns, by the question's id, the usable trace with the highest reward of each question that has one.

    Prints how many traces are left out, and why. A trace belongs to every question with the same text, and is rewarded
    as an episode of that question would be. Its log-probabilities are 0: the teacher's probability is taken to be 1.
    Its `group` is set when a round takes it. Raises R3LiteError if no trace is usable.
    """
    matched = _matched_traces(traces, questions, layout)
    fitting = [match for match in matched if match.row is not None]
    episodes = [Episode(match.question, list(match.trace.steps), ANSWERED) for match in fitting]
    sources = {question.source for question in questions}
    rewards = score_all(episodes, config.reward, judge, run_sources=sources)
    missing_rewards = 0
    wrong_answers = 0
    best: dict[str, Rollout] = {}  # by the question's id
    for match, reward in zip(fitting, rewards, strict=True):
        if reward is None:
            missing_rewards += 1
            continue
        if outcome_share(reward, config.reward) < config.rl.trace_min_outcome:
            wrong_answers += 1
            continue
        id = match.question.id
        if id not in best or reward.total > best[id].total:
            best[id] = _trace_rollout(match.row, reward)
    texts = {_normalized(question.text) for question in questions}
    reasons = {
        "have no question in --data": sum(_normalized(trace.question) not in texts for trace in traces),
        f"are longer than {layout.lengths.max_length} tokens": len(matched) - len(fitting),
        "have no verdict of the judge, or no value of another reward": missing_rewards,
        f"have an answer reward below {config.rl.trace_min_outcome:g} of the maximum": wrong_answers,
        "are not the best of their question": len(fitting) - missing_rewards - wrong_answers - len(best),
    }
    message = f"{len(best)} of {len(questions)} questions have a usable trace, of {len(traces)} traces"
    for reason, count in reasons.items():
        if count:
            message += f"; {count} {reason}"
    if not best:
        raise R3LiteError(
            f"--traces {config.rl.traces}: {message}",
            "Pass traces with correct answers to --data.",
            code="traces-useless",
        )
    print(message, file=sys.stderr)
    return best


def _matched_traces(traces: Sequence[Trajectory], questions: Sequence[Question], layout: Layout) -> list[MatchedTrace]:
    """Returns each trace with each question that has the same text."""
    by_text: dict[str, list[Question]] = {}
    for question in questions:
        by_text.setdefault(_normalized(question.text), []).append(question)
    matched = []
    for trace in traces:
        for question in by_text.get(_normalized(trace.question), ()):
            row = encode_row(replace(trace, question=question.text), layout)
            matched.append(MatchedTrace(trace, question, row))
    return matched


def _normalized(text: str) -> str:
    """Returns a text with one blank between any two words."""
    return " ".join(text.split())


def _trace_rollout(row: Row, reward: EpisodeReward) -> Rollout:
    """Returns a trace as an off-policy rollout. Its group 0 stands for none."""
    rollout = Rollout.with_final_reward(row, reward=reward.total, group=0)
    return replace(rollout, off_policy=True, signal=reward.signal)


@dataclass(frozen=True)
class Guidance:
    """Chooses the off-policy episodes of each round. The replay buffer is all that changes from round to round."""

    config: PpoConfig
    questions: dict[str, Question]  # by id
    traces: dict[str, Rollout]  # by the id of the question
    replay: ReplayBuffer | None
    mean_entropies: Callable[[Batch], Tensor]  # of each row [B] of a batch, under the current policy

    def replayed(self, number: int) -> list[str]:
        """Returns the ids of the questions of the replay buffer that round `number` asks again."""
        if self.replay is None:
            return []
        count = self.config.rl.question_count(self.config.rl.replay_share)
        return self.replay.choose(count, f"{self.config.common.seed}/replay {number}")

    def with_replayed(self, drawn: list[Question], replayed: list[str]) -> list[Question]:
        """Returns the questions of a round's episodes, with those of the ids `replayed` in place of the last groups.

        `drawn` has the question of each episode, group by group. A replayed question that was drawn anyway stays
        where it is. If there are too few places, the last replayed questions are left out.
        """
        size = self.config.rl.num_generations
        group_questions = drawn[::size]
        places = [i for i in reversed(range(len(group_questions))) if group_questions[i].id not in replayed]
        drawn_ids = {question.id for question in group_questions}
        ids_to_place = [id for id in replayed if id not in drawn_ids]
        for i, id in zip(places, ids_to_place, strict=False):
            group_questions[i] = self.questions[id]
        return [question for question in group_questions for _ in range(size)]

    def choose_and_store(
        self,
        number: int,
        group_questions: list[str],
        rewarded: Iterable[tuple[Rollout, EpisodeReward]],
        replayed: list[str],
    ) -> tuple[list[Rollout], dict[str, float]]:
        """Chooses the off-policy episodes of round `number`, then adds the round's successes to the replay buffer.

        Returns the off-policy episodes, and metrics of them and of the buffer. `group_questions` has the id of each
        group's question, `rewarded` the sampled episodes that have a reward. `replayed` has the ids that the method
        `replayed` returned. If several groups have one question, the first of them gets its off-policy episodes.
        """
        questions = list(dict.fromkeys(group_questions))  # each id once, in the order of the groups
        episodes: list[Rollout] = []
        metrics: dict[str, float] = {}
        if self.traces:
            episodes += self._traces_of_round(group_questions, questions)
            metrics["off_policy/traces"] = len(episodes)
        if self.replay is not None:
            replayed_questions = [id for id in replayed if id in questions]
            successes = self.replay.of_lowest_entropy(replayed_questions, self.mean_entropies)
            episodes += [success.rollout(group_questions.index(id)) for id, success in successes.items()]
            metrics["off_policy/replays"] = len(successes)
            if successes:
                ages = [number - success.round for success in successes.values()]  # in rounds
                metrics["replay/age"] = sum(ages) / len(ages)
            outcomes = self._outcomes(group_questions, questions, rewarded)
            self.replay.add(number, outcomes, draws=Counter(group_questions))
            metrics |= self.replay.metrics()
        return episodes, metrics

    def _traces_of_round(self, group_questions: list[str], questions: list[str]) -> list[Rollout]:
        """Returns the traces of the first questions that have one, up to --trace-share of the questions."""
        limit = self.config.rl.question_count(self.config.rl.trace_share)
        guided = [id for id in questions if id in self.traces][:limit]
        return [replace(self.traces[id], group=group_questions.index(id)) for id in guided]

    def _outcomes(
        self,
        group_questions: list[str],
        questions: list[str],
        rewarded: Iterable[tuple[Rollout, EpisodeReward]],
    ) -> dict[str, list[tuple[Rollout, bool]]]:
        """Returns, by the question's id, the rewarded episodes, each with whether it succeeded.

        A question without a rewarded episode has an empty list.
        """
        outcomes: dict[str, list[tuple[Rollout, bool]]] = {id: [] for id in questions}
        for rollout, reward in rewarded:
            succeeded = outcome_share(reward, self.config.reward) >= self.config.rl.replay_min_outcome
            question = group_questions[rollout.group]
            outcomes[question].append((rollout, succeeded))
        return outcomes


def build_guidance(
    config: PpoConfig,
    questions: Sequence[Question],
    traces: Sequence[Trajectory],
    replay: ReplayBuffer | None,
    layout: Layout,
    judge: Judge | None,
    ranks: Ranks,
    mean_entropies: Callable[[Batch], Tensor],
) -> Guidance | None:
    """Returns the guidance of a run; None if its algorithm has neither traces nor a replay buffer.

    Only the first rank, which has the judge, rewards the traces.
    """
    trace_rollouts: dict[str, Rollout] = {}
    if traces:
        trace_rollouts = ranks.from_first(lambda: usable_traces(traces, config, questions, layout=layout, judge=judge))
    if not trace_rollouts and replay is None:
        return None
    return Guidance(
        config=config,
        questions={question.id: question for question in questions},
        traces=trace_rollouts,
        replay=replay,
        mean_entropies=mean_entropies,
    )
