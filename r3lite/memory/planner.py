"""The memory planner: what a run will hold, phase by phase, with given settings.

All figures are bytes of live tensors, in closed form from the model's sizes, and on CUDA what `cuda_parts` adds;
nothing is loaded to find them. They follow what `models` keeps: `activation_checkpointing` (layer inputs, one layer at
a time), `logprobs` (one chunk of logits), `kv_cache` and `nf4`. `bench/memory.py` compares them with measured peaks.
The kind of a layer is given by the taps of its convolution, see `layer_tensors.layer_taps`.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from math import prod
from typing import NamedTuple

from r3lite.core.grant import Memory
from r3lite.memory.cuda_parts import NOT_TENSORS, beside_tensors
from r3lite.memory.layer_tensors import delta_heads, layer_taps, layer_tensors, layers_by_taps
from r3lite.memory.mixers import (
    FP32,
    activation_bytes,
    key_value_size,
    mixer_sizes,
    query_size,
    rule_backward,
    rule_forward,
)
from r3lite.memory.parameters import (
    adapter_bytes,
    cast_bytes,
    copy_bytes,
    moment_bytes,
    rounded,
    table_bytes,
    weight_bytes,
)
from r3lite.memory.work import JudgeWork, TeacherWork, Workload
from r3lite.models import logprobs, nf4
from r3lite.models.carried import SAVED_EVERY, ring_slots
from r3lite.models.kv_cache import BLOCK
from r3lite.models.masked_pack import MOST_TOKENS, padded_size
from r3lite.settings.rollout import DRAFTING_SEQUENCES, GRAPH_PLACES, MOST_DRAFTED, TRUNCATED_ROWS

Parts = dict[str, int]  # bytes, by the names that the plan's table has for them
TILE8 = 25 << 20  # bytes that training/adamw8.py takes while it updates some weights at a time
# Bytes for each probability that is sorted (top-k and top-p): the sorted number and its place in int64. While a card
# sorts several rows, it also has two copies of pairs of int32, a copy of the numbers, and another number and place to
# sort into (segmented_sort_pairs_by_full_sort in aten/src/ATen/native/cuda/SortStable.cu). What follows the sort takes
# less.
SORTING = (4 + 8) + 2 * 8 + 4 + (4 + 8)


def largest(candidates: list[Parts] | Iterator[Parts]) -> Parts:
    """Returns the largest of the candidates, each the parts that are held at one point of time."""
    return max(candidates, key=lambda parts: sum(parts.values()))


# Phases


def standing(w: Workload, memory: Memory) -> Parts:
    """Returns the bytes that the run holds from its first step to its last, by part."""
    parts = {
        "weights": weight_bytes(w, memory.nf4, memory.stream_layers),
        "adapters": adapter_bytes(w) * w.adapters,
    }
    if w.trains:
        parts["optimizer"] = moment_bytes(w)
    if w.keeps_step and not w.on_cuda:  # without CUDA, copies on the host lie in the device's memory
        # Two copies of weights and moments: one from before this round's update, with which the next round can take it
        # back; and the budget's previous copy, which it gets back if this round is interrupted.
        parts["last updates"] = 2 * copy_bytes(w)
    return parts


def phases(w: Workload, memory: Memory) -> dict[str, Parts]:
    """Returns the bytes that each phase of the run holds at its peak, by phase and part."""
    always = standing(w, memory)
    by_phase = {"load": _load(w, memory)}
    if w.episodes:
        by_phase["sample"] = always | {"adapter casts": cast_bytes(w)} | _sample(w, memory)
    if w.scores:
        by_phase["score"] = always | _score(w, memory)
    if w.teacher:
        by_phase["teach"] = always | _teach(w, memory, w.teacher)
    if w.judge:
        by_phase["judge"] = always | _judge(w, w.judge)
    if w.trains:
        by_phase["update"] = always | {"adapter casts": cast_bytes(w)} | largest(_update(w, memory))
        if w.captures:  # copies of gradients while a graph is compared with an ordinary pass
            by_phase["update"]["compared gradients"] = 2 * adapter_bytes(w)
        by_phase["save"] = dict(always)
    if not w.on_cuda:
        return by_phase
    captured = _captured(w, memory)
    for name, parts in by_phase.items():
        tensors = sum(parts.values())
        by_phase[name] = parts | beside_tensors(tensors, captured.get(name, 0), w.beside, pools=w.lanes)
    return by_phase


def _captured(w: Workload, memory: Memory) -> dict[str, int]:
    """Returns the bytes of the tensors of CUDA graphs by phase.

    Graphs are decoding steps (rollout/decoder.py), or passes of SFT (training/captured_passes.py).
    """
    captured = {"sample": 0}
    if w.episodes and runs_graphs(w, memory):
        step_tokens = w.lane_rows(memory.rollout_batch_size)
        if w.draft_tokens:  # a graph with drafts runs up to GRAPH_PLACES tokens, of all rows together
            step_tokens = max(step_tokens, GRAPH_PLACES)
        captured["sample"] = _forward(w, memory, step_tokens)
    if w.judge and delta_heads(w.judge.model) is None:
        judge_memory = w.judge.memory
        captured["judge"] = _forward(as_judge(w, w.judge), judge_memory, judge_memory.rollout_batch_size)
    if w.captures and not memory.offload:
        captured["update"] = _captured_pass(w, memory)
    return captured


def _captured_pass(w: Workload, memory: Memory) -> int:
    """Returns the bytes of the tensors of the largest pass that is run as a CUDA graph."""
    tokens = padded_size(min(_largest_pass(w, memory, w.rows).tokens, MOST_TOKENS))
    as_row = replace(w, row_tokens=tokens, rows=1, step_rows=1, shared=0)  # whatever its rows, it is run as one
    mask = tokens * tokens * w.element
    return sum(largest(_update(as_row, memory)).values()) + mask


def runs_graphs(w: Workload, memory: Memory) -> bool:
    """Returns whether tokens are sampled by CUDA graphs: not with streamed layers, nor with a gated delta rule."""
    return w.on_cuda and not memory.stream_layers and delta_heads(w.model) is None


def peak(w: Workload, memory: Memory) -> int:
    """Returns the most bytes that the run holds at once."""
    return max(sum(parts.values()) for parts in phases(w, memory).values())


def allocated(w: Workload, memory: Memory) -> int:
    """Returns the peak of the bytes of tensors: those that LiveTensors counts, and CUDA's allocator calls allocated."""
    totals = []
    for parts in phases(w, memory).values():
        totals.append(sum(size for name, size in parts.items() if name not in NOT_TENSORS))
    return max(totals)


