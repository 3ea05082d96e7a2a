"""Layers streamed from the host's memory: the same numbers to the bit, and a schedule in which copies are hidden."""

import pytest
import torch

from bench.stress.simulated_cuda import SimulatedCuda
from r3lite.core.grant import Grant, Memory
from r3lite.devices.live_tensors import LiveTensors
from r3lite.models import activation_checkpointing
from r3lite.models.kv_cache import KVCache, Prefill
from r3lite.models.lora import adapter_parameters, add_adapter, set_adapter
from r3lite.models.packing import states_before
from r3lite.models.saving import save_nf4
from r3lite.models.streaming import LayerStream
from r3lite.models.weights import load_model
from r3lite.rollout.decoder import Decoder
from tests.lfm2_models import in_file, switches

ROWS = [list(range(1, 31)), list(range(40, 77))]
CHOSEN = [[True] * len(row) for row in ROWS]
SIZES = {"hidden_size": 128, "intermediate_size": 192}
no_card = pytest.mark.skipif(torch.cuda.is_available(), reason="a real card is here")


@pytest.fixture(params=["tied", "untied", "odd", "heads normalized", "convolutions"])
def folder(request, small_model, write_folder, tmp_path):
    """A model folder; `odd`: the first layer and the last one have the same place.

    Layers with convolutions are larger than those with attention, and take turns with them in one place.
    """
    if request.param == "convolutions":
        return write_folder(small_model(**SIZES, **switches(4)), tmp_path / "model", **in_file(4))
    changes = {"num_hidden_layers": 5 if request.param == "odd" else 4, "tie_word_embeddings": request.param == "tied"}
    changes |= {"qk_norm": True, "qkv_bias": False} if request.param == "heads normalized" else {}
    config_extras = {"model_type": "qwen3"} if request.param == "heads normalized" else {}
    return write_folder(small_model(**SIZES, **changes), tmp_path / "model", **config_extras)


def loaded(folder, quantize: bool, streamed: bool, device: str = "cpu"):
    """A model with an adapter that matters, whose layers are recomputed in a backward pass."""
    model = load_model(folder, torch.float32, device, quantize, streamed)
    if streamed:
        model.layer_stream.attach(model)
    add_adapter(model, "policy", 4, 8)
    generator = torch.Generator().manual_seed(0)
    for parameter in adapter_parameters(model, "policy").values():
        parameter.data.copy_(torch.empty(parameter.shape).normal_(0, 0.1, generator=generator))
    set_adapter(model, "policy")
    layers = len(model.model.layers)
    activation_checkpointing.enable(model, Grant(Memory(recompute_layers=layers, mlp_tile=16)))
    return model


def trained(model) -> list[torch.Tensor]:
    """States and gradients of a pass, after one that only reads."""
    with torch.no_grad():
        read = states_before(model, ROWS, CHOSEN)[0]
    hidden, tokens = states_before(model, ROWS, CHOSEN)
    model.logits(hidden).log_softmax(-1).gather(1, tokens[:, None]).sum().backward()
    return [read, hidden.detach(), *(p.grad for p in adapter_parameters(model, "policy").values())]


@torch.no_grad()
def decoded(model) -> list[torch.Tensor]:
    """Hidden states of a prefill and of three steps of decoding."""
    cache = KVCache.of(model, len(ROWS))
    prefill = Prefill(cache, list(enumerate(ROWS)))
    return [model(prefill.tokens, prefill), *(Decoder(model, cache)([5 + i, 9]) for i in range(3))]


@pytest.mark.parametrize("quantize", [True, False], ids=["nf4", "dense"])
@pytest.mark.parametrize("work", [trained, decoded])
def test_streaming_changes_no_bit(folder, quantize, work):
    ours, theirs = (work(loaded(folder, quantize, streamed)) for streamed in (True, False))
    assert len(ours) == len(theirs) > 3
    assert all(
        torch.equal(streamed_tensor, plain_tensor) and streamed_tensor.abs().sum() > 0
        for streamed_tensor, plain_tensor in zip(ours, theirs, strict=True)
    )


