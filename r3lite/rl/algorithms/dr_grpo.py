"""Dr. GRPO, GRPO done right (arXiv 2503.20783, section 3.2): GRPO without the divisions that bias it.

advantages  R_i - mean R over the episodes of one question. It is not divided by the std: that would favour questions
            that are nearly always or nearly never solved
loss        GRPO's; beta is 0 by default
normalizer  sum over each episode's action tokens / a constant, the largest number of tokens that an episode may sample,
            then mean over the episodes of the mini-batch: with 1 / length instead of the constant, each token of a long
            wrong answer is punished less than one of a short wrong answer
"""

from torch import Tensor

from r3lite.rl.advantages import group_centered
from r3lite.rl.algorithms.grpo import Grpo
from r3lite.rl.batch import Batch
from r3lite.rl.losses import episode_sum


class DrGrpo(Grpo):
    group_advantages = staticmethod(group_centered)
    own_settings = Grpo.own_settings | {"length_constant"}

    def weights(self, batch: Batch) -> Tensor:
        constant = self.settings.length_constant or self.max_sampled_tokens
        return episode_sum(batch.action_mask, constant)
