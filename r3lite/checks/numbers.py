"""Checks of numbers: device, cache, graphs, sampler and offload change them only by rounding; NF4 is as defined."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from r3lite.checks.finding import BOUNDS, Finding, closeness, judged, largest, skipped
from r3lite.checks.sample import CPU, logprobs, padded, predicted, questions, sentences, tiny
from r3lite.core.episode import Document, Question
from r3lite.core.grant import Grant, Memory
from r3lite.devices.precision import Precision, dtype_name
from r3lite.models import activation_checkpointing, nf4
from r3lite.models.causal_lm import CausalLM
from r3lite.models.kv_cache import BLOCK, KVCache, Prefill
from r3lite.models.logprobs import cross_entropy, token_loss
from r3lite.models.lora import adapter_parameters
from r3lite.models.offload import Offload
from r3lite.models.packing import states_before
from r3lite.models.projections import Nf4Linear
from r3lite.models.weights import resolve_folder
from r3lite.protocols.layout import Layout
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.rl.batch import Batch, Rollout, action_logprobs
from r3lite.rollout.decoder import LEAST_COSINE, Decoder, GraphDecoder
from r3lite.rollout.engine import Engine
from r3lite.rollout.sampling import Sampler
from r3lite.settings import LengthSettings, ProtocolSettings

# Cross-entropy, in nats per token, of the shipped model on `sentences()` in fp32. It changes if the model is replaced.
ENTROPY = 3.6177
ENTROPY_BOUND = 0.001
LOGIT_BOUND = 1e-3  # largest difference of logits in fp32; a card that multiplies in TF32 is off by 1e-2
WRONG_BUILD = "This PyTorch computes wrong numbers here: install another build, and report it with doctor.json."


# Largest mean error of a product with NF4 weights, as a share of the product's mean size. It comes from rounding the
# weights, inputs and outputs to the dtype. Measured on a CPU: 0 in fp32, 4e-4 in fp16, 3e-3 in bf16.
NF4_BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 0.02}
# Largest root mean square error allowed when weights with a standard deviation of 1 are quantized. It is 0.092 if they
# are normally distributed.
NF4_ERROR = 0.11


def logits(precision: Precision) -> Finding:
    """Compares the device's logits in fp32 with the CPU's, and the model's cross-entropy with the recorded one."""
    exact = Precision(torch.float32, precision.device)
    rows = sentences()
    model = tiny(exact)
    entropy = -float(logprobs(model, rows, exact).mean())
    message = f"cross-entropy {entropy:.4f} nats per token, expected {ENTROPY}"
    if not abs(entropy - ENTROPY) <= ENTROPY_BOUND:
        return judged(False, message, WRONG_BUILD, entropy=entropy)
    if precision.device.type == "cpu":
        return judged(True, message, entropy=entropy)
    return against_the_cpu(model, rows, precision.device, message)


@torch.no_grad()
def against_the_cpu(
    model: CausalLM,
    rows: list[list[int]],
    device: torch.device,
    about: str,
) -> Finding:
    """Compares the logits of `model`, in fp32 on `device`, with the CPU's; `about` ends the finding's message."""
    reference = tiny(Precision(torch.float32, CPU))
    logits_on_device = model.logits(model(padded(rows, device)))
    logits_on_cpu = reference.logits(reference(padded(rows, CPU)))
    difference = float((logits_on_device.cpu() - logits_on_cpu).abs().max())
    message = f"largest difference from the CPU {difference:.1e}, {LOGIT_BOUND:g} allowed; {about}"
    remedy = f"Disable TF32 if it is on. If not: {WRONG_BUILD}"
    return judged(difference <= LOGIT_BOUND, message, remedy, largest_difference=difference)


def logits_in_dtype(precision: Precision) -> Finding:
    """Compares log-probabilities in the run's dtype with the CPU's in fp32."""
    if precision.dtype == torch.float32:
        return skipped("not for fp32")
    rows = sentences()
    exact = Precision(torch.float32, CPU)
    expected = logprobs(tiny(exact), rows, exact)
    on_device = logprobs(tiny(precision), rows, precision)
    return closeness({precision.dtype: (on_device, expected)})


def _fp32_and_run_precision(precision: Precision) -> dict[torch.dtype, Precision]:
    """Returns two precisions on the device, by dtype: fp32, in which bugs are not hidden by rounding, and the run's.

    They are one if the run is in fp32.
    """
    exact = Precision(torch.float32, precision.device)
    return {p.dtype: p for p in (exact, precision)}


