"""The update of a round: old and reference log-probabilities, advantages, then optimizer steps over mini-batches.

Works on a model and a batch of numbers; knows no text, no retriever, no judge and no algorithm by name. Formulas of the
algorithms are in `rl/algorithms`.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from tqdm import tqdm

from r3lite.core.bars import BRIEF
from r3lite.core.grant import Grant
from r3lite.devices.precision import Precision
from r3lite.devices.ranks import ALONE, Ranks
from r3lite.models import hooks
from r3lite.models.causal_lm import CausalLM
from r3lite.models.logprobs import TEACHER_TEMPERATURE, chosen_loss, token_logprobs, token_loss
from r3lite.models.lora import cast_once, use_adapter
from r3lite.models.packing import groups
from r3lite.rl.algorithms.base import Algorithm
from r3lite.rl.batch import ActionTokens, Batch, action_logprobs, action_states
from r3lite.rl.losses import (
    GUIDED,
    OFF_POLICY,
    TOKENS,
    Sums,
    k3_kl,
    means_of,
    sampling_metrics,
    sum_by_name,
    token_sums,
)
from r3lite.settings import RLSettings


class Budget(Protocol):
    """Judges the last update by the KL of the policy from the reference, and sets the rate of the next one."""

    metrics: dict[str, float]  # of the last call

    def accepts(self, kl: float, error: float) -> bool:
        """Whether an update may be taken, by the KL and its standard error; if not, the last one was taken back."""


@dataclass
class Learner:
    """Trains the model's active adapter, the policy, by one algorithm. Ranks divide the rows that the model runs on."""

    model: CausalLM
    vocabulary: int  # ids of the tokenizer; those beyond are padding of the embedding and get no probability
    temperature: float  # of the sampler
    settings: RLSettings
    algorithm: Algorithm
    reference: str | None  # name of the reference adapter; None: the bare base
    precision: Precision
    optimizer_step: Callable[[], tuple[float, bool]]  # clips and updates; returns (norm before clipping, skipped)
    grant: Grant
    value_head: nn.Module | None = None  # if the algorithm has a critic
    ranks: Ranks = ALONE
    budget: Budget | None = None
    _last_micro_batch: Batch | None = field(default=None, init=False)

    def __post_init__(self):
        assert (self.value_head is not None) == self.algorithm.has_critic

    def learn(self, batch: Batch, seed: str) -> dict[str, float]:
        """Takes all optimizer steps of a round and returns its metrics. `seed` shuffles the mini-batches."""
        s = self.settings
        if s.old_logprobs == "trainer":
            batch = batch.rescored(self.sum_over_ranks(self.policy_logprobs, batch))
        if s.has_reference:
            batch = replace(batch, reference=self.sum_over_ranks(self.reference_logprobs, batch))
        if self.budget and not self.budget.accepts(*kl_on_policy(batch)):
            return dict(self.budget.metrics)
        batch = self.algorithm.with_advantages(batch)
        scaled = s.negative_advantage_scale * batch.advantages
        batch = replace(batch, advantages=torch.where(batch.advantages < 0, scaled, batch.advantages))
        step_sums: list[Sums] = []  # of each optimizer step
        log_ratios: list[Tensor] = []  # [2, N] of each optimizer step of the first epoch, see `loss`
        norms: list[float] = []
        bar = tqdm(total=s.update_epochs * len(batch), desc="learning", unit="episode", **BRIEF)
        for epoch in range(s.update_epochs):
            for rows in batch.mini_batches(s.mini_batch_size, f"{seed}/{epoch}", self.algorithm.has_groups):
                sums, ratios = self.grant.attempt("update", self.add_gradients, batch.rows(rows))
                bar.update(len(rows))
                step_sums.append(sums)
                if epoch == 0:
                    log_ratios.append(ratios)
                norm, _ = self.optimizer_step()
                norms.append(norm)
        bar.close()
        of_ranks = self.ranks.gather((step_sums, log_ratios))
        sums = sum_by_name([sums for of_rank, _ in of_ranks for sums in of_rank])
        log_ratios = [torch.cat(of_step, dim=1) for of_step in zip(*(ratios for _, ratios in of_ranks))]
        means = {"loss": float(sums.pop("loss")) / len(norms)} | means_of(sums)
        finite = [n for n in norms if math.isfinite(n)]  # that of a skipped step is not
        means |= {"grad_norm": statistics.fmean(finite or [math.inf])}
        means |= sampling_metrics(log_ratios, s.clip_low, s.clip_high)
        means |= self.algorithm.adapt_kl(means.get("kl")) | self.algorithm.statistics(batch)
        return means | self.budget.metrics if self.budget else means

    def sum_over_ranks(self, work: Callable[..., Tensor], *args) -> Tensor:
        """`work(*args)` [B, T], which each rank computes for its own rows and leaves 0 at all others."""
        return self.ranks.sum_(self.grant.attempt("update", work, *args))

    def reference_logprobs(self, batch: Batch) -> Tensor:
        """Log-probabilities [B, T] of the action tokens under the reference policy: the same base, another adapter."""
        with use_adapter(self.model, self.reference):
            return self.policy_logprobs(batch)

    @torch.no_grad()
    def policy_logprobs(self, batch: Batch, entropies: bool = False) -> Tensor:
        """Log-probabilities [B, T] of the action tokens under the active adapter, or the entropies of their
        distributions; 0 at other ranks' rows."""
        result, chunk = torch.zeros_like(batch.logprobs), self.grant.memory.loss_chunk
        with self.precision.autocast():
            for rows in self.micro_batches(batch):
                part = batch.rows(rows)
                of_part = action_logprobs(self.model, part, self.vocabulary, self.temperature, chunk, entropies)
                result[rows] = part.spread(of_part.cpu())
        return result

    def mean_entropies(self, batch: Batch) -> Tensor:
        """The policy's mean entropy [B] over each row's action tokens, in nats."""
        return self.sum_over_ranks(self.policy_logprobs, batch, True).sum(-1) / batch.action_mask.sum(-1)

    def micro_batches(self, batch: Batch) -> list[list[int]]:
        """This rank's rows in groups that go through the model together: rows without a teacher, then those with one,
        whose loss is another."""
        rows, most = batch.token_rows(), self.settings.micro_batch_size or len(batch)
        mine, made = sorted(self.ranks.share([len(row) for row in rows])), []
        for guided in (False, True):
            some = [i for i in mine if (batch.teacher[i] is not None) == guided]
            packs = groups([rows[i] for i in some], self.grant.memory.micro_batch_tokens, most)
            made += [[some[i] for i in pack] for pack in packs]
        return made

    def add_gradients(self, batch: Batch) -> tuple[Sums, Tensor]:
        """Accumulates the gradients of a mini-batch's loss over its micro-batches.

        Returns the metrics' sums over this rank's action tokens, and the log-ratios [2, N] of its N on-policy ones.
        """
        batch = replace(batch, weights=self.algorithm.weights(batch))  # over all micro-batches and ranks
        sums: list[Sums] = []
        log_ratios = [torch.empty(2, 0, device=self.precision.device)]
        with cast_once(self.model, self.precision.dtype):
            for rows in self.micro_batches(batch):
                part = batch.rows(rows)
                loss, chunk_sums, ratios = self.loss(part) if part.teacher[0] is None else self.guided_loss(part)
                self.precision.backward(loss)
                sums += chunk_sums
                log_ratios.append(ratios)
        return sum_by_name(sums), torch.cat(log_ratios, dim=1)

    def loss(self, batch: Batch) -> tuple[Tensor, list[Sums], Tensor]:
        """The summed loss of a micro-batch, the metrics' sums chunk by chunk, and the log-ratios [2, N].

        The log-ratios are those of its N on-policy action tokens: row 0 is the current log-probability minus the one
        that the sampler recorded, row 1 the log of the ratio that the algorithm clips. The sums of the chunks are not
        added up here, so that they are always added in one order.
        """
        self._last_micro_batch = batch
        actions = ActionTokens.of(batch, self.model.head_weight.device)
        log_ratios = actions.old_logprobs.new_empty(2, len(actions.old_logprobs))

        def policy_loss(rows: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Sums]:
            some, now = actions[rows], logprobs.detach()
            log_ratios[0, rows], log_ratios[1, rows] = now - some.sampled_logprobs, self.algorithm.log_ratios(some, now)
            per_token, metrics = self.algorithm.loss(some, logprobs, entropy)
            return (per_token * some.weights).sum(), token_sums({"entropy": entropy} | metrics, some.off_policy)

        with self.precision.autocast():
            hidden, tokens = action_states(self.model, batch)
            head = self.model.head_weight[: self.vocabulary]
            chunk = self.grant.memory.loss_chunk
            if self.algorithm.has_episode_ratios:
                logprobs, _ = token_logprobs(hidden.detach(), head, tokens, self.temperature, chunk)
                actions = actions.with_episode_log_ratios(logprobs, batch.action_mask.sum(-1).tolist())
            loss, sums = token_loss(hidden, head, tokens, policy_loss, self.temperature, chunk, with_entropy=True)
            values = None if self.value_head is None else self.value_head(hidden)
        if values is not None:
            per_token, metrics = self.algorithm.value_loss(actions, values)
            loss = loss + self.settings.value_coefficient * (per_token * actions.weights).sum()
            sums = [*sums, token_sums(metrics)]
        if (off := batch.off_policy_actions) is not None:  # on the host, so that indexing does not wait for the device
            log_ratios = log_ratios[:, torch.nonzero(~off)[:, 0].to(log_ratios.device, non_blocking=True)]
        counts = {TOKENS: log_ratios.shape[1], OFF_POLICY + TOKENS: len(tokens) - log_ratios.shape[1]}
        return loss, [*sums, {"loss": loss.detach(), **counts}], log_ratios

    def guided_loss(self, batch: Batch) -> tuple[Tensor, list[Sums], Tensor]:
        """`loss` of a micro-batch whose rows all have a teacher's distributions; it has no ratios."""
        self._last_micro_batch = batch
        weights, teacher = batch.weights[batch.action_mask], torch.cat([top.logprobs for top in batch.teacher])

        def distillation_loss(rows: slice, logprobs: Tensor) -> tuple[Tensor, Sums]:
            weight, top = (x[rows].to(logprobs.device, non_blocking=True) for x in (weights, teacher))
            per_token, metrics = self.algorithm.guided_loss(top, logprobs)
            return (per_token * weight).sum(), token_sums(metrics)

        with self.precision.autocast():
            hidden, _ = action_states(self.model, batch)
            head, chunk = self.model.head_weight[: self.vocabulary], self.grant.memory.loss_chunk
            ids = torch.cat([top.ids for top in batch.teacher])
            loss, sums = chosen_loss(hidden, head, ids, distillation_loss, TEACHER_TEMPERATURE, chunk)
        return loss, [*sums, {"loss": loss.detach(), GUIDED + TOKENS: len(weights)}], loss.new_empty(2, 0)

    def explain_overflow(self) -> str:
        """Which layer overflowed first when the last micro-batch is run again, or that none did."""
        with self.precision.autocast():
            return hooks.explain_overflow(self.model, lambda: action_states(self.model, self._last_micro_batch))


def kl_on_policy(batch: Batch) -> tuple[float, float]:
    """The k3 estimate of the KL from the reference over the tokens that the policy sampled in this round.

    Returns the mean over these tokens in nats, and its standard error, infinite for a single group: groups are drawn
    independently, and nearly all of the KL may be that of a few (error of a ratio of sums; Cochran, Sampling
    Techniques, section 6.4).
    """
    mask = batch.action_mask
    if batch.off_policy is not None:
        mask = mask & ~batch.off_policy[:, None]
    kl = torch.where(mask, k3_kl(batch.old_logprobs, batch.reference), 0.0).double().sum(-1)  # [B]
    _, place = batch.groups.unique(return_inverse=True)
    groups = int(place.max()) + 1
    of_groups = torch.zeros(groups, dtype=torch.float64).index_add(0, place, kl)
    tokens = torch.zeros(groups, dtype=torch.float64).index_add(0, place, mask.sum(-1).double())
    mean = of_groups.sum() / tokens.sum()
    if groups == 1:
        return float(mean), math.inf
    squares = (of_groups - mean * tokens).square().sum()
    return float(mean), float((squares * groups / (groups - 1)).sqrt() / tokens.sum())
