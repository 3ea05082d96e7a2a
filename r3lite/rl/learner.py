"""One round's learning: from rewards to advantages, from advantages to optimizer steps.

Works on a model and a batch of numbers. What is particular to an algorithm is in `rl/algorithms`; this file knows no
algorithm by name, no text, no retriever and no judge.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from tqdm import tqdm

from r3lite.core.bars import BRIEF
from r3lite.core.grant import Grant
from r3lite.devices.precision import Precision
from r3lite.devices.ranks import ALONE, Ranks
from r3lite.models import hooks
from r3lite.models.causal_lm import CausalLM
from r3lite.models.logprobs import chosen_loss, token_logprobs, token_loss
from r3lite.models.lora import cast_once, use_adapter
from r3lite.models.packing import groups
from r3lite.rl.algorithms.base import Algorithm
from r3lite.rl.batch import ActionTokens, Batch, action_logprobs, action_states
from r3lite.rl.sums import GUIDED, OFF_POLICY, TOKENS, Sums, added, means_of, sampling_metrics, summed
from r3lite.settings import RLSettings


@dataclass
class Learner:
    """Improves a policy, the model's active adapter, by one algorithm. Ranks divide the rows that the model runs on."""

    model: CausalLM
    vocabulary: int  # number of ids that may be sampled
    temperature: float  # of the sampler
    settings: RLSettings
    algorithm: Algorithm
    reference: str | None  # name of the reference adapter; None: the bare base
    precision: Precision
    optimizer_step: Callable[[], tuple[float, bool]]  # clips and updates; returns (gradient norm, skipped)
    grant: Grant
    value_head: nn.Module | None = None  # if the algorithm has a critic
    ranks: Ranks = ALONE
    _last: Batch | None = field(default=None, init=False)  # the newest micro-batch, to explain an overflow by

    def __post_init__(self):
        assert (self.value_head is not None) == self.algorithm.has_critic

    def learn(self, batch: Batch, seed: str) -> dict[str, float]:
        """All optimizer steps of a round; returns its metrics. `seed` orders the mini-batches."""
        s = self.settings
        if s.old_logprobs == "trainer":
            batch = batch.rescored(self.of_all_rows(self.policy_logprobs, batch))
        if s.kl_beta:
            batch = replace(batch, reference=self.of_all_rows(self.reference_logprobs, batch))
        batch = self.algorithm.with_advantages(batch)
        scaled = s.negative_advantage_scale * batch.advantages
        batch = replace(batch, advantages=torch.where(batch.advantages < 0, scaled, batch.advantages))
        measured: list[Sums] = []
        log_ratios: list[Tensor] = []  # [2, N] of the first epoch's mini-batches, as `loss` returns them
        norms: list[float] = []
        bar = tqdm(total=s.update_epochs * len(batch), desc="learning", unit="episode", **BRIEF)
        for epoch in range(s.update_epochs):
            for rows in batch.mini_batches(s.mini_batch_size, f"{seed}/{epoch}", self.algorithm.has_groups):
                sums, ratios = self.grant.attempt("update", self.add_gradients, batch.rows(rows))
                bar.update(len(rows))
                measured.append(sums)
                if epoch == 0:
                    log_ratios.append(ratios)
                norm, _ = self.optimizer_step()
                norms.append(norm)
        bar.close()
        parts = self.ranks.gather((measured, log_ratios))
        sums = added([sums for of_rank, _ in parts for sums in of_rank])
        log_ratios = [torch.cat(of_step, dim=1) for of_step in zip(*(ratios for _, ratios in parts))]
        means = {"loss": float(sums.pop("loss")) / len(norms)} | means_of(sums)
        finite = [n for n in norms if math.isfinite(n)]  # a skipped step has none
        means |= {"grad_norm": statistics.fmean(finite or [math.inf])}
        means |= sampling_metrics(log_ratios, s.clip_low, s.clip_high)
        return means | self.algorithm.follow_kl(means.get("kl")) | self.algorithm.statistics(batch)

    def of_all_rows(self, work: Callable[..., Tensor], *args) -> Tensor:
        """What `work` finds of each row [B, T]; of those of other ranks it finds 0."""
        return self.ranks.sum_(self.grant.attempt("update", work, *args))

    def reference_logprobs(self, batch: Batch) -> Tensor:
        """Log-probabilities [B, T] of the action tokens under the reference: the same base, another adapter."""
        with use_adapter(self.model, self.reference):
            return self.policy_logprobs(batch)

    @torch.no_grad()
    def policy_logprobs(self, batch: Batch, entropies: bool = False) -> Tensor:
        """Log-probabilities [B, T] of the action tokens under the adapter that is switched on, or their entropies."""
        found, chunk = torch.zeros_like(batch.logprobs), self.grant.memory.loss_chunk
        with self.precision.autocast():
            for rows in self.micro_batches(batch):
                part = batch.rows(rows)
                of_part = action_logprobs(self.model, part, self.vocabulary, self.temperature, chunk, entropies)
                found[rows] = part.spread(of_part.cpu())
        return found

    def mean_entropies(self, batch: Batch) -> Tensor:
        """The mean entropy [B] of the policy at each row's action tokens, in nats."""
        return self.of_all_rows(self.policy_logprobs, batch, True).sum(-1) / batch.action_mask.sum(-1)

    def micro_batches(self, batch: Batch) -> list[list[int]]:
        """This rank's rows, as they go through the model; those that a teacher speaks of have their own loss."""
        rows, most = batch.token_rows(), self.settings.micro_batch_size or len(batch)
        mine = sorted(self.ranks.share([len(row) for row in rows]))
        taught = [i for i in mine if batch.teacher[i] is not None]
        return [
            [kind[i] for i in group]
            for kind in ([i for i in mine if i not in taught], taught)
            for group in groups([rows[i] for i in kind], self.grant.memory.micro_batch_tokens, most)
        ]

    def add_gradients(self, batch: Batch) -> tuple[Sums, Tensor]:
        """Adds the gradients of a mini-batch's loss, micro-batch by micro-batch.

        Returns sums over this rank's action tokens, and the log-ratios [2, N] of those that are on-policy.
        """
        batch = replace(batch, weights=self.algorithm.weights(batch))
        measured: list[Sums] = []
        log_ratios = [torch.empty(2, 0, device=self.precision.device)]
        with cast_once(self.model, self.precision.dtype):
            for rows in self.micro_batches(batch):
                part = batch.rows(rows)
                loss, more, ratios = self.loss(part) if part.teacher[0] is None else self.guided_loss(part)
                self.precision.backward(loss)
                measured += more
                log_ratios.append(ratios)
        return added(measured), torch.cat(log_ratios, dim=1)

    def loss(self, batch: Batch) -> tuple[Tensor, list[Sums], Tensor]:
        """The loss of a micro-batch, whose tokens have their weights; sums over its tokens, chunk by chunk; log-ratios.

        The sums of the chunks are not added up here, so that a round adds all of them in one order. The log-ratios
        [2, N] are those of its N on-policy action tokens: the log-probability now minus the one that the sampler
        recorded, and that of the algorithm.
        """
        self._last = batch
        known = ActionTokens.of(batch, self.model.head_weight.device)
        log_ratios = known.old_logprobs.new_empty(2, len(known.old_logprobs))

        def policy_loss(rows: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Sums]:
            some, now = known[rows], logprobs.detach()
            log_ratios[0, rows], log_ratios[1, rows] = now - some.sampled_logprobs, self.algorithm.log_ratios(some, now)
            per_token, metrics = self.algorithm.loss(some, logprobs, entropy)
            return (per_token * some.weights).sum(), summed({"entropy": entropy} | metrics, some.off_policy)

        with self.precision.autocast():
            hidden, tokens = action_states(self.model, batch)
            head = self.model.head_weight[: self.vocabulary]
            chunk = self.grant.memory.loss_chunk
            if self.algorithm.has_episode_ratios:
                logprobs, _ = token_logprobs(hidden.detach(), head, tokens, self.temperature, chunk)
                known = known.with_episode_log_ratios(logprobs, batch.action_mask.sum(-1).tolist())
            loss, measured = token_loss(hidden, head, tokens, policy_loss, self.temperature, chunk, with_entropy=True)
            values = None if self.value_head is None else self.value_head(hidden)
        if values is not None:
            per_token, metrics = self.algorithm.value_loss(known, values)
            loss = loss + self.settings.value_coefficient * (per_token * known.weights).sum()
            measured = [*measured, summed(metrics)]
        if (off := batch.off_policy_actions) is not None:  # found on the host: no wait
            log_ratios = log_ratios[:, torch.nonzero(~off)[:, 0].to(log_ratios.device, non_blocking=True)]
        counts = {TOKENS: log_ratios.shape[1], OFF_POLICY + TOKENS: len(tokens) - log_ratios.shape[1]}
        return loss, [*measured, {"loss": loss.detach(), **counts}], log_ratios

    def guided_loss(self, batch: Batch) -> tuple[Tensor, list[Sums], Tensor]:
        """The same of a micro-batch of which a teacher says something, at every action token; no token has a ratio."""
        self._last = batch
        weights, teacher = batch.weights[batch.action_mask], torch.cat([said.logprobs for said in batch.teacher])

        def distillation_loss(rows: slice, logprobs: Tensor) -> tuple[Tensor, Sums]:
            weight, said = (x[rows].to(logprobs.device, non_blocking=True) for x in (weights, teacher))
            per_token, metrics = self.algorithm.guided_loss(said, logprobs)
            return (per_token * weight).sum(), summed(metrics)

        with self.precision.autocast():
            hidden, _ = action_states(self.model, batch)
            head, chunk = self.model.head_weight[: self.vocabulary], self.grant.memory.loss_chunk
            ids = torch.cat([said.ids for said in batch.teacher])
            loss, measured = chosen_loss(hidden, head, ids, distillation_loss, self.temperature, chunk)
        return loss, [*measured, {"loss": loss.detach(), GUIDED + TOKENS: len(weights)}], loss.new_empty(2, 0)

    def explain_overflow(self) -> str:
        """Runs the newest micro-batch once more; says which layer overflowed first, or that none did."""
        with self.precision.autocast():
            return hooks.explain_overflow(self.model, lambda: action_states(self.model, self._last))
