"""GGUF files as models: numbers, names and tokens are those of the folder they were made of, and others are refused."""

import json
import re
import shutil
import struct

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend

from r3lite import export, sft
from r3lite.assembly.policy import check_lengths
from r3lite.core.errors import R3LiteError
from r3lite.core.files import folder_fingerprint, write_json
from r3lite.models import gguf_files, gguf_folder, gguf_tokenizer, lora
from r3lite.models.config_file import read_config
from r3lite.models.gguf_files import Header, gguf_name, published_name
from r3lite.models.tensor_files import opened
from r3lite.models.weights import checkpoint_tensors, fingerprint, load_model, resolve_folder
from r3lite.protocols.tokenizer import Tokenizer
from tests.errors import raises
from tests.gguf_models import KINDS, TEXTS, write_gguf, write_model, write_tokenizer

gguf = pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("transformers")
Q = gguf.GGMLQuantizationType
WRITTEN_ONLY = {"granite", "lfm2", "qwen35", "smollm3"}  # whose files are not read as models
# What their files say of a config, beside what every file does.
KEYS = {
    "granite": lambda config: {
        "embedding_scale": 30.0,  # 9 / 0.3: the residual multiplier is in it
        "residual_scale": 1.0,
        "attention.scale": 0.2,
        "logit_scale": 7.0,
    },
    "lfm2": lambda config: {
        "attention.head_count_kv": [0, 2],
        "feed_forward_length": config.intermediate_size,
    },
    "smollm3": lambda config: {"rope.dimension_count": config.head_dim},
    "qwen35": lambda config: {
        "attention.head_count_kv": 2,
        "attention.key_length": 32,
        "rope.dimension_count": 8,
        "rope.dimension_sections": [11, 11, 10, 0],
        "full_attention_interval": 2,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 6,
        "ssm.inner_size": 96,
    },
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache") / "r3lite"
    monkeypatch.setattr(gguf_folder, "CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder and its GGUF file of each kind, made once."""
    exports = {}

    def make(kind: str, weights: str = "fp32"):
        if (kind, weights) not in exports:
            parent = tmp_path_factory.mktemp(kind)
            splits = {"llama": "smollm", "llama3": "smollm", "gemma3": "gemma", "gemma3-linear": "gemma"}
            split = (splits | {"qwen35": "qwen35"}).get(kind, "qwen2")
            source = write_model(parent / "source", kind, split)
            exports[kind, weights] = source, write_gguf(source, parent / "out" / "model.gguf", weights)
        return exports[kind, weights]

    return make


def rewrite(path, out, changes=None, tensors=None, architecture=None):
    """A copy of a file with other keys (None: without it) and other tensors."""
    reader = gguf.GGUFReader(path)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    writer = gguf.GGUFWriter(out, architecture or fields["general.architecture"].contents())
    for name, value in (changes or {}).items():
        fields.pop(name, None)
        if value is not None:
            kind = gguf.GGUFValueType.get_type(value) if not isinstance(value, float) else gguf.GGUFValueType.FLOAT32
            item_kind = None
            if isinstance(value, list):
                item_kind = gguf.GGUFValueType.FLOAT32 if isinstance(value[0], float) else gguf.GGUFValueType.INT32
            writer.add_key_value(name, value, kind, item_kind)
    for name, field in fields.items():
        if name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None)
    typed = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in reader.tensors} | (tensors or {})
    for name, typed_tensor in typed.items():
        if typed_tensor is not None:
            writer.add_tensor(name, typed_tensor[0], raw_dtype=typed_tensor[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - WRITTEN_ONLY))
@torch.no_grad()
def test_a_file_is_the_folder_it_was_exported_of(models, kind):
    source, path = models(kind)
    folder = resolve_folder(str(path))
    assert resolve_folder(str(path)) == folder  # from the cache
    ours = read_config(folder)
    theirs = read_config(source)
    assert ours == theirs
    source_model = load_model(source, torch.float32, "cpu")
    file_model = load_model(folder, torch.float32, "cpu")
    for name, tensor in checkpoint_tensors(source_model).items():
        assert torch.equal(checkpoint_tensors(file_model)[name], tensor), name
    same_family = KINDS[kind]["model_type"] != "mistral"
    assert fingerprint(folder) == fingerprint(source) and same_family == (
        json.loads((folder / "config.json").read_text())["model_type"] == KINDS[kind]["model_type"]
    )


