"""REINFORCE++ with a baseline (arXiv 2501.03262): the mean of the group is taken off first, then it is as REINFORCE++.

advantages  R_i - mean R over the episodes of one question, for all tokens of episode i, whitened over the round: what
            is compared within a group is measured with the spread of all groups, which a small group does not know
loss        -min(ratio A, clip(ratio, 1 - low, 1 + high) A) - c_H entropy
            + beta k2(pi, pi_ref), whose gradient is that of the KL divergence
normalizer  mean over the action tokens of the mini-batch

Whitening takes the mean of the round off too, so a group whose rewards are all equal gets a little advantage where
long and short episodes did differently well: --refill-limit leaves such groups out.
"""

from dataclasses import replace

from r3lite.rl.advantages import group_centered, whiten
from r3lite.rl.algorithms.base import Algorithm
from r3lite.rl.batch import Batch


class ReinforceBaseline(Algorithm):
    has_groups = True
    compare = staticmethod(group_centered)
    own = frozenset({"refill_limit", "expand_limit"})

    def with_advantages(self, batch: Batch) -> Batch:
        return replace(batch, advantages=whiten(super().with_advantages(batch).advantages, batch.action_mask))
