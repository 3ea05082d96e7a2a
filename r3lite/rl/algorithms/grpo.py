"""Group relative policy optimization (arXiv 2402.03300): PPO's clip without a critic.

advantages  (R_i - mean R) / (std R + eps) over the episodes of one question, for all action tokens of episode i
loss        -min(ratio A, clip(ratio, 1 - low, 1 + high) A) - c_H entropy
            + beta KL(pi, pi_ref), by default the estimate k3                            (eq. 3 and 4)
normalizer  mean over each episode's action tokens, then mean over the episodes of the mini-batch

R_i is the sum of the rewards of episode i, ratio = pi / pi_old of a token, low and high are --clip-low and --clip-high,
c_H is --entropy-coefficient and beta --kl-beta. The other files of this folder use the same symbols.
"""

from torch import Tensor

from r3lite.rl.advantages import group_normalized
from r3lite.rl.algorithms.base import Algorithm
from r3lite.rl.batch import Batch
from r3lite.rl.losses import episode_mean


class Grpo(Algorithm):
    has_groups = True
    group_advantages = staticmethod(group_normalized)
    own_settings = frozenset({"refill_limit", "expand_limit"})

    def weights(self, batch: Batch) -> Tensor:
        return episode_mean(batch.action_mask)