@pytest.mark.parametrize("kind", sorted(WRITTEN_ONLY))
@torch.no_grad()
def test_a_file_of_some_families_is_written_whole_and_not_read_as_a_model(models, kind):
    from r3lite.exporting.gguf import fill

    source, path = models(kind)
    model = load_model(source, torch.float32, "cpu")
    source_tensors = {name: tensor.clone() for name, tensor in checkpoint_tensors(model).items()}
    for tensor in checkpoint_tensors(model).values():
        tensor.zero_()
    header = Header(path)
    fill(model, header)
    for name, tensor in checkpoint_tensors(model).items():
        rounding = 1e-6 if name.endswith("A_log") else 0.0  # of which the file has the exponential
        torch.testing.assert_close(tensor, source_tensors[name], rtol=0, atol=rounding)
        assert tensor.any(), name
    for key, value in KEYS[kind](model.config).items():
        assert header.keys[f"{kind}.{key}"] == pytest.approx(value)
    with raises(R3LiteError, "gguf-architecture", f"'{kind}'"):
        resolve_folder(str(path))


def test_value_heads_and_decays_of_qwen35_are_as_in_llama_cpp(models):
    """There key heads take turns: of two that serve three value heads each, 0 serves the heads 0, 2 and 4 of a file."""
    source, path = models("qwen35")
    layer = "model.layers.0.linear_attn."
    tensors = checkpoint_tensors(load_model(source, torch.float32, "cpu"))
    published = {name.removeprefix(layer): tensor for name, tensor in tensors.items() if name.startswith(layer)}
    stored = {tensor.name.removeprefix("blk.0."): tensor for tensor in gguf.GGUFReader(path).tensors}
    heads = [0, 3, 1, 4, 2, 5]  # the published one in the place of each
    rows = np.concatenate([np.arange(16 * head, 16 * (head + 1)) for head in heads])
    with_keys = np.concatenate((np.arange(64), 64 + rows))  # queries and keys: two heads of 16 each
    expected = {
        "attn_qkv.weight": published["in_proj_qkv.weight"][with_keys],
        "attn_gate.weight": published["in_proj_z.weight"][rows],
        "ssm_alpha.weight": published["in_proj_a.weight"][heads],
        "ssm_beta.weight": published["in_proj_b.weight"][heads],
        "ssm_conv1d.weight": published["conv1d.weight"][with_keys, 0],
        "ssm_dt.bias": published["dt_bias"][heads],
        "ssm_a": -published["A_log"][heads].exp(),
        "ssm_norm.weight": published["norm.weight"],
        "ssm_out.weight": published["out_proj.weight"][:, rows],
        "attn_norm.weight": tensors["model.layers.0.input_layernorm.weight"] + 1,
        "post_attention_norm.weight": tensors["model.layers.0.post_attention_layernorm.weight"] + 1,
    }
    for name, tensor in expected.items():
        assert stored[name].tensor_type == Q.F32
        torch.testing.assert_close(torch.tensor(stored[name].data), tensor, rtol=1e-6, atol=0)
    feed_forward = {f"ffn_{name}.weight" for name in ("gate", "up", "down")}
    assert {
        name for name in stored if not name.startswith(("blk", "token", "output"))
    } == expected.keys() | feed_forward


def test_a_qwen35_that_llama_cpp_would_compute_otherwise_is_not_written(tmp_path):
    source = write_model(tmp_path / "source", "qwen35", "qwen35", num_hidden_layers=2, linear_value_head_dim=8)
    with raises(R3LiteError, "gguf-family"):
        write_gguf(source, tmp_path / "out" / "x.gguf")


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "gemma3"])
@torch.no_grad()
def test_a_file_says_what_it_says_in_transformers(models, kind):
    """Whose reader has the order of rows from llama.cpp."""
    from transformers import AutoModelForCausalLM

    path = models(kind)[1]
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model, ids = load_model(resolve_folder(str(path)), torch.float32, "cpu"), torch.arange(40)[None]
    assert (model.logits(model(ids)) - theirs(ids).logits).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0",
                                  "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])  # fmt: skip
