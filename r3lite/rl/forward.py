"""Runs the model over a batch's episodes: what it says of the tokens that were sampled."""

from torch import Tensor

from r3lite.models.causal_lm import CausalLM
from r3lite.models.logprobs import CHUNK, token_logprobs
from r3lite.models.packing import states_before
from r3lite.rl.batch import Batch


def action_states(model: CausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """Runs the model over whole episodes: hidden states [N, C] before the action tokens, and these tokens [N].

    N counts action tokens in row-major order of the batch's action mask. A token is predicted by the state before it.
    """
    return states_before(model, batch.token_rows(), batch.action_mask.tolist())


def action_logprobs(
    model: CausalLM, batch: Batch, vocabulary: int, temperature: float, chunk: int = CHUNK, entropies: bool = False
) -> Tensor:
    """Log-probabilities [N] of the action tokens, under the distributions that they were drawn from; or the entropies
    [N] of these, in nats.

    The first `vocabulary` rows of the head are the tokens that may be sampled; the temperature is the sampler's.
    """
    hidden, targets = action_states(model, batch)
    head = model.head_weight[:vocabulary]
    return token_logprobs(hidden, head, targets, temperature, chunk, with_entropy=entropies)[entropies]
