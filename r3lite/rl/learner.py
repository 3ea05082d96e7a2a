"""The update of a round: old and reference log-probabilities, advantages, then optimizer steps over mini-batches.

Works on a model and a batch of numbers; knows no text, no retriever, no judge and no algorithm by name. Formulas of the
algorithms are in `rl/algorithms`.

Shapes: [B, T] rows and positions, [N] the action tokens of a batch, [n] those of a chunk of it; see rl/batch.py.
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

    The updated policy samples the episodes of the next round, so an update is judged by the KL of the next round.
    """

    metrics: dict[str, float]  # of the current round

    def begin(self, number: int) -> None:
        """Begins round `number`, before its update."""

    def judge_last_update(self, kl: float, error: float) -> bool:
        """Judges the previous round's update by this round's KL, in nats per token, and the KL's standard error.

        If the KL is too large, restores the weights from before that update and returns False. The policy that sampled
        this round is then gone, so the round must not be learned from. Else sets the learning rate of this round's
        update and returns True.
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
    # What `sum_by_name` adds up later: for each chunk the sums of the policy's metrics; then the sums that are taken
    # once for the micro-batch, of the critic's metrics, the loss and the tokens. No metric is in both. The order is
    # fixed, so that results are equal to the bit.
    sums: list[Sums]
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
    # Clips the gradients, updates the weights and clears the gradients. Returns the norm before clipping, and whether
    # the update was skipped because gradients in fp16 were not finite.
    optimizer_step: Callable[[], tuple[float, bool]]
    grant: Grant  # the sizes of the passes, which shrink if memory runs out
    value_head: nn.Module | None = None  # the critic's, if the algorithm has one
    ranks: Ranks = ALONE
    budget: UpdateBudget | None = None
    _last_micro_batch: Batch | None = field(default=None, init=False)  # for `explain_overflow`

    def __post_init__(self):
        assert (self.value_head is not None) == self.algorithm.has_critic

    def learn(self, batch: Batch, seed: str) -> dict[str, float]:
        """Takes all optimizer steps of a round and returns its metrics. `seed` shuffles the mini-batches.

        If the budget undoes the previous round's update, this takes no step and returns only the budget's metrics.
        """
        settings = self.settings
        if settings.old_logprobs == "trainer":
            batch = batch.with_trainer_logprobs(self.run_on_all_ranks(self.policy_logprobs, batch))
        if settings.has_reference:
            batch = replace(batch, reference=self.run_on_all_ranks(self.reference_logprobs, batch))
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
                # "update" is a phase of the memory plan. If memory runs out in it, `run_within_memory` drops all
                # gradients, and calls `add_gradients` again with smaller passes.
                sums, log_ratios = self.grant.run_within_memory("update", self.add_gradients, batch.select(rows))
                step_sums.append(sums)
                if epoch == 0:
                    first_epoch_log_ratios.append(log_ratios)
                norm, _ = self.optimizer_step()
                norms.append(norm)
        metrics = self._metrics(step_sums, first_epoch_log_ratios, norms)
        metrics |= self.algorithm.statistics(batch)
        metrics |= self.algorithm.adapt_kl(metrics.get("kl"))  # changes beta for the next round
        if self.budget:
            metrics |= self.budget.metrics
        return metrics

    def _metrics(
        self,
        step_sums: list[Sums],
        first_epoch_log_ratios: list[Tensor],
        norms: list[float],
    ) -> dict[str, float]:
        """Joins what the ranks have measured of a round's optimizer steps, and returns the metrics.

        `step_sums` and `first_epoch_log_ratios` are those of this rank's rows; `norms` are equal on all ranks. `loss`
        and `grad_norm` are means over the optimizer steps. The other metrics are means over the tokens of all steps,
        except those of `sampling_metrics`.
        """
        sums_by_rank = self.ranks.gather(step_sums)  # [rank][step]
        sums = sum_by_name(list(chain.from_iterable(sums_by_rank)))
        log_ratios_by_rank = self.ranks.gather(first_epoch_log_ratios)  # [rank][step]
        log_ratios_by_step = []
        for rank_parts in zip(*log_ratios_by_rank, strict=True):
            log_ratios_by_step.append(torch.cat(rank_parts, dim=1))  # [2, N] of all ranks
        metrics = {"loss": float(sums.pop("loss")) / len(norms)}
        metrics |= means_of(sums)
        finite_norms = [norm for norm in norms if math.isfinite(norm)]  # the norm of a skipped step is not finite
        metrics["grad_norm"] = statistics.fmean(finite_norms or [math.inf])
        metrics |= sampling_metrics(log_ratios_by_step, self.settings.clip_low, self.settings.clip_high)
        return metrics

    def run_on_all_ranks(self, work: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
        """Runs `work(batch)` on all ranks; returns the result [B, T] for the rows of all ranks.

        On each rank, `work` computes the rank's rows and returns 0 in all other rows. So the sum of the ranks' results
        has every row once.
        """
        # The phase "update" is right for passes without gradients, too: they run over whole rows as those of an update.
        rank_rows = self.grant.run_within_memory("update", work, batch)
        return self.ranks.sum_(rank_rows)

    def reference_logprobs(self, batch: Batch) -> Tensor:
        """Returns the log-probabilities [B, T] of the action tokens under the reference policy.

        The reference is the same base with another adapter or with none. Rows of other ranks are 0.
        """
        with use_adapter(self.model, self.reference):
            return self._measure_actions(action_logprobs, batch)

    def policy_logprobs(self, batch: Batch) -> Tensor:
        """Returns the log-probabilities [B, T] of the action tokens under the active adapter.

        Rows of other ranks are 0.
        """
        return self._measure_actions(action_logprobs, batch)

    def policy_entropies(self, batch: Batch) -> Tensor:
        """Returns the entropies [B, T], in nats, of the policy's distributions of the action tokens.

        Rows of other ranks are 0.
        """
        return self._measure_actions(action_entropies, batch)

    @torch.no_grad()
    def _measure_actions(self, measure: Callable[..., Tensor], batch: Batch) -> Tensor:
        """Returns numbers [B, T] of the action tokens in this rank's rows, 0 elsewhere.

        `measure` is `action_logprobs` or `action_entropies`: it returns the numbers [N] of a micro-batch.
        """
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
        entropies = self.run_on_all_ranks(self.policy_entropies, batch)  # [B, T]
        return entropies.sum(-1) / batch.action_mask.sum(-1)

    def micro_batches(self, batch: Batch) -> list[list[int]]:
        """Returns the rows of each of this rank's micro-batches. The rows of one go through the model together.

        Micro-batches of rows without a teacher come first, then those of rows with a teacher, which have another loss.
        """
        token_rows = batch.token_rows()
        row_limit = self.settings.micro_batch_size or len(batch)
        lengths = [len(tokens) for tokens in token_rows]
        rank_rows = self.ranks.rows_of_rank(lengths)
        without_teacher = [row for row in rank_rows if batch.teacher[row] is None]
        with_teacher = [row for row in rank_rows if batch.teacher[row] is not None]
        micro_batches = []
        for rows in (without_teacher, with_teacher):
            tokens = [token_rows[row] for row in rows]
            packs = pack_rows(tokens, self.grant.memory.micro_batch_tokens, row_limit)
            for pack in packs:
                micro_batches.append([rows[i] for i in pack])
        return micro_batches

    def add_gradients(self, batch: Batch) -> tuple[Sums, Tensor]:
        """Accumulates the gradients of a mini-batch's loss over this rank's micro-batches.

        Returns the sums of the metrics over this rank's action tokens, and the log-ratios [2, N] of its N on-policy
        tokens, as in MeasuredLoss.
        """
        # A token's weight depends on the whole mini-batch, so weights are computed before the micro-batches are taken.
        batch = replace(batch, weights=self.algorithm.weights(batch))
        sums: list[Sums] = []
        log_ratios = [torch.empty(2, 0, device=self.precision.device)]  # a rank may have no rows
        # No weight changes before the optimizer step, so the adapter is cast to the dtype of the passes only once.
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
        """Returns the algorithm's loss of a micro-batch without teachers. A critic's loss is added, if there is one."""
        self._last_micro_batch = batch
        actions = ActionTokens.of(batch, self.model.head_weight.device)
        with self.precision.autocast():
            hidden, tokens = action_states(self.model, batch)
            head = self.model.head_weight[: self.vocabulary]
            chunk_size = self.grant.memory.loss_chunk
            if self.algorithm.has_episode_ratios:
                # `_policy_loss` gets one chunk of tokens at a time, but needs the mean log-ratio of whole episodes. So
                # the head is applied twice: here to find these means, without gradients (gspo.py explains why none are
                # needed), and below for the loss.
                logprobs, _ = token_logprobs(
                    hidden.detach(),
                    head,
                    tokens,
                    temperature=self.temperature,
                    chunk=chunk_size,
                )
                actions = actions.with_episode_log_ratios(logprobs, batch.action_mask.sum(-1).tolist())
            # `token_loss` calls `_policy_loss(actions, places, logprobs, entropy)` for each chunk of tokens in turn. It
            # returns the sum of the chunks' losses and the list of their MeasuredChunks.
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
        off_policy = batch.off_policy_actions
        if off_policy is not None:
            # Indices from a mask on the host: with a mask on the device, the host would have to wait for their number.
            on_policy = torch.nonzero(~off_policy)[:, 0]
            log_ratios = log_ratios[:, on_policy.to(log_ratios.device, non_blocking=True)]
        on_policy_tokens = log_ratios.shape[1]
        # The numbers of tokens are those by which `means_of` divides the sums.
        totals = {
            "loss": loss.detach(),
            TOKENS: on_policy_tokens,
            OFF_POLICY + TOKENS: len(tokens) - on_policy_tokens,
        }
        return MeasuredLoss(loss, [*sums, totals], log_ratios)

    def _policy_loss(
        self,
        actions: ActionTokens,
        places: slice,
        logprobs: Tensor,
        entropy: Tensor,
    ) -> tuple[Tensor, MeasuredChunk]:
        """Returns the weighted sum [] of the losses of a chunk's action tokens, and what is measured of the chunk.

        The chunk is `actions[places]`. `logprobs` [n] and `entropy` [n] are the current policy's, with gradients.
        """
        chunk = actions[places]
        detached = logprobs.detach()
        # Two log-ratios without gradients, for metrics. `algorithm.loss` computes the second again, with gradients.
        sampler_log_ratios = detached - chunk.sampled_logprobs
        log_ratios_to_clip = self.algorithm.log_ratios(chunk, detached)
        per_token, metrics = self.algorithm.loss(chunk, logprobs, entropy)
        measured = MeasuredChunk(
            sums=token_sums({"entropy": entropy} | metrics, chunk.off_policy),
            log_ratios=torch.stack((sampler_log_ratios, log_ratios_to_clip)),
        )
        return (per_token * chunk.weights).sum(), measured

    def guided_loss(self, batch: Batch) -> MeasuredLoss:
        """Returns the loss of a micro-batch whose rows all have a teacher's distributions, without log-ratios."""
        self._last_micro_batch = batch
        weights = batch.weights[batch.action_mask]  # [N]
        teacher_logprobs = torch.cat([top_tokens.logprobs for top_tokens in batch.teacher])  # [N, k]
        teacher_ids = torch.cat([top_tokens.ids for top_tokens in batch.teacher])  # [N, k]

        def distillation_loss(places: slice, logprobs: Tensor) -> tuple[Tensor, Sums]:
            """Returns the weighted sum [] of a chunk's losses, and the sums of its metrics.

            `logprobs` [n, k] are those that the policy gives the teacher's k tokens.
            """
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

    Returns the mean over these tokens in nats, and its standard error. With G groups, where group g has the sum k_g of
    its tokens' KL and n_g tokens, they are

        mean = sum_g k_g / sum_g n_g,    error = sqrt(G / (G - 1) sum_g (k_g - mean n_g)^2) / sum_g n_g

    (a ratio of sums: Cochran, Sampling Techniques, section 6.4). The tokens of a group are not independent, but the
    groups are, so the error is computed from groups. It is infinite for a single group.
    """
    # Rows with a teacher were sampled, too: dgpo.py refuses --kl-budget with --teacher-logprobs.
    mask = batch.action_mask
    if batch.off_policy is not None:
        mask = mask & ~batch.off_policy[:, None]
    token_kl = torch.where(mask, k3_kl(batch.old_logprobs, batch.reference), 0.0)  # [B, T]
    _, group_index = batch.groups.unique(return_inverse=True)  # [B] of 0 to G - 1
    group_count = int(group_index.max()) + 1
    zeros = torch.zeros(group_count, dtype=torch.float64)
    group_kl = zeros.index_add(0, group_index, token_kl.double().sum(-1))  # [G]
    group_tokens = zeros.index_add(0, group_index, mask.sum(-1).double())  # [G]
    mean = group_kl.sum() / group_tokens.sum()
    if group_count == 1:
        return float(mean), math.inf
    squares = (group_kl - mean * group_tokens).square().sum()
    error = (squares * group_count / (group_count - 1)).sqrt() / group_tokens.sum()
    return float(mean), float(error)
