"""What LUFFY and ExGRPO share: GRPO over groups in which some episodes are off-policy.

advantages  GRPO's, over all episodes of a group, on-policy and off-policy
loss        on-policy tokens: GRPO's
            off-policy tokens: -f(r) A - c_H entropy, f(r) = r / (r + gamma), r = pi / pi_b, without a clip
normalizer  GRPO's: mean over each episode's action tokens, then mean over the episodes of the mini-batch

pi_b is the policy that wrote the tokens, gamma is --shaping-gamma. Off-policy tokens have no KL term: its estimates are
only right for tokens that the policy samples, and on a teacher's tokens the term would work against learning them.
"""

import torch
from torch import Tensor

from r3lite.rl import losses
from r3lite.rl.algorithms.grpo import Grpo
from r3lite.rl.batch import ActionTokens, Batch


class Mixed(Grpo):
    own_settings = frozenset({"shaping_gamma"})

    def loss(
        self,
        actions: ActionTokens,
        logprobs: Tensor,
        entropy: Tensor,
    ) -> losses.TokenLoss:
        off_policy = actions.off_policy
        if off_policy is None:
            return super().loss(actions, logprobs, entropy)
        # At off-policy tokens GRPO's loss, which is not used there, gets the ratio 1: a ratio that overflows would make
        # the gradient nan in spite of the `where` below.
        safe_logprobs = torch.where(off_policy, actions.old_logprobs, logprobs)
        clipped_loss, metrics = super().loss(actions, safe_logprobs, entropy)
        shaped_loss, shaped_ratio = losses.shaped_surrogate(
            log_ratios=logprobs - actions.old_logprobs,
            advantages=actions.advantages,
            gamma=self.settings.shaping_gamma,
        )
        shaped_loss = shaped_loss - self.settings.entropy_coefficient * entropy
        metrics["off_policy/shaped_ratio"] = shaped_ratio
        metrics["off_policy/entropy"] = entropy
        metrics["off_policy/logp"] = logprobs
        return torch.where(off_policy, shaped_loss, clipped_loss), metrics

    def statistics(self, batch: Batch) -> dict[str, float]:
        """Adds the share of the action tokens that are off-policy."""
        metrics = super().statistics(batch)
        off_policy = batch.off_policy_actions
        if off_policy is None:
            metrics["off_policy/token_share"] = 0.0
        else:
            metrics["off_policy/token_share"] = float(off_policy.float().mean())
        return metrics