def _load(w: Workload, memory: Memory) -> Parts:
    """Returns the peak of loading.

    On a CPU a tensor is in memory twice while it is copied from the mapped file. The peak is at one of these moments:
    when the embedding is copied, which is read first, or when the largest linear layer is, as if it were the last of
    all, or an untied head, which is the last.
    """
    largest_linear = 0
    for taps in layers_by_taps(w.model):
        largest_linear = max(largest_linear, *map(prod, layer_tensors(w.model, taps).linears.values()))
    last = largest_linear * w.element
    weights = weight_bytes(w, memory.nf4, memory.stream_layers)
    if w.on_cuda:  # the mapped file is in the host's memory
        return {"weights": weights, "one tensor": last if memory.nf4 else 0}
    if not w.model.tie_word_embeddings:
        last = max(table_bytes(w), last - table_bytes(w))  # the head is not there yet when the linear layers are read
    highest = max(2 * table_bytes(w), weights + last)
    return {"weights": weights, "one tensor": highest - weights}


# Passes


def _dequantized_bytes(w: Workload, memory: Memory, weights: int) -> int:
    """Returns the bytes that dequantizing `weights` weights takes, those of the result included; 0 without NF4."""
    if not memory.nf4:
        return 0
    # See nf4.dequantize. The temporaries are indices, and code points, which are in fp16 on a card, else in fp32. With
    # several tiles, the code points of two tiles exist at once.
    index = 4 // 2  # bytes of a weight: an index in int32 for each byte of codes, which holds two weights
    if w.on_cuda:
        temporary = weights * (index + 2)
    elif weights > nf4.TILE:
        temporary = nf4.TILE * (index + 2 * FP32)
    else:
        temporary = weights * (index + FP32)
    absmax = weights // nf4.BLOCK * 2 * FP32  # fp32 scales twice: once for each matrix, once joined
    return weights * w.element + absmax + temporary


# The factors below count tensors that exist at once, as in memory/mixers.py.