def cached_decode(precision: Precision) -> Finding:
    """Compares rows that the model reads in pieces, with a KV cache, with whole rows; in fp32 and the run's dtype."""
    precisions = _fp32_and_run_precision(precision)
    return closeness({dtype: _in_pieces_and_whole(p) for dtype, p in precisions.items()})


@torch.no_grad()
def _in_pieces_and_whole(precision: Precision) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities of rows that the model reads in pieces, with a KV cache, and of the same rows whole."""
    model = tiny(precision)
    rows = sentences()
    of_whole_rows = logprobs(model, rows, precision)
    cache = KVCache.of(model, len(rows))
    hidden_of_rows: list[list[Tensor]] = [[] for _ in rows]  # the hidden states of each piece
    # Each list is a pass: how many tokens it reads of each of the four rows. With one token per row it is a decoding
    # step.
    decoding_steps = [[1, 1, 1, 1]] * 3
    passes = [[40, 25, 61, 5], *decoding_steps, [30, 41, 1, 17], *decoding_steps]
    read_lengths = [sum(counts) for counts in zip(*passes)]
    passes.append([len(row) - length for row, length in zip(rows, read_lengths)])  # what is left of each row
    cached_lengths = [0] * len(rows)
    with precision.autocast():
        for counts in passes:
            ends = [start + count for start, count in zip(cached_lengths, counts)]
            pieces = [row[start:end] for row, start, end in zip(rows, cached_lengths, ends)]
            hidden_of_pieces = _read(model, cache, pieces)
            for hidden_of_row, hidden in zip(hidden_of_rows, hidden_of_pieces):
                hidden_of_row.append(hidden)
            cached_lengths = ends
        logprobs_of_rows = []
        for hidden_of_row, row in zip(hidden_of_rows, rows):
            logits_of_row = model.logits(torch.cat(hidden_of_row))
            logprobs_of_rows.append(predicted(logits_of_row, row))
    return torch.cat(logprobs_of_rows), of_whole_rows


def _read(model: CausalLM, cache: KVCache, pieces: list[list[int]]) -> list[Tensor]:
    """Appends a piece of tokens to each row of a cache, and returns the hidden states of each piece.

    Runs a decoding step if each piece is one token, else a prefill.
    """
    if all(len(piece) == 1 for piece in pieces):
        tokens = torch.tensor(pieces, device=cache.device)
        return list(model(tokens, cache.decode(len(pieces))))
    prefill = Prefill(cache, list(enumerate(pieces)))
    hidden = model(prefill.tokens, prefill)[0]
    return list(hidden.split([len(piece) for piece in pieces]))


# The number of rows in each decoding step of `graphs`. The caches have 6 rows. 3 rows run in a graph for 4; at the
# fourth step the longest row exceeds BLOCK slots, which takes another graph. 5 rows run in the graph for 6.
STEPS = (3, 3, 3, 3, 6, 1, 5)
DRAFTS = (1, 8, 3)  # the number of tokens of each row in a pass over drafts, which comes after the steps
# The graphs that STEPS and DRAFTS capture, in this order: for how many rows, tokens of a row, and slots of a row.
BUCKETS = [(4, 1, BLOCK), (4, 1, 2 * BLOCK), (6, 1, 2 * BLOCK), (1, 1, BLOCK), (4, 8, 2 * BLOCK)]
# The lowest cosine allowed between hidden states of a graph and of the model. Other dtypes have the decoder's bound.
COSINES = {torch.float32: 0.99999}


def graphs(precision: Precision, capture: Callable | None = None) -> Finding:
    """Compares decoding by CUDA graphs with decoding without, for the sizes of BUCKETS, in fp32 and the run's dtype.

    `capture` replaces the capture of a graph in tests.
    """
    if precision.device.type != "cuda" and capture is None:
        return skipped("for CUDA only")
    parts = []
    figures = {}
    sound = True
    for dtype, p in _fp32_and_run_precision(precision).items():
        name = dtype_name(dtype)
        cosine, pools = _cosine_and_pools(p, capture)
        bound = COSINES.get(dtype, LEAST_COSINE)
        sound &= cosine >= bound
        parts.append(f"{cosine:.6f} in {name} ({bound} allowed)")
        figures[f"least_cosine_{name}"] = cosine
        figures["graph_pools_mib"] = pools
    remedy = "Decoding without graphs is only slower. Please report it with doctor.json."
    return judged(sound, f"{len(BUCKETS)} graphs; lowest cosine of states {', '.join(parts)}", remedy, **figures)


@torch.no_grad()
def _cosine_and_pools(precision: Precision, capture: Callable | None) -> tuple[float, float]:
    """Returns the lowest cosine between hidden states with and without graphs, and MiB of the graphs' memory pools.

    The cosine is -1 if the decoder gave graphs up, or captured other graphs than BUCKETS, or if a hidden state of the
    drafts is not finite.
    """
    model = tiny(precision, adapted=True)
    row = sentences()[0]
    plain_cache = KVCache.of(model, 6)
    graph_cache = KVCache.of(model, 6)
    beginnings = [row[:length] for length in (5, 40, BLOCK - 3, 17, 2, 9)]
    with precision.autocast():
        for cache in (plain_cache, graph_cache):
            _read(model, cache, beginnings)
        plain_decoder = Decoder(model, plain_cache)
        graph_decoder = GraphDecoder(model, graph_cache, 2 * BLOCK, capture)
        cosines = []
        for step, row_count in enumerate(STEPS):
            tokens = row[step : step + row_count]  # one for each row; which tokens they are does not matter
            hidden = graph_decoder(tokens).float()
            expected = plain_decoder(tokens).float()
            cosines += F.cosine_similarity(hidden, expected, dim=-1).tolist()
        drafts = [row[:count] for count in DRAFTS]
        hidden = graph_decoder.run_drafts(drafts)
        expected = plain_decoder.run_drafts(drafts)
        if hidden is None or expected is None:
            return -1.0, _pools_mib()
        cosines += F.cosine_similarity(hidden.float(), expected.float(), dim=-1).tolist()
    if not graph_decoder.uses_graphs or list(graph_decoder.graphs) != BUCKETS:
        return -1.0, _pools_mib()
    lowest = -largest(-cosine for cosine in cosines)  # nan if a cosine is nan
    return lowest, _pools_mib()


def _pools_mib() -> float:
    """Returns MiB of the memory pools of all graphs that exist; 0 if PyTorch's allocator reports no sizes."""
    if not torch.cuda.is_available() or not torch.cuda.memory_reserved():
        return 0.0
    size = 0
    for segment in torch.cuda.memory_snapshot():
        belongs_to_graph = tuple(segment["segment_pool_id"]) != (0, 0)  # (0, 0): the pool of all other tensors
        if belongs_to_graph:
            size += segment["total_size"]
    return size / 2**20


