"""Group sequence policy optimization (arXiv 2507.18071): GRPO with one ratio for a whole episode.

ratio       s_i = (pi(y_i) / pi_old(y_i))^(1 / |y_i|) = exp(mean over tokens of log pi - log pi_old)     (eq. 7)
advantages  GRPO's: (R_i - mean R) / (std R + eps)                                                      (eq. 6)
loss        -min(s_i A_i, clip(s_i, 1 - 3e-4, 1 + 4e-4) A_i)                                            (eq. 5)
normalizer  mean over the episodes of the mini-batch

The gradient of s_i is s_i times the mean of the gradients of log pi over the tokens. The value of s_i needs all
log-probabilities of an episode, but the loss sees a chunk of tokens at a time, whose logits are then gone. So a token
gets the ratio s_i,t = sg[s_i] pi_t / sg[pi_t] (GSPO-token, eq. 14; sg stops the gradient), which has the value of s_i
and s_i times the gradient of its own log pi: with GRPO's normalizer, the mean over an episode's tokens, the values and
the gradients add up to those of eq. 5. sg[s_i] is found first, from the hidden states that the loss then uses: the
head is applied twice, in chunks, and one number a token is kept.

The clip is narrower than what bf16 rounds between sampler and trainer, so the ratio is taken to log-probabilities that
the trainer has found itself (--old-logprobs trainer).
"""

from torch import Tensor

from r3lite.rl.algorithms.grpo import Grpo
from r3lite.rl.batch import ActionTokens


class Gspo(Grpo):
    has_episode_ratios = True

    def log_ratios(self, actions: ActionTokens, logprobs: Tensor) -> Tensor:
        return actions.episode_log_ratios + (logprobs - logprobs.detach())
