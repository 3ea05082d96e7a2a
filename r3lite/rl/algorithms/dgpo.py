"""Distillation-guided policy optimization (arXiv 2508.20324): successes learn by GRPO, failures from a teacher.

advantages  GRPO's: (R_i - mean R) / (std R + eps) over all episodes of one question, failed ones too
loss        of an episode that succeeded, GRPO's (beta is 0 by default): -min(ratio A, clip(ratio, 1 - low, 1 + high) A)
            - c_H entropy
            of an episode that failed, at each of its tokens: w KL(p || q) = w sum_v p_v log(p_v / q_v). p is the
            teacher's distribution, q the policy's, both at temperature 1; v is a token id, w --teacher-weight
normalizer  GRPO's: mean over each episode's action tokens, then mean over the episodes of the mini-batch

The paper trains by PPO with the reward 1 for a right answer, and -beta KL(pi_teacher || pi) for a wrong one, which it
estimates from the sampled tokens (section 4). Here the KL is a loss: its gradient at the logits, w (q - p), needs no
advantages. Only the k likeliest tokens of p are known; all others count as one token. The tokens of a failed episode
are those that the policy sampled. With --teacher-logprobs, they are replaced by those of the teacher's right answer to
the same question. The base is GRPO and not PPO, because GRPO's advantages are 0 in a group that failed as a whole, and
because a critic would be trained on the teacher's answers, which the policy has not sampled.
"""

from torch import Tensor

from r3lite.core.config import UsageError
from r3lite.rl import losses
from r3lite.rl.algorithms.grpo import Grpo
from r3lite.rl.batch import Batch
from r3lite.settings import LengthSettings, RLSettings


class Dgpo(Grpo):
    has_teacher = True
    own_settings = frozenset(
        {
            "failed_below",
            "teacher",
            "teacher_adapter",
            "teacher_quantize",
            "teacher_logprobs",
            "teacher_top",
            "teacher_weight",
            "expand_limit",
        }
    )

    def __init__(self, settings: RLSettings, lengths: LengthSettings):
        super().__init__(settings, lengths)
        if (settings.teacher is None) == (settings.teacher_logprobs is None):
            ways = "--teacher MODEL, or --teacher-logprobs FOLDER, which `collect` writes"
            raise UsageError(f"{settings.algorithm} needs one teacher: pass {ways}", code="one-teacher-needed")
        if settings.kl_budget and settings.teacher_logprobs:
            cause = "--kl-budget is measured on episodes that the policy sampled, but --teacher-logprobs replaces those"
            raise UsageError(f"{cause} that failed: pass --teacher, or no --kl-budget", code="budget-without-teacher")

    def guided_loss(self, teacher: Tensor, logprobs: Tensor) -> losses.TokenLoss:
        kl = losses.truncated_kl(teacher, logprobs)
        return self.settings.teacher_weight * kl, {losses.GUIDED + "kl": kl}

    def statistics(self, batch: Batch) -> dict[str, float]:
        """Adds two shares of the episodes: of those that failed, and of those that learn from the teacher."""
        guided = sum(top_tokens is not None for top_tokens in batch.teacher)
        metrics = super().statistics(batch)
        metrics[losses.GUIDED + "failed"] = float(batch.failed.float().mean())
        metrics[losses.GUIDED + "guided"] = guided / len(batch)
        return metrics
