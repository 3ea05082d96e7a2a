"""Distillation-guided policy optimization (arXiv 2508.20324): GRPO for what succeeds, a teacher for what fails.

reward      1 if the answer is right, else -beta KL(pi_teacher || pi)                    (section 4, the reward)
advantages  GRPO's, (R_i - mean R) / (std R + eps) over all episodes of one question, failed ones too
loss        of an episode that succeeded, GRPO's: -min(ratio A, clip(ratio, 1 - low, 1 + high) A); beta of the reference
            is 0. The loss of an episode that failed is w sum_v p_v log(p_v / q_v) at each of its tokens instead, where
            p is the teacher's distribution, q the policy's, both at temperature 1
normalizer  GRPO's: mean over each episode's action tokens, then mean over the episodes of the mini-batch

The paper makes its KL a reward of PPO, found from the sampled tokens alone. Here the KL is the loss itself, whose
gradient, q - p at the logits, needs no advantages. Of p the k likeliest tokens are known; all others count as one. An
episode's tokens are those that the policy sampled or, with a cache of the teacher's, those of a right answer to the
same question. The base is GRPO rather than PPO: its advantages are 0 in a group that failed as a whole, and a critic
would be trained on episodes of the cache, which the policy has not sampled.
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
        """Adds the shares of episodes that failed, and that learn from the teacher."""
        guided = sum(top_tokens is not None for top_tokens in batch.teacher)
        metrics = super().statistics(batch)
        metrics[losses.GUIDED + "failed"] = float(batch.failed.float().mean())
        metrics[losses.GUIDED + "guided"] = guided / len(batch)
        return metrics