def sampler(precision: Precision) -> Finding:
    """Compares the log-probabilities that the rollout engine records with those that the trainer recomputes."""
    precisions = _fp32_and_run_precision(precision)
    return closeness({dtype: _recorded_and_recomputed(p) for dtype, p in precisions.items()})


def _recorded_and_recomputed(precision: Precision) -> tuple[Tensor, Tensor]:
    """Samples a few episodes; returns log-probabilities of their sampled tokens as recorded, and as recomputed."""
    model = tiny(precision, adapted=True)
    lengths = LengthSettings(max_hops=2, max_new_tokens=24, max_length=512, max_document_tokens=64)
    prompts = ProtocolSettings(init_prompt="prompts/tiny/init_prompt.txt", step_prompt="prompts/tiny/step_prompt.txt")
    layout = Layout(Tokenizer.load(resolve_folder("tiny")), build_protocol(prompts), lengths)
    engine = Engine(model, layout, Sampler(1.0), Grant(Memory()), autocast=precision.autocast)

    def retrieve(queries: list[tuple[Question, str]]) -> list[list[Document]]:
        return [list(question.gold) for question, _ in queries]

    sequences = engine.run(questions(8), seeds=list("abcdefgh"), retrieve=retrieve)
    rollouts = [Rollout(sequence, [], 0) for sequence in sequences]  # without rewards, in one group
    batch = Batch.of(rollouts)
    with torch.no_grad(), precision.autocast():
        recomputed = action_logprobs(model, batch, layout.tokenizer.size, 1.0)
    return batch.logprobs[batch.action_mask], recomputed


