"""The update of a round: old and reference log-probabilities, advantages, then optimizer steps over mini-batches.

Works on a model and a batch of numbers; knows no text, no retriever, no judge and no algorithm by name. Formulas of the
algorithms are in `rl/algorithms`.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor, nn

from r3lite.core.grant import Grant
from r3lite.devices.precision import Precision
from r3lite.devices.ranks import ALONE, Ranks
from r3lite.models import hooks
from r3lite.models.causal_lm import CausalLM
from r3lite.models.logprobs import TEACHER_TEMPERATURE, candidates_loss, token_logprobs, token_loss
from r3lite.models.lora import cast_once, use_adapter
from r3lite.models.packing import pack_rows
from r3lite.rl.algorithms.base import Algorithm
from r3lite.rl.batch import ActionTokens, Batch, action_entropies, action_logprobs, action_states
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


class UpdateBudget(Protocol):
    """Keeps the KL of the policy from the reference small, as --kl-budget says; see training/kl_budget.py.

    The episodes of a round are sampled after the update of the round before: their KL measures that update.
    """

    metrics: dict[str, float]  # of the current round

    def begin(self, number: int, rollbacks: int) -> None:
        """Called in round `number` before it is learned from, with the number of rollbacks of the collapse guard."""

    def judge_last_update(self, kl: float, error: float) -> bool:
        """Judges the previous round's update, by the KL and its standard error; sets the next update's learning rate.

        If the KL is too large, restores the weights from before that update and returns False. The policy that sampled
        this round is then gone, so the round must not be learned from.
        """


@dataclass(frozen=True)
class MeasuredChunk:
    """What is measured of n action tokens, some of which may be off-policy."""

    sums: Sums  # sums of the metrics over the tokens
    # [2, n], two logs of ratios for each token. Row 0 is the current log-probability minus the one that the sampler
    # recorded. Row 1 is the log of the ratio that the algorithm clips.
    log_ratios: Tensor


@dataclass(frozen=True)
class MeasuredLoss:
    """The loss of a micro-batch, and what is measured of its action tokens."""

    loss: Tensor  # [] summed over the tokens, with gradients
    sums: list[Sums]  # sums of the metrics, one for each chunk: they are added up later, always in one order
    log_ratios: Tensor  # [2, N] for the N on-policy tokens; the two rows are those of MeasuredChunk


@dataclass
class Learner:
    """Trains the model's active adapter, the policy, by one algorithm. Ranks divide the rows that the model runs on."""

    model: CausalLM
    vocabulary: int  # number of ids of the tokenizer; higher ids are padding of the embedding, with probability 0
    temperature: float  # the sampler's
    settings: RLSettings
    algorithm: Algorithm
    reference: str | None  # name of the reference adapter; None: the bare base
    precision: Precision
    optimizer_step: Callable[[], tuple[float, bool]]  # clips and updates; returns (norm before clipping, is skipped)
    grant: Grant
    value_head: nn.Module | None = None  # the critic's, if the algorithm has one
    ranks: Ranks = ALONE
    budget: UpdateBudget | None = None
    _last_micro_batch: Batch | None = field(default=None, init=False)

    def __post_init__(self):
        assert (self.value_head is not None) == self.algorithm.has_critic

    def learn(self, batch: Batch, seed: str) -> dict[str, float]:
        """Takes all optimizer steps of a round and returns its metrics. `seed` shuffles the mini-batches.

        Takes none if the budget undoes the update of the round before, see UpdateBudget.
        """
        settings = self.settings
        if settings.old_logprobs == "trainer":
            batch = batch.with_trainer_logprobs(self.join_ranks(self.policy_logprobs, batch))
        if settings.has_reference:
            batch = replace(batch, reference=self.join_ranks(self.reference_logprobs, batch))
        if self.budget:
            kl, error = kl_on_policy(batch)
            if not self.budget.judge_last_update(kl, error):
                return dict(self.budget.metrics)
        batch = self.algorithm.with_advantages(batch)
        advantages = batch.advantages
        scaled = settings.negative_advantage_scale * advantages
        batch = replace(batch, advantages=torch.where(advantages < 0, scaled, advantages))
        step_sums: list[Sums] = []  # for each optimizer step, the sums of its metrics
        first_epoch_log_ratios: list[Tensor] = []  # for each optimizer step of the first epoch, [2, N]
        norms: list[float] = []  # for each optimizer step, the norm of its gradients
        for epoch in range(settings.update_epochs):
            mini_batches = batch.mini_batches(
                settings.mini_batch_size,
                seed=f"{seed}/{epoch}",
                by_group=self.algorithm.has_groups,
            )
            for rows in mini_batches:
                sums, log_ratios = self.grant.run_within_memory("update", self.add_gradients, batch.select(rows))
                step_sums.append(sums)
                if epoch == 0:
                    first_epoch_log_ratios.append(log_ratios)
                norm, _ = self.optimizer_step()
                norms.append(norm)
        metrics = self._metrics(step_sums, first_epoch_log_ratios, norms)
        metrics |= self.algorithm.adapt_kl(metrics.get("kl"))  # changes beta for the next round
        metrics |= self.algorithm.statistics(batch)
        if self.budget:
            metrics |= self.budget.metrics
        return metrics

    def _metrics(
        self,
        step_sums: list[Sums],
        first_epoch_log_ratios: list[Tensor],
        norms: list[float],
    ) -> dict[str, float]:
        """Returns the metrics of an update, of all ranks; the arguments are only this rank's.

        The metrics are means over the tokens of all ranks and optimizer steps, but `loss` and `grad_norm` over the
        optimizer steps. For the metrics of `sampling_metrics` see there.
        """
        sums_by_rank = self.ranks.gather(step_sums)  # [rank][step]
        sums = sum_by_name(list(chain.from_iterable(sums_by_rank)))
        log_ratios_by_rank = self.ranks.gather(first_epoch_log_ratios)  # [rank][step]
        log_ratios_by_step = []
        for of_step in zip(*log_ratios_by_rank, strict=True):
            log_ratios_by_step.append(torch.cat(of_step, dim=1))  # the tokens of all ranks side by side
        metrics = {"loss": float(sums.pop("loss")) / len(norms)}
        metrics |= means_of(sums)
        finite_norms = [norm for norm in norms if math.isfinite(norm)]  # the norm of a skipped step is not finite
        metrics["grad_norm"] = statistics.fmean(finite_norms or [math.inf])
        metrics |= sampling_metrics(log_ratios_by_step, self.settings.clip_low, self.settings.clip_high)
        return metrics

    def join_ranks(self, work: Callable[..., Tensor], *args: Batch) -> Tensor:
        """Returns the results [B, T] of `work(*args)` on all ranks, joined into one.

        Each rank computes its own rows and has 0 in all other rows, so that the sum over the ranks has every row once.
        """
        # "update" is the phase of passes over whole rows, with gradients or without: if memory runs out in it, the
        # passes become smaller.
        return self.ranks.sum_(self.grant.run_within_memory("update", work, *args))

    def reference_logprobs(self, batch: Batch) -> Tensor:
        """Returns the log-probabilities [B, T] of the action tokens under the reference policy.

        The reference is the same base with another adapter or with none. Rows of other ranks are 0.
        """
        with use_adapter(self.model, self.reference):
            return self.policy_logprobs(batch)

    def policy_logprobs(self, batch: Batch) -> Tensor:
        """Returns the log-probabilities [B, T] of the action tokens under the active adapter.

        Rows of other ranks are 0.
        """
        return self._measure_actions(action_logprobs, batch)

    def policy_entropies(self, batch: Batch) -> Tensor:
        """Returns the entropies [B, T] of the distributions of the action tokens, as in `policy_logprobs`."""
        return self._measure_actions(action_entropies, batch)

    @torch.no_grad()
    def _measure_actions(self, measure: Callable[..., Tensor], batch: Batch) -> Tensor:
        """Returns the numbers of `measure(model, batch)` as [B, T]: at the action tokens of this rank's rows, else
        0."""
        measured = torch.zeros_like(batch.logprobs)
        with self.precision.autocast():
            for rows in self.micro_batches(batch):
                micro_batch = batch.select(rows)
                numbers = measure(
                    self.model,
                    micro_batch,
                    vocabulary=self.vocabulary,
                    temperature=self.temperature,
                    chunk=self.grant.memory.loss_chunk,
                )
                measured[rows] = micro_batch.spread(numbers.cpu())
        return measured

    def mean_entropies(self, batch: Batch) -> Tensor:
        """Returns the policy's mean entropy [B] over each row's action tokens, in nats."""
        entropies = self.join_ranks(self.policy_entropies, batch)  # [B, T]
        return entropies.sum(-1) / batch.action_mask.sum(-1)

    def micro_batches(self, batch: Batch) -> list[list[int]]:
        """Returns this rank's rows in packs that go through the model together.

        Rows without a teacher come first, then rows with a teacher, which have another loss.
        """
        token_rows = batch.token_rows()
        row_limit = self.settings.micro_batch_size or len(batch)
        lengths = [len(tokens) for tokens in token_rows]
        rank_rows = sorted(self.ranks.rows_of_rank(lengths))
        without_teacher = [row for row in rank_rows if batch.teacher[row] is None]
        with_teacher = [row for row in rank_rows if batch.teacher[row] is not None]
        micro_batches = []
        for rows in (without_teacher, with_teacher):
            tokens = [token_rows[row] for row in rows]
            packs = pack_rows(tokens, self.grant.memory.micro_batch_tokens, row_limit)
            micro_batches += [[rows[i] for i in pack] for pack in packs]
        return micro_batches

    def add_gradients(self, batch: Batch) -> tuple[Sums, Tensor]:
        """Accumulates the gradients of a mini-batch's loss over its micro-batches.

        Returns the metrics' sums over this rank's action tokens, and the log-ratios [2, N] of its N on-policy tokens.
        """
        batch = replace(batch, weights=self.algorithm.weights(batch))  # before rows are divided among micro-batches
        sums: list[Sums] = []
        log_ratios = [torch.empty(2, 0, device=self.precision.device)]  # a rank may have no rows
        # No weight changes before the update, so the adapter is cast to the dtype of the passes only once.
        with cast_once(self.model, self.precision.dtype):
            for rows in self.ranks.with_progress(self.micro_batches(batch), "learning", "passes"):
                micro_batch = batch.select(rows)
                if micro_batch.teacher[0] is None:  # then no row of the micro-batch has a teacher
                    measured = self.loss(micro_batch)
                else:
                    measured = self.guided_loss(micro_batch)
                self.precision.backward(measured.loss)
                sums += measured.sums
                log_ratios.append(measured.log_ratios)
        return sum_by_name(sums), torch.cat(log_ratios, dim=1)

    def loss(self, batch: Batch) -> MeasuredLoss:
        """Returns the algorithm's loss of a micro-batch, with the critic's loss if there is a critic."""
        self._last_micro_batch = batch
        actions = ActionTokens.of(batch, self.model.head_weight.device)
        with self.precision.autocast():
            hidden, tokens = action_states(self.model, batch)
            head = self.model.head_weight[: self.vocabulary]
            chunk_size = self.grant.memory.loss_chunk
            if self.algorithm.has_episode_ratios:
                # The loss sees one chunk of tokens at a time, but these algorithms need the mean over an episode first.
                # So the head is applied twice, here without gradients: gspo.py explains why none are needed.
                logprobs, _ = token_logprobs(
                    hidden.detach(),
                    head,
                    tokens,
                    temperature=self.temperature,
                    chunk=chunk_size,
                )
                actions = actions.with_episode_log_ratios(logprobs, batch.action_mask.sum(-1).tolist())
            # `token_loss` calls `_policy_loss(actions, places, logprobs, entropy)` for each chunk of tokens in turn.
            # Then it returns the sum of their losses and the list of their MeasuredChunks.
            loss, measured_chunks = token_loss(
                hidden,
                head,
                tokens,
                loss=partial(self._policy_loss, actions),
                temperature=self.temperature,
                chunk=chunk_size,
                with_entropy=True,
            )
            values = None
            if self.value_head is not None:
                values = self.value_head(hidden)
        sums = [chunk.sums for chunk in measured_chunks]
        if values is not None:
            per_token, metrics = self.algorithm.value_loss(actions, values)
            loss = loss + self.settings.value_coefficient * (per_token * actions.weights).sum()
            sums.append(token_sums(metrics))
        log_ratios = torch.cat([chunk.log_ratios for chunk in measured_chunks], dim=1)
        off_policy = batch.off_policy_actions  # on the host, so that indexing does not wait for the device
        if off_policy is not None:
            on_policy = torch.nonzero(~off_policy)[:, 0]
            log_ratios = log_ratios[:, on_policy.to(log_ratios.device, non_blocking=True)]
        on_policy_tokens = log_ratios.shape[1]
        # `means_of` divides the sums of metrics by the numbers of tokens.
        totals = {
            "loss": loss.detach(),
            TOKENS: on_policy_tokens,
            f"{OFF_POLICY}{TOKENS}": len(tokens) - on_policy_tokens,
        }
        return MeasuredLoss(loss, [*sums, totals], log_ratios)

    def _policy_loss(
        self,
        actions: ActionTokens,
        places: slice,
        logprobs: Tensor,
        entropy: Tensor,
    ) -> tuple[Tensor, MeasuredChunk]:
        """Returns the algorithm's summed loss of the action tokens at `places`, and what is measured of them.

        `logprobs` [n] and `entropy` [n] are those of the current policy, with gradients.
        """
        chunk = actions[places]
        detached = logprobs.detach()
        # Both only for metrics: `algorithm.loss` does not get them. It computes the log-ratios to clip once more, with
        # gradients.
        sampler_log_ratios = detached - chunk.sampled_logprobs
        log_ratios_to_clip = self.algorithm.log_ratios(chunk, detached)
        per_token, metrics = self.algorithm.loss(chunk, logprobs, entropy)
        measured = MeasuredChunk(
            sums=token_sums({"entropy": entropy} | metrics, chunk.off_policy),
            log_ratios=torch.stack((sampler_log_ratios, log_ratios_to_clip)),
        )
        return (per_token * chunk.weights).sum(), measured

    def guided_loss(self, batch: Batch) -> MeasuredLoss:
        """Returns the loss of a micro-batch whose rows all have a teacher's distributions. Measures no log-ratios."""
        self._last_micro_batch = batch
        weights = batch.weights[batch.action_mask]  # [N]
        teacher_logprobs = torch.cat([top_tokens.logprobs for top_tokens in batch.teacher])  # [N, k]
        teacher_ids = torch.cat([top_tokens.ids for top_tokens in batch.teacher])  # [N, k]

        def distillation_loss(places: slice, logprobs: Tensor) -> tuple[Tensor, Sums]:
            chunk_weights = weights[places].to(logprobs.device, non_blocking=True)
            chunk_teacher = teacher_logprobs[places].to(logprobs.device, non_blocking=True)
            per_token, metrics = self.algorithm.guided_loss(chunk_teacher, logprobs)
            return (per_token * chunk_weights).sum(), token_sums(metrics)

        with self.precision.autocast():
            hidden, _ = action_states(self.model, batch)
            loss, sums = candidates_loss(
                hidden,
                self.model.head_weight[: self.vocabulary],
                teacher_ids,
                loss=distillation_loss,
                temperature=TEACHER_TEMPERATURE,
                chunk=self.grant.memory.loss_chunk,
            )
        totals = {"loss": loss.detach(), GUIDED + TOKENS: len(weights)}
        return MeasuredLoss(loss, [*sums, totals], log_ratios=loss.new_empty(2, 0))

    def explain_overflow(self) -> str:
        """Runs the last micro-batch again; returns a text that names the layer that overflowed first, if any did."""
        with self.precision.autocast():
            return hooks.explain_overflow(self.model, lambda: action_states(self.model, self._last_micro_batch))


