"""fp16 with activations of real size: a residual stream that reaches 8,000, as Qwen2.5's does, against fp32.

The sum of its squares, and a product of it with itself, are far beyond fp16's 65,504.
"""

import copy

import pytest
import torch

from r3lite.core.grant import Grant, Memory
from r3lite.devices.precision import Precision
from r3lite.models import activation_checkpointing, lora
from r3lite.models.causal_lm import CausalLM, RMSNorm
from r3lite.models.hooks import ActivationWatch
from r3lite.models.kv_cache import KVCache, Prefill
from r3lite.models.logprobs import cross_entropy, token_logprobs, token_loss
from r3lite.models.packing import Pack, states_at

CPU = torch.device("cpu")
REACHED = 8000.0
CHANNEL = 5  # of the residual stream, the one that is large
ROWS = [[*range(40)], [*range(20), *range(60, 90)]]


@pytest.fixture
def models(small_model) -> tuple[CausalLM, CausalLM]:
    """A model in whose residual stream one channel is REACHED and the others are about 10, in fp32 and in fp16.

    As in real models, the norms make that channel small and the others of size 1. Weights are equal.
    """
    model = small_model(tie_word_embeddings=False)
    embedding = model.model.embed_tokens.weight
    embedding.mul_(10 / embedding.std())
    embedding[:, CHANNEL] = REACHED
    rms = REACHED / model.config.hidden_size**0.5
    for norm in (n for n in model.modules() if isinstance(n, RMSNorm)):
        norm.weight.mul_(rms / 10)
        norm.weight[CHANNEL] = 0.01
    half = copy.deepcopy(model).half()
    return copy.deepcopy(half).float(), half


def largest(model: CausalLM, ids: torch.Tensor, layer: str) -> float:
    with torch.no_grad(), ActivationWatch(model) as watch:
        model(ids)
    assert watch.first_overflow is None
    return watch.largest[layer]


def adapted(model: CausalLM) -> CausalLM:
    lora.add_adapter(model, "policy", 4, 8.0)
    lora.set_adapter(model, "policy")
    generator = torch.Generator().manual_seed(1)
    for name, parameter in lora.adapter_parameters(model, "policy").items():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.02, generator=generator)
    return model


def test_the_stream_is_as_large_as_a_real_one(models):
    for model in models:
        assert REACHED * 0.9 < largest(model, torch.tensor([ROWS[0]]), "model.layers.0") < REACHED * 1.1


def test_logprobs_of_fp16_are_those_of_fp32(models):
    logprobs = []
    for model in models:
        ids = torch.tensor([ROWS[0]])
        with torch.no_grad():
            logprobs.append(token_logprobs(model(ids)[0, :-1], model.head_weight, ids[0, 1:])[0])
    assert (logprobs[0] - logprobs[1]).abs().mean() < 0.005


def test_cached_decoding_in_fp16_is_the_uncached(models):
    _, model = models
    row = ROWS[0]
    with torch.no_grad():
        uncached = model(torch.tensor([row]))[0]
        cache = KVCache.of(model, 1)
        prefill = Prefill(cache, [(0, row[:30])])
        states = [model(prefill.tokens, prefill)[0]]
        states += [model(torch.tensor([[token]]), cache.decode(1))[0] for token in row[30:]]
    assert torch.nn.functional.cosine_similarity(torch.cat(states).float(), uncached.float(), dim=-1).min() > 0.9999


@pytest.mark.parametrize("recomputed", [0, 3])
def test_gradients_in_fp16_are_those_of_fp32(models, recomputed):
    exact, half = models
    expected = gradients(adapted(exact), Precision(torch.float32, CPU), recomputed)
    precision = Precision(torch.float16, CPU)
    grad = gradients(adapted(half), precision, recomputed) / precision.scaler.get_scale()
    assert (grad - expected).norm() / expected.norm() < 0.01  # and none overflowed, at the first step's scale


def gradients(model: CausalLM, precision: Precision, recomputed: int) -> torch.Tensor:
    """All gradients of an adapter, of the mean loss of ROWS, times the scaler's scale."""
    activation_checkpointing.enable(model, Grant(Memory(recompute_layers=recomputed)))
    with precision.autocast():
        pack = Pack.of(ROWS, CPU)
        states, targets = pack.predicted([[True] * len(row) for row in ROWS])
        hidden = states_at(model(pack.tokens, pack), states)
        loss, _ = token_loss(hidden, model.head_weight, targets, cross_entropy)
    precision.backward(loss / len(targets))
    return torch.cat([p.grad.flatten() for p in lora.adapter_parameters(model, "policy").values()])
