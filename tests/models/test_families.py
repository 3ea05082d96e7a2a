"""Each family of models against transformers and PEFT: logits, gradients, the KV cache, files, and what a config may
ask for."""

import json
from dataclasses import replace

import pytest
import torch

from r3lite.core.errors import R3LiteError
from r3lite.core.grant import Grant, Memory
from r3lite.models import activation_checkpointing
from r3lite.models.causal_lm import CausalLM, LayerKind
from r3lite.models.config_file import FAMILIES, SIZES, read_config
from r3lite.models.gated_delta import DeltaHeads
from r3lite.models.kv_cache import KVCache
from r3lite.models.layer_kinds import FULL
from r3lite.models.lora import adapter_parameters, add_adapter, load_adapter, merge_adapter, save_adapter, set_adapter
from r3lite.models.packing import Pack
from r3lite.models.qwen3_5 import LINEAR
from r3lite.models.rotary import LinearScaling
from r3lite.models.saving import save_merged
from r3lite.models.weights import checkpoint_tensors, layer_linears, load_model
from tests.models.test_causal_lm import cache_error, prefilled, step

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
# Weights of more than the usual size: with small ones attention is nearly a mean, in which a window hardly shows.
SHARP = {"initializer_range": 0.07, "max_position_embeddings": 4096}
MULTIPLIERS = {"embedding_multiplier": 12, "residual_multiplier": 0.22, "attention_multiplier": 0.15,
               "logits_scaling": 3.0}  # fmt: skip
HYBRID = {"model_type": "granitemoehybrid", "num_local_experts": 0, "shared_intermediate_size": 128,
          "position_embedding_type": "rope", "tie_word_embeddings": True} | MULTIPLIERS | SHARP  # fmt: skip
WINDOWS = ["sliding_attention", "full_attention"]
NEW = {
    "granite": {"model_type": "granite", **MULTIPLIERS, **SHARP},
    "granite4": HYBRID,
    "granite4-nope": HYBRID | {"position_embedding_type": None, "intermediate_size": 64},
    "smollm3": {"model_type": "smollm3", "pad_token_id": 0, **SHARP},
    "smollm3-window": {"model_type": "smollm3", "pad_token_id": 0, "use_sliding_window": True, "sliding_window": 90,
                       "no_rope_layers": [0, 1, 1, 0, 1], **SHARP},
    "mistral-window": {"model_type": "mistral", "sliding_window": 77, **SHARP},
    "qwen2-window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 100,
                     "max_window_layers": 1, **SHARP},
    "qwen3-window": {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 33, "head_dim": 32,
                     "layer_types": WINDOWS, **SHARP},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 50, "head_dim": 32, "query_pre_attn_scalar": 150,
               "layer_types": WINDOWS, **SHARP},
    "gemma3-window": {"model_type": "gemma3_text", "sliding_window": 130, "head_dim": 16, "query_pre_attn_scalar": 90,
                      "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                                          "full_attention": {"rope_type": "linear", "factor": 8.0}}, **SHARP},
    "qwen3_5": {"model_type": "qwen3_5_text", "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                "linear_key_head_dim": 16, "linear_value_head_dim": 32, "tie_word_embeddings": True,
                "layer_types": ["linear_attention", "full_attention", "linear_attention"], **SHARP},
    "qwen3_5-untied": {"model_type": "qwen3_5_text", "head_dim": 16, "linear_num_key_heads": 2,
                       "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 32,
                       "full_attention_interval": 2, "tie_word_embeddings": False,
                       "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5,
                                           "mrope_section": [2, 1, 1], "mrope_interleaved": True}, **SHARP},
    "lfm2": {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], **SHARP},
    "lfm2-taps": {"model_type": "lfm2", "layer_types": ["full_attention", "conv"], "conv_L_cache": 5, "norm_eps": 1e-3,
                  "block_multiple_of": 64, "block_ffn_dim_multiplier": 1.1, "tie_word_embeddings": False, **SHARP},
}  # fmt: skip
WINDOWED = [kind for kind in NEW if "window" in kind]
LONG = 2000  # tokens, of models that are small enough for these
NARROW = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4,
          "num_attention_heads": 1, "num_key_value_heads": 1}  # fmt: skip