@np.errstate(all="ignore")  # of random numbers some are none
def test_numbers_are_those_of_the_package(tmp_path, monkeypatch, kind):
    """Also a part of the rows, in any order, and in tiles."""
    block, size = gguf.GGML_QUANT_SIZES[Q[kind]]
    data = np.random.default_rng(0).integers(0, 255, (24, 512 // block * size), np.uint8)
    if kind in ("F32", "F16"):
        data = data.view(np.float32 if kind == "F32" else np.float16)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_head_count(3)
    writer.add_tensor("blk.0.attn_q.weight", data, raw_dtype=Q[kind])
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=Q[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = torch.tensor(gguf.quants.dequantize(data, Q[kind]).astype(np.float32))
    halves = expected.reshape(3, 4, 2, 512).swapaxes(1, 2).reshape(24, 512)
    monkeypatch.setattr(gguf_files, "TILE", 5 * 512)
    write_json(tmp_path / "gguf.json", {"tensors": Header(tmp_path / "x.gguf").published()})
    with opened(tmp_path / "gguf.json") as file:
        for name, wanted in (("mlp.up_proj", expected), ("self_attn.q_proj", halves)):
            name = f"model.layers.0.{name}.weight"
            tolerances = {"rtol": 0, "atol": 0, "equal_nan": True}
            torch.testing.assert_close(file.get_tensor(name), wanted, **tolerances)
            torch.testing.assert_close(file.get_slice(name)[:4], wanted[:4], **tolerances)
            assert file.get_slice(name).get_shape() == [24, 512]


def test_names_are_those_of_the_package():
    for architecture in ("qwen2", "qwen3", "llama", "gemma3"):
        name_map = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], 12)
        names = gguf_files.NAMES_OF.get(architecture, gguf_files.NAMES)
        for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
                     *(f"model.layers.11.{part}.weight" for part in names.values() if not part.startswith("model.")),
                     "model.layers.3.self_attn.q_proj.bias"):  # fmt: skip
            ours = gguf_name(name, architecture)
            theirs = name_map.get_name(name, (".weight", ".bias"))
            assert theirs in (None, ours) and published_name(ours, architecture) == name
    assert published_name("blk.0.ffn_gate_exps.weight", "llama") == "blk.0.ffn_gate_exps.weight"


@pytest.mark.skipif(not hasattr(gguf.MODEL_ARCH, "QWEN35"), reason="an old version of the package")
def test_names_of_qwen35_are_those_of_the_package(models):
    templates = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.QWEN35]}
    names = [re.sub(r"\.(weight|bias)$", "", name) for name in Header(models("qwen35")[1]).tensors]
    file_templates = {re.sub(r"\d+", "{bid}", name, count=1) for name in names}
    assert file_templates <= templates and len(file_templates) == 22


def test_nf4_is_quantized_from_the_numbers_of_the_file(models):
    source, path = models("llama", "q8_0")
    packed = load_model(resolve_folder(str(path)), torch.float32, "cpu", quantize=True)
    dense = load_model(resolve_folder(str(path)), torch.float32, "cpu")
    packed_source = load_model(source, torch.float32, "cpu", quantize=True)
    assert packed.state_dict().keys() == packed_source.state_dict().keys()
    packed_weight, dense_weight = (checkpoint_tensors(m)["model.layers.1.mlp.up_proj.weight"] for m in (packed, dense))
    assert 0 < (packed_weight - dense_weight).norm() < 0.15 * dense_weight.norm()


def quantized(weight: torch.Tensor, kind: str):
    return gguf.quants.quantize(weight.numpy(), Q[kind]), Q[kind]


def test_two_precisions_of_one_matrix_are_a_tied_model(models, tmp_path):
    """Quantizers write the head of a tied model beside its embedding, in more bits."""
    source, path = models("qwen2")
    weight = checkpoint_tensors(load_model(source, torch.float32, "cpu"))["model.embed_tokens.weight"]
    both = {"token_embd.weight": quantized(weight, "Q4_0"), "output.weight": quantized(weight, "Q8_0")}
    folder = resolve_folder(str(rewrite(path, tmp_path / "both.gguf", tensors=both)))
    model = load_model(folder, torch.float32, "cpu")
    assert model.config.tie_word_embeddings
    assert torch.equal(model.head_weight, torch.tensor(gguf.quants.dequantize(*both["output.weight"])))
    untied = both | {"output.weight": quantized(weight.roll(1, 0), "Q8_0")}
    assert not read_config(
        resolve_folder(str(rewrite(path, tmp_path / "own.gguf", tensors=untied)))
    ).tie_word_embeddings
    near = {"token_embd.weight": quantized(weight, "F32"), "output.weight": quantized(weight + 1e-3, "F32")}
    assert not read_config(resolve_folder(str(rewrite(path, tmp_path / "near.gguf", tensors=near)))).tie_word_embeddings