def kl_on_policy(batch: Batch) -> tuple[float, float]:
    """Estimates the KL from the reference (k3) over the tokens that the policy sampled in this round.

    Returns the mean over these tokens in nats, and its standard error. The error is computed from groups and not from
    tokens: groups are drawn independently, and few of them may have nearly all of the KL. The mean is a ratio of sums:
    its error is that of Cochran, Sampling Techniques, section 6.4, and infinite for a single group.
    """
    mask = batch.action_mask
    if batch.off_policy is not None:
        mask = mask & ~batch.off_policy[:, None]
    token_kl = torch.where(mask, k3_kl(batch.old_logprobs, batch.reference), 0.0)  # [B, T]
    _, group_index = batch.groups.unique(return_inverse=True)  # [B], 0 to the number of groups - 1
    group_count = int(group_index.max()) + 1
    zeros = torch.zeros(group_count, dtype=torch.float64)
    group_kl = zeros.index_add(0, group_index, token_kl.double().sum(-1))
    group_tokens = zeros.index_add(0, group_index, mask.sum(-1).double())
    mean = group_kl.sum() / group_tokens.sum()
    if group_count == 1:
        return float(mean), math.inf
    squares = (group_kl - mean * group_tokens).square().sum()
    error = (squares * group_count / (group_count - 1)).sqrt() / group_tokens.sum()
    return float(mean), float(error)
