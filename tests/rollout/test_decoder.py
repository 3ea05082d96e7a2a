"""A step of decoding by graphs equals the model's own, whatever the bucket; where it does not, it is not used."""

import dataclasses

import pytest
import torch

from r3lite.models import lora
from r3lite.models.kv_cache import BLOCK, KVCache, Prefill
from r3lite.rollout.decoder import Decoder, GraphDecoder

ROWS, SLOTS = 6, 2 * BLOCK


def cache_of(model) -> KVCache:
    c, weight = model.config, model.head_weight
    return KVCache(c.num_hidden_layers, ROWS, c.num_key_value_heads, c.head_dim, weight.dtype, weight.device)


class Replayed:
    """Does what a capture does, without a card: the same work again on the same buffers, its result in one place."""

    def __init__(self):
        self.count = 0

    def __call__(self, work):
        result = work()
        self.count += 1
        return lambda: result.copy_(work()), result


def filled(model, decoder_of):
    """A decoder whose rows have read prompts of different lengths, one of them nearly a block."""
    cache = cache_of(model)
    decoder = decoder_of(cache)
    ids = torch.randint(0, model.config.vocab_size, (ROWS, BLOCK - 3), generator=torch.Generator().manual_seed(0))
    prefill = Prefill(cache, [(row, ids[row, :n].tolist()) for row, n in enumerate([5, 40, BLOCK - 3, 17, 2, 9])])
    model(prefill.tokens, prefill)
    return decoder


@torch.no_grad()
def test_graphs_give_what_the_model_gives(model):
    capture = Replayed()
    plain = filled(model, lambda cache: Decoder(model, cache))
    graphs = filled(model, lambda cache: GraphDecoder(model, cache, SLOTS, capture))
    # 3 rows fill a bucket of 4; the rows beyond them wait, and must find their slots as they left them. The longest
    # row passes into a second block.
    for n in (3, 3, 3, 3, 6, 1, 5):
        tokens = [7 * n + i for i in range(n)]
        assert torch.allclose(graphs(tokens), plain(tokens), atol=1e-5)
        assert graphs.cache.lengths == plain.cache.lengths
    for one, other in zip((*graphs.cache.keys, *graphs.cache.values), (*plain.cache.keys, *plain.cache.values)):
        for row, used in enumerate(plain.cache.lengths):
            assert torch.allclose(one[row, :, :used], other[row, :, :used], atol=1e-5)
    assert sorted(graphs.graphs) == [(1, BLOCK), (4, BLOCK), (4, 2 * BLOCK), (6, 2 * BLOCK)]
    assert capture.count == 4


@torch.no_grad()
@pytest.mark.parametrize("how", ["another result", "no capture"])
def test_what_cannot_be_captured_is_decoded_by_the_model_and_said(model, capsys, how):
    def broken(work):
        if how == "no capture":
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        result = -work()
        return lambda: None, result

    plain = filled(model, lambda cache: Decoder(model, cache))
    graphs = filled(model, lambda cache: GraphDecoder(model, cache, SLOTS, broken))
    for _ in range(3):
        assert torch.allclose(graphs([1, 2, 3]), plain([1, 2, 3]), atol=1e-5)
    assert capsys.readouterr().err.count("warning: decoding goes on without CUDA graphs") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_card_captured_graphs_give_what_the_model_gives(model, dtype):
    model = model.to("cuda", dtype)
    lora.add_adapter(model, "policy", 4, 8)
    lora.set_adapter(model, "policy")
    with torch.no_grad(), torch.autocast("cuda", dtype):
        plain = filled(model, lambda cache: Decoder(model, cache))
        graphs = filled(model, lambda cache: GraphDecoder(model, cache, SLOTS))
        for n in (3, 3, 3, 3, 6, 1, 5):
            tokens = [7 * n + i for i in range(n)]
            got, expected = graphs(tokens).float(), plain(tokens).float()
            assert torch.nn.functional.cosine_similarity(got, expected, dim=-1).min() > 0.999
    assert graphs.works and len(graphs.graphs) == 4


@pytest.mark.gpu
def test_on_a_card_episodes_are_the_same_with_graphs_and_without(engine_of, model, monkeypatch):
    from tests.rollout.test_scheduler import LENGTHS, PROTOCOL, nothing, questions

    model.to("cuda")
    engine = engine_of(PROTOCOL, dataclasses.replace(LENGTHS, max_new_tokens=40))
    asked, seeds = questions(5), list("abcde")
    with_graphs = [s.tokens for s in engine.run(asked, seeds, nothing)]
    monkeypatch.setattr("r3lite.rollout.engine.GraphDecoder", lambda model, cache, slots: Decoder(model, cache))
    assert [s.tokens for s in engine.run(asked, seeds, nothing)] == with_graphs
