"""Checks of a pass: that a device, a cache, a graph, a sampler, NF4 and offload change no number."""

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

# Cross-entropy in nats a token of the shipped model on `sentences()`, in fp32. Another model has another figure.
ENTROPY = 3.6177
ENTROPY_BOUND = 0.001
LOGIT_BOUND = 1e-3  # in fp32; a card that multiplies in TF32 is off by 1e-2
WRONG_BUILD = "This PyTorch computes wrong numbers here: install another build, and report it with doctor.json."


# Largest mean error of an NF4 product, as a share of its mean size, from rounding weights, inputs and outputs to the
# dtype. A CPU needs 0 in fp32, 4e-4 in fp16 and 3e-3 in bf16.
NF4_BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 0.02}
NF4_ERROR = 0.11  # largest root mean square error of weights of size 1; a normal distribution loses 0.092


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
    """Compares a model's logits in fp32 with those of the same model on the CPU; `about` ends the message."""
    reference = tiny(Precision(torch.float32, CPU))
    logits_here = model.logits(model(padded(rows, device)))
    logits_on_cpu = reference.logits(reference(padded(rows, CPU)))
    off = float((logits_here.cpu() - logits_on_cpu).abs().max())
    message = f"largest difference from the CPU {off:.1e}, {LOGIT_BOUND:g} allowed; {about}"
    remedy = f"Disable TF32 if it is on. If not: {WRONG_BUILD}"
    return judged(off <= LOGIT_BOUND, message, remedy, largest_difference=off)


def logits_in_dtype(precision: Precision) -> Finding:
    """Compares log-probabilities in the run's dtype with the CPU's in fp32."""
    if precision.dtype == torch.float32:
        return skipped("not for fp32")
    rows = sentences()
    exact = Precision(torch.float32, CPU)
    expected = logprobs(tiny(exact), rows, exact)
    return closeness({precision.dtype: (logprobs(tiny(precision), rows, precision), expected)})


def _exact_and_own(precision: Precision) -> list[Precision]:
    """Returns fp32, where mistakes of logic show, and the run's precision, each on the device."""
    return [Precision(torch.float32, precision.device), precision]


def cached_decode(precision: Precision) -> Finding:
    """Compares rows that are read piece by piece into a KV cache with whole rows, in fp32 and as the run is."""
    return closeness({p.dtype: _in_pieces(p) for p in _exact_and_own(precision)})


@torch.no_grad()
def _in_pieces(precision: Precision) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities of rows that a cache reads in stretches of any length, and those of whole rows."""
    model = tiny(precision)
    rows = sentences()
    of_whole_rows = logprobs(model, rows, precision)
    cache = KVCache.of(model, len(rows))
    hidden_of_rows: list[list[Tensor]] = [[] for _ in rows]
    cached_lengths = [0] * len(rows)
    # The number of tokens that each stretch reads of every row; the last stretch reads the rest of the rows.
    single_tokens = [[1] * len(rows)] * 3
    stretches = [[40, 25, 61, 5], *single_tokens, [30, 41, 1, 17], *single_tokens]
    read_lengths = map(sum, zip(*stretches))
    stretches.append([len(row) - length for row, length in zip(rows, read_lengths)])
    with precision.autocast():
        for counts in stretches:
            ends = [start + count for start, count in zip(cached_lengths, counts)]
            parts = [row[start:end] for row, start, end in zip(rows, cached_lengths, ends)]
            for hidden_of_row, hidden in zip(hidden_of_rows, _read(model, cache, parts)):
                hidden_of_row.append(hidden)
            cached_lengths = ends
        of_pieces = []
        for hidden_of_row, row in zip(hidden_of_rows, rows):
            logits_of_row = model.logits(torch.cat(hidden_of_row))
            of_pieces.append(predicted(logits_of_row, row))
    return torch.cat(of_pieces), of_whole_rows


def _read(model: CausalLM, cache: KVCache, parts: list[list[int]]) -> list[Tensor]:
    """Returns the hidden states of a cache's new tokens: from a decoding step if each row has one, else a prefill."""
    if all(len(part) == 1 for part in parts):
        tokens = torch.tensor(parts, device=cache.device)
        return list(model(tokens, cache.decode(len(parts))))
    prefill = Prefill(cache, list(enumerate(parts)))
    hidden = model(prefill.tokens, prefill)[0]
    return list(hidden.split([len(part) for part in parts]))


