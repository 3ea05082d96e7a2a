"""Model folders that are damaged, absurd or hostile: each is refused at once, naming file and key; fingerprints."""

import json
import os
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from r3lite.core.errors import R3LiteError
from r3lite.models import weights
from r3lite.models.config_file import read_config
from r3lite.models.lora import adapter_parameters, add_adapter, merge_adapter
from r3lite.models.saving import save_merged, save_nf4
from r3lite.models.weights import fingerprint, load_model
from tests.errors import raises

SIZES = {"intermediate_size": 128}  # in_features of NF4 must be multiples of 64


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 10_000_000}, "num_hidden_layers is 10000000, not a whole number from 1 to 1,000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 3.0}, r"num_hidden_layers is 3\.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"vocab_size": -300}, "vocab_size is -300"),
        ({"vocab_size": 10**15}, "vocab_size is 1000000000000000"),
        ({"hidden_size": [64]}, r"hidden_size is \[64\]"),
        ({"head_dim": 15}, "is 15; it must be even"),
        ({"head_dim": "16"}, "head_dim is '16'"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6', not a finite number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06"),
        ({"rope_theta": "big"}, "rope_theta is 'big'"),
        ({"rope_theta": 1e300}, r"rope_theta is 1e\+300"),
        ({"rope_parameters": {"rope_theta": -1}}, r"rope_parameters\.rope_theta is -1"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\], not a JSON object"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', not a JSON object"),
        ({"rope_scaling": {"type": 7}}, r"rope_scaling\.type is 7, not text"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"max_position_embeddings": "4096"}, "max_position_embeddings is '4096'"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', not true or false"),
        ({"use_sliding_window": "false"}, "use_sliding_window is 'false'"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention', not a list"),
        ({"quantization_config": ["nf4"]}, r"quantization_config is \['nf4'\]"),
        ({"model_type": ["qwen2"]}, r"model_type is \['qwen2'\]"),
        ({"hidden_act": 1}, "hidden_act is 1"),
    ],
)
def test_wrong_values_are_named_with_their_key(small_model, write_folder, tmp_path, change, words):
    folder = write_folder(small_model(), tmp_path, **change)
    start = time.monotonic()
    with pytest.raises(R3LiteError, match=words) as error:
        read_config(folder)
    assert str(folder / "config.json") in error.value.cause
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 200_000, "nested more than 100 deep"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "too many digits"),
        ('{"rope_theta": NaN}', "NaN is not a JSON number"),
        ('{"rms_norm_eps": Infinity}', "Infinity is not a JSON number"),
        ("[]", "not a JSON object"),
        ('"config"', "not a JSON object"),
        ("", "not JSON"),
        ('{"vocab_size": 1, "vocab_size": 2}', "duplicate key"),
    ],
)
def test_json_that_is_beyond_bounds(tmp_path, text, words):
    for name, read in (("config.json", read_config), ("model.safetensors.index.json", weights._shards)):
        (tmp_path / name).write_text(text)
        with pytest.raises(R3LiteError, match=words) as error:
            read(tmp_path)
        assert str(tmp_path / name) in error.value.cause


