"""REINFORCE++ (arXiv 2501.03262): no critic and no groups; the round's mean return is the baseline.

rewards     r_t - beta (log pi_old(a_t) - log pi_ref(a_t)), at every action token
advantages  sum over k of gamma^k r_(t+k), over the action tokens from t on, gamma 1, whitened over the round. The paper
            has one reward, at the end of an answer; here each step may have a reward, for all action tokens before it
loss        -min(ratio A, clip(ratio, 1 - low, 1 + high) A) - c_H entropy
normalizer  mean over the action tokens of the mini-batch

This is PPO with values 0 and lambda 1. The paper's variant with a baseline, the mean of the group, is in
`reinforce_baseline.py`.
"""

from dataclasses import replace

import torch

from r3lite.rl.advantages import gae, whiten
from r3lite.rl.algorithms.base import Algorithm
from r3lite.rl.batch import Batch


class ReinforcePlusPlus(Algorithm):
    kl_in = "reward"
    own_settings = frozenset({"gamma"})

    def with_advantages(self, batch: Batch) -> Batch:
        rewards = self.penalized_rewards(batch)
        returns, _ = gae(
            rewards,
            values=torch.zeros_like(rewards),
            action_mask=batch.action_mask,
            gamma=self.settings.gamma,
            lam=1.0,
        )
        return replace(batch, advantages=whiten(returns, batch.action_mask))