@pytest.mark.parametrize("first", [False, True], ids=["last", "first"])
@pytest.mark.parametrize(
    ("split", "bos"),
    [("qwen2", False), ("qwen35", False), ("llama-bpe", True), ("smollm", False), ("gpt-2", False), ("gemma", True)],
)
def test_the_tokenizer_gives_the_same_tokens(tmp_path, split, bos, first):
    source = write_model(tmp_path / "source", "llama", vocab_size=800)
    write_tokenizer(source, split, first, bos)
    path = write_gguf(source, tmp_path / "out" / "x.gguf")
    folder = resolve_folder(str(path))
    ours, theirs = (Backend.from_file(str(where / "tokenizer.json")) for where in (folder, source))
    assert ours.get_vocab() == theirs.get_vocab()
    for text in [*TEXTS, __doc__]:
        for special in (False, True):
            assert (
                ours.encode(text, add_special_tokens=special).ids == theirs.encode(text, add_special_tokens=special).ids
            )
        assert ours.decode(theirs.encode(text).ids) == theirs.decode(theirs.encode(text).ids)
    file_tokenizer = Tokenizer.load(folder)
    source_tokenizer = Tokenizer.load(source)
    assert (file_tokenizer.fingerprint, file_tokenizer.stop_id, file_tokenizer.pad_id) == (
        source_tokenizer.fingerprint,
        source_tokenizer.stop_id,
        source_tokenizer.pad_id,
    )
    assert {p.name for p in folder.iterdir()} >= {"generation_config.json", "tokenizer_config.json"}


def test_texts_are_split_as_in_qwen35():
    splitting = pytest.importorskip("transformers.models.qwen3_5.tokenization_qwen3_5")
    assert gguf_tokenizer.QWEN35 == splitting.PRETOKENIZE_REGEX


