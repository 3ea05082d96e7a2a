"""Proximal policy optimization (arXiv 1707.06347) of a language model, with the KL penalty of arXiv 2203.02155.

rewards     r_t - beta (log pi_old(a_t) - log pi_ref(a_t)), at every action token      (2203.02155, eq. 2)
advantages  GAE(gamma, lambda) over action tokens, whitened over the round             (1506.02438, eq. 16)
loss        -min(ratio A, clip(ratio, 1 - low, 1 + high) A) - c_H entropy              (1707.06347, eq. 7)
            + c_V 0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), or c_V 0.5 (V - R)^2 without c
normalizer  mean over the action tokens of the mini-batch

V is the critic's value, V_old its value while sampling, R the target of GAE (advantage before whitening + V_old), c is
--value-clip and c_V --value-coefficient.
"""

from dataclasses import replace

from torch import Tensor

from r3lite.rl import losses
from r3lite.rl.advantages import gae, whiten
from r3lite.rl.algorithms.base import Algorithm
from r3lite.rl.batch import ActionTokens, Batch


class Ppo(Algorithm):
    has_critic = True
    kl_in = "reward"
    own_settings = frozenset({"gamma", "gae_lambda", "value_clip", "value_coefficient", "value_learning_rate"})

    def with_advantages(self, batch: Batch) -> Batch:
        advantages, targets = gae(
            rewards=self.penalized_rewards(batch),
            values=batch.values,
            action_mask=batch.action_mask,
            gamma=self.settings.gamma,
            lam=self.settings.gae_lambda,
        )
        return replace(batch, advantages=whiten(advantages, batch.action_mask), value_targets=targets)

    def value_loss(self, actions: ActionTokens, values: Tensor) -> losses.TokenLoss:
        loss = losses.value_loss(
            values,
            old_values=actions.old_values,
            targets=actions.value_targets,
            clip=self.settings.value_clip,
        )
        return loss, {"value_loss": loss}

    def statistics(self, batch: Batch) -> dict[str, float]:
        """Adds the share of the targets' variance that the critic explained while sampling: 1 - Var(R - V) / Var(R)."""
        targets = batch.value_targets[batch.action_mask]
        errors = (batch.value_targets - batch.values)[batch.action_mask]
        explained = 1 - errors.var(correction=0) / (targets.var(correction=0) + 1e-8)
        metrics = super().statistics(batch)
        metrics["explained_variance"] = float(explained)
        return metrics
