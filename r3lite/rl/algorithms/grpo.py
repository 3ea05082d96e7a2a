"""Group relative policy optimization (arXiv 2402.03300): PPO's clip without a critic.

advantages  (R_i - mean R) / (std R + eps) over the episodes of one question, for all tokens of episode i
loss        -min(ratio A, clip(ratio, 1 - low, 1 + high) A) - c_H entropy
            + beta k3(pi, pi_ref)                                                        (eq. 3 and 4)
normalizer  mean over each episode's action tokens, then mean over the episodes of the mini-batch
"""

from dataclasses import replace

import torch
from torch import Tensor

from r3lite.config import UsageError
from r3lite.rl import losses
from r3lite.rl.advantages import group_normalized
from r3lite.rl.algorithms.base import Algorithm
from r3lite.rl.batch import ActionTokens, Batch
from r3lite.settings import RLSettings


class Grpo(Algorithm):
    def __init__(self, settings: RLSettings):
        if settings.num_generations == 1:
            raise UsageError(
                "--num-generations is 1; GRPO compares episodes of one question: pass 2 or more, such as 8"
            )
        super().__init__(settings)

    def with_advantages(self, batch: Batch) -> Batch:
        return replace(batch, advantages=group_normalized(batch.returns, batch.groups)[:, None] * batch.action_mask)

    def units(self, batch: Batch) -> list[list[int]]:
        """Groups stay together: episodes that are compared are learned from in one step, and share one prompt."""
        return [torch.nonzero(batch.groups == g)[:, 0].tolist() for g in batch.groups.unique()]

    def weights(self, batch: Batch) -> Tensor:
        return batch.action_mask / (batch.action_mask.sum(-1, keepdim=True) * len(batch))

    def loss(self, known: ActionTokens, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = self.clipped_surrogate(known, logprobs, entropy)
        if known.reference is not None:
            kl = losses.k3_kl(logprobs, known.reference)
            loss, metrics = loss + self.settings.kl_beta * kl, metrics | {"kl": kl}
        return loss, metrics