WIDER = {"vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5,
         "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip


def sizes_of(kind: str, sizes: dict) -> dict:
    """The values of the config.json of a kind; patterns of layers are as long as it has layers."""
    values = sizes | (KINDS | NEW)[kind]
    layers = values["num_hidden_layers"]
    if values["model_type"] == "granitemoehybrid":
        values["layer_types"] = ["full_attention"] * layers
        values["mamba_n_heads"] = 1  # of no layer, but transformers checks it
    for key in ("layer_types", "no_rope_layers"):
        if key in values:
            values[key] = (values[key] * layers)[:layers]
    return values


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    model_folders = {}

    def folder(kind: str, sizes: dict):
        key = kind, sizes["hidden_size"]
        if key not in model_folders:
            torch.manual_seed(0)
            config = transformers.AutoConfig.for_model(**sizes_of(kind, sizes))
            model = transformers.AutoModelForCausalLM.from_config(config).float()
            for parameter in model.parameters():  # norms and biases begin as ones and zeros
                if parameter.dim() == 1:
                    parameter.data.add_(0.3 * torch.randn_like(parameter))
            model_folders[key] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(model_folders[key])
        return model_folders[key]

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


@pytest.mark.parametrize("sizes", [NARROW, WIDER], ids=["narrow", "wider"])
@pytest.mark.parametrize("kind", NEW)
@torch.no_grad()
def test_logits_of_long_rows_are_those_of_transformers_padded_and_packed(folders, kind, sizes):
    """Beyond the window, and where a row goes on from a prefix that it shares, whose keys are in a segment before."""
    folder = folders(kind, sizes)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(sizes["vocab_size"], (2, LONG), generator=generator)
    ids[1, :700] = ids[0, :700]
    length = LONG - 300  # of the second row
    is_token = torch.arange(LONG) < torch.tensor([LONG, length])[:, None]
    model = load_model(folder, torch.float32, "cpu")
    expected = transformers_model(folder)(ids, attention_mask=is_token.long()).logits
    padded = model.logits(model(ids))
    assert (padded - expected)[is_token].abs().max() < 1e-4
    pack = Pack.of([ids[0].tolist(), ids[1, :length].tolist()], torch.device("cpu"))
    assert pack.tokens.shape[1] < LONG + length
    packed = model.logits(model(pack.tokens, pack))[0]
    for row, places in enumerate(pack.places):
        assert (packed[places] - expected[row, : len(places)]).abs().max() < 1e-4


def transformers_model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", WINDOWED)
@torch.no_grad()
def test_a_window_of_one_token_more_is_seen_in_the_logits(folders, kind):
    """Else the tests of windows here could not fail."""
    model = load_model(folders(kind, SMALL), torch.float32, "cpu")
    kinds = []
    for layer in model.config.layer_kinds:
        kinds.append(replace(layer, window=layer.window and layer.window + 1))
    widened = CausalLM(replace(model.config, layer_kinds=tuple(kinds)))
    widened.load_state_dict(model.state_dict())
    ids = torch.arange(200)[None]
    assert (model.logits(model(ids)) - widened.logits(widened(ids))).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["qwen3", "llama3", "mistral", *NEW])
def test_cached_equals_uncached(folders, kind):
    """Two rows begin to leave keys out of the window while they decode, one as a retrieval of 100 tokens is read."""
    model = load_model(folders(kind, SMALL), torch.float32, "cpu")
    assert cache_error(model, prompts=(70, 4, 150), decoded=12, observation=100) < 1e-4


@pytest.mark.parametrize("kind", NEW)
@torch.no_grad()
def test_64_greedy_tokens_are_those_of_transformers(folders, kind):
    folder = folders(kind, SMALL)
    model = load_model(folder, torch.float32, "cpu")
    theirs = transformers_model(folder)
    theirs.generation_config.eos_token_id = None
    prompt = torch.randint(SMALL["vocab_size"], (1, 60), generator=torch.Generator().manual_seed(2))
    expected = theirs.generate(prompt, max_new_tokens=64, do_sample=False, pad_token_id=0)[0, 60:].tolist()
    cache = KVCache.of(model, 1)
    (hidden,) = prefilled(model, cache, prompt)
    generated = [model.logits(hidden[-1]).argmax().item()]
    while len(generated) < 64:
        hidden = step(model, cache, torch.tensor([[generated[-1]]]))
        generated.append(model.logits(hidden[0, -1]).argmax().item())
    assert generated == expected