def _forward(w: Workload, memory: Memory, tokens: int) -> int:
    """Returns the bytes of a pass without gradients over `tokens` tokens, one layer at a time."""
    hidden = w.model.hidden_size
    inner = w.model.intermediate_size
    e = w.element
    tile = min(tokens, memory.mlp_tile)
    first_half = 0
    for taps in layers_by_taps(w.model):
        mixer = mixer_sizes(w, taps)
        size = tokens * (2 * hidden + mixer.forward) * e + _dequantized_bytes(w, memory, mixer.weights)
        first_half = max(first_half, size)
        if taps:  # rule_forward is 0 if the convolution has no delta rule
            first_half = max(first_half, tokens * 2 * hidden * e + rule_forward(w, tokens))
    dense = _dequantized_bytes(w, memory, 2 * hidden * inner)
    gate_and_up = tile * 2 * inner * e
    product = tile * inner * e
    inside_mlp = gate_and_up + max(product, dense)
    states = tokens * hidden * e
    feed_forward = 2 * states + tile * hidden * e + inside_mlp
    if tile < tokens:
        feed_forward += states  # the results of the tiles, joined
    return 2 * states + max(first_half, feed_forward)


def _chunk(w: Workload, memory: Memory, tokens: int, gradients: bool) -> int:
    """Returns the bytes of the logits of a chunk of tokens, and of what is computed from a tile of them in fp32.

    With `gradients`, also those of the gradient of the hidden states of all `tokens`.
    """
    chunk_tokens = min(memory.loss_chunk, tokens)
    tile_tokens = min(chunk_tokens, logprobs.tile_rows("cuda" if w.on_cuda else "cpu"))
    logits = chunk_tokens * w.vocabulary * w.element
    in_fp32 = 3 * tile_tokens * w.vocabulary * FP32  # scaled logits, log-probabilities and probabilities
    hidden_gradient = tokens * w.model.hidden_size * FP32 if gradients else 0
    return logits + in_fp32 + hidden_gradient


class _Pass(NamedTuple):
    """The sizes of the largest pass over several rows."""

    tokens: int
    loss_tokens: int  # tokens that a loss may fall on
    shared_keys: int  # keys that rows share, counted once for each row, as attention copies them for each row


