"""Checks of a pass: that a device, a cache, a graph, a sampler, NF4 and offload change no number."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from r3lite.checks.finding import BOUNDS, Finding, closeness, judged, largest, skipped
from r3lite.checks.sample import CPU, logprobs, padded, predicted, questions, sentences, tiny
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
ENTROPY, ENTROPY_BOUND = 3.6177, 0.001
LOGIT_BOUND = 1e-3  # in fp32; a card that multiplies in TF32 is off by 1e-2
WRONG_BUILD = "This PyTorch computes wrong numbers here: install another build, and report it with doctor.json."


# Of an NF4 product's mean size: what it costs to round weights, inputs and outputs to the dtype. A CPU needs 0 in fp32,
# 4e-4 in fp16 and 3e-3 in bf16.
NF4_BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 0.02}
NF4_ERROR = 0.11  # of weights of size 1: a normal distribution loses 0.092


def logits(precision: Precision) -> Finding:
    """The device's logits in fp32 against the CPU's, and the shipped model's cross-entropy against the recorded one."""
    exact, rows = Precision(torch.float32, precision.device), sentences()
    model = tiny(exact)
    entropy = -float(logprobs(model, rows, exact).mean())
    message = f"cross-entropy {entropy:.4f} nats per token, expected {ENTROPY}"
    if not abs(entropy - ENTROPY) <= ENTROPY_BOUND:
        return judged(False, message, WRONG_BUILD, entropy=entropy)
    if precision.device.type == "cpu":
        return judged(True, message, entropy=entropy)
    return against_the_cpu(model, rows, precision.device, message)


@torch.no_grad()
def against_the_cpu(model: CausalLM, rows: list[list[int]], device: torch.device, about: str) -> Finding:
    """The largest difference of a model's logits in fp32 from those of the same one on the CPU; `about` goes along."""
    exact = tiny(Precision(torch.float32, CPU))
    ours, theirs = model.logits(model(padded(rows, device))), exact.logits(exact(padded(rows, CPU)))
    off = float((ours.cpu() - theirs).abs().max())
    message = f"largest difference from the CPU {off:.1e}, {LOGIT_BOUND:g} allowed; {about}"
    remedy = f"Disable TF32 if it is on. If not: {WRONG_BUILD}"
    return judged(off <= LOGIT_BOUND, message, remedy, largest_difference=off)


def logits_in_dtype(precision: Precision) -> Finding:
    """What the model says in the run's dtype against the CPU in fp32."""
    if precision.dtype == torch.float32:
        return skipped("not for fp32")
    rows = sentences()
    exact = logprobs(tiny(Precision(torch.float32, CPU)), rows, Precision(torch.float32, CPU))
    return closeness({precision.dtype: (logprobs(tiny(precision), rows, precision), exact)})


def cached_decode(precision: Precision) -> Finding:
    """Rows read piece by piece into a KV cache, against whole rows: in fp32, where mistakes show, and as the run is."""
    return closeness({p.dtype: _in_pieces(p) for p in (Precision(torch.float32, precision.device), precision)})


@torch.no_grad()
def _in_pieces(precision: Precision) -> tuple[Tensor, Tensor]:
    """Log-probabilities of rows given to a cache in single tokens and long stretches in turn, and of whole rows."""
    model, rows = tiny(precision), sentences()
    whole = logprobs(model, rows, precision)
    cache, states, done = KVCache.of(model, len(rows)), [[] for _ in rows], [0] * len(rows)
    stretches = [[40, 25, 61, 5], *[[1] * len(rows)] * 3, [30, 41, 1, 17], *[[1] * len(rows)] * 3]
    stretches.append([len(row) - sum(s[i] for s in stretches) for i, row in enumerate(rows)])
    with precision.autocast():
        for counts in stretches:
            parts = [row[start : start + n] for row, start, n in zip(rows, done, counts)]
            for own, hidden in zip(states, _read(model, cache, parts)):
                own.append(hidden)
            done = [start + n for start, n in zip(done, counts)]
        pieces = torch.cat([predicted(model.logits(torch.cat(own)), row) for own, row in zip(states, rows)])
    return pieces, whole


