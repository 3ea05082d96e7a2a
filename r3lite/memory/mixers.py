"""What a layer's mixer of tokens (attention, short convolution or gated delta rule) takes in a pass.

The factors count, per token, the tensors of models/causal_lm.py, lfm2.py and qwen3_5.py that exist at once, by their
widths. They were found by counting live tensors: bench/memory.py holds the planner's sums against measured peaks.
"""

from math import prod
from typing import NamedTuple

from r3lite.memory.layer_tensors import adapted, delta_heads, layer_tensors
from r3lite.memory.work import Workload
from r3lite.models.causal_lm import ModelConfig
from r3lite.models.gated_delta import CHUNK, TOGETHER

FP32 = 4  # bytes of a number


def query_size(m: ModelConfig) -> int:
    """Returns the numbers of a token's queries in a layer, and of its attention's output."""
    return m.num_attention_heads * m.head_dim


def key_value_size(m: ModelConfig) -> int:
    """Returns the numbers of a token's keys and values in a layer."""
    return 2 * m.num_key_value_heads * m.head_dim


class MixerSizes(NamedTuple):
    """Sizes of what a layer has before its feed-forward network: an attention, a short convolution or a delta rule."""

    forward: int  # numbers of a token that exist at once in a pass without gradients
    activations: int  # numbers of a token that a backward pass needs
    backward: int  # numbers of a token that exist at once in a backward pass
    scales: int  # bytes of a token that a backward pass needs besides
    weights: int  # of the mixer's largest product


def mixer_sizes(w: Workload, taps: int) -> MixerSizes:
    """Returns the sizes of the mixer of layers whose convolution has so many taps; 0: of those that attend."""
    m = w.model
    hidden = m.hidden_size
    delta = delta_heads(m)
    if taps and delta:
        mixed = sum(delta.sizes)
        values = delta.sizes[2]
        projected = mixed + values + 2 * delta.values
        return MixerSizes(
            # All that is projected, the rule's inputs, its output, the normalized output, gates, and their product.
            forward=projected + mixed + delta.values + 4 * values,
            activations=projected + 2 * mixed + delta.values + 4 * values,  # and the convolution's output
            backward=hidden + projected + 2 * mixed + delta.values + 6 * values,
            scales=4 * FP32 * delta.values + prod(delta.state_shape) * FP32 // CHUNK,
            weights=hidden * projected,
        )
    if taps:
        return MixerSizes(
            forward=5 * hidden,  # gates and values, their product, the product joined to earlier tokens', output
            activations=5 * hidden,  # gates and values, output, output times its gate
            backward=9 * hidden,
            scales=0,
            weights=3 * hidden * hidden,
        )
    queries = query_size(m)
    keys_and_values = key_value_size(m)
    gates = queries if delta else 0
    return MixerSizes(
        forward=3 * queries + keys_and_values + 3 * gates,
        activations=4 * queries + keys_and_values + 3 * gates,  # rotated, keys and values for every head, output
        backward=8 * queries + keys_and_values + 3 * gates,
        scales=4 * m.num_attention_heads + _head_norm_bytes(w),
        weights=hidden * (queries + keys_and_values + gates),
    )


def rule_forward(w: Workload, tokens: int) -> int:
    """Returns the bytes that a gated delta rule takes without gradients, with what its layer holds meanwhile."""
    delta = delta_heads(w.model)
    if delta is None:
        return 0
    mixed = sum(delta.sizes)
    values = delta.sizes[2]
    held = 2 * mixed + 2 * values + 3 * delta.values  # projections, inputs and output
    per_head = 4 * delta.key_dim + 4 * delta.value_dim + 5 * CHUNK  # numbers of a token in fp32
    return tokens * held * w.element + _chunk_bytes(w, tokens, per_head, states=4)


def rule_backward(w: Workload, tokens: int) -> int:
    """Returns the bytes that the backward pass of a gated delta rule takes, with what its layer holds meanwhile."""
    delta = delta_heads(w.model)
    if delta is None:
        return 0
    mixed = sum(delta.sizes)
    values = delta.sizes[2]
    held = w.model.hidden_size + 4 * mixed + 3 * values + 4 * delta.values  # and gradients of inputs and output
    per_head = 12 * delta.key_dim + 10 * delta.value_dim + 7 * CHUNK
    return tokens * held * w.element + _chunk_bytes(w, tokens, per_head, states=1)


def _chunk_bytes(w: Workload, tokens: int, per_head: int, states: int) -> int:
    """Returns the bytes of the chunks that are computed at once: one of each row of the pass, but at most TOGETHER."""
    delta = delta_heads(w.model)
    rows = -(-tokens // w.row_tokens)
    numbers = delta.values * per_head
    if delta.keys < delta.values:  # queries and keys are held once for all the value heads that each serves
        numbers -= 2 * delta.key_dim * (delta.values - delta.keys)
    chunk = CHUNK * numbers + states * prod(delta.state_shape)
    return min(rows, TOGETHER) * chunk * FP32


def activation_bytes(w: Workload, taps: int) -> int:
    """Returns the bytes per token of the activations, without its input, that a layer keeps if it is not recomputed."""
    m = w.model
    mixer = mixer_sizes(w, taps)
    norm_count = layer_tensors(m, taps).norms
    # The results of the two norms, and the hidden state between the layer's halves. A norm of an output (Gemma has two)
    # keeps that output.
    norms = (1 + norm_count) * m.hidden_size
    feed_forward = 3 * m.intermediate_size  # gate, up, their product
    low_rank = len(adapted(m, w.targets, taps)) * w.lora_r  # the products with each adapter's A
    numbers = norms + mixer.activations + feed_forward + low_rank
    return w.element * numbers + FP32 * norm_count + mixer.scales


def _head_norm_bytes(w: Workload) -> int:
    """Returns the bytes per token of what the norms of heads keep: their input, and a scale for each head."""
    m = w.model
    if not m.qk_norm:
        return 0
    heads = m.num_attention_heads + m.num_key_value_heads
    return (query_size(m) + key_value_size(m)) * w.element + 4 * heads
