"""Each family of models against transformers: logits, gradients' path, the KV cache, and what a config may ask for."""

import json

import pytest
import torch

from r3lite.core.errors import R3LiteError
from r3lite.core.grant import Grant, Memory
from r3lite.models import activation_checkpointing
from r3lite.models.config_file import FAMILIES, read_config
from r3lite.models.lora import adapter_parameters, add_adapter, save_adapter, set_adapter
from r3lite.models.weights import checkpoint_tensors, load_model
from tests.models.test_causal_lm import cache_error

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}  # fmt: skip
LARGE = {"vocab_size": 1000, "hidden_size": 192, "intermediate_size": 352, "num_hidden_layers": 5,
         "num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 512}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64, "rope_theta": 500000.0}  # fmt: skip
PLAIN = {"rope_theta": 100000.0, "rope_type": "default"}
KINDS = {
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-untied": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "qwen3-untied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False},
    "llama": {"model_type": "llama", "rms_norm_eps": 1e-5},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, "rope_parameters": PLAIN},
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 24},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 40},
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(kind: str, sizes: dict):
        key = kind, sizes["hidden_size"]
        if key not in made:
            torch.manual_seed(0)
            config = transformers.AutoConfig.for_model(**{**sizes, **KINDS[kind]})
            model = transformers.AutoModelForCausalLM.from_config(config).float()
            for parameter in model.parameters():  # norms and biases begin as ones and zeros
                if parameter.dim() == 1:
                    parameter.data.add_(0.3 * torch.randn_like(parameter))
            made[key] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(made[key])
        return made[key]

    return folder


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_are_those_of_transformers(folders, kind, sizes):
    folder = folders(kind, sizes)
    ids = torch.randint(sizes["vocab_size"], (2, 300))
    model = load_model(folder, torch.float32, "cpu")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits
    assert (model.logits(model(ids)) - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["qwen3", "llama3", "mistral"])
def test_cached_equals_uncached(folders, kind):
    model = load_model(folders(kind, SMALL), torch.float32, "cpu")
    assert cache_error(model, prompts=(9, 4, 21), decoded=6, observation=40) < 1e-4


@pytest.mark.parametrize("recompute", [0, 2], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", ["qwen3", "llama3"])
def test_gradients_of_an_adapter_are_those_of_peft(folders, tmp_path, kind, recompute):
    peft = pytest.importorskip("peft")
    model = load_model(folders(kind, SMALL), torch.float32, "cpu")
    add_adapter(model, "a", 4, 8.0)
    for parameter in adapter_parameters(model, "a").values():
        parameter.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(1))
    save_adapter(model, "a", tmp_path / "adapter", str(folders(kind, SMALL)))
    activation_checkpointing.enable(model, Grant(Memory(recompute_layers=recompute)))
    set_adapter(model, "a")
    base = transformers.AutoModelForCausalLM.from_pretrained(folders(kind, SMALL), dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    ids = torch.arange(7, 47)[None]
    model.logits(model(ids)).square().mean().backward()
    theirs(ids).logits.square().mean().backward()
    expected = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    found = {name: p.grad for name, p in adapter_parameters(model, "a").items()}
    assert found.keys() == expected.keys()
    assert max((found[name] - expected[name]).abs().max() / expected[name].abs().max() for name in found) < 1e-4


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@torch.no_grad()
def test_nf4_is_the_dequantized_model(folders, kind):
    """Llama's layers have no biases, and Qwen3's norms of heads stay dense."""
    packed = load_model(folders(kind, SMALL), torch.float32, "cpu", quantize=True)
    dense = load_model(folders(kind, SMALL), torch.float32, "cpu")
    for name, tensor in checkpoint_tensors(packed).items():
        dense.get_parameter(name).copy_(tensor)
    ids = torch.arange(7, 47)[None]
    assert (packed(ids) - dense(ids)).abs().max() < 1e-5


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_s_defaults_are_those_of_transformers(tmp_path, model_type):
    """What a config.json does not say, transformers fills in by the family."""
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
             "num_attention_heads": 4}  # fmt: skip
    theirs = transformers.AutoConfig.for_model(model_type, **sizes)
    sizes |= {} if model_type == "llama" else {"num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **sizes}))
    ours = read_config(tmp_path)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 64 // 4)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.num_key_value_heads == (4 if model_type == "llama" else 2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma3"}, "model_type is 'gemma3'"),
        ({"model_type": "qwen3_moe"}, "did you mean qwen3"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias is true"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias is true"),
        ({"model_type": "llama", "rope_interleaved": True}, "rope_interleaved is true"),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}}, "type 'linear'"),
        ({"model_type": "llama", "rope_parameters": LLAMA3 | {"factor": None}}, "rope_parameters.factor is missing"),
        (
            {"model_type": "llama", "rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}},
            "low_freq_factor must be less than",
        ),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window"),
        ({"model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "qwen3", "head_dim": 31}, "head_dim is 31"),
        ({"model_type": "llama", "num_attention_heads": 3}, "do not divide"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, changes, named):
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **changes}))
    with pytest.raises(R3LiteError) as error:
        read_config(tmp_path)
    assert named in str(error.value)
