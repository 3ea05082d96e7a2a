"""What an algorithm defines: advantages, the loss per token, and each token's weight in the loss of a mini-batch.

The learner does everything else in the same way for all algorithms.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Literal

from torch import Tensor

from r3lite.core.config import UsageError, flag
from r3lite.core.records import Record, Source
from r3lite.rl import losses
from r3lite.rl.advantages import share_without_variance
from r3lite.rl.batch import ActionTokens, Batch
from r3lite.settings import LengthSettings, RLSettings

GAIN = 0.1  # K_beta in section 2.2 of arXiv 1909.08593
MAX_ERROR = 0.2  # the bound of e_t in that section


class KlMultiplier:
    """What --kl-beta is multiplied by: an adaptive factor, and a scale that the collapse guard sets.

    Without a target KL the factor stays 1. With a target it is kept in checkpoints, and adapted after each round
    (arXiv 1909.08593, section 2.2) by:

        e = clip((KL - target) / target, -0.2, 0.2),    factor <- factor (1 + 0.1 e)

    Here KL is the mean over a round's tokens, in nats; in the paper it is the sum over an answer.
    """

    def __init__(self, target: float | None):
        self.target = target
        self.factor = 1.0
        self.scale = 1.0

    def update(self, kl: float) -> None:
        """Adapts the factor after a round whose mean KL is `kl`. It stays if `kl` is nan, after an overflow in fp16."""
        if self.target is None or math.isnan(kl):
            return
        error = (kl - self.target) / self.target
        clipped_error = min(max(error, -MAX_ERROR), MAX_ERROR)
        self.factor *= 1 + GAIN * clipped_error

    def state_dict(self) -> dict:
        """Returns the state for a checkpoint, as JSON values."""
        return {"factor": self.factor}

    def load_state_dict(self, state: dict) -> None:
        """Restores the state that `state_dict` returned; raises R3LiteError if `state` is no such state."""
        record = Record(state, Source("the checkpoint's weight of the KL", "Pass another checkpoint."))
        self.factor = record.number("factor")


class Algorithm:
    """The base class: PPO's clipped loss, KL in the reward or in the loss, and groups.

    The learner calls the methods from `with_advantages` on, in their order here. An algorithm holds its settings and
    the limits of an episode; only its `kl_multiplier` changes during a run.
    """

    has_critic: ClassVar[bool] = False  # trains a value head with `value_loss`
    has_groups: ClassVar[bool] = False  # compares the episodes of a question: shuffling keeps them side by side
    has_teacher: ClassVar[bool] = False  # learns by `guided_loss` from failed episodes
    has_episode_ratios: ClassVar[bool] = False  # `log_ratios` needs `actions.episode_log_ratios`
    has_traces: ClassVar[bool] = False  # a teacher's traces join the groups of their questions
    has_replay: ClassVar[bool] = False  # successful episodes of earlier rounds join the groups of their questions
    learns_right_answers: ClassVar[bool] = False  # also learns right answers, each with its probability as reward
    # A staticmethod (returns [B], groups [B]) -> advantages [B]. Needed by `with_advantages`; see rl/advantages.py.
    group_advantages: ClassVar[Callable[[Tensor, Tensor], Tensor]]
    kl_in: ClassVar[Literal["reward", "loss"] | None] = "loss"  # None: the algorithm penalizes no KL
    # Names of the settings that this algorithm uses and at least one other ignores.
    own_settings: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, settings: RLSettings, lengths: LengthSettings):
        """Raises UsageError if the settings contradict each other or the algorithm."""
        self.settings = settings
        self.lengths = lengths
        self.kl_multiplier = KlMultiplier(settings.kl_target)
        default_estimator = "k1" if self.kl_in == "reward" else "k3"
        self.kl_estimator = settings.kl_estimator or default_estimator
        name = settings.algorithm
        if self.has_groups and settings.num_generations == 1:
            cause = f"--num-generations is 1, but {name.upper()} compares episodes of a question"
            raise UsageError(f"{cause}: pass 2 or more", code="group-of-one")
        if self.kl_in is None:
            for setting in ("kl_estimator", "kl_target"):
                if getattr(settings, setting):
                    cause = f"{flag(setting)} has no use with --algorithm {name}, which penalizes no KL"
                    raise UsageError(f"{cause}: remove it, or pass --kl-budget", code="kl-setting-without-penalty")
        if settings.kl_target and not settings.kl_beta:
            raise UsageError("--kl-target needs a --kl-beta above 0, which it adapts", code="kl-target-without-beta")
        if settings.kl_target and settings.kl_budget:
            raise UsageError(
                "--kl-target and --kl-budget would both steer the same KL: pass one of them", code="kl-steered-twice"
            )
        if settings.kl_beta and self.kl_in == "loss" and self.kl_estimator == "k1":
            raise UsageError(
                f"--kl-estimator k1 has a mean gradient of 0 in the loss of {name}: pass k2 or k3",
                code="kl-estimator-zero",
            )
        if settings.importance_cap is not None and settings.old_logprobs == "sampler":
            raise UsageError("--importance-cap also needs --old-logprobs trainer", code="cap-without-trainer-logprobs")

    @property
    def max_off_policy(self) -> int:
        """The largest number of off-policy episodes in a round.

        In this class: a trace for each question in a round's --trace-share, and a replayed success for each in its
        --replay-share.
        """
        settings = self.settings
        traces = settings.question_count(settings.trace_share) if self.has_traces else 0
        replayed = settings.question_count(settings.replay_share) if self.has_replay else 0
        return traces + replayed

    @property
    def max_sampled_tokens(self) -> int:
        """The most tokens that may be sampled in an episode: in one turn with --learn answer, else in all turns."""
        if self.settings.learn == "answer":
            return self.lengths.max_new_tokens
        return self.lengths.most_sampled

    @property
    def kl_weight(self) -> float:
        """beta, the weight of the KL in this round."""
        return self.settings.kl_beta * (self.kl_multiplier.factor * self.kl_multiplier.scale)

    def penalized_rewards(self, batch: Batch) -> Tensor:
        """Returns the rewards [B, T], minus beta * KL at every action token if `kl_in` is "reward"."""
        if self.kl_in != "reward" or batch.reference is None or not self.settings.kl_beta:
            return batch.rewards
        estimate = losses.KL_ESTIMATES[self.kl_estimator]
        kl = estimate(batch.old_logprobs, batch.reference)  # [B, T]
        return batch.rewards - self.kl_weight * kl * batch.action_mask

    def returns(self, batch: Batch) -> Tensor:
        """Returns the return [B] of each episode, the sum of its penalized rewards."""
        return self.penalized_rewards(batch).sum(-1)

    def with_advantages(self, batch: Batch) -> Batch:
        """Returns the round's batch with `advantages` [B, T] and, with a critic, `value_targets` [B, T].

        `batch.reference` is set if --kl-beta is above 0, and with --kl-budget. By default every action token of an
        episode gets the episode's advantage, which `group_advantages` computes from the returns of its group.
        """
        episode_advantages = self.group_advantages(self.returns(batch), batch.groups)  # [B]
        return replace(batch, advantages=episode_advantages[:, None] * batch.action_mask)

    def weights(self, batch: Batch) -> Tensor:
        """Returns the weight [B, T] of each action token in the loss of a mini-batch, sum(weight * loss).

        By default the loss is the mean over all action tokens.
        """
        return losses.token_mean(batch.action_mask)

    def log_ratios(self, actions: ActionTokens, logprobs: Tensor) -> Tensor:
        """Returns the log [N] of the ratio that the loss clips, for each action token: by default log pi - log pi_old.

        `logprobs` [N] are log pi, the current policy's.
        """
        return logprobs - actions.old_logprobs

    def loss(
        self,
        actions: ActionTokens,
        logprobs: Tensor,
        entropy: Tensor,
    ) -> losses.TokenLoss:
        """Returns the loss [N] of each action token, and metrics [N] by name, which are logged as means over tokens.

        `logprobs` [N] and `entropy` [N] are those of the current policy, with gradients. By default the loss is

            PPO's clipped loss (arXiv 1707.06347, eq. 7) * w - entropy_coefficient * entropy + beta * KL.

        With --importance-cap, w is min(pi_old / pi_sampler, cap), else 1. The last term is only there if `kl_in` is
        "loss". The metric `kl` is always the k3 estimate, also with another --kl-estimator.
        """
        settings = self.settings
        loss, metrics = losses.clipped_surrogate(
            log_ratios=self.log_ratios(actions, logprobs),
            advantages=actions.advantages,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
        )
        if settings.importance_cap is not None:
            sampling_ratio = (actions.old_logprobs - actions.sampled_logprobs).exp()
            loss = loss * sampling_ratio.clamp(max=settings.importance_cap)
            metrics["sampling/importance_sampling_ratio/mean"] = sampling_ratio
        if settings.entropy_coefficient:
            loss = loss - settings.entropy_coefficient * entropy
        if actions.reference is not None:
            metrics["kl"] = losses.k3_kl(logprobs, actions.reference)
            if self.kl_in == "loss" and settings.kl_beta:
                estimate = losses.KL_ESTIMATES[self.kl_estimator]
                loss = loss + self.kl_weight * estimate(logprobs, actions.reference)
        return loss, metrics

    def value_loss(self, actions: ActionTokens, values: Tensor) -> losses.TokenLoss:
        """Returns the critic's loss [N] of each action token, and metrics [N]. Needed if `has_critic`.

        `values` [N] are the critic's, with gradients.
        """
        raise AssertionError("an algorithm with a critic needs a value loss")

    def guided_loss(self, teacher: Tensor, logprobs: Tensor) -> losses.TokenLoss:
        """Returns the loss [N] of each action token that has a teacher's distribution, and metrics [N].

        Needed if `has_teacher`. `teacher` [N, k] are the teacher's log-probabilities of its k likeliest tokens,
        `logprobs` [N, k] the policy's of the same tokens, with gradients. The metrics' names begin with losses.GUIDED.
        """
        raise AssertionError("an algorithm with a teacher needs a loss for its distributions")

    def statistics(self, batch: Batch) -> dict[str, float]:
        """Returns metrics of the whole round, from its batch with advantages."""
        # TRL's name for the share of the groups whose signals are all equal.
        return {"frac_reward_zero_std": share_without_variance(batch.signals, batch.groups)}

    def adapt_kl(self, kl: float | None) -> dict[str, float]:
        """Adapts beta for the next round by this round's mean KL. Returns this round's beta as a metric.

        Without a target KL beta does not change, and no metric is returned. `kl` is None if the KL was measured at no
        token of the round: then beta does not change either.
        """
        beta = self.kl_weight  # before it is adapted
        if kl is not None:
            self.kl_multiplier.update(kl)
        if not self.kl_multiplier.target:
            return {}
        return {"kl_beta": beta}