def _read(model: CausalLM, cache: KVCache, parts: list[list[int]]) -> list[Tensor]:
    """Hidden states of what the rows of a cache are given: one token each by a decoding step, else by a prefill."""
    if all(len(part) == 1 for part in parts):
        return list(model(torch.tensor(parts, device=cache.device), cache.decode(len(parts))))
    prefill = Prefill(cache, list(enumerate(parts)))
    return list(model(prefill.tokens, prefill)[0].split([len(part) for part in parts]))


# Rows of each step: 3 rows fill a bucket of 4, and the longest row passes into a second block.
STEPS = (3, 3, 3, 3, 6, 1, 5)
BUCKETS = [(4, BLOCK), (4, 2 * BLOCK), (6, 2 * BLOCK), (1, BLOCK)]  # in the order in which they are captured
COSINES = {torch.float32: 0.99999}  # the least that is allowed; in other dtypes what the decoder itself asks for


def graphs(precision: Precision, capture: Callable | None = None) -> Finding:
    """Decoding by CUDA graphs against the model itself, in buckets of several sizes; in fp32, and as the run is.

    `capture` is a test's stand-in.
    """
    if precision.device.type != "cuda" and capture is None:
        return skipped("for CUDA only")
    parts, figures, sound = [], {}, True
    for p in {p.dtype: p for p in (Precision(torch.float32, precision.device), precision)}.values():
        cosine, pool = _captured(p, capture)
        bound = COSINES.get(p.dtype, LEAST_COSINE)
        sound &= cosine >= bound
        parts.append(f"{cosine:.6f} in {dtype_name(p.dtype)} ({bound} allowed)")
        figures |= {f"least_cosine_{dtype_name(p.dtype)}": cosine, "graph_pools_mib": pool}
    remedy = "Decoding without graphs is only slower. Please report it with doctor.json."
    return judged(sound, f"{len(BUCKETS)} graphs; lowest cosine of states {', '.join(parts)}", remedy, **figures)


@torch.no_grad()
def _captured(precision: Precision, capture: Callable | None) -> tuple[float, float]:
    """The least cosine between hidden states of graphs and of the model, and MiB of the graphs' pools.

    The cosine is -1 if graphs were given up, or were not those of BUCKETS.
    """
    model, (row, *_) = tiny(precision, adapted=True), sentences()
    caches = [KVCache.of(model, 6) for _ in range(2)]
    with precision.autocast():
        for cache in caches:
            _read(model, cache, [row[:n] for n in (5, 40, BLOCK - 3, 17, 2, 9)])
        plain, captured = Decoder(model, caches[0]), GraphDecoder(model, caches[1], 2 * BLOCK, capture)
        cosines = []
        for step, n in enumerate(STEPS):
            tokens = row[step : step + n]
            cosines += F.cosine_similarity(captured(tokens).float(), plain(tokens).float(), dim=-1).tolist()
    works = captured.works and list(captured.graphs) == BUCKETS
    return (-largest(-cosine for cosine in cosines) if works else -1.0), _pools_mib()


def _pools_mib() -> float:
    """MiB of the memory pools of all graphs that exist now; 0 if PyTorch's allocator says nothing."""
    if not torch.cuda.is_available() or not torch.cuda.memory_reserved():
        return 0.0
    pieces = torch.cuda.memory_snapshot()
    return sum(piece["total_size"] for piece in pieces if tuple(piece["segment_pool_id"]) != (0, 0)) / 2**20


def sampler(precision: Precision) -> Finding:
    """The log-probabilities that the rollout engine records against those that the trainer recomputes; as above."""
    return closeness({p.dtype: _sampled(p) for p in (Precision(torch.float32, precision.device), precision)})


