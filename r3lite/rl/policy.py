"""The trainer's side of token-in, token-out: log-probabilities and values of the tokens that were sampled."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from r3lite.models.logprobs import token_logprobs
from r3lite.models.qwen2 import Qwen2
from r3lite.rl.batch import Batch


class ActionStats(NamedTuple):
    """One number per action token, in row-major order of the batch's action mask."""

    logprobs: Tensor  # [N] fp32
    entropy: Tensor  # [N] fp32, of the distribution that the token was drawn from
    values: Tensor | None  # [N] fp32


def action_stats(
    model: Qwen2, batch: Batch, vocabulary: int, temperature: float, value_head: nn.Module | None = None
) -> ActionStats:
    """Runs the model over whole episodes and reads off their action tokens.

    A token is predicted by the hidden state before it. The head's first `vocabulary` rows are those that may be
    sampled; the distribution is scaled by the temperature that sampled it.
    """
    chosen = batch.action[:, 1:]  # [B, T-1]; the first token of an episode is given
    hidden = model(batch.tokens)[:, :-1][chosen]  # [N, C]
    targets = batch.tokens[:, 1:][chosen]  # [N]
    logprobs, entropy = token_logprobs(hidden, model.head_weight[:vocabulary], targets, temperature, with_entropy=True)
    return ActionStats(logprobs, entropy, None if value_head is None else value_head(hidden))


def at_actions(x: Tensor, batch: Batch) -> Tensor:
    """The entries [N] of x [B, T] at action tokens, in the order of `action_stats`."""
    return x[batch.action]


def spread(x: Tensor, batch: Batch) -> Tensor:
    """The inverse of `at_actions`: x [N] at the action tokens of a [B, T] tensor that is 0 elsewhere."""
    return torch.zeros(batch.tokens.shape, dtype=x.dtype, device=x.device).masked_scatter(batch.action, x)
