"""The rounds of --algorithm verifree: the reward of an end is the probability of the right answer after its analysis.

An end is a context with a new last turn (see answer_round.py). It is split where its answer begins: the last turn up to
there is the analysis. The right answer replaces the sampled one, and a pass of the policy over the result gives the
right answer's probability. See `rl/algorithms/verifree.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from r3lite.assembly.answer_round import AnswerRound, AnswerSampler, is_context
from r3lite.core.episode import ANSWERED, Step
from r3lite.core.spans import Stopwatch
from r3lite.core.token_record import TokenRecord
from r3lite.protocols.layout import Layout
from r3lite.rewards.reward import EpisodeReward
from r3lite.rl.batch import Batch, Rollout
from r3lite.rollout.sequence import Sequence


@dataclass(frozen=True)
class SplitEnd:
    """An end whose answer was replaced by the right one."""

    analysis: TokenRecord  # the end's tokens up to its answer
    # The analysis, then the right answer. Only the tokens of the right answer are actions; `_likelihoods` sets their
    # log-probabilities.
    with_answer: TokenRecord


@dataclass(frozen=True, kw_only=True)
class LikelihoodRound(AnswerRound):
    """The ends of a round's contexts, each rewarded by the probability of the right answer."""

    split_ends: dict[int, SplitEnd]  # by the index of the end; only ends that were split are in it

    def rollouts(self, failed_below: float | None = None) -> list[Rollout]:
        """Returns the analyses to learn from, each followed by an off-policy rollout of the right answer after it.

        Ends without an answer are learned as a whole, with the reward 0. `failed_below` is not used: only algorithms
        with a teacher read which episodes failed.
        """
        rollouts = []
        for i, (end, reward, group) in enumerate(zip(self.sequences, self.rewards, self.groups, strict=True)):
            if group not in self.learned_groups or reward is None:
                continue
            if i not in self.split_ends:
                rollouts.append(Rollout.with_final_reward(end, reward=reward.total, group=group))
                continue
            split_end = self.split_ends[i]
            analysis = Rollout.with_final_reward(split_end.analysis, reward=reward.total, group=group)
            answer = Rollout.with_final_reward(split_end.with_answer, reward=reward.total, group=group)
            rollouts += [analysis, replace(answer, off_policy=True)]
        return rollouts


@dataclass
class LikelihoodSampler(AnswerSampler):
    """Samples the rounds of --algorithm verifree."""

    requirement: ClassVar[str] = "retrieved every gold paragraph and wrote an analysis before its answer"
    # Returns the policy's log-probabilities [B, T] of a batch's action tokens.
    policy_logprobs: Callable[[Batch], Tensor] = field(kw_only=True)

    def run_stages(self, number: int, watch: Stopwatch) -> LikelihoodRound:
        """Samples the ends of a round's contexts and rewards them; `watch` times the stages."""
        this_round = super().run_stages(number, watch)
        with watch.stage("likelihood"):
            return self._rewarded(this_round)

    def is_usable(self, sequence: Sequence) -> bool:
        """Returns whether an episode gives a context whose ends have an analysis.

        If the answer of its last turn was forced, so is that of every new last turn (`Sequence.reopened`). A turn with
        a forced answer begins after the heading of the answer.
        """
        return is_context(sequence) and sequence.closed_forced_step is None

    def _rewarded(self, this_round: AnswerRound) -> LikelihoodRound:
        """Returns the round with the probabilities of the right answers as rewards.

        The reward is missing if the end searches again, or if its answer cannot be replaced (see `split`). It is 0 if
        the end has no answer. A group is learned if one of its rewards is above 0: even a group without variance has
        right answers to learn.
        """
        rewards = list(this_round.rewards)
        split_ends: dict[int, SplitEnd] = {}
        for i, end in enumerate(this_round.sequences):
            if rewards[i] is None or end.finish != ANSWERED:
                continue
            split_end = split(end, self.engine.layout_of(end))
            if split_end is None:
                rewards[i] = None
            else:
                split_ends[i] = split_end
        if split_ends:
            likelihoods = self._likelihoods([split_end.with_answer for split_end in split_ends.values()])
            for i, likelihood in zip(split_ends, likelihoods, strict=True):
                rewards[i] = with_outcome(rewards[i], likelihood * self.config.reward.outcome_em)
        learned_groups = set()
        for group, reward in zip(this_round.groups, rewards, strict=True):
            if reward is not None and reward.total > 0:
                learned_groups.add(group)
        fields = vars(this_round) | {"rewards": rewards, "learned_groups": learned_groups}
        return LikelihoodRound(**fields, split_ends=split_ends)

    def _likelihoods(self, ends: list[TokenRecord]) -> list[float]:
        """Returns the probability of the right answer in each end.

        Stores the log-probabilities of its tokens in the end's record.
        """
        batch = Batch.of([Rollout.with_final_reward(end, reward=0.0, group=0) for end in ends])
        logprobs = self.policy_logprobs(batch)  # [B, T], 0 where the mask is False
        for row, end in enumerate(ends):
            end.logprobs = logprobs[row][batch.action_mask[row]].tolist()
        return logprobs.sum(-1).exp().tolist()


def split(end: Sequence, layout: Layout) -> SplitEnd | None:
    """Splits an end where its answer begins, and puts the right answer there.

    Returns None if no token begins exactly there, or if the end with the right answer would exceed --max-length.
    """
    start = answer_start(end, layout)
    if start is None:
        return None
    answer = right_answer(end, layout)
    if start + len(answer) > layout.lengths.max_length:
        return None
    with_answer = TokenRecord(
        tokens=end.tokens[:start] + answer,
        action_mask=[False] * start + [True] * len(answer),
    )
    return SplitEnd(analysis=end.first(start), with_answer=with_answer)


def answer_start(end: Sequence, layout: Layout) -> int | None:
    """Returns the index of the first token after the heading of an end's answer.

    Returns None if the last turn has no heading, or if the token that ends the heading also begins the answer.
    """
    protocol = layout.protocol
    for start in range(end.turn_start + 1, len(end.tokens) + 1):
        text = layout.turn_text.read(replace(end, tokens=end.tokens[:start]))
        if protocol.begins_answer(text):
            # Lenient formats take the heading in any letter case.
            if text.lower().endswith(protocol.answer_heading.lower()):
                return start
            return None
    return None


def right_answer(end: Sequence, layout: Layout) -> list[int]:
    """Returns the tokens that follow the heading of the answer in an SFT row: the right answer and the turn's end."""
    protocol = layout.protocol
    number = len(end.steps)
    # The heading is looked for before the answer "-", because the right answer may itself have the heading's words.
    placeholder = protocol.render(Step("-", answer="-"), number)
    place = placeholder.rindex(protocol.answer_heading) + len(protocol.answer_heading)
    text = protocol.render(Step("-", answer=end.question.answers[0]), number)[place:]
    tokens = layout.tokenizer.encode(text)
    if protocol.user_turns:  # else a stop string ends the turn
        tokens.append(layout.tokenizer.stop_id)
    return tokens


def with_outcome(reward: EpisodeReward, outcome: float) -> EpisodeReward:
    """Returns a copy of an end's reward with another outcome.

    The outcome is the whole reward, given at the last step, because --learn answer has no other rewards.
    """
    by_step = [0.0] * len(reward.by_step)
    by_step[-1] = outcome
    return EpisodeReward(by_step, parts=reward.parts | {"outcome": outcome}, answer_reward=outcome)