def test_nf4_weights_are_kept_whole_while_they_are_on_the_host(folder, tmp_path):
    """A cache is written before two layers take turns: then every layer has its own numbers."""
    model = load_model(folder, torch.float32, "cpu", True, True)
    save_nf4(model, folder, tmp_path / "kept")
    reloaded = load_model(tmp_path / "kept", torch.float32, "cpu")
    plain = load_model(folder, torch.float32, "cpu", True)
    assert all(torch.equal(t, reloaded.state_dict()[name]) for name, t in plain.state_dict().items())


def test_the_count_of_live_tensors_tells_the_devices_part_from_the_hosts(folder):
    with LiveTensors() as counter:
        model = loaded(folder, True, True)
        layers = sum(len(layer) for layer in model.layer_stream.host)
        table = model.model.embed_tokens.weight
        host = layers + (0 if model.config.tie_word_embeddings else table.nbytes)
        counter.peak = counter.live
        trained(model)
    assert host <= counter.host <= host + 512 * (len(model.layer_stream.host) + 1)
    places = [len(place) for place in model.layer_stream.places]
    weights = sum(places) + model.head_weight.nbytes + model.model.norm.weight.nbytes
    adapter = sum(p.nbytes for p in adapter_parameters(model, "policy").values())
    assert weights + adapter < counter.live < weights + 2 * adapter + 200_000
    del model, table
    assert counter.host == 0


@pytest.fixture
def copies(monkeypatch) -> list[int]:
    """The layers that are copied, in order."""
    layers = []
    copy = LayerStream._copy
    monkeypatch.setattr(LayerStream, "_copy", lambda self, layer: (layers.append(layer), copy(self, layer))[1])
    return layers


def test_no_layer_is_copied_twice_in_a_pass(small_model, write_folder, tmp_path, copies):
    model = loaded(write_folder(small_model(**SIZES, num_hidden_layers=4), tmp_path / "model"), True, True)

    def during(work) -> list[int]:
        copies.clear()
        work()
        return list(copies)

    def read():
        with torch.no_grad():
            states_before(model, ROWS, CHOSEN)

    assert during(read) == [0, 1, 2, 3, 0]  # the next pass's first layer while the last one computes
    assert during(read) == [1, 2, 3, 0]
    assert during(lambda: states_before(model, ROWS, CHOSEN)[0].sum().backward()) == [1, 2, 3, 1, 0]
    assert during(lambda: states_before(model, ROWS, CHOSEN)[0].sum().backward()) == [2, 3, 1, 0]


@no_card
@pytest.mark.parametrize("work", [trained, decoded])
def test_a_layer_is_copied_while_the_one_before_it_computes(folder, work, monkeypatch):
    """Nothing of a layer's work comes before the copy of the next one; and no layer reads what is still being copied,
    nor is a place written that may still be read: the simulated card raises Unordered.
    """
    copies: list[tuple[int, int]] = []  # layer, and how much work of the computing stream comes before its copy
    starts: list[tuple[int, int]] = []  # likewise before a layer computes
    copy = LayerStream._copy
    enter = LayerStream.enter
    with torch.backends.mkldnn.flags(enabled=False), SimulatedCuda() as card:
        main = card.stream

        def seen_copy(self, layer):
            copy(self, layer)
            copies.append((layer, self.stream.done[main]))

        def seen_enter(self, layer, next_layer):
            enter(self, layer, next_layer)
            starts.append((layer, main.done[main]))

        monkeypatch.setattr(LayerStream, "_copy", seen_copy)
        monkeypatch.setattr(LayerStream, "enter", seen_enter)
        model = loaded(folder, True, True, "cuda")
        counts_before = card.so_far()
        work(model)
        waits = (card.so_far() - counts_before).waits
    assert not waits  # whoever reads a result waits for it, nothing else
    last = len(model.model.layers) - 1
    computes = dict.fromkeys(starts)
    assert len(copies) > len(model.model.layers)
    for layer, work_before in copies[1:]:  # the very first layer has none before it
        during = [running for running, place in computes if place == work_before]
        hidden = during and during[0] in (layer - 1, layer + 1, last)
        assert hidden or (layer == 0 and last % 2 == 0), (layer, during)  # an odd number: first and last share a place
