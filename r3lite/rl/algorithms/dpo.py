"""Direct preference optimization (DPO, arXiv 2305.18290), on pairs of the policy's own episodes.

pairs       (w, l): every two episodes of a group whose rewards differ; w has the higher one
loss        -log sigmoid(h), h = beta (log pi(w) / pi_ref(w) - log pi(l) / pi_ref(l))    (eq. 7)
            - alpha log pi(w) / |w|, which keeps w likely                                (arXiv 2404.19733)
            beta is --kl-beta, alpha is --likelihood-weight
normalizer  mean over the pairs of a group, then mean over the groups that have pairs

In the paper the pairs are given; here each round samples new ones. The loss has the gradient

    -beta sigmoid(-h) (grad log pi(w) - grad log pi(l)) - alpha grad log pi(w) / |w|

So w has the advantage beta sigmoid(-h) + alpha / |w|, and l has -beta sigmoid(-h), each summed over the episode's
pairs. Advantages are computed once in a round. In its first optimizer step the gradient is exactly that above; in later
steps PPO's clipped ratio corrects for the changed policy, as in the other algorithms here.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from r3lite.core.config import UsageError
from r3lite.rl.algorithms.base import Algorithm
from r3lite.rl.batch import Batch
from r3lite.settings import LengthSettings, RLSettings

MIN_DIFFERENCE = 1e-6  # between the rewards of a pair: the rounding of fp32 sums is no preference


@dataclass(frozen=True)
class Pairs:
    """The P pairs of a batch."""

    preferred: Tensor  # [P] rows
    rejected: Tensor  # [P] rows
    weights: Tensor  # [P] 1 / the number of the pairs of the same group
    margins: Tensor  # [P] h


class Dpo(Algorithm):
    has_groups = True
    kl_in = "pairs"
    own_settings = frozenset({"likelihood_weight", "refill_limit", "expand_limit"})

    def __init__(self, settings: RLSettings, lengths: LengthSettings):
        super().__init__(settings, lengths)
        if not settings.kl_beta:
            raise UsageError("dpo needs a --kl-beta above 0: it is the beta of its loss", code="dpo-without-beta")
        if settings.kl_estimator:
            raise UsageError(
                "--kl-estimator has no effect with --algorithm dpo, which estimates no KL",
                code="dpo-with-kl-estimator",
            )

    def with_advantages(self, batch: Batch) -> Batch:
        pairs = self._pairs(batch)
        lengths = batch.action_mask.sum(-1)  # [B]
        preference = self.kl_weight * torch.sigmoid(-pairs.margins) * pairs.weights  # [P]
        likelihood = self.settings.likelihood_weight * pairs.weights / lengths[pairs.preferred]  # [P]
        advantages = torch.zeros(len(batch))
        advantages.index_add_(0, pairs.preferred, preference + likelihood)
        advantages.index_add_(0, pairs.rejected, -preference)
        return replace(batch, advantages=advantages[:, None] * batch.action_mask)

    def weights(self, batch: Batch) -> Tensor:
        in_pair = batch.advantages.any(-1)  # [B]
        group_count = len(batch.groups[in_pair].unique())
        return batch.action_mask / max(group_count, 1)

    def statistics(self, batch: Batch) -> dict[str, float]:
        """Adds TRL's metrics of the pairs: the mean of h, and the share of the pairs in which h is above 0."""
        metrics = super().statistics(batch)
        margins = self._pairs(batch).margins
        if len(margins):
            metrics["rewards/margins"] = float(margins.mean())
            metrics["rewards/accuracies"] = float((margins > 0).float().mean())
        return metrics

    def _pairs(self, batch: Batch) -> Pairs:
        returns = self.returns(batch)  # [B]
        in_same_group = batch.groups[:, None] == batch.groups  # [B, B]
        is_preferred = returns[:, None] - returns > MIN_DIFFERENCE  # [B, B]: the row to the column
        is_pair = in_same_group & is_preferred
        preferred, rejected = is_pair.nonzero(as_tuple=True)
        pair_counts = (is_pair.sum(-1) * in_same_group).sum(-1)  # [B]: those of a row's group
        log_ratios = ((batch.old_logprobs - batch.reference) * batch.action_mask).sum(-1)  # [B]
        return Pairs(
            preferred=preferred,
            rejected=rejected,
            weights=1 / pair_counts[preferred],
            margins=self.kl_weight * (log_ratios[preferred] - log_ratios[rejected]),
        )
