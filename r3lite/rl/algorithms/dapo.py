"""DAPO, decoupled clip and dynamic sampling (arXiv 2503.14476): GRPO with four changes.

rewards     R_i - c clip((length_i - (L_max - L_cache)) / L_cache, 0, 1): long episodes lose up to c (eq. 13, with c 1)
sampling    groups whose rewards are all equal are replaced (eq. 11), see `rl/refill.py`: at most --refill-limit times
advantages  GRPO's: (R_i - mean R) / (std R + eps)                                               (eq. 9)
loss        -min(ratio A, clip(ratio, 1 - low, 1 + high) A) - c_H entropy, with low 0.2, high 0.28 and beta 0
            (eq. 8 and 10)
normalizer  mean over all action tokens of the mini-batch (eq. 12), without those of episodes that were cut off
            (overlong filtering, section 3.4)

length_i is the number of action tokens of episode i, and c is --overlong-penalty. L_max is the largest number of tokens
that an episode may sample. L_cache is --overlong-cache, by default a fifth, times L_max: the paper has 4,096 of 20,480.
"""

import torch
from torch import Tensor

from r3lite.rl.algorithms.grpo import Grpo
from r3lite.rl.batch import Batch
from r3lite.rl.losses import token_mean


class Dapo(Grpo):
    own_settings = Grpo.own_settings | {"overlong_filter", "overlong_penalty", "overlong_cache"}

    def length_penalties(self, batch: Batch) -> Tensor:
        """Returns the penalty [B] of each episode's length, which is subtracted from its return."""
        lengths = batch.action_mask.sum(-1)
        max_length = self.max_sampled_tokens  # L_max
        cache = self.settings.overlong_cache * max_length  # L_cache
        excess = lengths - (max_length - cache)
        return self.settings.overlong_penalty * (excess / cache).clamp(0, 1)

    def returns(self, batch: Batch) -> Tensor:
        return super().returns(batch) - self.length_penalties(batch)

    def filtered(self, batch: Batch) -> Tensor:
        """Returns which episodes have no loss, [B] bool."""
        if self.settings.overlong_filter == "on":
            return batch.cut_off
        return torch.zeros_like(batch.cut_off)

    def weights(self, batch: Batch) -> Tensor:
        return token_mean(batch.action_mask & ~self.filtered(batch)[:, None])

    def statistics(self, batch: Batch) -> dict[str, float]:
        """Adds the mean length penalty, and the share of episodes without a loss."""
        metrics = super().statistics(batch)
        metrics["overlong/penalty"] = float(self.length_penalties(batch).mean())
        metrics["overlong/filtered"] = float(self.filtered(batch).float().mean())
        return metrics
