"""Group sequence policy optimization (arXiv 2507.18071): GRPO with one ratio for a whole episode.

ratio       s_i = (pi(y_i) / pi_old(y_i))^(1 / |y_i|) = exp(mean over tokens of log pi - log pi_old)     (eq. 7)
advantages  GRPO's: (R_i - mean R) / (std R + eps)                                                      (eq. 6)
loss        -min(s_i A_i, clip(s_i, 1 - 3e-4, 1 + 4e-4) A_i) - c_H entropy                              (eq. 5)
normalizer  mean over the episodes of the mini-batch

s_i depends on all log-probabilities of episode i, but the loss is computed for a chunk of tokens at a time. So token t
gets a ratio of its own, s_i,t = sg[s_i] pi_t / sg[pi_t] (GSPO-token, eq. 14; sg stops the gradient). Its value is s_i,
its gradient s_i times the gradient of log pi_t. The gradient of s_i is s_i times the mean of the gradients of log pi_t
over the tokens of the episode. GRPO's normalizer takes this mean, so values and gradients are those of eq. 5. sg[s_i]
needs no gradient: the learner computes it first, from the same hidden states.

Rounding in bf16 makes the trainer's log-probabilities differ from the sampler's by more than the width of this clip. So
log pi_old is recomputed by the trainer (--old-logprobs trainer).
"""

from torch import Tensor

from r3lite.rl.algorithms.grpo import Grpo
from r3lite.rl.batch import ActionTokens


class Gspo(Grpo):
    has_episode_ratios = True

    def log_ratios(self, actions: ActionTokens, logprobs: Tensor) -> Tensor:
        return actions.episode_log_ratios + (logprobs - logprobs.detach())  # log s_i,t; the difference is 0