# Rows of each step: 3 rows fill a bucket of 4, and the longest row passes into a second block.
STEPS = (3, 3, 3, 3, 6, 1, 5)
DRAFTS = (1, 8, 3)  # tokens of each row, afterwards, in a pass over drafts
# Rows, places of a row, and slots, in the order in which they are captured.
BUCKETS = [(4, 1, BLOCK), (4, 1, 2 * BLOCK), (6, 1, 2 * BLOCK), (1, 1, BLOCK), (4, 8, 2 * BLOCK)]
COSINES = {torch.float32: 0.99999}  # the least that is allowed; in other dtypes what the decoder itself asks for


def graphs(precision: Precision, capture: Callable | None = None) -> Finding:
    """Compares decoding by CUDA graphs with the model itself, in buckets of several sizes, in fp32 and as the run is.

    `capture` is a test's stand-in.
    """
    if precision.device.type != "cuda" and capture is None:
        return skipped("for CUDA only")
    parts = []
    figures = {}
    sound = True
    precisions = {p.dtype: p for p in _exact_and_own(precision)}
    for dtype, p in precisions.items():
        name = dtype_name(dtype)
        cosine, pools = _captured(p, capture)
        bound = COSINES.get(dtype, LEAST_COSINE)
        sound &= cosine >= bound
        parts.append(f"{cosine:.6f} in {name} ({bound} allowed)")
        figures[f"least_cosine_{name}"] = cosine
        figures["graph_pools_mib"] = pools
    remedy = "Decoding without graphs is only slower. Please report it with doctor.json."
    return judged(sound, f"{len(BUCKETS)} graphs; lowest cosine of states {', '.join(parts)}", remedy, **figures)


@torch.no_grad()
def _captured(precision: Precision, capture: Callable | None) -> tuple[float, float]:
    """Returns the least cosine between hidden states of graphs and of the model, and MiB of the graphs' pools.

    The cosine is -1 if graphs were given up, or were not those of BUCKETS.
    """
    model = tiny(precision, adapted=True)
    row = sentences()[0]
    plain_cache = KVCache.of(model, 6)
    graph_cache = KVCache.of(model, 6)
    beginnings = [row[:length] for length in (5, 40, BLOCK - 3, 17, 2, 9)]
    with precision.autocast():
        for cache in (plain_cache, graph_cache):
            _read(model, cache, beginnings)
        plain = Decoder(model, plain_cache)
        by_graphs = GraphDecoder(model, graph_cache, 2 * BLOCK, capture)
        cosines = []
        for step, n in enumerate(STEPS):
            tokens = row[step : step + n]
            hidden = by_graphs(tokens).float()
            expected = plain(tokens).float()
            cosines += F.cosine_similarity(hidden, expected, dim=-1).tolist()
        additions = [row[:count] for count in DRAFTS]
        hidden = by_graphs.run_drafts(additions)
        expected = plain.run_drafts(additions)
        if hidden is None or expected is None:
            return -1.0, _pools_mib()
        cosines += F.cosine_similarity(hidden.float(), expected.float(), dim=-1).tolist()
    if not by_graphs.works or list(by_graphs.graphs) != BUCKETS:
        return -1.0, _pools_mib()
    return -largest(-cosine for cosine in cosines), _pools_mib()


def _pools_mib() -> float:
    """Returns MiB of the memory pools of all graphs that exist; 0 if PyTorch's allocator says nothing."""
    if not torch.cuda.is_available() or not torch.cuda.memory_reserved():
        return 0.0
    size = 0
    for piece in torch.cuda.memory_snapshot():
        if tuple(piece["segment_pool_id"]) != (0, 0):
            size += piece["total_size"]
    return size / 2**20


def sampler(precision: Precision) -> Finding:
    """Compares the log-probabilities that the rollout engine records with those that the trainer recomputes."""
    return closeness({p.dtype: _sampled(p) for p in _exact_and_own(precision)})


