"""What an algorithm defines: advantages, the loss per token, and each token's weight in the loss of a mini-batch.

The learner does everything else in the same way for all algorithms.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Literal

from torch import Tensor

from r3lite.core.config import UsageError
from r3lite.core.records import Record, Source
from r3lite.rl import losses
from r3lite.rl.advantages import share_without_variance
from r3lite.rl.batch import ActionTokens, Batch
from r3lite.settings import LengthSettings, RLSettings

GAIN, MAX_ERROR = 0.1, 0.2  # K_beta and the bound of e_t in section 2.2 of arXiv 1909.08593


class KlFactor:
    """What --kl-beta is multiplied by: an adaptive factor, and a scale that the collapse guard sets.

    With a target KL the factor follows the controller of arXiv 1909.08593, section 2.2, once a round, and checkpoints
    keep it: e = clip((KL - target) / target, -0.2, 0.2); factor <- factor (1 + 0.1 e). Without a target it stays 1.
    KL is the mean over a round's tokens, in nats; the paper's is the sum over an answer.
    """

    def __init__(self, target: float | None):
        self.target, self.factor, self.scale = target, 1.0, 1.0

    def update(self, kl: float) -> None:
        """Adapts the factor after a round whose mean KL is `kl`."""
        if self.target is not None:
            error = (kl - self.target) / self.target
            self.factor *= 1 + GAIN * min(max(error, -MAX_ERROR), MAX_ERROR)

    def state_dict(self) -> dict:
        return {"factor": self.factor}

    def load_state_dict(self, state: dict) -> None:
        record = Record(state, Source("the checkpoint's weight of the KL", "Pass another checkpoint."))
        self.factor = record.number("factor")


class Algorithm:
    """The base class: PPO's clipped loss, KL in the reward or in the loss, and groups.

    The methods stand in the order in which the learner calls them. An algorithm holds its settings and the limits of
    an episode; its only state is the factor of the KL weight.
    """

    has_critic: ClassVar[bool] = False  # trains a value head with `value_loss`
    has_groups: ClassVar[bool] = False  # compares the episodes of a question, which are therefore kept together
    has_teacher: ClassVar[bool] = False  # learns from a teacher's distributions at the tokens of failed episodes
    has_episode_ratios: ClassVar[bool] = False  # `log_ratios` needs `actions.episode_log_ratios`
    has_traces: ClassVar[bool] = False  # a teacher's traces join the groups of their questions
    has_replay: ClassVar[bool] = False  # successful episodes of earlier rounds join the groups of their questions
    compare: ClassVar[Callable[[Tensor, Tensor], Tensor]]  # (returns [B], groups [B]) -> advantages [B]
    kl_in: ClassVar[Literal["reward", "loss"]] = "loss"
    own_settings: ClassVar[frozenset[str]] = frozenset()  # settings that only some algorithms, this one too, read

    def __init__(self, settings: RLSettings, lengths: LengthSettings):
        """Raises UsageError if the settings contradict each other or the algorithm."""
        s = self.settings = settings
        self.lengths = lengths
        self.kl = KlFactor(s.kl_target)
        self.estimator = s.kl_estimator or ("k1" if self.kl_in == "reward" else "k3")
        if self.has_groups and s.num_generations == 1:
            name = s.algorithm.upper()
            raise UsageError(f"--num-generations is 1, but {name} compares episodes of a question: pass 2 or more")
        if s.kl_target and not s.kl_beta:
            raise UsageError("--kl-target needs a --kl-beta above 0, which it adapts")
        if s.kl_target and s.kl_budget:
            raise UsageError("--kl-target and --kl-budget would both steer the same KL: pass one of them")
        if s.kl_beta and self.kl_in == "loss" and self.estimator == "k1":
            raise UsageError(f"--kl-estimator k1 has a mean gradient of 0 in the loss of {s.algorithm}: pass k2 or k3")
        if s.importance_cap is not None and s.old_logprobs == "sampler":
            raise UsageError("--importance-cap also needs --old-logprobs trainer")

    @property
    def most_off_policy(self) -> int:
        """The largest number of off-policy episodes in a round, beside the sampled ones."""
        s = self.settings
        return self.has_traces * s.questions_at(s.trace_share) + self.has_replay * s.questions_at(s.replay_share)

    @property
    def most_sampled(self) -> int:
        """The most tokens that an episode may sample: with --learn answer a turn, else all turns."""
        if self.settings.learn == "answer":
            return self.lengths.max_new_tokens
        return self.lengths.most_sampled

    @property
    def kl_weight(self) -> float:
        """beta of this round."""
        return self.settings.kl_beta * (self.kl.factor * self.kl.scale)

    def penalized_rewards(self, batch: Batch) -> Tensor:
        """The rewards [B, T], less beta KL at every action token if the algorithm has the KL in its reward."""
        if self.kl_in == "loss" or batch.reference is None or not self.settings.kl_beta:
            return batch.rewards
        kl = losses.KL_ESTIMATES[self.estimator](batch.old_logprobs, batch.reference)
        return batch.rewards - self.kl_weight * kl * batch.action_mask

    def returns(self, batch: Batch) -> Tensor:
        """The return [B] of each episode, by which the episodes of a group are compared."""
        return self.penalized_rewards(batch).sum(-1)

    def with_advantages(self, batch: Batch) -> Batch:
        """The round's batch with `advantages` [B, T] and, with a critic, `value_targets` [B, T].

        `batch.reference` is set if --kl-beta is above 0, or with --kl-budget. By default every token of an episode gets
        the episode's advantage, which `compare` computes from the returns of its group.
        """
        of_episodes = self.compare(self.returns(batch), batch.groups)
        return replace(batch, advantages=of_episodes[:, None] * batch.action_mask)

    def weights(self, batch: Batch) -> Tensor:
        """The weight [B, T] of each action token in the loss of a mini-batch, sum(weight * loss); by default the mean
        over all action tokens."""
        return losses.token_mean(batch.action_mask)

    def log_ratios(self, actions: ActionTokens, logprobs: Tensor) -> Tensor:
        """The log [N] of the ratio that is clipped, for each action token; by default log pi - log pi_old."""
        return logprobs - actions.old_logprobs

    def loss(self, actions: ActionTokens, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss [N] of each action token, and further metrics [N], which are logged as means over tokens.

        `logprobs` [N] and `entropy` [N] are those of the current policy, with gradients. By default PPO's clipped loss
        (arXiv 1707.06347, eq. 7) less the entropy bonus, plus beta KL if the algorithm has the KL in its loss. The
        metric `kl` is the k3 estimate whatever --kl-estimator is.
        """
        s = self.settings
        ratios = self.log_ratios(actions, logprobs)
        loss, metrics = losses.clipped_surrogate(ratios, actions.advantages, s.clip_low, s.clip_high)
        if s.importance_cap is not None:
            ratio = (actions.old_logprobs - actions.sampled_logprobs).exp()
            loss = loss * ratio.clamp(max=s.importance_cap)
            metrics["sampling/importance_sampling_ratio/mean"] = ratio
        if s.entropy_coefficient:
            loss = loss - s.entropy_coefficient * entropy
        if actions.reference is not None:
            metrics["kl"] = losses.k3_kl(logprobs, actions.reference)
            if self.kl_in == "loss" and s.kl_beta:
                loss = loss + self.kl_weight * losses.KL_ESTIMATES[self.estimator](logprobs, actions.reference)
        return loss, metrics

    def value_loss(self, actions: ActionTokens, values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The critic's loss [N] and metrics [N], for its values [N], with gradients. Needed if `has_critic`."""
        raise AssertionError("an algorithm with a critic needs a value loss")

    def guided_loss(self, teacher: Tensor, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss [N] of each action token with a teacher's distribution, and metrics [N], whose names begin with
        losses.GUIDED. Needed if `has_teacher`.

        `teacher` [N, k] are the teacher's log-probabilities of its k likeliest tokens, `logprobs` [N, k] the policy's
        of the same tokens, with gradients.
        """
        raise AssertionError("an algorithm with a teacher needs a loss for its distributions")

    def adapt_kl(self, kl: float | None) -> dict[str, float]:
        """Adapts beta to the mean KL of a round; returns the beta of that round as a metric, nothing without a target.

        `kl` is None if no token of the round has a reference: then beta stays.
        """
        beta = self.kl_weight
        if kl is not None:
            self.kl.update(kl)
        return {"kl_beta": beta} if self.kl.target else {}

    def statistics(self, batch: Batch) -> dict[str, float]:
        """Metrics of the whole round, from its batch with advantages."""
        return {"frac_reward_zero_std": share_without_variance(batch.signals, batch.groups)}