def _sampled(precision: Precision) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens of a few episodes, as they were recorded and as they are recomputed."""
    model = tiny(precision, adapted=True)
    lengths = LengthSettings(max_hops=2, max_new_tokens=24, max_length=512, max_document_tokens=64)
    prompts = ProtocolSettings(init_prompt="prompts/tiny/init_prompt.txt", step_prompt="prompts/tiny/step_prompt.txt")
    layout = Layout(Tokenizer.load(resolve_folder("tiny")), build_protocol(prompts), lengths)
    engine = Engine(model, layout, Sampler(1.0), Grant(Memory()), autocast=precision.autocast)
    found = engine.run(questions(8), list("abcdefgh"), lambda asked: [list(q.gold) for q, _ in asked])
    batch = Batch.of([Rollout(s, [], 0) for s in found])
    with torch.no_grad(), precision.autocast():
        trainers = action_logprobs(model, batch, layout.tokenizer.size, 1.0)
    return batch.logprobs[batch.action_mask], trainers


def nf4_weights(precision: Precision) -> Finding:
    """NF4 on the device against the CPU, both against the format's definition, and a product against a dense one."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(512, 256, generator=generator), torch.randn(16, 256, generator=generator)
    here = nf4.quantize(weight)
    there = nf4.quantize(weight.to(precision.device))
    other = float((here.codes != there.codes.cpu()).float().mean())
    moved = nf4.Nf4Weight(*(tensor.to(precision.device) for tensor in vars(here).values()))
    by_hand = _dequantized_by_hand(here)
    off = float((nf4.dequantize([moved], torch.float32).cpu() - by_hand).abs().max())
    error = float((by_hand - weight).square().mean().sqrt())  # of weights whose standard deviation is 1
    layer = Nf4Linear(moved, None, precision.dtype)
    product, exact = layer(x.to(precision.device, precision.dtype)).float().cpu(), x @ by_hand.t()
    share = float((product - exact).abs().mean() / exact.abs().mean())
    bound = NF4_BOUNDS[precision.dtype]
    message = f"{other:.1%} of codes differ from the CPU; weights off by {off:.1e}, product by {share:.1e}"
    message += f", {bound:g} allowed"
    sound = other <= 1e-3 and off <= 1e-5 and share <= bound and error <= NF4_ERROR
    return judged(sound, message, codes_differ=other, dequantized_off=off, product_off=share, quantization_error=error)


def _dequantized_by_hand(weight: nf4.Nf4Weight) -> Tensor:
    """The weight [out, in] in fp32 by the definition of the format, on the CPU, in none of the ways of `nf4`."""
    codes = torch.stack((weight.codes >> 4, weight.codes & 15), dim=-1).view(-1, nf4.BLOCK).long()
    absmax = weight.absmax.float() * weight.absmax_scale[:, None] + weight.absmax_mean[:, None]  # [groups, 256]
    return (torch.tensor(nf4.POINTS)[codes] * absmax.view(-1)[: len(codes), None]).view(weight.shape)


def offload(precision: Precision) -> Finding:
    """Tensors put into the host's memory and taken back, and a backward pass with its inputs there against without."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1 << 16, generator=generator).to(precision.device, precision.dtype) for _ in range(6)]
    host, on_card = Offload(precision.device), precision.device.type == "cuda"
    for x in given:
        host.put(x)
    back = [host.take() for _ in given][::-1]
    if not all(torch.equal(x, y) for x, y in zip(given, back, strict=True)):
        return judged(False, "tensors changed on their way to the host's memory and back")
    with_host, without = (_gradients(precision, offloaded) for offloaded in (True, False))
    share = float((with_host - without).abs().max() / without.abs().max())
    bound = BOUNDS[precision.dtype]  # a card's attention adds gradients in no fixed order
    message = f"tensors unchanged; gradients differ by {share:.1e} of the largest, {bound:g} allowed"
    message += "; slower, as memory cannot be pinned here" if on_card and not host.pinned else ""
    return judged(share <= bound, message, gradient_difference=share)


def _gradients(precision: Precision, offloaded: bool) -> Tensor:
    """An adapter's gradients, end to end on the host, of the cross-entropy of `sentences`; all layers recomputed."""
    model, rows = tiny(precision, adapted=True), [row[:48] for row in sentences()]
    layers = model.config.num_hidden_layers
    activation_checkpointing.enable(model, Grant(Memory(recompute_layers=layers, mlp_tile=64, offload=offloaded)))
    with precision.autocast():
        hidden, targets = states_before(model, rows, [[True] * len(row) for row in rows])
        loss, _ = token_loss(hidden, model.head_weight, targets, cross_entropy)
    (loss / len(targets)).backward()
    return torch.cat([p.grad.flatten().cpu() for p in adapter_parameters(model, "policy").values()])