def test_the_tokenizer_of_qwen_gives_the_same_tokens(shared, tmp_path):
    import gzip

    published = json.loads(gzip.decompress((shared / "tokenizers/qwen2.5/tokenizer.json.gz").read_bytes()))
    source = write_model(tmp_path / "source", "qwen2", vocab_size=151_936, hidden_size=16, num_hidden_layers=1)
    (source / "tokenizer.json").write_text(json.dumps(published), encoding="utf-8")
    settings = (shared / "tokenizers/qwen2.5/tokenizer_config.json").read_text(encoding="utf-8")
    (source / "tokenizer_config.json").write_text(settings, encoding="utf-8")
    folder = resolve_folder(str(write_gguf(source, tmp_path / "out" / "x.gguf", "bf16")))
    restored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    assert restored["added_tokens"] == published["added_tokens"] and restored["normalizer"] == published["normalizer"]
    assert restored["pre_tokenizer"] == published["pre_tokenizer"]
    assert restored["model"]["vocab"] == published["model"]["vocab"]
    assert restored["model"]["merges"] == published["model"]["merges"]
    assert Tokenizer.load(folder).fingerprint == Tokenizer.load(source).fingerprint


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general.architecture": "gemma2"}, "architecture 'gemma2'"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
        ({"llama.attention.sliding_window": 4096}, "llama.attention.sliding_window is 4096"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is not the head size, 16"),
        ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv differs from layer to layer"),
        ({"split.count": 3}, "one part of a split model"),
        ({"tokenizer.ggml.model": "llama"}, "the tokenizer is 'llama'"),
        ({"tokenizer.ggml.pre": "tekken"}, "split as 'tekken'"),
        ({"tokenizer.ggml.merges": None}, "lacks its tokens"),
        # Keys of other types than they should have: each was a traceback, or an error that named the cached copy.
        ({"general.name": "x", "split.count": "3"}, "split.count is '3', not a whole number"),
        ({"llama.block_count": "2"}, "llama.block_count is '2', not a whole number"),
        ({"llama.block_count": 0}, "llama.block_count is 0, not a whole number of at least 1"),
        ({"llama.block_count": 3}, "missing tensor model.layers.2"),
        ({"llama.embedding_length": None}, "llama.embedding_length is missing"),
        ({"llama.attention.head_count": -4}, "llama.attention.head_count is -4"),
        ({"llama.attention.head_count": 3}, "do not divide one another"),
        ({"llama.rope.freq_base": "much"}, "llama.rope.freq_base is 'much', not a finite number"),
        ({"llama.rope.freq_base": [1, 2]}, "llama.rope.freq_base is [1, 2], not a finite number"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "layer_norm_rms_epsilon is -1.0, not a finite number"),
        ({"tokenizer.ggml.pre": [1, 2]}, "tokenizer.ggml.pre is [1, 2], not text"),
        ({"tokenizer.ggml.model": 5}, "tokenizer.ggml.model is 5, not text"),
        ({"tokenizer.ggml.tokens": "abc"}, "tokenizer.ggml.tokens is 'abc', not a list"),
        ({"tokenizer.ggml.merges": [1, 2]}, "tokenizer.ggml.merges is [1, 2], not a list of texts"),
        ({"tokenizer.ggml.token_type": "abc"}, "tokenizer.ggml.token_type is 'abc', not a list"),
        ({"tokenizer.ggml.token_type": [0.5] * 400}, "token_type is [0.5, 0.5, 0.5, ...], not a list of whole numbers"),
        ({"tokenizer.ggml.eos_token_id": "2"}, "tokenizer.ggml.eos_token_id is '2', not a whole number"),
        ({"tokenizer.ggml.bos_token_id": [1]}, "tokenizer.ggml.bos_token_id is [1], not a whole number"),
        ({"tokenizer.ggml.add_bos_token": "yes"}, "add_bos_token is 'yes', not true or false"),
        ({"tokenizer.chat_template": [1]}, "tokenizer.chat_template is [1], not text"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(models, tmp_path, cache, changes, named):
    changes = dict(changes)
    path = rewrite(
        models("llama")[1], tmp_path / "x.gguf", changes, architecture=changes.pop("general.architecture", None)
    )
    with pytest.raises(R3LiteError) as error:
        resolve_folder(str(path))
    message = str(error.value)
    assert named in message and str(path) in message and str(cache) not in message
    assert not cache.exists() or not list(cache.iterdir())  # what cannot be used is not kept


def test_errors_of_its_tokenizer_and_its_lengths_name_the_file(models, tmp_path, cache):
    """They named the folder that was made of it, which nobody has seen."""
    template = "{% for message in messages %}"
    path = rewrite(models("llama")[1], tmp_path / "x.gguf", {"tokenizer.chat_template": template})
    folder = resolve_folder(str(path))
    with raises(R3LiteError, "template-unreadable", f"{path}: tokenizer_config.json") as error:
        Tokenizer.load(folder)
    assert str(cache) not in str(error.value)
    with raises(R3LiteError, "tokenizer-beyond-embedding", f"the tokenizer in {path} has token ids up to 499"):
        check_lengths(folder, ids=500, longest=8)
    with raises(R3LiteError, "rows-beyond-positions", f"max_position_embeddings in {path}: config.json is"):
        check_lengths(folder, ids=8, longest=1 << 20)


def test_ids_that_no_token_has_are_ignored(models, tmp_path):
    """As llama.cpp does; -1 was taken for the last token."""
    changes = {"tokenizer.ggml.padding_token_id": 1 << 20, "tokenizer.ggml.unknown_token_id": -1}
    path = rewrite(models("llama")[1], tmp_path / "x.gguf", changes)
    folder = resolve_folder(str(path))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert (settings["pad_token"], settings["unk_token"]) == (None, None)


def test_tensors_that_no_such_model_has_are_refused(models, tmp_path):
    path = models("llama3")[1]
    number = np.ones(16, np.float32)
    surplus = rewrite(path, tmp_path / "more.gguf", tensors={"blk.0.attn_q.bias": (number, Q.F32)})
    with raises(R3LiteError, "gguf-tensor-unexpected", "model.layers.0.self_attn.q_proj.bias"):
        load_model(resolve_folder(str(surplus)), torch.float32, "cpu")
    incomplete = rewrite(path, tmp_path / "less.gguf", tensors={"blk.1.ffn_up.weight": None})
    with raises(R3LiteError, "gguf-tensor-missing", "model.layers.1.mlp.up_proj.weight"):
        load_model(resolve_folder(str(incomplete)), torch.float32, "cpu")
    wrong_rope = rewrite(path, tmp_path / "other.gguf", tensors={"rope_freqs.weight": (number * 2, Q.F32)})
    with raises(R3LiteError, "gguf-rope", "rope_freqs.weight"):
        resolve_folder(str(wrong_rope))
    empty = rewrite(path, tmp_path / "empty.gguf", tensors={"rope_freqs.weight": (number[:0], Q.F32)})
    with raises(R3LiteError, "gguf-damaged", empty, "rope_freqs.weight is empty"):
        resolve_folder(str(empty))


def test_a_damaged_file_is_an_error_that_names_it(models, tmp_path, cache, monkeypatch):
    """A file that ends early, or says that a list is longer than the file, neither hangs nor takes memory."""
    content = models("qwen3")[1].read_bytes()
    path = tmp_path / "x.gguf"
    for end in [*range(0, 2000, 97), *range(2000, len(content), len(content) // 40), len(content) - 1]:
        path.write_bytes(content[:end])
        with pytest.raises(R3LiteError, match=r"x\.gguf (is damaged or truncated|is not a GGUF file)"):
            resolve_folder(str(path))
    generator, refusals = np.random.default_rng(0), []
    for _ in range(200):
        at = int(generator.integers(4, 1500))
        path.write_bytes(content[:at] + generator.bytes(4) + content[at + 4 :])
        try:
            load_model(resolve_folder(str(path)), torch.float32, "cpu")
        except R3LiteError as error:
            refusals.append(str(error))
    assert len(refusals) > 100
    assert [text for text in refusals if str(path) not in text or str(cache) in text] == []
    numbers = b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"x", 9, 0, 1 << 60)  # a list of bytes
    path.write_bytes(numbers + bytes(100))
    with raises(R3LiteError, "gguf-damaged", "unexpected end"):
        resolve_folder(str(path))
    monkeypatch.setattr(gguf_files, "MAX_READS", 1000)
    path.write_bytes(numbers + bytes(2000))
    with raises(R3LiteError, "gguf-damaged", "more than 1,000 values"):
        resolve_folder(str(path))
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60))
    with raises(R3LiteError, "gguf-damaged", "damaged"):
        resolve_folder(str(path))
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 1, 1))
    with raises(R3LiteError, "gguf-version", "50331648"):
        resolve_folder(str(path))
    with raises(R3LiteError, "file-unreadable", "nowhere.gguf"):
        resolve_folder(str(tmp_path / "some" / "nowhere.gguf"))


