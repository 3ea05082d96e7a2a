"""VeriFree (arXiv 2505.21493): an analysis is rewarded by the probability of the right answer after it.

The policy samples an analysis z, and an answer, which is not used. Let p = pi(right answer | z). The policy maximizes
the mean of p over the analyses. The gradient of this mean has two terms, p grad log pi(z) and
p grad log pi(right answer | z). p is the expected exact match of answers sampled after z, if only one wording is right.

groups      the analyses of one context. Each is followed by an off-policy row, the analysis with the right answer, in
            which only the answer's tokens are actions. Both rows have the reward p
advantages  of an analysis p - mean of the p of the same context's other analyses (RLOO); of its right answer p
loss        -min(ratio A, clip(ratio, 1 - low, 1 + high) A) - c_H entropy for both; + beta KL(pi, pi_ref) for analyses,
            since its estimates are only right for tokens that the policy samples. In the first mini-batch of a round
            the ratio is 1: then the gradient is that above
normalizer  dr-grpo's: sum over each row's action tokens / a constant, then mean over the rows of the mini-batch

The paper trains base models without retrieval: there the analysis is the whole reply up to the answer.
"""

from dataclasses import replace

import torch
from torch import Tensor

from r3lite.rl.advantages import leave_one_out
from r3lite.rl.algorithms.dr_grpo import DrGrpo
from r3lite.rl.batch import ActionTokens, Batch
from r3lite.rl.losses import TokenLoss


class VeriFree(DrGrpo):
    learns_right_answers = True
    own_settings = frozenset({"length_constant"})

    @property
    def max_off_policy(self) -> int:
        return self.settings.batch_size * self.settings.num_generations  # a right answer for each analysis

    def with_advantages(self, batch: Batch) -> Batch:
        likelihoods = self.returns(batch)  # [B]
        is_analysis = torch.ones(len(batch), dtype=torch.bool)
        if batch.off_policy is not None:
            is_analysis = ~batch.off_policy
        advantages = likelihoods.clone()
        advantages[is_analysis] = leave_one_out(likelihoods[is_analysis], batch.groups[is_analysis])
        return replace(batch, advantages=advantages[:, None] * batch.action_mask)

    def loss(
        self,
        actions: ActionTokens,
        logprobs: Tensor,
        entropy: Tensor,
    ) -> TokenLoss:
        if actions.reference is not None and actions.off_policy is not None:
            # Where both policies are equal, the KL is 0, and so is its gradient.
            reference = torch.where(actions.off_policy, logprobs.detach(), actions.reference)
            actions = replace(actions, reference=reference)
        return super().loss(actions, logprobs, entropy)
