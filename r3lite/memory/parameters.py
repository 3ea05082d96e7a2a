"""The memory of a run's parameters: frozen weights, adapters, and the optimizer's moments.

All figures are bytes, in closed form from the model's sizes. In the planner the kind of a layer is given by the taps of
its convolution, see `layer_tensors.layer_taps`.
"""

from collections import Counter
from functools import cache
from math import prod

from r3lite.core.grant import Memory
from r3lite.devices.live_tensors import GRAIN
from r3lite.memory.layer_tensors import adapted, layer_taps, layer_tensors, layers_by_taps, tensor_sizes
from r3lite.memory.mixers import FP32
from r3lite.memory.work import Workload
from r3lite.models import nf4
from r3lite.models.causal_lm import ModelConfig
from r3lite.models.stacks import stacks

# Of training/adamw8.py, which keeps moments in 8 bits:
MIN_WEIGHTS8 = 4096  # tensors of fewer weights have moments in fp32
BLOCK8 = 256  # numbers of a moment that share a scale


def rounded(size: float) -> int:
    """Returns the bytes that an allocation of `size` bytes takes."""
    return -(-int(size) // GRAIN) * GRAIN


def weight_bytes(w: Workload, quantized: bool, streamed: bool = False) -> int:
    """Returns the bytes of the frozen base on the device.

    With streaming these are the final norm, the head (which may be the embedding), and memory for two layers: one place
    is for the layers with even numbers, the other for those with odd numbers.
    """
    m = w.model
    norm = rounded(m.hidden_size * w.element)
    if not streamed:
        tables = 1 if m.tie_word_embeddings else 2
        return layers_bytes(w, quantized) + tables * table_bytes(w) + norm
    taps_of_layers = layer_taps(m)
    places = 0
    for taps_in_place in (set(taps_of_layers[0::2]), set(taps_of_layers[1::2])):
        places += max((layer_bytes(w, quantized, taps) for taps in taps_in_place), default=0)
    return places + table_bytes(w) + norm


def host_bytes(w: Workload, memory: Memory) -> int:
    """Returns what a base that is streamed takes of the host's memory: all layers, and an untied embedding.

    PyTorch pins memory in pieces whose sizes are powers of two (c10's CachingHostAllocator).
    """
    size = 0 if w.model.tie_word_embeddings else table_bytes(w)
    for taps, count in layers_by_taps(w.model).items():
        layer = layer_bytes(w, memory.nf4, taps)
        if w.on_cuda:
            layer = 1 << (layer - 1).bit_length()  # the next power of two
        size += count * layer
    return size


def table_bytes(w: Workload) -> int:
    """Returns the bytes of the embedding, or of the head."""
    return rounded(w.model.vocab_size * w.model.hidden_size * w.element)


def layers_bytes(w: Workload, quantized: bool) -> int:
    """Returns the bytes of the frozen weights of all layers."""
    return sum(count * layer_bytes(w, quantized, taps) for taps, count in layers_by_taps(w.model).items())


def layer_bytes(w: Workload, quantized: bool, taps: int) -> int:
    """Returns the bytes of the frozen weights of a layer of one kind."""
    m = w.model
    tensors = layer_tensors(m, taps)
    size = tensors.norms * rounded(m.hidden_size * w.element)
    size += sum(rounded(count * w.element) for count in tensors.others)
    if tensors.biases:
        size += rounded(sum(tensors.biases) * w.element)
    for stack in tensors.stacks:
        weights = [prod(tensors.linears[name]) for name in stack]  # of each linear layer
        if quantized:
            size += _nf4_bytes(weights)
        else:
            size += rounded(sum(weights) * w.element)
    if quantized and w.packed:
        size += _bytes_beyond_own_nf4(w.packed, w.element) // m.num_hidden_layers
    return size


def _bytes_beyond_own_nf4(packed: nf4.Packed, element: int) -> int:
    """Returns how many more bytes a folder in NF4 takes than r3lite's own quantization of the same layers.

    The folder may have left some layers dense, and may have some scales in fp32.
    """
    bytes_of_group = 2 * FP32  # scale and mean of the absmax values of its blocks
    bytes_of_block = 1 + bytes_of_group / nf4.GROUP  # an absmax in 8 bits, and its part of the group's bytes
    bytes_of_weight = 1 / 2 + bytes_of_block / nf4.BLOCK  # a code of 4 bits, and its part of the block's bytes
    absmax_in_fp32 = FP32 - 1  # more bytes than an absmax in 8 bits
    return int(packed.dense_weights * (element - bytes_of_weight)) + absmax_in_fp32 * packed.fp32_blocks


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
    """Returns `adapter_bytes` for the adapter's projections and rank."""
    bytes_of_feature = FP32 * r  # of the numbers that belong to one input or output of a projection
    size = 0
    for taps, count in layers_by_taps(m).items():
        shapes = layer_tensors(m, taps).linears  # (out, in)
        names = adapted(m, targets, taps)
        layer = sum(rounded(bytes_of_feature * shapes[name][0]) for name in names)  # each B
        for stack in stacks(names):
            inputs = sum(shapes[name][1] for name in stack)
            layer += rounded(bytes_of_feature * inputs)  # the A of a stack
        size += count * layer
    return size


def cast_bytes(w: Workload) -> int:
    """Returns the bytes of the adapter in half precision, if the run computes in it: see models/lora.py, cast_once."""
    return adapter_bytes(w) // 2 if w.element == 2 else 0


@cache
def _adapter_tensors(m: ModelConfig, targets: tuple[str, ...], r: int) -> Counter[int]:
    """Returns the number of an adapter's tensors by the bytes that each takes as an allocation of its own."""
    counts: Counter[int] = Counter()
    for taps, count in layers_by_taps(m).items():
        shapes = layer_tensors(m, taps).linears
        for name in adapted(m, targets, taps):
            for features in shapes[name]:  # of the outputs (for B), then of the inputs (for A)
                counts[rounded(FP32 * r * features)] += count
    return counts


def moment_bytes(w: Workload) -> int:
    """Returns the bytes of the two moments of each trained weight, and of AdamW's count of steps."""
    if w.full_tuning:
        of_layers, of_others = tensor_sizes(w.model)
        return sum(2 * _moment8(count) + GRAIN for count in of_layers + of_others)
    tensors = _adapter_tensors(w.model, w.targets, w.lora_r)
    return sum(count * (2 * size + GRAIN) for size, count in tensors.items())  # GRAIN: the count of steps


def copy_bytes(w: Workload) -> int:
    """Returns the bytes of a copy of the adapter's weights and moments: see training/kl_budget.py."""
    tensors = _adapter_tensors(w.model, w.targets, w.lora_r)
    return sum(count * size for size, count in tensors.items()) + moment_bytes(w)


def _moment8(count: int) -> int:
    """Returns the bytes of a moment of `count` numbers as training/adamw8.py keeps it: codes and scales, or fp32."""
    if count < MIN_WEIGHTS8 or count % BLOCK8:
        return rounded(count * FP32)
    scales = rounded(count / BLOCK8 * FP32)
    return rounded(count) + scales