@pytest.mark.parametrize("kind", NEW)
@torch.no_grad()
def test_an_exported_folder_and_adapters_of_peft_give_the_same_logits(folders, tmp_path, kind):
    peft = pytest.importorskip("peft")
    folder = folders(kind, SMALL)
    model = load_model(folder, torch.float32, "cpu")
    add_adapter(model, "a", 4, 8.0)
    names = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in adapter_parameters(model, "a")})
    theirs = peft.get_peft_model(
        transformers_model(folder),
        peft.LoraConfig(r=4, lora_alpha=8, target_modules=names, init_lora_weights=False),
    )
    theirs.save_pretrained(tmp_path / "adapter")
    load_adapter(model, "b", tmp_path / "adapter", trainable=False)
    set_adapter(model, "b")
    ids = torch.arange(7, 147)[None]
    expected = theirs(ids).logits
    assert (model.logits(model(ids)) - expected).abs().max() < 1e-4
    merge_adapter(model, "b")
    save_merged(model, folder, tmp_path / "merged")
    assert (transformers_model(tmp_path / "merged")(ids).logits - expected).abs().max() < 1e-4
    merged = load_model(tmp_path / "merged", torch.float32, "cpu")
    assert (merged.logits(merged(ids)) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("recompute", [0, 2], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", ["qwen3", "llama3", *NEW])
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
    ids = torch.arange(7, 147)[None]  # beyond the windows
    model.logits(model(ids)).square().mean().backward()
    theirs(ids).logits.square().mean().backward()
    expected = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    gradients = {name: p.grad for name, p in adapter_parameters(model, "a").items()}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).abs().max() / expected[name].abs().max() < 1e-4, name


def test_layers_of_two_kinds_may_be_streamed(folders):
    """Each has its tensors in the place of layers of other sizes."""
    hidden = []
    for streamed in (False, True):
        model = load_model(folders("qwen3_5", SMALL), torch.float32, "cpu", streamed=streamed)
        if streamed:
            model.layer_stream.attach(model)
        activation_checkpointing.enable(model, Grant(Memory(recompute_layers=2)))
        hidden.append(model(torch.arange(7, 47)[None]))
    assert torch.equal(*hidden)


@pytest.mark.parametrize("kind", ["qwen3", "llama", *NEW])
@torch.no_grad()
def test_nf4_is_the_dequantized_model(folders, kind):
    """Llama's layers have no biases, and Qwen3's norms of heads stay dense."""
    packed = load_model(folders(kind, SMALL), torch.float32, "cpu", quantize=True)
    dense = load_model(folders(kind, SMALL), torch.float32, "cpu")
    assert layer_linears(dense) and not layer_linears(packed)
    for name, tensor in checkpoint_tensors(packed).items():
        dense.get_parameter(name).copy_(tensor)
    ids = torch.arange(7, 47)[None]
    assert (packed(ids) - dense(ids)).abs().max() < 1e-5


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - {"granitemoehybrid"}))
def test_a_family_s_defaults_are_those_of_transformers(tmp_path, model_type):
    """What a config.json does not say, transformers fills in by the family."""
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
             "num_attention_heads": 4}  # fmt: skip
    theirs = transformers.AutoConfig.for_model(model_type, **sizes)
    sizes |= {} if model_type == "llama" else {"num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **sizes}))
    ours = read_config(tmp_path)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 64 // 4)
    assert ours.rms_norm_eps == (theirs.norm_eps if model_type == "lfm2" else theirs.rms_norm_eps)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    ropes = theirs.rope_parameters
    assert ours.rope_theta == ropes.get("full_attention", ropes)["rope_theta"]
    assert ours.num_key_value_heads == (4 if model_type == "llama" else 2)


@pytest.mark.parametrize(
    "values",
    [
        {},  # all layers attend, and feed-forward networks are two thirds as wide as the file says
        {"full_attn_idxs": [1], "block_ff_dim": 6656, "tie_embedding": False, "conv_L_cache": 4, "theta": 7.0},
        {"layer_types": ["full_attention", "conv"], "block_ffn_dim_multiplier": 2},
        {"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 64, "norm_eps": 1e-3},
        {"block_auto_adjust_ff_dim": False, "rope_theta": 5e5, "full_attn_idxs": []},
    ],
)
def test_what_a_config_of_lfm2_says_is_what_transformers_reads(tmp_path, values):
    values = SMALL | values
    theirs = transformers.Lfm2Config(**values)
    with torch.device("meta"):
        feed_forward = transformers.Lfm2ForCausalLM(theirs).model.layers[0].feed_forward
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lfm2"} | values))
    ours = read_config(tmp_path)
    taps = [theirs.conv_L_cache if name == "conv" else 0 for name in theirs.layer_types]
    assert [ours.kind(layer).taps for layer in range(2)] == taps
    assert ours.intermediate_size == feed_forward.w1.out_features
    assert (ours.tie_word_embeddings, ours.rms_norm_eps) == (theirs.tie_word_embeddings, theirs.norm_eps)
    ropes = {kind.rope.theta for kind in ours.layer_kinds if kind.rope}
    assert ropes <= {theirs.rope_parameters["rope_theta"]} and bool(ropes) == (0 in taps)


def test_defaults_of_windows_and_patterns_are_those_of_transformers(tmp_path):
    def ours(**values):
        (tmp_path / "config.json").write_text(json.dumps({**SMALL, "num_hidden_layers": 36, **values}))
        return read_config(tmp_path)

    def windows(**values):
        config = ours(**values)
        return [config.kind(layer).window for layer in range(36)]

    for model_type, extra in (
        ("mistral", {}),  # a config.json without the key means a window of 4,096
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": True}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None}),  # null means that there is no window
        ("qwen2", {"sliding_window": 10}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 0}),
    ):
        theirs = transformers.AutoConfig.for_model(model_type, **SMALL | {"num_hidden_layers": 36} | extra)
        types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 36
        expected = [theirs.sliding_window if name == "sliding_attention" else None for name in types]
        assert windows(model_type=model_type, **extra) == expected
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 36}  # the larger ones say no more
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3_text", **sizes}))
    gemma = read_config(tmp_path)
    theirs = transformers.AutoConfig.for_model("gemma3_text", **sizes)
    for name in ("vocab_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "head_dim"):
        assert getattr(gemma, name) == getattr(theirs, name)
    assert gemma.attention_scale == theirs.query_pre_attn_scalar**-0.5
    for layer, name in enumerate(theirs.layer_types):
        kind = gemma.kind(layer)
        assert kind.window == (theirs.sliding_window if name == "sliding_attention" else None)
        assert kind.rope.theta == theirs.rope_parameters[name]["rope_theta"]
    for scaling, factor in (
        ({"rope_type": "linear", "factor": 8.0}, 8.0),
        ({"type": "linear", "factor": 8.0}, 8.0),
        ({"rope_type": "default", "factor": 8.0}, None),  # transformers does not read this factor
        ({"factor": 8.0}, None),
    ):
        for ropes in ({"rope_scaling": scaling}, {"rope_parameters": {"full_attention": scaling}}):
            config = ours(model_type="gemma3_text", **ropes)
            expected = LinearScaling(factor) if factor else None
            assert [config.kind(layer).rope.scaling for layer in (4, 5)] == [None, expected]
    qwen = ours(model_type="qwen3_5_text", num_hidden_layers=36)
    theirs = transformers.AutoConfig.for_model("qwen3_5_text", num_hidden_layers=36)
    names = [FULL if qwen.kind(layer).delta is None else LINEAR for layer in range(36)]
    assert names == theirs.layer_types
    assert qwen.kind(3).rope.dims == theirs.head_dim * theirs.rope_parameters["partial_rotary_factor"]
    assert qwen.kind(0) == LayerKind(
        rope=None,
        taps=theirs.linear_conv_kernel_dim,
        delta=DeltaHeads(
            theirs.linear_num_key_heads,
            theirs.linear_num_value_heads,
            theirs.linear_key_head_dim,
            theirs.linear_value_head_dim,
        ),
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_text"}))
    assert {name: getattr(read_config(tmp_path), name) for name in SIZES} == {
        name: getattr(transformers.AutoConfig.for_model("qwen3_5_text"), name) for name in SIZES
    }
    smollm3 = ours(model_type="smollm3")
    theirs = transformers.AutoConfig.for_model("smollm3", num_hidden_layers=36)
    assert [int(smollm3.kind(layer).rope is not None) for layer in range(36)] == theirs.no_rope_layers
    hybrid = ours(model_type="granitemoehybrid", layers_block_type=["attention"] * 36, num_local_experts=0)
    theirs = transformers.AutoConfig.for_model("granitemoehybrid")
    assert hybrid.intermediate_size == theirs.shared_intermediate_size
    assert hybrid.kind(0).rope is None and theirs.position_embedding_type is None
    assert hybrid.attention_scale == theirs.attention_multiplier


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma3"}, "model_type is 'gemma3'"),
        ({"model_type": "qwen3_moe"}, "did you mean qwen3"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias is true"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias is true"),
        ({"model_type": "llama", "rope_interleaved": True}, "rope_interleaved is true"),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (
            {"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            "partial_rotary_factor is 0.25",
        ),
        ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}}, "type 'linear'"),
        ({"model_type": "llama", "rope_parameters": LLAMA3 | {"factor": None}}, "rope_parameters.factor is missing"),
        (
            {"model_type": "llama", "rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}},
            "low_freq_factor must be less than",
        ),
        ({"model_type": "llama", "use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "mistral", "sliding_window": 9, "layer_types": WINDOWS}, "layer_types is set beside"),
        ({"model_type": "qwen3", "layer_types": WINDOWS}, "set no window"),
        ({"model_type": "qwen3", "layer_types": WINDOWS * 2}, "layer_types has 4 layers"),
        ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 2}, "layer_types has 'chunked_attention'"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers is [1]"),
        ({"model_type": "granite", "residual_multiplier": 0}, "residual_multiplier is 0"),
        ({"model_type": "gemma3_text", "hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping is 30"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "type 'yarn'"),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 8.0}, "sliding_attention": {}},
            },
            "rope_type of full_attention is 'yarn'",
        ),
        ({"model_type": "lfm2", "conv_bias": True}, "conv_bias is true"),
        ({"model_type": "lfm2", "conv_L_cache": 1}, "conv_L_cache is 1"),
        ({"model_type": "lfm2", "layer_types": ["conv"]}, "layer_types has 1 layers"),
        ({"model_type": "lfm2", "layer_types": ["conv", "mamba"]}, "layer_types has 'mamba'"),
        ({"model_type": "lfm2", "layer_types": ["conv", "sliding_attention"]}, "sliding-window attention is on"),
        ({"model_type": "lfm2_moe"}, "model_type is 'lfm2_moe' (did you mean lfm2?)"),
        ({"model_type": "granitemoehybrid"}, "layer_types has 'mamba'"),
        ({"model_type": "granitemoehybrid", "layer_types": ["full_attention"] * 2}, "num_local_experts is 8"),
        ({"model_type": "qwen3_5_moe"}, "model_type is 'qwen3_5_moe'"),
        ({"model_type": "qwen3_5_text", "attn_output_gate": False}, "attn_output_gate is false"),
        ({"model_type": "qwen3_5_text", "layer_types": ["conv", FULL]}, "layer_types has 'conv'"),
        ({"model_type": "qwen3_5_text", "layer_types": [FULL]}, "layer_types has 1 layers"),
        ({"model_type": "qwen3_5_text", "linear_num_key_heads": 5}, "linear_num_value_heads 32 is no multiple"),
        (
            {"model_type": "qwen3_5_text", "partial_rotary_factor": 0.02},
            "partial_rotary_factor 0.02 rotates 5 of 256 numbers",
        ),
        ({"model_type": "qwen3_5_text", "rope_parameters": LLAMA3}, "type 'llama3'"),
        ({"model_type": "qwen3", "head_dim": 31}, "head_dim is 31"),
        ({"model_type": "llama", "num_attention_heads": 3}, "do not divide"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, changes, named):
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **changes}))
    with pytest.raises(R3LiteError) as error:
        read_config(tmp_path)
    assert named in str(error.value)
    assert error.value.code in ("model-config-unsupported", "model-type-unsupported", "bad-record")
