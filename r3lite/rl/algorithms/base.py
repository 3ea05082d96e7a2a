"""What an algorithm has to say. The learner does everything else, and is the same for all of them."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from r3lite.rl import losses
from r3lite.rl.advantages import share_without_variance
from r3lite.rl.batch import ActionTokens, Batch
from r3lite.settings import RLSettings


class Algorithm(ABC):
    """The methods stand in the order in which the learner calls them. An algorithm holds its settings and no state."""

    has_critic: ClassVar[bool] = False  # if so, a value head is trained, and `value_loss` is its loss

    def __init__(self, settings: RLSettings):
        """Raises UsageError if the settings contradict the algorithm."""
        self.settings = settings

    @abstractmethod
    def with_advantages(self, batch: Batch) -> Batch:
        """The round's batch with `advantages` [B, T] and, with a critic, `value_targets` [B, T].

        `batch.reference` is there if --kl-beta is not 0.
        """

    def units(self, batch: Batch) -> list[list[int]]:
        """Rows that stay together when an epoch is shuffled into mini-batches; by default each row alone."""
        return [[i] for i in range(len(batch))]

    @abstractmethod
    def weights(self, batch: Batch) -> Tensor:
        """The weight [B, T] of each action token in the loss of a mini-batch: the loss is sum(weight * loss)."""

    @abstractmethod
    def loss(self, known: ActionTokens, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss [n] of each of n action tokens, and further metrics [n], which are logged as means over tokens.

        `logprobs` [n] are the policy's now, `entropy` [n] that of its distributions; both have gradients.
        """

    def clipped_surrogate(
        self, known: ActionTokens, logprobs: Tensor, entropy: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """PPO's clipped loss [n] (arXiv 1707.06347, eq. 7) less the entropy bonus, with its metrics: for `loss`."""
        s = self.settings
        loss, metrics = losses.clipped_surrogate(
            logprobs, known.old_logprobs, known.advantages, s.clip_low, s.clip_high
        )
        if s.entropy_coefficient:
            loss = loss - s.entropy_coefficient * entropy
        return loss, metrics

    def value_loss(self, known: ActionTokens, values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The same for the critic's values [N], which have gradients. Needed if `has_critic`."""
        raise AssertionError("an algorithm with a critic needs a value loss")

    def statistics(self, batch: Batch) -> dict[str, float]:
        """Metrics of the whole round, whose advantages are known."""
        return {"frac_reward_zero_std": share_without_variance(batch.returns, batch.groups)}
