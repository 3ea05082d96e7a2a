"""Model folders: spellings, shards, dtypes, what is refused and how it is named, merged checkpoints."""

import json
import os
import subprocess
import sys
import weakref

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from r3lite.core.errors import R3LiteError
from r3lite.devices.live_tensors import LiveTensors
from r3lite.models import nf4, tensor_files, weights
from r3lite.models.config_file import read_config
from r3lite.models.lora import adapter_parameters, add_adapter, use_adapter
from r3lite.models.saving import save_merged, save_nf4
from r3lite.models.weights import fingerprint, load_model, model_config, resolve_folder
from tests.errors import raises, shows


def shard(folder):
    """Splits model.safetensors of a folder in two, as large checkpoints are."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, where = sorted(tensors), {}
    for i, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{i}-of-00002.safetensors"
        save_file({n: tensors[n] for n in part}, folder / file)
        where |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_both_spellings_give_the_same_config(small_model, write_folder, tmp_path):
    model = small_model(rope_theta=500_000.0)
    four = write_folder(model, tmp_path / "4")
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    new = {"torch_dtype": None, "dtype": "float32", "rope_theta": None, "rope_parameters": rope}
    layers = ["full_attention"] * 3
    five = write_folder(model, tmp_path / "5", **new, layer_types=layers, sliding_window=None)
    assert read_config(four) == read_config(five) == model.config


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_that_transformers_writes(tmp_path, tied):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 12_345.0}
    config = transformers.Qwen2Config(**sizes, **heads, tie_word_embeddings=tied)
    theirs = transformers.Qwen2ForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    ours, ids = load_model(tmp_path, torch.float32, "cpu"), torch.arange(40)[None]
    assert ours.config.rope_theta == theirs.config.rope_parameters["rope_theta"]
    assert (ours.logits(ours(ids)) - theirs(ids).logits).abs().max() <= 1e-4


def test_shards_equal_one_file(small_model, write_folder, tmp_path):
    model = small_model(tie_word_embeddings=False)
    folder = write_folder(model, tmp_path)
    shard(folder)
    loaded = load_model(folder, torch.float32, "cpu")
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.bfloat16])
def test_dtype_decides_and_everything_is_frozen(small_model, write_folder, tmp_path, stored, wanted):
    folder = write_folder(small_model().to(stored), tmp_path)
    model = load_model(folder, wanted, "cpu")
    assert {p.dtype for p in model.parameters()} == {wanted}
    assert not any(p.requires_grad for p in model.parameters())
    assert not any(t.is_meta for t in model.state_dict().values())


def add_head(folder, head):
    """Writes `head` of the embedding beside it, and what old exporters wrote."""
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = head(tensors["model.embed_tokens.weight"].clone())
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_head_that_equals_a_tied_embedding_is_the_embedding(small_model, write_folder, tmp_path):
    folder = write_folder(small_model(), tmp_path)
    fingerprint_before = fingerprint(folder)
    add_head(folder, torch.Tensor.double)  # in another type
    model = load_model(folder, torch.float32, "cpu")
    assert model.head_weight is model.model.embed_tokens.weight
    assert model_config(folder).tie_word_embeddings and fingerprint(folder) == fingerprint_before


def test_a_head_that_differs_from_a_tied_embedding_is_used(small_model, write_folder, tmp_path, monkeypatch):
    """It was dropped, and transformers computes with it."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(weights, "COMPARED_ROWS", 50)
    folder = write_folder(small_model(intermediate_size=128), tmp_path / "source")
    fingerprint_before = fingerprint(folder)

    def last_row_differs(embedding):
        embedding[-1] += 1
        return embedding

    add_head(folder, last_row_differs)
    ids = torch.arange(20)[None]
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
    model = load_model(folder, torch.float32, "cpu")
    assert (model.logits(model(ids)) - expected).abs().max() < 1e-4
    assert not model.config.tie_word_embeddings and fingerprint(folder) != fingerprint_before
    save_merged(model, folder, tmp_path / "merged")
    save_nf4(load_model(folder, torch.float32, "cpu", quantize=True), folder, tmp_path / "nf4")
    for exported in (tmp_path / "merged", tmp_path / "nf4"):
        assert not read_config(exported).tie_word_embeddings and fingerprint(exported) == fingerprint(folder)
        assert torch.equal(load_model(exported, torch.float32, "cpu").head_weight, model.head_weight)
    (expected,) = expected.unbind()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert (merged(ids).logits[0] - expected).abs().max() < 1e-4


