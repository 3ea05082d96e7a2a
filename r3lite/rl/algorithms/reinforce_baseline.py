"""REINFORCE++ with a baseline (arXiv 2501.03262): the baseline is the mean of the group.

advantages  R_i - mean R over the episodes of one question, for all action tokens of episode i, then whitened over the
            tokens of the round: their std is less noisy than that of a small group
loss        -min(ratio A, clip(ratio, 1 - low, 1 + high) A) - c_H entropy
            + beta k2(pi, pi_ref), whose gradient is that of the KL divergence
normalizer  mean over the action tokens of the mini-batch

Whitening also subtracts the mean over the round's tokens, which is not 0 if long and short episodes differ in reward.
Then a group whose rewards are all equal gets a small advantage that is not 0; --refill-limit leaves such groups out.
"""

from dataclasses import replace

from r3lite.rl.advantages import group_centered, whiten
from r3lite.rl.algorithms.base import Algorithm
from r3lite.rl.batch import Batch


class ReinforceBaseline(Algorithm):
    has_groups = True
    group_advantages = staticmethod(group_centered)
    own_settings = frozenset({"refill_limit", "expand_limit"})

    def with_advantages(self, batch: Batch) -> Batch:
        centered = super().with_advantages(batch).advantages
        return replace(batch, advantages=whiten(centered, batch.action_mask))
