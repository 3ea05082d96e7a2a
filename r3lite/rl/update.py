"""One round's learning: from rewards to advantages, from advantages to optimizer steps.

Handed a model, a batch and what an optimizer step is; knows no text, no retriever and no judge.
"""

import math
import random
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor, nn

from r3lite.models.logprobs import CHUNK, token_loss
from r3lite.models.lora import use_adapter
from r3lite.models.packing import groups
from r3lite.models.qwen2 import Qwen2
from r3lite.rl import losses
from r3lite.rl.advantages import gae, group_normalized, share_without_variance, whiten
from r3lite.rl.batch import Batch
from r3lite.rl.policy import action_logprobs, action_states, at_actions, spread
from r3lite.settings import RLSettings

T = TypeVar("T")


@dataclass
class Learner:
    """A policy (the model's active adapter), a frozen reference adapter and, for PPO, a critic.

    `backward` adds a loss's gradients; `optimizer_step` clips, updates and returns (gradient norm, skipped).
    """

    model: Qwen2
    vocabulary: int  # ids that may be sampled
    temperature: float
    settings: RLSettings
    reference: str | None  # name of the reference adapter; None: the bare base
    backward: Callable[[Tensor], None]
    optimizer_step: Callable[[], tuple[float, bool]]
    value_head: nn.Module | None = None
    autocast: Callable[[], AbstractContextManager] = nullcontext
    # Does a piece of work; whoever knows what to do when memory runs out may do it again.
    attempt: Callable[[Callable[[], T]], T] = lambda work: work()
    pass_tokens: int = 1 << 20  # of one pass; a longer episode goes alone
    loss_chunk: int = CHUNK
    last: Batch | None = None  # what went through the model last, to explain an overflow by

    def learn(self, batch: Batch, seed: str) -> dict[str, float]:
        """All optimizer steps of a round; returns its metrics. `seed` orders the mini-batches."""
        returns = batch.rewards.sum(-1)  # [B], what each episode was paid
        reference = self.attempt(lambda: self.reference_logprobs(batch)) if self.settings.kl_beta else None
        advantages, targets = self.advantages(batch, returns, reference)
        advantages = torch.where(advantages < 0, self.settings.negative_advantage_scale * advantages, advantages)
        sums: dict[str, Tensor] = {}
        norms: list[float] = []
        for epoch in range(self.settings.update_epochs):
            for rows in self._mini_batches(batch, f"{seed}/{epoch}"):
                norms.append(self._mini_batch(batch, rows, advantages, targets, reference, sums))
        tokens, loss = sums.pop("tokens"), sums.pop("loss")
        measured = {"loss": float(loss) / len(norms)} | {name: float(total) / tokens for name, total in sums.items()}
        measured |= {
            "grad_norm": statistics.fmean([n for n in norms if math.isfinite(n)] or [math.inf]),  # less skipped steps
            "frac_reward_zero_std": share_without_variance(returns, batch.groups),
        }
        if targets is not None:
            error = at_actions(targets - batch.values, batch)
            measured["explained_variance"] = float(
                1 - error.var(correction=0) / (at_actions(targets, batch).var(correction=0) + 1e-8)
            )
        return measured

    @torch.no_grad()
    def reference_logprobs(self, batch: Batch) -> Tensor:
        """Log-probabilities [B, T] of the action tokens under the reference: the same base, another adapter."""
        parts = torch.zeros_like(batch.logprobs)
        with use_adapter(self.model, self.reference), self.autocast():
            for rows in self._micro_batches(batch, list(range(len(batch.tokens)))):
                part = batch.rows(rows)
                logprobs = action_logprobs(self.model, part, self.vocabulary, self.temperature, self.loss_chunk)
                parts[rows] = spread(logprobs.cpu(), part)
        return parts

    def advantages(self, batch: Batch, returns: Tensor, reference: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Advantages [B, T], and for PPO the targets [B, T] of its critic.

        PPO is paid -beta KL at every action token on top of its rewards (arXiv 2203.02155, eq. 2); GRPO has the KL
        term in its loss and one advantage for the whole episode.
        """
        settings = self.settings
        if settings.algorithm == "grpo":
            return group_normalized(returns, batch.groups)[:, None] * batch.action, None
        rewards = batch.rewards
        if reference is not None:
            rewards = rewards - settings.kl_beta * losses.k1_kl(batch.logprobs, reference) * batch.action
        advantages, targets = gae(rewards, batch.values, batch.action, settings.gamma, settings.gae_lambda)
        return whiten(advantages, batch.action), targets

    def _micro_batches(self, batch: Batch, rows: list[int]) -> list[list[int]]:
        """Rows in groups that go through the model together."""
        found = groups(batch.rows(rows).read(), self.pass_tokens, self.settings.micro_batch_size or len(rows))
        return [[rows[i] for i in group] for group in found]

    def _mini_batches(self, batch: Batch, seed: str) -> list[list[int]]:
        """The rows of each optimizer step of an epoch, in an order that `seed` shuffles.

        GRPO's groups stay together: what its advantages compare is then learned from at once, and its prompt read once.
        """
        units = [[i] for i in range(len(batch.tokens))]
        if self.settings.algorithm == "grpo":
            units = [torch.nonzero(batch.groups == g)[:, 0].tolist() for g in batch.groups.unique()]
        random.Random(seed).shuffle(units)
        order, size = list(chain.from_iterable(units)), self.settings.mini_batch_size
        return [order[start : start + size] for start in range(0, len(order), size)]

    def _mini_batch(self, batch, rows, advantages, targets, reference, sums) -> float:
        """One optimizer step over whole episodes; adds to `sums` and returns the gradient's norm."""

        def add_gradients() -> dict[str, Tensor]:
            seen: dict[str, Tensor] = {}
            actions = batch.action[rows].sum()
            for micro in self._micro_batches(batch, rows):
                part = batch.rows(micro)
                # PPO: mean over the mini-batch's action tokens. GRPO: over each episode's, then over episodes.
                share = part.action / (
                    actions if self.settings.algorithm == "ppo" else part.action.sum(-1, keepdim=True) * len(rows)
                )
                known = (None if x is None else x[micro] for x in (advantages, targets, reference))
                self.backward(self._loss(part, *known, share, seen))
            return seen

        for name, total in self.attempt(add_gradients).items():
            sums[name] = sums.get(name, 0.0) + total
        norm, _ = self.optimizer_step()
        return norm

    def _loss(self, part: Batch, advantages: Tensor, targets, reference, share: Tensor, sums: dict) -> Tensor:
        """The loss of a micro-batch, its tokens weighted by their share of the mini-batch; adds to `sums`.

        What is known of its tokens is [B, T], in the host's memory.
        """
        settings, device = self.settings, self.model.head_weight.device
        known = part.logprobs, part.values, share, advantages, targets, reference
        old, old_values, share, advantages, targets, reference = (
            None if x is None else at_actions(x, part).to(device, non_blocking=True) for x in known
        )
        clips = settings.clip_low, settings.clip_high

        def count(**seen: Tensor) -> None:
            for name, x in seen.items():
                sums[name] = sums.get(name, 0.0) + x.detach().sum()

        def policy_loss(rows: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, dict]:
            advantage = advantages[rows]
            per_token = losses.policy_loss(logprobs, old[rows], advantage, *clips)
            low, high = losses.clipped(logprobs, old[rows], advantage, *clips)
            count(entropy=entropy, **{"clip_ratio/low_mean": low, "clip_ratio/high_mean": high})
            if settings.entropy_coefficient:
                per_token = per_token - settings.entropy_coefficient * entropy
            if reference is not None:
                kl = losses.k3_kl(logprobs, reference[rows])
                count(kl=kl)
                if settings.algorithm == "grpo":
                    per_token = per_token + settings.kl_beta * kl
            return (per_token * share[rows]).sum(), {}

        self.last = part
        with self.autocast():
            hidden, tokens = action_states(self.model, part)
            head = self.model.head_weight[: self.vocabulary]
            loss, _ = token_loss(
                hidden, head, tokens, policy_loss, self.temperature, self.loss_chunk, with_entropy=True
            )
            values = None if targets is None else self.value_head(hidden)
        if targets is not None:
            value = losses.value_loss(values, old_values, targets, settings.value_clip)
            count(value_loss=value)
            loss = loss + settings.value_coefficient * (value * share).sum()
        count(loss=loss)
        sums["tokens"] = sums.get("tokens", 0) + len(share)
        return loss