@pytest.mark.parametrize("change", [1, -32, 32, 4096, (1 << 64) - 64], ids=hex)
def test_each_tensor_begins_where_the_one_before_ends(models, tmp_path, change):
    """As in llama.cpp. Another place was taken, also before the data: its numbers are no less finite."""
    content = models("qwen3")[1].read_bytes()
    name = b"blk.0.attn_q.weight"
    at = content.index(name) + len(name) + 24  # after the number of dimensions, two of them, and the type
    (offset,) = struct.unpack("<Q", content[at : at + 8])
    path = tmp_path / "x.gguf"
    path.write_bytes(content[:at] + struct.pack("<Q", (offset + change) % (1 << 64)) + content[at + 8 :])
    with raises(R3LiteError, "gguf-damaged", path, "blk.0.attn_q.weight begins at byte"):
        resolve_folder(str(path))


def test_another_file_of_the_same_name_is_another_model(models, tmp_path):
    """A run goes on with its own base only, though config and tokenizer are the same."""
    path = tmp_path / "x.gguf"
    path.write_bytes(models("llama", "fp32")[1].read_bytes())
    fp32_folder = resolve_folder(str(path))
    fp32_fingerprint = folder_fingerprint(resolve_folder(str(path)))
    path.write_bytes(models("llama", "bf16")[1].read_bytes())
    bf16_folder = resolve_folder(str(path))
    assert fp32_folder != bf16_folder and folder_fingerprint(bf16_folder) != fp32_fingerprint
    assert fingerprint(bf16_folder) != fingerprint(resolve_folder(str(models("llama", "fp32")[1])))