def nf4_weights(precision: Precision) -> Finding:
    """Checks NF4: codes of the device against the CPU's, weights and a product against the format's definition."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(512, 256, generator=generator)
    x = torch.randn(16, 256, generator=generator)
    on_cpu = nf4.quantize(weight)
    on_device = nf4.quantize(weight.to(precision.device))
    codes_differ = float((on_cpu.codes != on_device.codes.cpu()).float().mean())  # a share of all codes
    tensors = [tensor.to(precision.device) for tensor in vars(on_cpu).values()]
    moved = nf4.Nf4Weight(*tensors)  # the CPU's codes and scales on the device, so that only dequantizing is compared
    by_hand = _dequantized_by_hand(on_cpu)
    dequantized = nf4.dequantize([moved], torch.float32).cpu()
    weights_off = float((dequantized - by_hand).abs().max())
    error = float((by_hand - weight).square().mean().sqrt())  # root mean square
    layer = Nf4Linear(moved, None, precision.dtype)
    product = layer(x.to(precision.device, precision.dtype)).float().cpu()
    exact = x @ by_hand.t()
    difference = (product - exact).abs().mean()
    product_off = float(difference / exact.abs().mean())
    bound = NF4_BOUNDS[precision.dtype]
    message = f"{codes_differ:.1%} of codes differ from the CPU; weights off by {weights_off:.1e}, "
    message += f"product by {product_off:.1e} ({bound:g} allowed), error of four bits {error:.2g}"
    return judged(
        codes_differ <= 1e-3 and weights_off <= 1e-5 and product_off <= bound and error <= NF4_ERROR,
        message,
        codes_differ=codes_differ,
        dequantized_off=weights_off,
        product_off=product_off,
        quantization_error=error,
    )


def _dequantized_by_hand(weight: nf4.Nf4Weight) -> Tensor:
    """Returns the weight [out, in] in fp32 by the format's definition, on the CPU, without the functions of `nf4`."""
    first = weight.codes >> 4
    second = weight.codes & 15
    codes = torch.stack((first, second), dim=-1).view(-1, nf4.BLOCK).long()
    absmax = weight.absmax.float() * weight.absmax_scale[:, None]  # [groups, 256]: a group has 256 blocks
    absmax = absmax + weight.absmax_mean[:, None]
    points = torch.tensor(nf4.POINTS)[codes]  # [blocks, 64]: a block has 64 weights
    scales = absmax.view(-1)[: len(codes), None]
    return (points * scales).view(weight.shape)


def offload(precision: Precision) -> Finding:
    """Checks that tensors return unchanged from the host's memory, and that offloading changes no gradients."""
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randn(1 << 16, generator=generator) for _ in range(6)]
    tensors = [x.to(precision.device, precision.dtype) for x in numbers]
    host = Offload(precision.device)
    for tensor in tensors:
        host.put(tensor)
    returned = [host.take() for _ in tensors]  # the last one first
    for tensor, copy in zip(tensors, reversed(returned), strict=True):
        if not torch.equal(tensor, copy):
            return judged(False, "tensors changed on their way to the host's memory and back")
    with_offload = _gradients(precision, offloaded=True)
    without_offload = _gradients(precision, offloaded=False)
    difference = (with_offload - without_offload).abs().max()
    share = float(difference / without_offload.abs().max())
    bound = BOUNDS[precision.dtype]  # above 0, as a card's attention adds gradients up in no fixed order
    message = f"tensors unchanged; gradients differ by {share:.1e} of the largest, {bound:g} allowed"
    if precision.device.type == "cuda" and not host.pinned:
        message += "; slower, as memory cannot be pinned here"
    return judged(share <= bound, message, gradient_difference=share)


def _gradients(precision: Precision, offloaded: bool) -> Tensor:
    """Returns the gradients of the cross-entropy of some `sentences` with respect to an adapter, as one vector.

    The vector is on the host.
    The layers are recomputed in the backward pass; if `offloaded`, their inputs wait for it in the host's memory.
    """
    model = tiny(precision, adapted=True)
    rows = [row[:48] for row in sentences()]
    memory = Memory(recompute_layers=model.config.num_hidden_layers, mlp_tile=64, offload=offloaded)
    activation_checkpointing.enable(model, Grant(memory))
    with precision.autocast():
        hidden, targets = states_before(model, rows, [[True] * len(row) for row in rows])
        loss, _ = token_loss(hidden, model.head_weight, targets, cross_entropy)
    (loss / len(targets)).backward()
    parameters = adapter_parameters(model, "policy").values()
    return torch.cat([parameter.grad.flatten().cpu() for parameter in parameters])