def test_loading_holds_one_tensor_beside_the_weights(small_model, write_folder, tmp_path, monkeypatch):
    model = small_model(hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    folder = write_folder(model, tmp_path)
    sizes = [4 * p.numel() for p in model.parameters()]
    del model
    alive = []  # tensors read from the file that still exist, sampled whenever one is read
    with safe_open(folder / "model.safetensors", "pt") as file:
        read = weakref.WeakSet()

        class Watched:
            keys = file.keys
            __enter__ = lambda self: self  # noqa: E731
            __exit__ = lambda self, *exception: None  # noqa: E731

            def get_tensor(self, name):
                tensor = file.get_tensor(name)
                read.add(tensor)
                alive.append(len(read))
                return tensor

        monkeypatch.setattr(tensor_files, "safe_open", lambda *arguments, **options: Watched())
        with LiveTensors() as memory:
            loaded = load_model(folder, torch.float32, "cpu")
    assert len(alive) == len(sizes) and max(alive) == 1
    assert sum(sizes) <= memory.peak <= sum(sizes) + 2 * max(sizes)
    assert loaded.head_weight.untyped_storage().nbytes() == 4 * loaded.head_weight.numel()


def test_quantized_loading_holds_one_tensor_beside_the_weights(small_model, write_folder, tmp_path, monkeypatch):
    """The embedding is the largest by far; it must be read while the rest is not there yet."""
    monkeypatch.setattr(nf4, "TILE", 2**12)
    model = small_model(vocab_size=2000, hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    folder = write_folder(model.bfloat16(), tmp_path)
    del model
    with LiveTensors() as memory:
        loaded = load_model(folder, torch.bfloat16, "cpu", quantize=True)
    result = sum(t.numel() * t.element_size() for t in loaded.state_dict().values())
    assert result <= memory.peak <= result + 2 * 512 * 256 + 32 * nf4.TILE  # one linear, a tile's temporaries


def test_loaded_weights_do_not_hang_on_the_file(small_model, write_folder, tmp_path):
    """A view of the mapped file would change, or crash the process, when the file is written again."""
    folder = write_folder(small_model(), tmp_path)
    model = load_model(folder, torch.float32, "cpu")
    norm_before = model.model.norm.weight.clone()
    size = (folder / "model.safetensors").stat().st_size
    (folder / "model.safetensors").write_bytes(b"\0" * size)
    assert torch.equal(model.model.norm.weight, norm_before)


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({Q: None}, f"missing tensor {Q}"),
        (
            {"model.layers.3.mlp.up_proj.weight": torch.zeros(96, 64)},
            "unexpected tensor model.layers.3.mlp.up_proj.weight",
        ),
        ({"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}, "unexpected tensor .*o_proj.bias"),
        ({Q: torch.zeros(64, 63)}, rf"{Q} has shape \[64, 63\], but config.json needs \[64, 64\]"),
        ({Q: torch.zeros(64, 64, dtype=torch.int8)}, f"{Q} is of type torch.int8"),
    ],
)
def test_wrong_tensors_are_named(small_model, write_folder, tmp_path, change, message):
    folder = write_folder(small_model(), tmp_path)
    tensors = load_file(folder / "model.safetensors") | change
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors")
    with pytest.raises(R3LiteError, match=message):
        load_model(folder, torch.float32, "cpu")


def test_an_untied_model_needs_its_head(small_model, write_folder, tmp_path):
    with raises(R3LiteError, "weight-names", "missing", "lm_head"):
        load_model(write_folder(small_model(), tmp_path, tie_word_embeddings=False), torch.float32, "cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma"}, "model_type is 'gemma'"),
        ({"model_type": None}, "model_type is missing"),
        ({"model_type": "llama", "use_sliding_window": True}, "sliding-window attention is on"),
        (
            {"model_type": "llama", "layer_types": ["full_attention", "sliding_attention"]},
            "sliding-window attention is on",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope scaling of type 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope scaling of type 'linear'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is '3'"),
        ({"num_key_value_heads": 3}, "do not divide"),
    ],
)
def test_unsupported_configs_are_refused(small_model, write_folder, tmp_path, change, message):
    folder = write_folder(small_model(), tmp_path, **change)
    with pytest.raises(R3LiteError, match=message):
        read_config(folder)