def test_commands_take_a_file_as_model(tmp_path, capsys):
    tiny = resolve_folder("tiny")
    path = write_gguf(tiny, tmp_path / "tiny" / "tiny.gguf")
    model = load_model(tiny, torch.float32, "cpu")
    assert fingerprint(resolve_folder(str(path))) == fingerprint(tiny)
    lora.add_adapter(model, "policy", 4, 8)
    lora.save_adapter(model, "policy", tmp_path / "adapter", str(path), fingerprint(tiny))
    assert sft.main(["--preset", "tiny", "--model", str(path), "--dry-run", "--output", str(tmp_path / "run")]) == 0
    flags = ["--model", str(path), "--adapter", str(tmp_path / "adapter"), "--prompts", "2", "--weights", "fp32"]
    assert export.main([*flags, "--output", str(tmp_path / "merged")]) == 0
    assert "token is the same for 2\n" in capsys.readouterr().out
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(tmp_path / "merged")(TEXTS[1], add_special_tokens=False)["input_ids"]
    assert ids == Tokenizer.load(tiny).encode(TEXTS[1])
    with torch.no_grad():
        ours = model.logits(model(torch.tensor([ids])))
        assert (theirs(torch.tensor([ids])).logits - ours).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda model: model["merges"].pop(), "the merges lack ("),
        (lambda model: model["merges"].append(model["merges"].pop(0)), "are apart"),
        (lambda model: model.update(ignore_merges=True), "the tokenizer is SentencePiece, but not as Gemma's"),
    ],
)
def test_merges_that_scores_cannot_say_are_not_written(models, tmp_path, change, named):
    """llama.cpp would merge other tokens."""
    source = shutil.copytree(models("gemma3")[0], tmp_path / "source")
    content = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    merges = content["model"]["merges"]
    several = next(
        i for i in range(len(merges) - 1) if merges[i] != merges[i + 1] and "".join(merges[i]) == "".join(merges[i + 1])
    )
    merges[:] = merges[several : several + 2] + merges[:several] + merges[several + 2 :]
    change(content["model"])
    (source / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(R3LiteError, match=re.escape(named)):
        write_gguf(source, tmp_path / "out" / "x.gguf", tokenizer=Tokenizer.load(models("gemma3")[0]))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokenizer.ggml.add_space_prefix": True}, "the tokenizer is 'llama'"),
        ({"tokenizer.ggml.scores": None}, "lacks its tokens"),
        ({"tokenizer.ggml.scores": [0.5]}, "tokenizer.ggml.scores is [0.5], not"),
        ({"gemma3.rope.scaling.type": "yarn"}, "gemma3.rope.scaling.type is 'yarn'"),
        ({"gemma3.attention.sliding_window": None}, "gemma3.attention.sliding_window is missing"),
        ({"gemma3.final_logit_softcapping": 30.0}, "gemma3.final_logit_softcapping is 30"),
    ],
)
def test_what_is_not_supported_of_gemma_is_refused_by_name(models, tmp_path, changes, named):
    path = rewrite(models("gemma3")[1], tmp_path / "x.gguf", changes)
    with pytest.raises(R3LiteError) as error:
        resolve_folder(str(path))
    assert named in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"query_pre_attn_scalar": 64},
        {"sliding_window_pattern": 3, "layer_types": None},
        {"rope_local_base_freq": 5e3, "rope_parameters": {}},
    ],
)
def test_a_gemma_that_llama_cpp_would_compute_otherwise_is_not_written(models, tmp_path, changes):
    source = shutil.copytree(models("gemma3")[0], tmp_path / "source")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (source / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    with raises(R3LiteError, "gguf-family"):
        write_gguf(source, tmp_path / "out" / "x.gguf")


def test_a_sentencepiece_tokenizer_is_not_written(tmp_path):
    """That of Llama 2, TinyLlama and Mistral."""
    source = write_model(tmp_path / "source", "mistral", "gpt-2")
    tokenizer = Tokenizer.load(source)
    content = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["byte_fallback"], content["pre_tokenizer"] = True, {"type": "Metaspace", "replacement": "_"}
    (source / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(R3LiteError, match="the tokenizer is SentencePiece"):
        write_gguf(source, tmp_path / "out" / "x.gguf", tokenizer=tokenizer)
    assert not (tmp_path / "out").exists()
