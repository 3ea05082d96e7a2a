"""VeriFree (arXiv 2505.21493): an analysis is rewarded by the probability of the right answer after it.

The policy samples an analysis z and then an answer. With p = pi(right answer | z), the sampled answers play no part:
the policy maximizes the mean of p over the analyses. The gradient of this mean has two terms, p grad log pi(z) and
p grad log pi(right answer | z). p is the expected exact match of the answers to z, if only one wording is right.

groups      the analyses of one context, each an on-policy row; and for each the right answer behind it, an off-policy
            row. Both rows of an analysis have the reward p
advantages  of an analysis p - mean of the p of the same context's other analyses (RLOO); of its right answer p
loss        -min(ratio A, clip(ratio, 1 - low, 1 + high) A) - c_H entropy for both. In the first mini-batch of a round
            the ratio is 1: then the gradient is that above
normalizer  dr-grpo's: sum over each row's action tokens / a constant, then mean over the rows of the mini-batch

The paper begins at a base model, whose analysis is all that it writes before the answer, and filters its questions.
Here a context is an episode up to its last turn, and --kl-beta 0 and the optimizer are the user's choice.
"""

from dataclasses import replace

import torch

from r3lite.rl.advantages import leave_one_out
from r3lite.rl.algorithms.dr_grpo import DrGrpo
from r3lite.rl.batch import Batch


class VeriFree(DrGrpo):
    learns_right_answers = True
    own_settings = frozenset({"length_constant"})

    @property
    def max_off_policy(self) -> int:
        return self.settings.batch_size * self.settings.num_generations  # a right answer for each end

    def with_advantages(self, batch: Batch) -> Batch:
        likelihoods = self.returns(batch)  # [B]
        is_analysis = torch.ones(len(batch), dtype=torch.bool)
        if batch.off_policy is not None:
            is_analysis = ~batch.off_policy
        advantages = likelihoods.clone()
        advantages[is_analysis] = leave_one_out(likelihoods[is_analysis], batch.groups[is_analysis])
        return replace(batch, advantages=advantages[:, None] * batch.action_mask)
