"""The memory that a layer's mixer of tokens (attention, short convolution or gated delta rule) takes in a pass.

In a formula such as `3 * queries + values`, each term is a width, that is, how many numbers of a token a tensor has.
Its factor says how many tensors of this width exist at once in models/causal_lm.py, lfm2.py and qwen3_5.py. The factors
were found by counting live tensors: bench/memory.py compares the planner's sums with measured peaks.
"""

from math import prod
from typing import NamedTuple

from r3lite.memory.layer_tensors import adapted, delta_heads, layer_tensors
from r3lite.memory.work import Workload
from r3lite.models.causal_lm import ModelConfig
from r3lite.models.gated_delta import CHUNK, TOGETHER

FP32 = 4  # bytes of a number


def query_size(m: ModelConfig) -> int:
    """Returns the width of a layer's queries, which is also that of its attention's output."""
    return m.num_attention_heads * m.head_dim


def key_value_size(m: ModelConfig) -> int:
    """Returns the width of a layer's keys and values together."""
    return 2 * m.num_key_value_heads * m.head_dim


class MixerSizes(NamedTuple):
    """Sizes of a layer's mixer. Those of a token are in numbers of the run's dtype, except `scales`."""

    forward: int  # of a token: what exists at once in a pass without gradients
    activations: int  # of a token: what a backward pass needs
    backward: int  # of a token: what exists at once in a backward pass
    scales: int  # of a token, in bytes: what a backward pass also needs, in fp32
    weights: int  # weights of the mixer's largest product


def mixer_sizes(w: Workload, taps: int) -> MixerSizes:
    """Returns the sizes of the mixer of layers whose convolution has so many taps; 0: of those with attention."""
    m = w.model
    hidden = m.hidden_size
    delta = delta_heads(m)
    if taps and delta:
        mixed = sum(delta.sizes)  # queries, keys and values
        values = delta.sizes[2]
        projected = mixed + values + 2 * delta.value_heads  # with gates, strengths and decays
        return MixerSizes(
            # All that is projected, the rule's inputs, its output, the normalized output, gates, and their product.
            forward=projected + mixed + delta.value_heads + 4 * values,
            activations=projected + 2 * mixed + delta.value_heads + 4 * values,  # and the convolution's output
            backward=hidden + projected + 2 * mixed + delta.value_heads + 6 * values,
            scales=4 * FP32 * delta.value_heads + prod(delta.state_shape) * FP32 // CHUNK,
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
        scales=FP32 * m.num_attention_heads + _head_norm_bytes(w),  # the log of each softmax's sum, and norms
        weights=hidden * (queries + keys_and_values + gates),
    )


def rule_forward(w: Workload, tokens: int) -> int:
    """Returns the bytes that a gated delta rule and its layer hold while the rule runs without gradients.

    0 if the model has no such rule.
    """
    delta = delta_heads(w.model)
    if delta is None:
        return 0
    mixed = sum(delta.sizes)
    values = delta.sizes[2]
    of_layer = 2 * mixed + 2 * values + 3 * delta.value_heads  # projections, inputs and output
    per_head = 4 * delta.key_dim + 4 * delta.value_dim + 5 * CHUNK  # numbers of a token in fp32
    return tokens * of_layer * w.element + _chunk_bytes(w, tokens, per_head, states=4)


def rule_backward(w: Workload, tokens: int) -> int:
    """Returns the bytes that a gated delta rule and its layer hold in the rule's backward pass; 0 without a rule."""
    delta = delta_heads(w.model)
    if delta is None:
        return 0
    mixed = sum(delta.sizes)
    values = delta.sizes[2]
    # As in the forward pass, and the gradients of inputs and output.
    of_layer = w.model.hidden_size + 4 * mixed + 3 * values + 4 * delta.value_heads
    per_head = 12 * delta.key_dim + 10 * delta.value_dim + 7 * CHUNK  # numbers of a token in fp32
    return tokens * of_layer * w.element + _chunk_bytes(w, tokens, per_head, states=1)


def _chunk_bytes(w: Workload, tokens: int, per_head: int, states: int) -> int:
    """Returns the bytes of the chunks that are computed at once: one of each row of the pass, but at most TOGETHER.

    `per_head`: numbers of a token in each value head. `states`: copies of a row's states.
    """
    delta = delta_heads(w.model)
    rows = -(-tokens // w.row_tokens)
    numbers = delta.value_heads * per_head
    if delta.key_heads < delta.value_heads:
        # One copy of the queries and keys exists per key head, not per value head.
        numbers -= 2 * delta.key_dim * (delta.value_heads - delta.key_heads)
    chunk = CHUNK * numbers + states * prod(delta.state_shape)
    return min(rows, TOGETHER) * chunk * FP32


def activation_bytes(w: Workload, taps: int) -> int:
    """Returns the bytes per token that a layer that is not recomputed keeps for the backward pass, beside its input."""
    m = w.model
    mixer = mixer_sizes(w, taps)
    norm_count = layer_tensors(m, taps).norms
    # The outputs of the two norms, and the hidden state between the layer's halves. Gemma has two more norms, of the
    # halves' outputs, which keep these outputs.
    norms = (1 + norm_count) * m.hidden_size
    feed_forward = 3 * m.intermediate_size  # gate, up, their product
    low_rank = len(adapted(m, w.targets, taps)) * w.lora_r  # the products with each adapter's A
    numbers = norms + mixer.activations + feed_forward + low_rank
    return w.element * numbers + FP32 * norm_count + mixer.scales


def _head_norm_bytes(w: Workload) -> int:
    """Returns the bytes per token that the norms of heads keep: their input, and a scale in fp32 for each head."""
    m = w.model
    if not m.qk_norm:
        return 0
    heads = m.num_attention_heads + m.num_key_value_heads
    return (query_size(m) + key_value_size(m)) * w.element + FP32 * heads
