"""What an algorithm has to say. The learner does everything else, and is the same for all of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Literal

from torch import Tensor

from r3lite.core.config import UsageError
from r3lite.rl import losses
from r3lite.rl.advantages import share_without_variance
from r3lite.rl.batch import ActionTokens, Batch
from r3lite.rl.kl import KlFactor
from r3lite.rl.losses import token_mean
from r3lite.settings import LengthSettings, RLSettings


class Algorithm:
    """The methods stand in the order in which the learner calls them.

    An algorithm holds its settings and the limits of an episode; its only state is a factor of the KL's weight.
    What most papers share is here: the KL in the reward or in the loss, groups, and PPO's clipped loss.
    """

    has_critic: ClassVar[bool] = False  # if so, a value head is trained, and `value_loss` is its loss
    has_groups: ClassVar[bool] = False  # if so, the episodes of one question are compared, and learned from in one step
    has_teacher: ClassVar[bool] = False  # if so, a teacher says of failed episodes what it would have said
    has_episode_ratios: ClassVar[bool] = False  # if so, `known.episode_log_ratios` is there for `log_ratios`
    has_traces: ClassVar[bool] = False  # if so, a teacher's traces join the groups of their questions
    has_replay: ClassVar[bool] = False  # if so, successes of earlier rounds do
    compare: ClassVar[Callable[[Tensor, Tensor], Tensor]]  # advantages [B] of returns [B] within groups [B]
    kl_in: ClassVar[Literal["reward", "loss"]] = "loss"
    own: ClassVar[frozenset[str]] = frozenset()  # settings that it reads and some other algorithm does not

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
        if s.kl_beta and self.kl_in == "loss" and self.estimator == "k1":
            raise UsageError(f"--kl-estimator k1 has a mean gradient of 0 in the loss of {s.algorithm}: pass k2 or k3")
        if s.importance_cap is not None and s.old_logprobs == "sampler":
            raise UsageError("--importance-cap also needs --old-logprobs trainer")

    @property
    def most_off_policy(self) -> int:
        """The most episodes that a round learns from beside those that it samples."""
        s = self.settings
        return self.has_traces * s.questions_at(s.trace_share) + self.has_replay * s.questions_at(s.replay_share)

    @property
    def kl_weight(self) -> float:
        """beta of this round."""
        return self.settings.kl_beta * self.kl.value

    def paid(self, batch: Batch) -> Tensor:
        """The rewards [B, T], less beta KL at every action token if that is where the algorithm has its KL."""
        if self.kl_in == "loss" or batch.reference is None:
            return batch.rewards
        kl = losses.KL_ESTIMATES[self.estimator](batch.old_logprobs, batch.reference)
        return batch.rewards - self.kl_weight * kl * batch.action_mask

    def returns(self, batch: Batch) -> Tensor:
        """What each episode of a group is compared by, [B]."""
        return self.paid(batch).sum(-1)

    def with_advantages(self, batch: Batch) -> Batch:
        """The round's batch with `advantages` [B, T] and, with a critic, `value_targets` [B, T].

        `batch.reference` is there if --kl-beta is not 0. By default all tokens of an episode get what `compare` makes
        of the returns of its group.
        """
        of_episodes = self.compare(self.returns(batch), batch.groups)
        return replace(batch, advantages=of_episodes[:, None] * batch.action_mask)

    def weights(self, batch: Batch) -> Tensor:
        """The weight [B, T] of each action token in the loss of a mini-batch: the loss is sum(weight * loss). By
        default the mean over its action tokens."""
        return token_mean(batch.action_mask)

    def log_ratios(self, known: ActionTokens, logprobs: Tensor) -> Tensor:
        """The logarithm [n] of the ratio that is clipped, of n action tokens; by default that of each token."""
        return logprobs - known.old_logprobs

    def loss(self, known: ActionTokens, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss [n] of each of n action tokens, and further metrics [n], which are logged as means over tokens.

        `logprobs` [n] are the policy's now, `entropy` [n] that of its distributions; both have gradients. It is PPO's
        clipped loss (arXiv 1707.06347, eq. 7) less the entropy bonus, plus beta KL if the KL is in the loss. The
        metric `kl` is the k3 estimate whatever --kl-estimator is.
        """
        s = self.settings
        ratios = self.log_ratios(known, logprobs)
        loss, metrics = losses.clipped_surrogate(ratios, known.advantages, s.clip_low, s.clip_high)
        if s.importance_cap is not None:
            ratio = (known.old_logprobs - known.sampled_logprobs).exp()
            loss = loss * ratio.clamp(max=s.importance_cap)
            metrics["sampling/importance_sampling_ratio/mean"] = ratio
        if s.entropy_coefficient:
            loss = loss - s.entropy_coefficient * entropy
        if known.reference is not None:
            metrics["kl"] = losses.k3_kl(logprobs, known.reference)
            if self.kl_in == "loss":
                loss = loss + self.kl_weight * losses.KL_ESTIMATES[self.estimator](logprobs, known.reference)
        return loss, metrics

    def value_loss(self, known: ActionTokens, values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The same for the critic's values [N], which have gradients. Needed if `has_critic`."""
        raise AssertionError("an algorithm with a critic needs a value loss")

    def guided_loss(self, teacher: Tensor, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss [n] of each of n action tokens that a teacher says something of, and metrics [n] of them, whose
        names begin with sums.GUIDED. Needed if `has_teacher`.

        `teacher` [n, k] are its log-probabilities of k tokens, `logprobs` [n, k] the policy's, with gradients.
        """
        raise AssertionError("an algorithm with a teacher needs a loss for what it says")

    def follow_kl(self, measured: float | None) -> dict[str, float]:
        """Adapts the weight after a round whose KL was `measured`; if it is adapted, the round's weight as a metric."""
        if self.settings.kl_target is None:
            return {}
        assert measured is not None, "with a target there is a reference, and so a KL"
        used = {"kl_beta": self.kl_weight}
        self.kl.follow(measured)
        return used

    def statistics(self, batch: Batch) -> dict[str, float]:
        """Metrics of the whole round, whose advantages are known."""
        return {"frac_reward_zero_std": share_without_variance(batch.rewards.sum(-1), batch.groups)}