def _sampled(precision: Precision) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities of the tokens of a few episodes, as they were recorded and as they are recomputed."""
    model = tiny(precision, adapted=True)
    lengths = LengthSettings(max_hops=2, max_new_tokens=24, max_length=512, max_document_tokens=64)
    prompts = ProtocolSettings(init_prompt="prompts/tiny/init_prompt.txt", step_prompt="prompts/tiny/step_prompt.txt")
    layout = Layout(Tokenizer.load(resolve_folder("tiny")), build_protocol(prompts), lengths)
    engine = Engine(model, layout, Sampler(1.0), Grant(Memory()), autocast=precision.autocast)

    def retrieve(queries: list[tuple[Question, str]]) -> list[list[Document]]:
        return [list(question.gold) for question, _ in queries]

    sequences = engine.run(questions(8), list("abcdefgh"), retrieve)
    batch = Batch.of([Rollout(sequence, [], 0) for sequence in sequences])
    with torch.no_grad(), precision.autocast():
        recomputed = action_logprobs(model, batch, layout.tokenizer.size, 1.0)
    return batch.logprobs[batch.action_mask], recomputed


def nf4_weights(precision: Precision) -> Finding:
    """Compares NF4 on the device with the CPU, both with the format's definition, and a product with a dense one."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(512, 256, generator=generator)
    x = torch.randn(16, 256, generator=generator)
    on_cpu = nf4.quantize(weight)
    on_device = nf4.quantize(weight.to(precision.device))
    codes_differ = float((on_cpu.codes != on_device.codes.cpu()).float().mean())
    tensors = [tensor.to(precision.device) for tensor in vars(on_cpu).values()]
    moved = nf4.Nf4Weight(*tensors)
    by_hand = _dequantized_by_hand(on_cpu)
    dequantized = nf4.dequantize([moved], torch.float32).cpu()
    weights_off = float((dequantized - by_hand).abs().max())
    error = float((by_hand - weight).square().mean().sqrt())  # of weights whose standard deviation is 1
    layer = Nf4Linear(moved, None, precision.dtype)
    product = layer(x.to(precision.device, precision.dtype)).float().cpu()
    exact = x @ by_hand.t()
    difference = (product - exact).abs().mean()
    product_off = float(difference / exact.abs().mean())
    bound = NF4_BOUNDS[precision.dtype]
    message = f"{codes_differ:.1%} of codes differ from the CPU; weights off by {weights_off:.1e}, "
    message += f"product by {product_off:.1e}, {bound:g} allowed"
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
    absmax = weight.absmax.float() * weight.absmax_scale[:, None]  # [groups, 256]
    absmax = absmax + weight.absmax_mean[:, None]
    points = torch.tensor(nf4.POINTS)[codes]  # [blocks, 64]
    scales = absmax.view(-1)[: len(codes), None]
    return (points * scales).view(weight.shape)


def offload(precision: Precision) -> Finding:
    """Checks tensors that are put into the host's memory and taken back, and a backward pass with its inputs there."""
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randn(1 << 16, generator=generator) for _ in range(6)]
    tensors = [x.to(precision.device, precision.dtype) for x in numbers]
    host = Offload(precision.device)
    for x in tensors:
        host.put(x)
    returned = [host.take() for _ in tensors]
    for x, y in zip(tensors, reversed(returned), strict=True):
        if not torch.equal(x, y):
            return judged(False, "tensors changed on their way to the host's memory and back")
    with_host = _gradients(precision, offloaded=True)
    without = _gradients(precision, offloaded=False)
    difference = (with_host - without).abs().max()
    share = float(difference / without.abs().max())
    bound = BOUNDS[precision.dtype]  # a card's attention adds gradients in no fixed order
    message = f"tensors unchanged; gradients differ by {share:.1e} of the largest, {bound:g} allowed"
    if precision.device.type == "cuda" and not host.pinned:
        message += "; slower, as memory cannot be pinned here"
    return judged(share <= bound, message, gradient_difference=share)


def _gradients(precision: Precision, offloaded: bool) -> Tensor:
    """Returns an adapter's gradients, end to end on the host, of the cross-entropy of `sentences`.

    All layers are recomputed.
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
