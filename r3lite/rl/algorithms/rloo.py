"""REINFORCE leave-one-out (arXiv 2402.14740): a whole episode is one action, the rest of its group its baseline.

rewards     R_i - beta sum over tokens of (log pi_old - log pi_ref)
advantages  R_i - mean of the R_j of the same question, j != i
loss        -min(ratio A, clip(ratio, 1 - low, 1 + high) A) - c_H entropy at each token, as in PPO. In the first
            mini-batch of a round the ratio is 1: then the gradient is that of the paper's loss, -A_i log pi(y_i). The
            paper has no later mini-batches or epochs in a round
normalizer  sum over each episode's action tokens, then mean over the episodes of the mini-batch
"""

from torch import Tensor

from r3lite.rl.advantages import leave_one_out
from r3lite.rl.algorithms.base import Algorithm
from r3lite.rl.batch import Batch
from r3lite.rl.losses import episode_sum


class Rloo(Algorithm):
    has_groups = True
    kl_in = "reward"
    group_advantages = staticmethod(leave_one_out)
    own_settings = frozenset({"refill_limit", "expand_limit"})

    def weights(self, batch: Batch) -> Tensor:
        return episode_sum(batch.action_mask)
