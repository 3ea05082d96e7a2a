"""A step of decoding by graphs equals the model's own, whatever the bucket; if it does not, it is not used."""

import dataclasses

import pytest
import torch

from r3lite.checks.numbers import BUCKETS, DRAFTS, STEPS
from r3lite.devices.live_tensors import UncompiledMode
from r3lite.models import lora
from r3lite.models.causal_lm import CausalLM, LayerKind
from r3lite.models.kv_cache import BLOCK, KVCache, Prefill
from r3lite.rollout.decoder import Decoder, GraphDecoder

ROWS, SLOTS = 6, 2 * BLOCK


def cache_of(model) -> KVCache:
    return KVCache.of(model, ROWS)


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


def compared(model, capture) -> tuple[GraphDecoder, Decoder]:
    """Decoders with graphs and without after STEPS, each of which must give the same."""
    plain = filled(model, lambda cache: Decoder(model, cache))
    graphs = filled(model, lambda cache: GraphDecoder(model, cache, SLOTS, capture))
    for n in STEPS:
        tokens = [7 * n + i for i in range(n)]
        assert torch.allclose(graphs(tokens), plain(tokens), atol=1e-5)
        assert graphs.cache.lengths == plain.cache.lengths
    additions = [list(range(count)) for count in DRAFTS]
    assert torch.allclose(graphs.run_drafts(additions), plain.run_drafts(additions), atol=1e-5)
    assert graphs.cache.lengths == plain.cache.lengths
    return graphs, plain


@torch.no_grad()
def test_graphs_of_layers_with_windows_give_what_the_model_gives(model):
    """A row that pads a graph writes behind all windows: a softmax of no keys would fill its cache with nan."""
    rope = model.config.kind(0).rope
    kinds = (LayerKind(rope, window=20), LayerKind(rope, window=3))
    windowed = CausalLM(dataclasses.replace(model.config, layer_kinds=kinds)).requires_grad_(False).eval()
    windowed.load_state_dict(model.state_dict())
    graphs, _ = compared(windowed, Replayed())
    assert graphs.uses_graphs and all(layer.block.isfinite().all() for layer in graphs.cache.layers)


@torch.no_grad()
def test_graphs_give_what_the_model_gives(model):
    capture = Replayed()
    graphs, plain = compared(model, capture)
    for graph_layer, plain_layer in zip(graphs.cache.layers, plain.cache.layers):
        for row, used in enumerate(plain.cache.lengths):
            assert torch.allclose(graph_layer.block[row, :, :used], plain_layer.block[row, :, :used], atol=1e-5)
    assert list(graphs.graphs) == BUCKETS and capture.count == len(BUCKETS)


@torch.no_grad()
@pytest.mark.parametrize("bad", BUCKETS, ids=str)
@pytest.mark.parametrize("failure", ["another result", "no capture"])
def test_what_cannot_be_captured_is_decoded_by_the_model_and_said(model, capsys, failure, bad):
    """Every bucket is held against the model, not the first alone."""

    class Broken(Replayed):
        def __call__(self, work):
            replay, result = super().__call__(work)
            if BUCKETS[self.count - 1] != bad:
                return replay, result
            if failure == "no capture":
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
            return lambda: result.copy_(-work()), result

    capture = Broken()
    graphs, _ = compared(model, capture)
    assert not graphs.uses_graphs and BUCKETS[capture.count - 1] == bad  # nothing is captured after it
    assert capsys.readouterr().err.count("warning: decoding continues without CUDA graphs") == 1


@torch.no_grad()
def test_rows_that_only_fill_a_bucket_up_are_not_compared(model):
    """What is in them is nobody's episode; it may even be no number."""

    def capture(work):
        def replay():
            result.copy_(work())
            result[3:] = float("nan")

        result = work()
        return replay, result

    graphs = filled(model, lambda cache: GraphDecoder(model, cache, SLOTS, capture))
    plain = filled(model, lambda cache: Decoder(model, cache))
    assert torch.allclose(graphs([1, 2, 3]), plain([1, 2, 3]), atol=1e-5) and graphs.uses_graphs


def allocator(work):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def driver(work):
    raise RuntimeError("CUDA error: out of memory")


def ending(work):
    """As `torch.cuda.graph` does if ending the capture fails as well: the first error is only the second's context."""
    try:
        allocator(work)
    finally:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


@torch.no_grad()
@pytest.mark.parametrize("capture", [allocator, driver, ending])
def test_a_capture_that_runs_out_of_memory_is_handed_on(model, capsys, capture):
    """`Grant.run_within_memory` then repeats the rollout with fewer rows, for which there is room."""
    graphs = filled(model, lambda cache: GraphDecoder(model, cache, SLOTS, capture))
    with pytest.raises(torch.OutOfMemoryError):
        graphs([1, 2, 3])
    assert not capsys.readouterr().err


@torch.no_grad()
@pytest.mark.parametrize("error", [RuntimeError, TypeError, AssertionError])
def test_an_error_of_the_model_is_no_problem_of_graphs(model, monkeypatch, capsys, error):
    """Even a RuntimeError, such as of shapes that do not fit: without graphs it would be the same."""
    graphs = filled(model, lambda cache: GraphDecoder(model, cache, SLOTS, Replayed()))

    def wrong(*_, **__):
        raise error("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(model.model.layers[1], "forward", wrong)
    with pytest.raises(error, match="mat1"):
        graphs([1, 2, 3])
    assert not capsys.readouterr().err


class Capturable(UncompiledMode):
    """Refuses what a capture cannot hold: waiting for the device's numbers, and new tensors from the host's."""

    refused = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "_unique2")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.refused, f"a graph cannot hold {name}"
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("adapted", [False, True])
def test_a_step_can_be_captured(model, adapted):
    """On a card a step that cannot be would only be slower, with a word said: here it fails."""
    if adapted:
        lora.add_adapter(model, "policy", 4, 8)
        lora.set_adapter(model, "policy")

    def capture(work):
        with Capturable():
            return Replayed()(work)

    graphs, _ = compared(model, capture)
    assert graphs.uses_graphs
    with Capturable(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        torch.ones(1).item()


@pytest.mark.gpu
def test_on_a_card_episodes_are_the_same_with_graphs_and_without(engine_of, model, monkeypatch):
    from tests.rollout.test_scheduler import LENGTHS, PROTOCOL, nothing, questions

    model.to("cuda")
    engine = engine_of(PROTOCOL, dataclasses.replace(LENGTHS, max_new_tokens=40))
    batch = questions(5)
    seeds = list("abcde")
    with_graphs = [s.tokens for s in engine.run(batch, seeds, nothing)]
    monkeypatch.setattr(
        "r3lite.rollout.engine.GraphDecoder", lambda model, cache, slots, drafter: Decoder(model, cache, drafter)
    )
    assert [s.tokens for s in engine.run(batch, seeds, nothing)] == with_graphs