@pytest.mark.parametrize("quantize", [False, True])
def test_sizes_beyond_the_weights_are_refused_at_once(small_model, write_folder, tmp_path, quantize):
    """A config of the largest sizes took hours and much memory before the first tensor was read."""
    source = write_folder(small_model(**SIZES), tmp_path / "source")
    folder = tmp_path / "nf4"
    save_nf4(load_model(source, torch.float32, "cpu", quantize=True), source, folder)
    largest = {"intermediate_size": 1 << 20, "hidden_size": 1 << 16}
    for where, change, words in (
        (source, {"num_hidden_layers": 1000}, r"missing tensor model\.layers\.999"),
        (folder, {"num_hidden_layers": 1000}, r"missing tensor model\.layers\.999"),
        (source, {"num_hidden_layers": 3, **largest}, "has shape"),
        (folder, {"num_hidden_layers": 3, **largest}, "has shape"),
    ):
        path = where / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        start = time.monotonic()
        with pytest.raises(R3LiteError, match=words):
            load_model(where, torch.float32, "cpu", quantize=quantize)
        assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "../model.safetensors"}, r"weight_map has '\.\./model\.safetensors'"),
        ({"a": "/etc/model.safetensors"}, r"weight_map has '/etc/model\.safetensors'"),
        ({"a": "sub/model.safetensors"}, "weight_map has"),
        ({"a": ".."}, "weight_map has"),
        ({"a": "pytorch_model.bin"}, "weight_map has 'pytorch_model.bin'"),
        ({"a": 7}, r"weight_map\.a is 7, not text"),
        ({"a": None}, r"weight_map\.a is missing"),
        ({}, "weight_map is missing or empty"),
        ([], r"weight_map is \[\], not a JSON object"),
        ("model.safetensors", "weight_map is 'model.safetensors', not a JSON object"),
    ],
)
def test_shards_stay_inside_the_folder(small_model, write_folder, tmp_path, weight_map, words):
    folder = write_folder(small_model(), tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(R3LiteError, match=words):
        load_model(folder, torch.float32, "cpu")


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    """The last one won."""
    for name in ("1.safetensors", "2.safetensors"):
        save_file({"a": torch.ones(2)}, tmp_path / name)
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with raises(R3LiteError, "weight-twice", "2.safetensors", "a", "1.safetensors"):
        weights.tensor_places(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_pipes_do_not_hang(small_model, write_folder, tmp_path, name):
    folder = write_folder(small_model(), tmp_path)
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with raises(R3LiteError, "not-a-file", name, "pipe or device"):
        load_model(folder, torch.float32, "cpu")


def change_weights(folder, change):
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(change(tensors), folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("tied", [True, False])
def test_a_fingerprint_is_of_the_numbers_and_not_of_how_they_are_kept(small_model, write_folder, tmp_path, tied):
    model = small_model(**SIZES, tie_word_embeddings=tied).bfloat16()
    folder = write_folder(model, tmp_path / "bf16")
    base_fingerprint = fingerprint(folder)
    assert len(base_fingerprint) == 16
    assert fingerprint(write_folder(model.float(), tmp_path / "fp32")) == base_fingerprint
    (tmp_path / "fp32" / "tokenizer_config.json").write_text("{}")
    assert fingerprint(tmp_path / "fp32") == base_fingerprint
    for dtype in (torch.float32, torch.bfloat16):
        nf4_folder = tmp_path / f"nf4-{dtype}"
        save_nf4(load_model(folder, dtype, "cpu", quantize=True), folder, nf4_folder)
        assert fingerprint(nf4_folder) == base_fingerprint
        save_nf4(load_model(nf4_folder, dtype, "cpu"), nf4_folder, tmp_path / f"copy-{dtype}")
        assert fingerprint(tmp_path / f"copy-{dtype}") == base_fingerprint
    change_weights(tmp_path / "nf4-torch.float32", lambda tensors: tensors)  # without its metadata, as once written
    assert fingerprint(tmp_path / "nf4-torch.float32") is None
    tensors = load_file(folder / "model.safetensors")
    surplus = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    surplus |= {"lm_head.weight": tensors["model.embed_tokens.weight"].float()} if tied else {}
    save_file(tensors | surplus, folder / "model.safetensors")
    assert fingerprint(folder) == base_fingerprint


def test_another_base_has_another_fingerprint(small_model, write_folder, tmp_path):
    folder = write_folder(small_model(), tmp_path / "base")
    merged = load_model(folder, torch.float32, "cpu")
    add_adapter(merged, "a", 2, 4, targets=["v_proj"])
    for parameter in adapter_parameters(merged, "a").values():
        torch.nn.init.normal_(parameter)
    merge_adapter(merged, "a")
    save_merged(merged, folder, tmp_path / "merged")
    variants = [
        write_folder(small_model(seed=1), tmp_path / "seed"),
        write_folder(small_model(), tmp_path / "theta", rope_theta=5.0),
        write_folder(small_model(num_hidden_layers=2), tmp_path / "shallow"),
        tmp_path / "merged",
    ]
    fingerprints = {fingerprint(path) for path in [folder, *variants]}
    assert len(fingerprints) == 5 and None not in fingerprints