def _largest_pass(w: Workload, memory: Memory, row_limit: int) -> _Pass:
    """Returns the sizes of a pass of at most `row_limit` rows.

    It has at most `micro_batch_tokens` tokens; more only if a single row has more, or in full tuning the rows of a
    step, which are never divided.
    """
    unshared = w.row_tokens - w.shared  # tokens of a row that no other row shares
    # `pass_tokens` are those of one row, or in full tuning of all rows of a step.
    token_limit = max(memory.micro_batch_tokens, w.pass_tokens)
    tokens_of_all_rows = w.shared + row_limit * unshared  # the shared tokens are run once
    tokens = min(token_limit, tokens_of_all_rows)
    rows = -(-(tokens - w.shared) // max(unshared, 1))
    loss_tokens = tokens
    if w.episodes:  # episodes share no more than the prompt, on which no loss falls
        loss_tokens -= w.shared
    shared_keys = rows * w.shared if rows > 1 else 0  # for a single row nothing is copied
    return _Pass(tokens, loss_tokens, shared_keys)


def _score(w: Workload, memory: Memory) -> Parts:
    """Returns the peak of a pass for log-probabilities: in a layer, or at the logits."""
    tokens, loss_tokens, shared_keys = _largest_pass(w, memory, w.scored_rows)
    repeated = shared_keys * 2 * query_size(w.model) * w.element  # keys and values, for every query head
    masks = _mask_bytes(w, tokens, shared_keys)
    layer = {"live layer": _forward(w, memory, tokens) + repeated + masks}
    loss = {
        "hidden states": (tokens + loss_tokens) * w.model.hidden_size * w.element,
        "loss chunk": _chunk(w, memory, loss_tokens, gradients=False),
    }
    return largest([layer, loss])


def as_teacher(w: Workload, memory: Memory, teacher: TeacherWork) -> tuple[Workload, Memory]:
    """Returns the teacher's reading as a workload of its own, and its memory figures."""
    work = replace(
        w,
        model=teacher.model,
        packed=teacher.packed,
        lora_r=teacher.lora_r,
        targets=teacher.targets,
        teacher=None,
    )
    return work, replace(memory, nf4=teacher.nf4, stream_layers=False)


def _teach(w: Workload, memory: Memory, teacher: TeacherWork) -> Parts:
    """Returns the peak of the teacher beside the policy: while its last tensor is loaded, or while it reads."""
    work, own_memory = as_teacher(w, memory, teacher)
    weights = {"teacher": weight_bytes(work, own_memory.nf4)}
    loading = weights | {"one tensor": _load(work, own_memory)["one tensor"]}
    reading = dict(weights)
    if teacher.adapters:
        reading["teacher's LoRA"] = adapter_bytes(work) * teacher.adapters
    reading |= _score(work, own_memory)
    loss_tokens = _largest_pass(work, own_memory, work.scored_rows).loss_tokens
    reading["distributions"] = loss_tokens * teacher.top * (4 + FP32)  # ids in int32, and log-probabilities
    return largest([loading, reading])


def as_judge(w: Workload, judge: JudgeWork) -> Workload:
    """Returns the judge's replies as a workload of its own."""
    return replace(
        w,
        model=judge.model,
        vocabulary=judge.vocabulary,
        packed=judge.packed,
        judge=None,
        row_tokens=judge.row_tokens,
        reads=judge.row_tokens,
        episodes=judge.memory.rollout_batch_size,
        draft_tokens=0,
        truncates=False,
    )


def _judge(w: Workload, judge: JudgeWork) -> Parts:
    """Returns the peak of the judge beside the policy: while its last tensor is loaded, or while it replies."""
    work = as_judge(w, judge)
    weights = {"judge": weight_bytes(work, judge.memory.nf4)}
    loading = weights | {"one tensor": _load(work, judge.memory)["one tensor"]}
    replying = weights | _sample(work, judge.memory)
    return largest([loading, replying])


def kv_bytes(w: Workload, rows: int, tokens: int) -> int:
    """Returns the bytes of the KV caches of all lanes, each of `rows` episodes of `tokens` tokens.

    A cache grows one layer at a time, and while a layer's tensor grows, its old and new memory exist together. So the
    largest such tensor counts once more.
    """
    slots = -(-tokens // BLOCK) * BLOCK
    size = 0
    largest_growing = 0
    for taps, count in layers_by_taps(w.model).items():
        if taps and delta_heads(w.model):
            size += count * _state_bytes(w, rows, taps)
            continue
        if taps:  # see carried.Ring: `values` has a fixed size, `saved` grows
            value = rows * w.model.hidden_size * w.element
            size += count * rounded(value * ring_slots(taps))
            growing = rounded(value * (taps - 1) * (slots // SAVED_EVERY))
        else:  # see carried.KeysValues
            growing = rounded(rows * key_value_size(w.model) * slots * w.element)
        size += count * growing
        largest_growing = max(largest_growing, growing)
    return w.lanes * size + largest_growing


def _state_bytes(w: Workload, rows: int, taps: int) -> int:
    """Returns the bytes of what a layer with a gated delta rule carries: see models/delta_rows.py."""
    delta = delta_heads(w.model)
    value = sum(delta.sizes) * w.element  # queries, keys and values of a token
    state = prod(delta.state_shape) * FP32  # of a row
    size = rounded(rows * state) + rounded(rows * value * ring_slots(taps))
    if w.draft_tokens:
        # Of each token that waits until it is accepted: queries, keys and values, the decay in fp32, the strength.
        inputs = value + delta.value_heads * (FP32 + w.element)
        size += rounded(rows * (1 + w.draft_tokens) * inputs)
    return size


def _sample(w: Workload, memory: Memory) -> Parts:
    """Returns the peak of sampling: while prompts or documents are read, or while tokens are sampled.

    Lanes read and sample in turns, but the caches of all lanes exist all the time.
    """
    rows = w.lane_rows(memory.rollout_batch_size)
    tokens_read = min(rows * w.reads, memory.micro_batch_tokens)  # that Engine reads in one pass
    # How many tokens of a row the cache has then: only the prompt, unless documents are read into rows that are nearly
    # full, other lanes have full rows, or CUDA graphs have all slots allocated from the start.
    cached = w.reads
    if w.retrieves or w.lanes > 1 or runs_graphs(w, memory):
        cached = w.row_tokens
    masks = tokens_read * cached * w.element + _window_mask_bytes(w, tokens_read, cached)
    # A prefill attends row by row: keys and values of one row, for every query head.
    repeated = cached * 2 * query_size(w.model) * w.element
    reading = {
        "KV cache": kv_bytes(w, rows, cached),
        "prefill": _forward(w, memory, tokens_read) + masks + repeated,
    }
    logits = w.model.vocab_size * w.element
    row_sampling = logits + w.model.vocab_size * (FP32 + FP32)  # logits; scaled logits and probabilities in fp32
    if w.own_samplers:
        row_sampling += logits
    sampled_tokens = rows
    sampling = sampled_tokens * row_sampling
    if w.draft_tokens:
        # A token is sampled after the last token of each sequence, and after each of its drafted tokens. Sequences that
        # share a row get a copy of its logits, so that logits count twice.
        sequences = min(rows, DRAFTING_SEQUENCES)
        sampled_tokens = sequences + min(sequences * w.draft_tokens, MOST_DRAFTED)
        sampling = max(sampling, sampled_tokens * (logits + row_sampling))
    if w.truncates:
        sampling += min(sampled_tokens, TRUNCATED_ROWS) * w.model.vocab_size * SORTING
    drawing = {
        "KV cache": kv_bytes(w, rows, w.row_tokens),
        "sampling": sampling,
    }
    return largest([reading, drawing])


def _mask_bytes(w: Workload, tokens: int, shared_keys: int) -> int:
    """Returns the bytes of the masks of a pass over whole rows: of windows, and of tokens after a shared prefix."""
    masks = _window_mask_bytes(w, tokens, w.row_tokens)
    if shared_keys:  # attention after a prefix is not just causal, see StretchMasks
        masks += tokens * w.row_tokens * w.element
    return masks


def _window_mask_bytes(w: Workload, tokens: int, keys: int) -> int:
    """Returns the bytes of a pass's masks, one [tokens, keys] for each window that is shorter than `keys`."""
    windows = {kind.window for kind in w.model.layer_kinds} - {None}
    masks = sum(window < keys for window in windows)
    return masks * tokens * keys * w.element


class _Backward(NamedTuple):
    """Sizes that stay the same during a backward pass."""

    tokens: int
    loss_tokens: int  # tokens that a loss may fall on
    recomputed: int  # how many layers, the first ones, are recomputed; the others keep their activations
    layer_input: int  # bytes of one layer's input
    inputs_on_device: int  # of how many recomputed layers the device holds the inputs at once
    rotary: int  # bytes of the cosines and sines
    masks: int  # bytes
    repeated: int  # bytes of keys and values that rows share, copied for every row and query head
    joined: int  # bytes of attention's outputs of several rows, laid end to end
    accumulated: int  # bytes of gradients of earlier passes

    def inputs(self, layers: int) -> Parts:
        """Returns the bytes of the inputs of `layers` recomputed layers and of one more hidden state.

        The rotary tables and masks, which all layers read, are counted with them.
        """
        return {"layer inputs": (layers + 1) * self.layer_input + self.rotary + self.masks}


def _backward(w: Workload, memory: Memory) -> _Backward:
    """Returns the sizes of the largest backward pass."""
    m = w.model
    tokens, loss_tokens, shared_keys = _largest_pass(w, memory, w.rows)
    recomputed = min(memory.recompute_layers, m.num_hidden_layers)
    inputs_on_device = recomputed
    if memory.offload and w.on_cuda:  # on a CPU, host and device have the same memory
        inputs_on_device = 2 if recomputed else 0
    several_passes = w.guided or w.step_rows * w.row_tokens > tokens  # in one optimizer step
    kinds = m.layer_kinds or (m.kind(0),)
    ropes = {kind.rope for kind in kinds} - {None}
    return _Backward(
        tokens=tokens,
        loss_tokens=loss_tokens,
        recomputed=recomputed,
        layer_input=tokens * m.hidden_size * w.element,
        inputs_on_device=inputs_on_device,
        rotary=sum(2 * tokens * (rope.dims or m.head_dim) * w.element for rope in ropes),
        masks=_mask_bytes(w, tokens, shared_keys),
        repeated=shared_keys * 2 * query_size(m) * w.element,
        joined=tokens * query_size(m) * w.element if tokens > w.row_tokens else 0,
        accumulated=adapter_bytes(w) if several_passes else 0,
    )


def _update(w: Workload, memory: Memory) -> Iterator[Parts]:
    """Yields what is held at each point of time in a backward pass that may be its peak."""
    m = w.model
    layers = m.num_hidden_layers
    b = _backward(w, memory)
    inputs = b.inputs(b.inputs_on_device)
    taps_of_layers = layer_taps(m)
    activations = 0  # of the layers that keep them
    for taps, count in Counter(taps_of_layers[b.recomputed :]).items():
        of_layer = b.tokens * activation_bytes(w, taps) + b.layer_input
        if not taps:
            of_layer += b.repeated + b.joined
        activations += count * of_layer
    kept_layers = {"kept layers": activations}
    accumulated = b.accumulated
    if w.full_tuning:
        accumulated = rounded(m.vocab_size * m.hidden_size * FP32)  # of the head
        # Within the backward pass, a layer is updated.
        yield inputs | {"optimizer's tile": TILE8, "gradients": accumulated}
    # At the loss the forward pass of all layers is done, and a chunk's logits exist.
    hidden_numbers = b.loss_tokens * m.hidden_size
    chunk = _chunk(w, memory, b.loss_tokens, gradients=True) + hidden_numbers * w.element
    if w.critic:
        chunk += 2 * hidden_numbers * FP32  # the hidden states in fp32 for the value head, and their gradient
    yield inputs | kept_layers | {"loss chunk": chunk, "gradients": accumulated}
    # The backward pass begins with the last layer. If this layer is not recomputed, the activations of all layers that
    # keep them still exist, and the gradients of the last layer, or of all layers if there were earlier passes.
    if b.recomputed < layers:
        live = _live_bytes_of_kept(w, memory, b.tokens)
        gradients = accumulated or adapter_bytes(w) // layers
        yield inputs | kept_layers | {"live layer": live, "gradients": gradients}
    if not b.recomputed:
        return
    if w.full_tuning:  # the gradients of one layer exist until they are applied
        accumulated += max(sum(layer_tensors(m, taps).sizes) for taps in layers_by_taps(m)) * w.element
    # Of the recomputed layers of each kind, two may be at the peak: the last one, when the most inputs exist, and the
    # first one, when the most gradients exist.
    first_layers: dict[int, int] = {}
    last_layers: dict[int, int] = {}
    for layer, taps in enumerate(taps_of_layers[: b.recomputed], 1):
        first_layers.setdefault(taps, layer)
        last_layers[taps] = layer
    for taps, layer in chain(first_layers.items(), last_layers.items()):
        live = _live_bytes_of_recomputed(w, memory, b, taps)
        layer_inputs = b.inputs(min(layer, b.inputs_on_device))
        gradients = accumulated or adapter_bytes(w) * (layers - layer + 1) // layers
        yield layer_inputs | {"live layer": live, "gradients": gradients}


def _live_bytes_of_kept(w: Workload, memory: Memory, tokens: int) -> int:
    """Returns the bytes that the backward pass of a layer takes beside the activations that the layer has kept.

    They are the largest at one of three moments in the backward pass of its feed-forward network.
    """
    hidden = w.model.hidden_size
    inner = w.model.intermediate_size
    number = tokens * w.element  # bytes of one number of each token
    return max(
        number * (2 * inner + hidden),
        number * (inner + hidden) + _dequantized_bytes(w, memory, hidden * inner),
        # `- inner`: the product of gate and up, one of the layer's activations, is freed by then.
        number * (hidden - inner) + _dequantized_bytes(w, memory, 2 * hidden * inner),
    )


def _live_bytes_of_recomputed(
    w: Workload,
    memory: Memory,
    b: _Backward,
    taps: int,
) -> int:
    """Returns the bytes that it takes to run a layer of one kind again, and its backward pass."""
    m = w.model
    e = w.element
    hidden = m.hidden_size
    inner = m.intermediate_size
    mixer = mixer_sizes(w, taps)
    tile = min(b.tokens, memory.mlp_tile)
    # A layer has two norms, one at the start of each half. In Gemma each half also ends with a norm, which keeps the
    # half's output.
    output_norms = layer_tensors(m, taps).norms - 2
    outputs = output_norms // 2 * hidden  # of one half
    tile_inner = tile * inner * e
    inside = max(
        5 * tile_inner,
        4 * tile_inner + _dequantized_bytes(w, memory, hidden * inner),
        2 * tile_inner + _dequantized_bytes(w, memory, 2 * hidden * inner),
    )
    second_half = b.tokens * (3 * hidden + outputs + mixer.activations) * e
    second_half += tile * (2 * hidden + outputs) * e + inside
    first_half = b.tokens * (3 * hidden + outputs + mixer.backward) * e + _dequantized_bytes(w, memory, mixer.weights)
    if taps:  # rule_backward is 0 if the convolution has no delta rule
        first_half = max(first_half, b.tokens * 3 * hidden * e + rule_backward(w, b.tokens))
    else:
        first_half += b.repeated + b.joined
    low_rank = 8 * w.lora_r  # bytes of a token's products with the A of adapters, roughly: they are small
    return max(second_half, first_half) + b.tokens * (mixer.scales + low_rank)