def test_harmless_keys_are_no_obstacle(small_model, write_folder, tmp_path):
    harmless = {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21}
    write_folder(small_model(), tmp_path, **harmless, rope_scaling={"type": "default"})
    assert read_config(tmp_path).num_hidden_layers == 3


def test_pickled_broken_and_absent_files_are_explained(small_model, write_folder, tmp_path):
    folder = write_folder(small_model(), tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with raises(R3LiteError, "tensors-unreadable", "model.safetensors"):
        load_model(folder, torch.float32, "cpu")
    file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with raises(R3LiteError, "weights-absent", "only pickled weights (pytorch_model.bin"):
        load_model(folder, torch.float32, "cpu")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with raises(R3LiteError, "file-unreadable", "gone.safetensors"):
        load_model(folder, torch.float32, "cpu")
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(R3LiteError, match="weight_map is missing"):
        load_model(folder, torch.float32, "cpu")
    (folder / "config.json").write_text("[]")
    with pytest.raises(R3LiteError, match="not a JSON object"):
        read_config(folder)


def test_names_of_models(tmp_path, monkeypatch):
    assert resolve_folder(str(tmp_path)) == tmp_path
    assert resolve_folder("tiny").parts[-2:] == ("checkpoints", "tiny")
    with raises(R3LiteError, "model-absent"):
        resolve_folder(str(tmp_path / "gone"))
    with raises(R3LiteError, "model-absent", "nosuch"):
        resolve_folder("nosuch")


def test_offline_says_what_to_put_where(tmp_path):
    code = "from r3lite.models.weights import resolve_folder; resolve_folder('Qwen/Qwen2.5-0.5B-Instruct')"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    root = str(weights.shipped("prompts").parent)
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True)
    assert shows(done.stderr, "model-absent", "Qwen/Qwen2.5-0.5B-Instruct", "--model FOLDER")


def test_the_bare_base_is_untouched_by_an_adapter(small_model):
    model = small_model()
    ids = torch.arange(9)[None]
    base_states = model(ids)
    add_adapter(model, "policy", 4, 8)
    for parameter in adapter_parameters(model, "policy").values():
        torch.nn.init.normal_(parameter)
    assert torch.equal(model(ids), base_states)
    with use_adapter(model, "policy"):
        assert not torch.allclose(model(ids), base_states)
    assert torch.equal(model(ids), base_states)


def test_loading_imports_no_compiler():
    """PyTorch draws the values of an embedding on the meta device by its compiler, whose import takes two seconds."""
    code = "import sys, torch; from r3lite.models import bert, weights\n"
    code += "weights.load_model(weights.resolve_folder('tiny'), torch.float32, 'cpu')\n"
    code += "with torch.device('meta'): bert.Bert(bert.BertConfig(9, 8, 1, 2, 8))\n"
    code += "assert 'torch._dynamo' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
