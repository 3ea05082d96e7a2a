"""The memory planner: what a run will hold, phase by phase, with given settings.

All figures are bytes of live tensors, in closed form from the model's sizes, and on CUDA what `cuda_parts` adds;
nothing is loaded to find them. They follow what `models` keeps: `activation_checkpointing` (layer inputs, one layer at
a time), `logprobs` (one chunk of logits), `kv_cache` and `nf4`. `bench/memory.py` holds them against measured peaks.
"""

from collections.abc import Iterator
from dataclasses import replace

from r3lite.core.grant import Memory
from r3lite.devices.live_tensors import GRAIN
from r3lite.memory.cuda_parts import NOT_TENSORS, beside_tensors
from r3lite.memory.work import JudgeWork, TeacherWork, Workload
from r3lite.models import logprobs, nf4
from r3lite.models.causal_lm import ModelConfig
from r3lite.models.kv_cache import BLOCK
from r3lite.models.stacks import stacks

Parts = dict[str, int]
TILE8 = 25 << 20  # bytes that training/adamw8.py takes for some weights at a time


def rounded(size: float) -> int:
    return -(-int(size) // GRAIN) * GRAIN


def linears(m: ModelConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of the seven projections of a layer."""
    W, kv = _queries(m), m.num_key_value_heads * m.head_dim
    C, wide = m.hidden_size, m.intermediate_size
    attention = {"q_proj": (W, C), "k_proj": (kv, C), "v_proj": (kv, C), "o_proj": (C, W)}
    return attention | {"gate_proj": (wide, C), "up_proj": (wide, C), "down_proj": (C, wide)}


def weight_bytes(w: Workload, quantized: bool, streamed: bool = False) -> int:
    """The frozen base; of one whose layers are streamed what the device holds: two layers, head and final norm."""
    m = w.model
    layers = min(2, m.num_hidden_layers) if streamed else m.num_hidden_layers
    tables = 1 if m.tie_word_embeddings or streamed else 2
    return layers * layer_bytes(w, quantized) + tables * _table(w) + rounded(m.hidden_size * w.element)


def host_bytes(w: Workload, memory: Memory) -> int:
    """What a base whose layers are streamed takes of the host's memory: all layers, and an untied embedding.

    PyTorch pins memory in pieces whose sizes are powers of two (c10's CachingHostAllocator).
    """
    layer = layer_bytes(w, memory.nf4)
    layer = 1 << (layer - 1).bit_length() if w.on_cuda else layer
    return w.model.num_hidden_layers * layer + (not w.model.tie_word_embeddings) * _table(w)


def _table(w: Workload) -> int:
    """The embedding, or the head."""
    return rounded(w.model.vocab_size * w.model.hidden_size * w.element)


def layer_bytes(w: Workload, quantized: bool) -> int:
    """The frozen weights of a layer."""
    m, e, C = w.model, w.element, w.model.hidden_size
    shapes = linears(m)
    layer = 2 * rounded(C * e) + 2 * m.qk_norm * rounded(m.head_dim * e)
    layer += m.qkv_bias * rounded(sum(shapes[name][0] for name in ("q_proj", "k_proj", "v_proj")) * e)
    for stack in stacks(shapes):
        weights = [shapes[name][0] * shapes[name][1] for name in stack]
        layer += _nf4_bytes(weights) if quantized else rounded(sum(weights) * e)
    return layer + (_beyond(w.packed, e) // m.num_hidden_layers if quantized and w.packed else 0)


def _beyond(packed: nf4.Packed, element: int) -> int:
    """Bytes that the layers of a folder in NF4 take beyond what they would if r3lite had quantized them all."""
    per_weight = 1 / 2 + (1 + 8 / nf4.GROUP) / nf4.BLOCK
    return int(packed.dense * (element - per_weight)) + 3 * packed.wide


def _nf4_bytes(weights: list[int]) -> int:
    """Bytes of NF4 linear layers with `weights` weights each, which lie one after another in memory."""
    groups = sum(-(-count // (nf4.BLOCK * nf4.GROUP)) for count in weights)
    return rounded(sum(weights) / 2) + rounded(groups * nf4.GROUP) + 2 * rounded(groups * 4)


def adapter_bytes(w: Workload) -> int:
    """One adapter's fp32 weights, the A of a stack together; its gradients are as large."""
    shapes = linears(w.model)
    layer = sum(rounded(4 * w.lora_r * shapes[name][0]) for name in w.targets)
    layer += sum(rounded(4 * w.lora_r * sum(shapes[name][1] for name in stack)) for stack in stacks(w.targets))
    return w.model.num_hidden_layers * layer


def _cast_bytes(w: Workload) -> int:
    """The adapter that is on in half precision, if the run computes in it: see models/lora.py, cast_once."""
    return adapter_bytes(w) // 2 if w.element == 2 else 0


def _moment_bytes(w: Workload) -> int:
    """The two moments of each of an adapter's weights, and AdamW's count of steps; full fine-tuning: of all weights."""
    if w.full:
        return sum(2 * _moment8(count) + GRAIN for some in sizes(w.model) for count in some)
    shapes = linears(w.model)
    layer = sum(2 * rounded(4 * w.lora_r * side) + GRAIN for name in w.targets for side in shapes[name])
    return w.model.num_hidden_layers * layer


def copy_bytes(w: Workload) -> int:
    """A copy of the adapter's weights and moments, each tensor for itself: see training/kl_budget.py."""
    shapes = linears(w.model)
    layer = sum(rounded(4 * w.lora_r * side) for name in w.targets for side in shapes[name])
    return w.model.num_hidden_layers * layer + _moment_bytes(w)


def sizes(m: ModelConfig) -> tuple[list[int], list[int]]:
    """How many numbers each tensor of a layer has, of all layers, and each of the others."""
    shapes, C = linears(m), m.hidden_size
    biases = [shapes[name][0] for name in ("q_proj", "k_proj", "v_proj")] if m.qkv_bias else []
    norms = [C, C] + [m.head_dim] * 2 * m.qk_norm
    tables = [m.vocab_size * C] * (1 if m.tie_word_embeddings else 2)
    layer = [out * into for out, into in shapes.values()] + biases + norms
    return layer * m.num_hidden_layers, [C, *tables]


def _moment8(count: int) -> int:
    """Bytes of a moment of `count` numbers, as training/adamw8.py keeps it: codes and scales, or fp32."""
    return rounded(count * 4) if count < 4096 or count % 256 else rounded(count) + rounded(count / 64)


def standing(w: Workload, memory: Memory) -> Parts:
    """What the run holds from its first step to its last, by part."""
    parts = {"weights": weight_bytes(w, memory.nf4, memory.stream_layers), "adapters": adapter_bytes(w) * w.adapters}
    parts |= {"optimizer": _moment_bytes(w)} if w.trains else {}
    if w.keeps_step and not w.on_cuda:  # elsewhere host and device are the same memory
        parts["last updates"] = 2 * copy_bytes(w)  # as a round is undone if it is interrupted, the one before it too
    return parts


def phases(w: Workload, memory: Memory) -> dict[str, Parts]:
    """What each phase of the run holds at its peak, by part."""
    fixed = standing(w, memory)
    found = {"load": _load(w, memory)}
    if w.episodes:
        found["sample"] = fixed | {"adapter casts": _cast_bytes(w)} | _sample(w, memory)
    if w.scores:
        found["score"] = fixed | _score(w, memory)
    if w.teacher:
        found["teach"] = fixed | _teach(w, memory, w.teacher)
    if w.judge:
        found["judge"] = fixed | _judge(w, w.judge)
    if w.trains:
        most = max(_update(w, memory), key=lambda parts: sum(parts.values()))
        found["update"] = fixed | {"adapter casts": _cast_bytes(w)} | most
        found["save"] = dict(fixed)
    if w.on_cuda:
        rows = 0 if memory.stream_layers else min(memory.rollout_batch_size, w.episodes)
        captured = {"sample": _forward(w, memory, rows) if rows else 0}  # see rollout/decoder.py
        if w.judge:
            captured["judge"] = _forward(as_judge(w, w.judge), w.judge.memory, w.judge.memory.rollout_batch_size)
        for name, parts in found.items():
            found[name] = parts | beside_tensors(sum(parts.values()), captured.get(name, 0), w.beside)
    return found


def peak(w: Workload, memory: Memory) -> int:
    return max(sum(parts.values()) for parts in phases(w, memory).values())


def allocated(w: Workload, memory: Memory) -> int:
    """The peak of tensors alone: what a count of them finds, and on CUDA PyTorch's allocator as allocated."""
    found = phases(w, memory).values()
    return max(sum(size for name, size in parts.items() if name not in NOT_TENSORS) for parts in found)


def _load(w: Workload, memory: Memory) -> Parts:
    """The peak of loading: the embedding beside its view of the file, or the last linear beside all other weights."""
    m, e = w.model, w.element
    table = _table(w)
    last = max(out * into * e for out, into in linears(m).values())
    weights = weight_bytes(w, memory.nf4, memory.stream_layers)
    if w.on_cuda:  # the file's view is the host's
        return {"weights": weights, "one tensor": last if memory.nf4 else 0}
    peak = max(2 * table, weights + last)
    return {"weights": weights, "one tensor": max(0, peak - weights)}


def _dense(w: Workload, memory: Memory, weights: int) -> int:
    """Bytes of `weights` weights of linear layers, dequantized, with the temporaries of that."""
    if not memory.nf4:
        return 0
    # On CUDA the codes as int32, and code points in fp16; elsewhere a tile's numbers, beside those of the one before.
    temporary = weights * 4 if w.on_cuda else nf4.TILE * 10 if weights > nf4.TILE else weights * 6
    return weights * w.element + weights // nf4.BLOCK * 8 + temporary


def _forward(w: Workload, memory: Memory, tokens: int) -> int:
    """Bytes of a pass without gradients over `tokens` tokens, one layer at a time."""
    C, wide, e = w.model.hidden_size, w.model.intermediate_size, w.element
    tile = min(tokens, memory.mlp_tile)
    W, kv = _queries(w.model), _kv(w)
    attention = tokens * (2 * C + 3 * W + kv) * e + _dense(w, memory, C * (W + kv))
    inside = max(tile * 3 * wide * e, tile * 2 * wide * e + _dense(w, memory, 2 * C * wide))
    feed_forward = tokens * 2 * C * e + tile * C * e + inside + (tokens * C * e if tile < tokens else 0)
    return tokens * 2 * C * e + max(attention, feed_forward)


def _chunk(w: Workload, memory: Memory, tokens: int, gradients: bool) -> int:
    """Bytes of a chunk's logits in the head's dtype, a few rows of them in fp32, and the gradient of hidden states."""
    rows = min(memory.loss_chunk, tokens)
    wide = min(rows, logprobs.wide_rows("cuda" if w.on_cuda else "cpu")) * w.vocabulary * 4 * 3
    return rows * w.vocabulary * w.element + wide + (tokens * w.model.hidden_size * 4 if gradients else 0)


def _pass(w: Workload, memory: Memory, rows: int) -> tuple[int, int, int]:
    """The most tokens that a pass of at most `rows` rows has, how many of them a loss may fall on, and how many tokens
    its rows attend to besides their own.
    """
    apart = w.row_tokens - w.shared
    tokens = min(max(memory.micro_batch_tokens, w.pass_tokens), w.shared + rows * apart)
    rows = -(-(tokens - w.shared) // max(apart, 1))
    return tokens, tokens - w.shared if w.episodes else tokens, rows * w.shared  # episodes share their prompt alone


def _score(w: Workload, memory: Memory) -> Parts:
    tokens, said, again = _pass(w, memory, w.scored_rows)
    layer = {"live layer": _forward(w, memory, tokens) + again * 2 * _queries(w.model) * w.element}
    hidden = (tokens + said) * w.model.hidden_size * w.element
    loss = {"hidden states": hidden, "loss chunk": _chunk(w, memory, said, False)}
    return max(layer, loss, key=lambda parts: sum(parts.values()))


def as_teacher(w: Workload, memory: Memory, teacher: TeacherWork) -> tuple[Workload, Memory]:
    """The teacher's reading as a workload of its own."""
    of_adapter = {"lora_r": teacher.lora_r, "targets": teacher.targets}
    own = replace(w, model=teacher.model, packed=teacher.packed, **of_adapter, teacher=None)
    return own, replace(memory, nf4=teacher.nf4, stream_layers=False)


def _teach(w: Workload, memory: Memory, teacher: TeacherWork) -> Parts:
    """The teacher beside the policy: as its last tensor is loaded, or as it reads."""
    work, own = as_teacher(w, memory, teacher)
    _, said, _ = _pass(work, own, work.scored_rows)
    weights = {"teacher": weight_bytes(work, own.nf4)}
    adapter = {"teacher's LoRA": adapter_bytes(work) * teacher.adapters} if teacher.adapters else {}
    loading = weights | {"one tensor": _load(work, own)["one tensor"]}
    reading = weights | adapter | _score(work, own) | {"distributions": said * teacher.top * 8}
    return max(loading, reading, key=lambda parts: sum(parts.values()))


def as_judge(w: Workload, judge: JudgeWork) -> Workload:
    """The judge's replies as a workload of its own."""
    sizes = {"row_tokens": judge.row_tokens, "reads": judge.row_tokens, "episodes": judge.memory.rollout_batch_size}
    return replace(w, model=judge.model, vocabulary=judge.vocabulary, packed=judge.packed, judge=None, **sizes)


def _judge(w: Workload, judge: JudgeWork) -> Parts:
    """The judge beside the policy: as its last tensor is loaded, or as it replies."""
    work = as_judge(w, judge)
    weights = {"judge": weight_bytes(work, judge.memory.nf4)}
    loading = weights | {"one tensor": _load(work, judge.memory)["one tensor"]}
    return max(loading, weights | _sample(work, judge.memory), key=lambda parts: sum(parts.values()))


def kv_bytes(w: Workload, rows: int, tokens: int) -> int:
    """Bytes of a KV cache of `rows` episodes of `tokens` tokens, and of the second block of a layer that grows."""
    m = w.model
    slots = -(-tokens // BLOCK) * BLOCK
    block = rows * _kv(w) * slots * w.element
    return (m.num_hidden_layers + 1) * rounded(block)


def _sample(w: Workload, memory: Memory) -> Parts:
    m, rows = w.model, min(memory.rollout_batch_size, w.episodes)
    together = min(rows * w.reads, memory.micro_batch_tokens)  # see Engine: this many are read at a time
    graphs = w.on_cuda and not memory.stream_layers  # they want a cache that does not move
    seen = w.row_tokens if w.retrieves or graphs else w.reads
    masks = together * seen * w.element + seen * 2 * _queries(m) * w.element  # and one row's keys, for every head
    prefill = {"KV cache": kv_bytes(w, rows, seen), "prefill": _forward(w, memory, together) + masks}
    sampler = rows * m.vocab_size * (w.element + 4 + 4)
    sampling = {"KV cache": kv_bytes(w, rows, w.row_tokens), "sampling": sampler}
    return max(prefill, sampling, key=lambda parts: sum(parts.values()))


def _queries(m: ModelConfig) -> int:
    """Numbers of a token's queries in a layer, and of its attention's output."""
    return m.num_attention_heads * m.head_dim


def _kv(w: Workload) -> int:
    """Numbers of a token's keys and values in a layer."""
    return 2 * w.model.num_key_value_heads * w.model.head_dim


def _kept(w: Workload) -> int:
    """Activations that a layer which is not recomputed keeps, per token, its input left out."""
    m, e = w.model, w.element
    C, W, wide = m.hidden_size, _queries(m), m.intermediate_size
    # Norm, middle, norm; rotated queries with keys and values, these for every head, output; gate, up, their product.
    numbers = 3 * C + 4 * W + _kv(w) + 3 * wide + len(w.targets) * w.lora_r
    return e * numbers + 4 * (m.num_attention_heads + 2) + _head_norms(w)


def _head_norms(w: Workload) -> int:
    """Bytes per token of what the norms of heads keep: their input, and a scale for each head."""
    m = w.model
    heads = m.num_attention_heads + m.num_key_value_heads
    return m.qk_norm * ((_queries(m) + _kv(w)) * w.element + 4 * heads)


def _update(w: Workload, memory: Memory) -> Iterator[Parts]:
    """The moments that may be the peak of a backward pass."""
    m, e = w.model, w.element
    C, W, wide, L = m.hidden_size, _queries(m), m.intermediate_size, m.num_hidden_layers
    tokens, said, again = _pass(w, memory, w.rows)
    again *= 2 * W * e  # bytes of keys and values, for every head
    joined = tokens * W * e if tokens > w.row_tokens else 0  # attention's outputs of several rows, laid end to end
    recomputed = min(memory.recompute_layers, L)
    state, gradients = tokens * C * e, adapter_bytes(w)
    accumulated = gradients if w.guided or w.step_rows * w.row_tokens > tokens else 0
    offload = memory.offload and w.on_cuda  # on a CPU host and device are the same memory
    held = (2 if recomputed else 0) if offload else recomputed
    inputs, rotary = (held + 1) * state, 2 * tokens * m.head_dim * e
    kept = (L - recomputed) * (tokens * _kept(w) + state + again + joined)
    masks = tokens * w.row_tokens * e if again else 0
    common = {"layer inputs": inputs + rotary + masks}
    # The loss: all layers are done, the chunk's logits are there.
    critic = 2 * said * C * 4 if w.critic else 0
    chunk = _chunk(w, memory, said, True) + said * C * e + critic
    if w.full:
        accumulated = rounded(m.vocab_size * C * 4)  # of the head, in fp32
        yield common | {"optimizer's tile": TILE8, "gradients": accumulated}
    yield common | {"kept layers": kept, "loss chunk": chunk, "gradients": accumulated}
    # The first of the layers that keep their activations, its gradients beside them.
    if recomputed < L:
        share = accumulated or gradients // L
        live = max(
            tokens * (2 * wide + C) * e,
            tokens * (wide + C) * e + _dense(w, memory, C * wide),
            tokens * (C - wide) * e + _dense(w, memory, 2 * C * wide),  # by then some of what was kept is freed
        )
        yield common | {"kept layers": kept, "live layer": live, "gradients": share}
    if recomputed:
        tile = min(tokens, memory.mlp_tile)
        inside = max(
            tile * 5 * wide * e,
            tile * 4 * wide * e + _dense(w, memory, C * wide),
            tile * 2 * wide * e + _dense(w, memory, 2 * C * wide),
        )
        feed_forward = tokens * (3 * C + 4 * W + _kv(w)) * e + tile * 2 * C * e + inside
        attention = tokens * (3 * C + 8 * W + _kv(w)) * e + _dense(w, memory, C * (W + _kv(w)))
        live = max(feed_forward, attention + again + joined) + tokens * (4 * m.num_attention_heads + 8 * w.lora_r)
        live += tokens * _head_norms(w)
        if w.full:
            accumulated += sum(sizes(m)[0]) // L * e
        # The last recomputed layer, when all inputs are there, and the first, when all gradients are.
        for layer in (recomputed, 1):
            here = min(layer, held) if offload else layer
            yield {"layer inputs": (here + 1) * state + rotary + masks, "live layer": live,
                   "gradients": accumulated or gradients * (L - layer + 1) // L}  # fmt: skip
