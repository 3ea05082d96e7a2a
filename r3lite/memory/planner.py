"""The memory planner: what a run will hold, phase by phase, with given settings.

All figures are bytes of live tensors, in closed form from the model's sizes, and on CUDA what `cuda_parts` adds;
nothing is loaded to find them. They follow what `models` keeps: `activation_checkpointing` (layer inputs, one layer at
a time), `logprobs` (one chunk of logits), `kv_cache` and `nf4`. `bench/memory.py` holds them against measured peaks.
The kind of a layer is known by the taps of its convolution, see `layer_tensors.layer_taps`.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import chain
from math import prod
from typing import NamedTuple

from r3lite.core.grant import Memory
from r3lite.devices.live_tensors import GRAIN
from r3lite.memory.cuda_parts import NOT_TENSORS, beside_tensors
from r3lite.memory.layer_tensors import adapted, delta_heads, layer_taps, layer_tensors, layers_by_taps, tensor_sizes
from r3lite.memory.mixers import (
    FP32,
    activation_bytes,
    key_value_size,
    mixer_sizes,
    query_size,
    rule_backward,
    rule_forward,
)
from r3lite.memory.work import JudgeWork, TeacherWork, Workload
from r3lite.models import logprobs, nf4
from r3lite.models.carried import SAVED_EVERY, ring_slots
from r3lite.models.causal_lm import ModelConfig
from r3lite.models.kv_cache import BLOCK
from r3lite.models.stacks import stacks
from r3lite.settings.rollout import DRAFTING_SEQUENCES, GRAPH_PLACES, MOST_DRAFTED, TRUNCATED_ROWS

Parts = dict[str, int]
TILE8 = 25 << 20  # bytes that training/adamw8.py takes for some weights at a time
MIN_WEIGHTS8 = 4096  # in training/adamw8.py, tensors of fewer weights have moments in fp32
BLOCK8 = 256  # numbers of a moment in 8 bits that share a scale, in the same file
# Bytes for each probability that is sorted (top-k and top-p): the sorted number and its place in int64. While a card
# sorts several rows, it also has two copies of pairs of int32, a copy of the numbers, and another number and place to
# sort into (segmented_sort_pairs_by_full_sort in aten/src/ATen/native/cuda/SortStable.cu). What follows the sort takes
# less.
SORTING = (4 + 8) + 2 * 8 + 4 + (4 + 8)


def rounded(size: float) -> int:
    """Returns the bytes that an allocation of `size` bytes takes."""
    return -(-int(size) // GRAIN) * GRAIN


def largest(candidates: list[Parts] | Iterator[Parts]) -> Parts:
    """Returns the largest of the candidates, each the parts that are held at one point of time."""
    return max(candidates, key=lambda parts: sum(parts.values()))


# Weights, adapters and the optimizer's moments


def weight_bytes(w: Workload, quantized: bool, streamed: bool = False) -> int:
    """Returns the bytes of the frozen base on the device.

    With streaming these are the final norm, the head (which may be the embedding), and memory for two layers: layers
    with even numbers take turns in one half, layers with odd numbers in the other.
    """
    m = w.model
    norm = rounded(m.hidden_size * w.element)
    if streamed:
        taps = layer_taps(m)
        layers = 0
        for kinds in (set(taps[0::2]), set(taps[1::2])):
            layers += max((layer_bytes(w, quantized, taps=kind) for kind in kinds), default=0)
        return layers + _table(w) + norm
    tables = 1 if m.tie_word_embeddings else 2
    return layers_bytes(w, quantized) + tables * _table(w) + norm


def host_bytes(w: Workload, memory: Memory) -> int:
    """Returns what a base that is streamed takes of the host's memory: all layers, and an untied embedding.

    PyTorch pins memory in pieces whose sizes are powers of two (c10's CachingHostAllocator).
    """
    size = 0 if w.model.tie_word_embeddings else _table(w)
    for taps, count in layers_by_taps(w.model).items():
        layer = layer_bytes(w, memory.nf4, taps)
        if w.on_cuda:
            layer = 1 << (layer - 1).bit_length()
        size += count * layer
    return size


def _table(w: Workload) -> int:
    """Returns the bytes of the embedding, or of the head."""
    return rounded(w.model.vocab_size * w.model.hidden_size * w.element)


def layers_bytes(w: Workload, quantized: bool) -> int:
    """Returns the bytes of the frozen weights of all layers."""
    return sum(count * layer_bytes(w, quantized, taps) for taps, count in layers_by_taps(w.model).items())


def layer_bytes(w: Workload, quantized: bool, taps: int) -> int:
    """Returns the bytes of the frozen weights of a layer of one kind."""
    m = w.model
    tensors = layer_tensors(m, taps)
    shapes = tensors.linears
    layer = tensors.norms * rounded(m.hidden_size * w.element)
    layer += sum(rounded(count * w.element) for count in tensors.others)
    if tensors.biases:
        layer += rounded(sum(tensors.biases) * w.element)
    for stack in tensors.stacks:
        weights = [shapes[name][0] * shapes[name][1] for name in stack]
        layer += _nf4_bytes(weights) if quantized else rounded(sum(weights) * w.element)
    if quantized and w.packed:
        layer += _bytes_beyond_own_nf4(w.packed, w.element) // m.num_hidden_layers
    return layer


def _bytes_beyond_own_nf4(packed: nf4.Packed, element: int) -> int:
    """Returns how many more bytes a folder in NF4 takes than r3lite's own quantization of the same layers.

    The folder may have left some layers dense, and may have some scales in fp32.
    """
    bytes_of_group = 2 * FP32  # scale and mean of the absmax of its blocks
    bytes_of_block = 1 + bytes_of_group / nf4.GROUP  # an absmax in 8 bits, and its part of the group's
    bytes_of_weight = 1 / 2 + bytes_of_block / nf4.BLOCK  # a code of 4 bits, and its part of the block's
    beyond_8_bits = FP32 - 1  # of an absmax that the folder has in fp32
    return int(packed.dense_weights * (element - bytes_of_weight)) + beyond_8_bits * packed.fp32_blocks


def _nf4_bytes(weights: list[int]) -> int:
    """Returns the bytes of NF4 linear layers with `weights` weights each, which lie one after another in memory."""
    groups = sum(-(-count // (nf4.BLOCK * nf4.GROUP)) for count in weights)
    codes = rounded(sum(weights) / 2)
    absmax = rounded(groups * nf4.GROUP)  # in 8 bits
    scale_and_mean = 2 * rounded(groups * FP32)
    return codes + absmax + scale_and_mean


def adapter_bytes(w: Workload) -> int:
    """Returns the bytes of one adapter in fp32; its gradients are as large.

    The A matrices of projections that read the same x (a stack, such as q, k and v) are one allocation, each B is its
    own.
    """
    return _bytes_of_adapter(w.model, w.targets, w.lora_r)


@cache  # the choice of the figures compares a thousand plans of one model and adapter
def _bytes_of_adapter(m: ModelConfig, targets: tuple[str, ...], r: int) -> int:
    row = FP32 * r  # bytes of the numbers that belong to one input or output
    size = 0
    for taps, count in layers_by_taps(m).items():
        shapes = layer_tensors(m, taps).linears
        names = adapted(m, targets, taps)
        layer = sum(rounded(row * shapes[name][0]) for name in names)
        for stack in stacks(names):
            inputs = sum(shapes[name][1] for name in stack)
            layer += rounded(row * inputs)
        size += count * layer
    return size


def _cast_bytes(w: Workload) -> int:
    """Returns the bytes of the adapter in half precision, if the run computes in it: see models/lora.py, cast_once."""
    return adapter_bytes(w) // 2 if w.element == 2 else 0


@cache
def _adapter_tensors(m: ModelConfig, targets: tuple[str, ...], r: int) -> Counter[int]:
    """Returns the number of an adapter's tensors by the bytes that each takes as an allocation of its own."""
    counts: Counter[int] = Counter()
    for taps, count in layers_by_taps(m).items():
        shapes = layer_tensors(m, taps).linears
        for name in adapted(m, targets, taps):
            for side in shapes[name]:
                counts[rounded(FP32 * r * side)] += count
    return counts


def _moment_bytes(w: Workload) -> int:
    """Returns the bytes of the two moments of each trained weight, and of AdamW's count of steps."""
    if w.full_tuning:
        of_layers, of_others = tensor_sizes(w.model)
        return sum(2 * _moment8(count) + GRAIN for count in of_layers + of_others)
    tensors = _adapter_tensors(w.model, w.targets, w.lora_r)
    return sum(count * (2 * size + GRAIN) for size, count in tensors.items())


def copy_bytes(w: Workload) -> int:
    """Returns the bytes of a copy of the adapter's weights and moments: see training/kl_budget.py."""
    tensors = _adapter_tensors(w.model, w.targets, w.lora_r)
    return sum(count * size for size, count in tensors.items()) + _moment_bytes(w)


def _moment8(count: int) -> int:
    """Returns the bytes of a moment of `count` numbers as training/adamw8.py keeps it: codes and scales, or fp32."""
    if count < MIN_WEIGHTS8 or count % BLOCK8:
        return rounded(count * FP32)
    scales = rounded(count / BLOCK8 * FP32)
    return rounded(count) + scales


# Phases


def standing(w: Workload, memory: Memory) -> Parts:
    """Returns the bytes that the run holds from its first step to its last, by part."""
    parts = {
        "weights": weight_bytes(w, memory.nf4, memory.stream_layers),
        "adapters": adapter_bytes(w) * w.adapters,
    }
    if w.trains:
        parts["optimizer"] = _moment_bytes(w)
    if w.keeps_step and not w.on_cuda:  # without CUDA, copies on the host lie in the device's memory
        # Two copies of weights and moments: to undo an interrupted round, and perhaps the one before it.
        parts["last updates"] = 2 * copy_bytes(w)
    return parts


def phases(w: Workload, memory: Memory) -> dict[str, Parts]:
    """Returns the bytes that each phase of the run holds at its peak, by part."""
    fixed = standing(w, memory)
    by_phase = {"load": _load(w, memory)}
    if w.episodes:
        by_phase["sample"] = fixed | {"adapter casts": _cast_bytes(w)} | _sample(w, memory)
    if w.scores:
        by_phase["score"] = fixed | _score(w, memory)
    if w.teacher:
        by_phase["teach"] = fixed | _teach(w, memory, w.teacher)
    if w.judge:
        by_phase["judge"] = fixed | _judge(w, w.judge)
    if w.trains:
        by_phase["update"] = fixed | {"adapter casts": _cast_bytes(w)} | largest(_update(w, memory))
        by_phase["save"] = dict(fixed)
    if not w.on_cuda:
        return by_phase
    captured = _captured(w, memory)
    for name, parts in by_phase.items():
        tensors = sum(parts.values())
        by_phase[name] = parts | beside_tensors(tensors, captured.get(name, 0), w.beside, pools=w.lanes)
    return by_phase


def _captured(w: Workload, memory: Memory) -> dict[str, int]:
    """Returns the bytes of a decoding step that is run as CUDA graphs, by phase: see rollout/decoder.py."""
    captured = {"sample": 0}
    if w.episodes and runs_graphs(w, memory):
        places = w.lane_rows(memory.rollout_batch_size)
        if w.draft_tokens:
            places = max(places, GRAPH_PLACES)
        captured["sample"] = _forward(w, memory, places)
    if w.judge and delta_heads(w.judge.model) is None:
        judge_memory = w.judge.memory
        captured["judge"] = _forward(as_judge(w, w.judge), judge_memory, judge_memory.rollout_batch_size)
    return captured


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

    It is at one of two moments: when the embedding is copied from the mapped file (on a CPU the file's pages and the
    copy are both in memory), or when the last linear layer is read, and all other weights are there.
    """
    largest_linear = max(
        out * into for taps in layers_by_taps(w.model) for out, into in layer_tensors(w.model, taps).linears.values()
    )
    last = largest_linear * w.element
    weights = weight_bytes(w, memory.nf4, memory.stream_layers)
    if w.on_cuda:  # the mapped file is in the host's memory
        return {"weights": weights, "one tensor": last if memory.nf4 else 0}
    beside_file = 2 * _table(w)
    highest = max(beside_file, weights + last)
    return {"weights": weights, "one tensor": max(0, highest - weights)}


# Passes


def _dequantized_bytes(w: Workload, memory: Memory, weights: int) -> int:
    """Returns the bytes of `weights` weights of linear layers, dequantized, and of the temporaries of dequantizing."""
    if not memory.nf4:
        return 0
    # See nf4.dequantize. The temporaries are indices and code points, which are in fp16 on a card, else in fp32. With
    # several tiles, the code points of the tile before count, too.
    index = 4 // 2  # bytes of a weight: an index in int32 for each byte of codes, which holds two weights
    if w.on_cuda:
        temporary = weights * (index + 2)
    elif weights > nf4.TILE:
        temporary = nf4.TILE * (index + 2 * FP32)
    else:
        temporary = weights * (index + FP32)
    absmax = weights // nf4.BLOCK * 2 * FP32  # in fp32 twice: of each matrix, and of all joined
    return weights * w.element + absmax + temporary


# The factors count tensors that exist at once, as in memory/mixers.py.


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
        if taps:
            first_half = max(first_half, tokens * 2 * hidden * e + rule_forward(w, tokens))
    dense = _dequantized_bytes(w, memory, 2 * hidden * inner)
    gate_and_up = tile * 2 * inner * e
    product = tile * inner * e
    inside = max(gate_and_up + product, gate_and_up + dense)
    states = tokens * hidden * e
    feed_forward = 2 * states + tile * hidden * e + inside
    if tile < tokens:
        feed_forward += states  # the results of the tiles, joined
    return 2 * states + max(first_half, feed_forward)


def _chunk(w: Workload, memory: Memory, tokens: int, gradients: bool) -> int:
    """Returns the bytes of a chunk's logits, a few rows of them in fp32, and the gradient of hidden states."""
    rows = min(memory.loss_chunk, tokens)
    tile_rows = min(rows, logprobs.tile_rows("cuda" if w.on_cuda else "cpu"))
    logits = rows * w.vocabulary * w.element
    in_fp32 = 3 * tile_rows * w.vocabulary * FP32  # scaled logits, log-probabilities and probabilities
    of_hidden = tokens * w.model.hidden_size * FP32 if gradients else 0
    return logits + in_fp32 + of_hidden


class _Pass(NamedTuple):
    """The sizes of the largest pass over several rows."""

    tokens: int
    loss_tokens: int  # tokens that a loss may fall on
    shared_keys: int  # copies of keys that several rows share, one for each row


def _largest_pass(w: Workload, memory: Memory, row_limit: int) -> _Pass:
    """Returns the sizes of a pass of at most `row_limit` rows.

    It is filled up to `micro_batch_tokens`. It has more if one row, or in full tuning a step, has more: that cannot be
    divided.
    """
    unshared = w.row_tokens - w.shared  # tokens of a row
    token_limit = max(memory.micro_batch_tokens, w.pass_tokens)
    tokens_of_all_rows = w.shared + row_limit * unshared  # what all rows begin with is run once
    tokens = min(token_limit, tokens_of_all_rows)
    rows = -(-(tokens - w.shared) // max(unshared, 1))
    loss_tokens = tokens
    if w.episodes:  # all that they share is the prompt, on which no loss falls
        loss_tokens -= w.shared
    shared_keys = rows * w.shared if rows > 1 else 0  # a row alone attends to its own keys
    return _Pass(tokens, loss_tokens, shared_keys)


def _score(w: Workload, memory: Memory) -> Parts:
    """Returns the peak of a pass for log-probabilities: in a layer, or at the logits."""
    tokens, loss_tokens, shared_keys = _largest_pass(w, memory, w.scored_rows)
    repeated = shared_keys * 2 * query_size(w.model) * w.element
    masks = _window_mask_bytes(w, tokens, w.row_tokens)
    layer = {"live layer": _forward(w, memory, tokens) + repeated + masks}
    loss = {
        "hidden states": (tokens + loss_tokens) * w.model.hidden_size * w.element,
        "loss chunk": _chunk(w, memory, loss_tokens, gradients=False),
    }
    return largest([layer, loss])


def as_teacher(w: Workload, memory: Memory, teacher: TeacherWork) -> tuple[Workload, Memory]:
    """Returns the teacher's reading as a workload of its own, and its memory."""
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
    """Returns the peak of the teacher beside the policy: as its last tensor is loaded, or as it reads."""
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
    """Returns the peak of the judge beside the policy: as its last tensor is loaded, or as it replies."""
    work = as_judge(w, judge)
    weights = {"judge": weight_bytes(work, judge.memory.nf4)}
    loading = weights | {"one tensor": _load(work, judge.memory)["one tensor"]}
    replying = weights | _sample(work, judge.memory)
    return largest([loading, replying])


def kv_bytes(w: Workload, rows: int, tokens: int) -> int:
    """Returns the bytes of the KV caches of all lanes, each of `rows` episodes of `tokens` tokens.

    One layer's part of a cache counts twice: it is copied as it grows.
    """
    slots = -(-tokens // BLOCK) * BLOCK
    size = 0
    growing = 0
    for taps, count in layers_by_taps(w.model).items():
        if taps and delta_heads(w.model):
            size += count * _state_bytes(w, rows, taps)
            continue
        if taps:
            value = rows * w.model.hidden_size * w.element
            size += count * rounded(value * ring_slots(taps))
            grown = rounded(value * (taps - 1) * (slots // SAVED_EVERY))
        else:
            grown = rounded(rows * key_value_size(w.model) * slots * w.element)
        size += count * grown
        growing = max(growing, grown)
    return w.lanes * size + growing


def _state_bytes(w: Workload, rows: int, taps: int) -> int:
    """Returns the bytes of what a layer with a gated delta rule carries: see models/delta_rows.py."""
    delta = delta_heads(w.model)
    value = sum(delta.sizes) * w.element  # of one token
    state = prod(delta.state_shape) * FP32
    size = rounded(rows * state) + rounded(rows * value * ring_slots(taps))
    if w.draft_tokens:
        inputs = value + delta.values * (FP32 + w.element)
        size += rounded(rows * (1 + w.draft_tokens) * inputs)
    return size


def _sample(w: Workload, memory: Memory) -> Parts:
    """Returns the peak of sampling: as prompts or documents are read, or as tokens are drawn.

    Lanes read and draw in turns, while their caches are there all the time.
    """
    rows = w.lane_rows(memory.rollout_batch_size)
    together = min(rows * w.reads, memory.micro_batch_tokens)  # see Engine: this many are read at a time
    cached = w.reads
    # Documents come when rows are nearly full, other lanes may be full, and graphs allocate all at once.
    if w.retrieves or w.lanes > 1 or runs_graphs(w, memory):
        cached = w.row_tokens
    masks = together * cached * w.element + _window_mask_bytes(w, together, cached)
    repeated = cached * 2 * query_size(w.model) * w.element  # one row's keys and values, for every head
    reading = {
        "KV cache": kv_bytes(w, rows, cached),
        "prefill": _forward(w, memory, together) + masks + repeated,
    }
    logits = w.model.vocab_size * w.element
    row_sampling = logits + w.model.vocab_size * (FP32 + FP32)  # logits; scaled ones and probabilities
    if w.own_samplers:
        row_sampling += logits
    places = rows
    sampling = places * row_sampling
    if w.draft_tokens:
        # A token is sampled after each place: the last token of a sequence, and each of its drafted ones. Sequences
        # that share a row get a copy of its logits, so that logits count twice.
        drafting = min(rows, DRAFTING_SEQUENCES)
        places = drafting + min(drafting * w.draft_tokens, MOST_DRAFTED)
        sampling = max(sampling, places * (logits + row_sampling))
    if w.truncates:
        sampling += min(places, TRUNCATED_ROWS) * w.model.vocab_size * SORTING
    drawing = {
        "KV cache": kv_bytes(w, rows, w.row_tokens),
        "sampling": sampling,
    }
    return largest([reading, drawing])


def _window_mask_bytes(w: Workload, tokens: int, keys: int) -> int:
    """Returns the bytes of a pass's masks, one [tokens, keys] for each window that is shorter than `keys`."""
    windows = {kind.window for kind in w.model.layer_kinds if kind.window is not None and kind.window < keys}
    return len(windows) * tokens * keys * w.element


class _Backward(NamedTuple):
    """Sizes that every point of time in a backward pass has in common."""

    tokens: int
    loss_tokens: int
    recomputed: int  # layers with activation checkpointing, the first ones; the others keep their activations
    layer_input: int  # bytes of one layer's input
    inputs_here: int  # recomputed layers whose inputs the device holds at once
    rotary: int  # bytes
    masks: int  # bytes
    repeated: int  # bytes of shared keys and values, for every head
    joined: int  # bytes of attention's outputs of several rows, laid end to end
    accumulated: int  # bytes of gradients of earlier passes

    def inputs(self, layers: int) -> Parts:
        """Returns what is held when the inputs of this many recomputed layers are there, and one more hidden state."""
        return {"layer inputs": (layers + 1) * self.layer_input + self.rotary + self.masks}


def _backward(w: Workload, memory: Memory) -> _Backward:
    """Returns the sizes of the largest backward pass."""
    m = w.model
    tokens, loss_tokens, shared_keys = _largest_pass(w, memory, w.rows)
    recomputed = min(memory.recompute_layers, m.num_hidden_layers)
    inputs_here = recomputed
    if memory.offload and w.on_cuda:  # on a CPU host and device are the same memory
        inputs_here = 2 if recomputed else 0
    accumulates = w.guided or w.step_rows * w.row_tokens > tokens
    kinds = m.layer_kinds or (m.kind(0),)
    ropes = {kind.rope for kind in kinds} - {None}
    masks = _window_mask_bytes(w, tokens, w.row_tokens)
    if shared_keys:
        masks += tokens * w.row_tokens * w.element
    return _Backward(
        tokens=tokens,
        loss_tokens=loss_tokens,
        recomputed=recomputed,
        layer_input=tokens * m.hidden_size * w.element,
        inputs_here=inputs_here,
        rotary=sum(2 * tokens * (rope.dims or m.head_dim) * w.element for rope in ropes),
        masks=masks,
        repeated=shared_keys * 2 * query_size(m) * w.element,
        joined=tokens * query_size(m) * w.element if tokens > w.row_tokens else 0,
        accumulated=adapter_bytes(w) if accumulates else 0,
    )


def _update(w: Workload, memory: Memory) -> Iterator[Parts]:
    """Yields what is held at those points of time in a backward pass that may be its peak."""
    m = w.model
    layers = m.num_hidden_layers
    b = _backward(w, memory)
    inputs = b.inputs(b.inputs_here)
    taps_of_layers = layer_taps(m)
    kept = 0
    for taps in taps_of_layers[b.recomputed :]:
        kept += b.tokens * activation_bytes(w, taps) + b.layer_input
        if not taps:
            kept += b.repeated + b.joined
    kept_layers = {"kept layers": kept}
    accumulated = b.accumulated
    if w.full_tuning:
        accumulated = rounded(m.vocab_size * m.hidden_size * FP32)  # of the head
        yield inputs | {"optimizer's tile": TILE8, "gradients": accumulated}
    # The loss: all layers are done, the chunk's logits are there.
    of_hidden = b.loss_tokens * m.hidden_size
    chunk = _chunk(w, memory, b.loss_tokens, gradients=True) + of_hidden * w.element
    if w.critic:
        chunk += 2 * of_hidden * FP32  # hidden states as the value head takes them, and their gradient
    yield inputs | kept_layers | {"loss chunk": chunk, "gradients": accumulated}
    # The backward pass begins with the last layer. If this layer keeps its activations, it and its gradients are there.
    if b.recomputed < layers:
        live = _live_bytes_of_kept(w, memory, b.tokens)
        # Without gradients of earlier passes there are those of this layer alone.
        yield inputs | kept_layers | {"live layer": live, "gradients": accumulated or adapter_bytes(w) // layers}
    if not b.recomputed:
        return
    if w.full_tuning:
        accumulated += max(sum(layer_tensors(m, taps).sizes) for taps in layers_by_taps(m)) * w.element
    # Two layers of each kind may be the peak: the last recomputed one, when the most inputs are there, and the first,
    # when the most gradients are there.
    first_layers: dict[int, int] = {}
    last_layers: dict[int, int] = {}
    for layer, taps in enumerate(taps_of_layers[: b.recomputed], 1):
        first_layers.setdefault(taps, layer)
        last_layers[taps] = layer
    for taps, layer in chain(first_layers.items(), last_layers.items()):
        live = _live_bytes_of_recomputed(w, memory, b, taps)
        inputs_here = min(layer, b.inputs_here)
        gradients = accumulated or adapter_bytes(w) * (layers - layer + 1) // layers
        yield b.inputs(inputs_here) | {"live layer": live, "gradients": gradients}


def _live_bytes_of_kept(w: Workload, memory: Memory, tokens: int) -> int:
    """Returns the bytes that the backward pass of a layer takes beside the activations that the layer has kept."""
    hidden = w.model.hidden_size
    inner = w.model.intermediate_size
    number = tokens * w.element  # bytes of one number of each token
    return max(
        number * (2 * inner + hidden),
        number * (inner + hidden) + _dequantized_bytes(w, memory, hidden * inner),
        # The product of gate and up, which is one of the layer's activations, is freed by then.
        number * (hidden - inner) + _dequantized_bytes(w, memory, 2 * hidden * inner),
    )


def _live_bytes_of_recomputed(
    w: Workload,
    memory: Memory,
    b: _Backward,
    taps: int,
) -> int:
    """Returns the bytes that running a layer of one kind again and its backward pass take."""
    m = w.model
    e = w.element
    hidden = m.hidden_size
    inner = m.intermediate_size
    mixer = mixer_sizes(w, taps)
    tile = min(b.tokens, memory.mlp_tile)
    # Each half of a layer may also have a norm of its output (Gemma), which keeps this output.
    output_norms = layer_tensors(m, taps).norms - 2
    outputs = output_norms // 2 * hidden
    tile_inner = tile * inner * e
    inside = max(
        5 * tile_inner,
        4 * tile_inner + _dequantized_bytes(w, memory, hidden * inner),
        2 * tile_inner + _dequantized_bytes(w, memory, 2 * hidden * inner),
    )
    second_half = b.tokens * (3 * hidden + outputs + mixer.activations) * e
    second_half += tile * (2 * hidden + outputs) * e + inside
    first_half = b.tokens * (3 * hidden + outputs + mixer.backward) * e + _dequantized_bytes(w, memory, mixer.weights)
    if not taps:
        first_half += b.repeated + b.joined
    else:
        first_half = max(first_half, b.tokens * 3 * hidden * e + rule_backward(w, b.tokens))
    low_rank = 8 * w.lora_r  # bytes of the products with the A of adapters; an estimate, as they are small
    return max(second_half, first_half) + b.tokens * (mixer.scales + low_rank)
