"""Direct preference optimization (DPO, arXiv 2305.18290), on pairs of the policy's own episodes.

pairs       (w, l): every two episodes of a group whose rewards differ; w has the higher one
loss        -log sigmoid(h), h = beta (log pi(w) / pi_ref(w) - log pi(l) / pi_ref(l))    (eq. 7)
            - alpha log pi(w) / |w|, which keeps w likely                                (arXiv 2404.19733)
            beta is --kl-beta, alpha is --likelihood-weight
normalizer  mean over the pairs of a group, then mean over the groups of the mini-batch

In the paper the pairs are given; here each round samples new ones. The loss of a pair has the gradient

    -beta sigmoid(-h) (grad log pi(w) - grad log pi(l)) - alpha grad log pi(w) / |w|

So w has the advantage beta sigmoid(-h) + alpha / |w|, and l has -beta sigmoid(-h), each in the mean over the pairs of
the group. Advantages are computed once in a round, with the h of the policy that sampled. In the first optimizer step,
if it has whole groups, the gradient is exactly that above; in later steps PPO's clipped ratio corrects for the changed
policy, as in the other algorithms here.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from r3lite.core.config import UsageError
from r3lite.rl.advantages import rounding
from r3lite.rl.algorithms.base import Algorithm
from r3lite.rl.batch import Batch
from r3lite.settings import LengthSettings, RLSettings


@dataclass(frozen=True)
class Pairs:
    """The P pairs of a batch."""

    preferred: Tensor  # [P] rows
    rejected: Tensor  # [P] rows
    weights: Tensor  # [P] 1 / the number of the pairs of the same group
    margins: Tensor  # [P] h


class Dpo(Algorithm):
    has_groups = True
    kl_in = None
    own_settings = frozenset({"likelihood_weight", "refill_limit", "expand_limit"})

    def __init__(self, settings: RLSettings, lengths: LengthSettings):
        super().__init__(settings, lengths)
        if not settings.kl_beta:
            raise UsageError("dpo needs a --kl-beta above 0: it is the beta of its loss", code="dpo-without-beta")

    def with_advantages(self, batch: Batch) -> Batch:
        pairs = self._pairs(batch)
        lengths = batch.action_mask.sum(-1)  # [B]
        preference = self.settings.kl_beta * torch.sigmoid(-pairs.margins) * pairs.weights  # [P]
        likelihood = self.settings.likelihood_weight * pairs.weights / lengths[pairs.preferred]  # [P]
        advantages = torch.zeros(len(batch))
        advantages.index_add_(0, pairs.preferred, preference + likelihood)
        advantages.index_add_(0, pairs.rejected, -preference)
        return replace(batch, advantages=advantages[:, None] * batch.action_mask)

    def weights(self, batch: Batch) -> Tensor:
        return batch.action_mask / len(batch.groups.unique())

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
        preferred = []
        rejected = []
        weights = []
        for group in batch.groups.unique():
            rows = batch.rows_of_group(group)
            differences = returns[rows][:, None] - returns[rows]  # of the row's return from the column's
            better, worse = torch.nonzero(differences > rounding(returns[rows]), as_tuple=True)
            preferred.append(rows[better])
            rejected.append(rows[worse])
            weights.append(torch.full((len(better),), 1 / max(len(better), 1)))
        log_ratios = ((batch.old_logprobs - batch.reference) * batch.action_mask).sum(-1)  # [B]
        margins = log_ratios[torch.cat(preferred)] - log_ratios[torch.cat(rejected)]
        return Pairs(
            preferred=torch.cat(preferred),
            rejected=torch.cat(rejected),
            weights=torch.cat(weights),
            margins=self.settings.kl_beta * margins,
        )
