"""Folders of which transformers reads the tokenizer otherwise than the file says, against transformers itself."""

import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from r3lite.core.errors import R3LiteError
from r3lite.core.files import read_record
from r3lite.core.records import Record, Source
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.protocols.tokenizer_classes import PROBE_TEXTS, QWEN2_WORDS, class_of, other_class
from r3lite.protocols.tokenizer_files import probe
from tests.gguf_models import TEMPLATE

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>"]
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def split_by(pattern: str) -> dict:
    words = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [words, BYTE_LEVEL]}


SPLITS = {
    "qwen2": split_by(QWEN2_WORDS),
    "llama 3": split_by(QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")),
    "gpt-2": {**BYTE_LEVEL, "use_regex": True},
}


@pytest.fixture
def folder(tmp_path):
    """Writes a tokenizer with the tokens "19" and "n't", or one of SentencePiece's kind."""

    def write(split: str, model_type: str, tokenizer_class: str | None, **config):
        if split in SPLITS:
            merges = [("1", "9"), ("n", "'"), ("n'", "t")]
            vocabulary = {token: id for id, token in enumerate([*LETTERS, *map("".join, merges)])}
            backend = Backend(models.BPE(vocabulary, merges))
            backend.decoder = decoders.ByteLevel()
        else:
            letters = ["<unk>", "\u2581", *(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(33, 127))]
            vocabulary = {token: id for id, token in enumerate([*letters, "\u2581W"])}
            options = {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
            backend = Backend(models.BPE(vocabulary, [("\u2581", "W")], **options))
            steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
            backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
        if split == "prepended":
            spaces = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
            backend.normalizer = normalizers.Sequence(spaces)
        elif split not in SPLITS:
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=split, split=False)
        backend.add_special_tokens(SPECIAL)
        definition = json.loads(backend.to_str())
        if split in SPLITS:
            definition["pre_tokenizer"] = SPLITS[split]
        settings = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<s>", "chat_template": TEMPLATE}
        if split not in SPLITS:
            settings["unk_token"] = "<unk>"
        if tokenizer_class:
            settings["tokenizer_class"] = tokenizer_class
        (tmp_path / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | config), encoding="utf-8")
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
        return tmp_path

    return write


CLASSES = [None, "Qwen2Tokenizer", "GPT2Tokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"]


@pytest.mark.parametrize("tokenizer_class", CLASSES)
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama", "mistral"])
@pytest.mark.parametrize("split", SPLITS)
def test_it_is_told_if_transformers_gives_other_tokens(folder, split, model_type, tokenizer_class):
    """A qwen2 folder with another splitting rule had 27 tokens here and 29 in transformers, which ignores the rule."""
    transformers = pytest.importorskip("transformers")
    place = folder(split, model_type, tokenizer_class)
    text = "<s>".join([*PROBE_TEXTS, probe()])
    theirs = transformers.AutoTokenizer.from_pretrained(place)(text, add_special_tokens=False)["input_ids"]
    same_ids = theirs == Backend.from_file(str(place / "tokenizer.json")).encode(text).ids
    differing_class = other_class(place, read_record(place / "tokenizer.json", ""), probe())
    assert (differing_class is None) == same_ids


@pytest.mark.parametrize("split", ["prepended", "first"])
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_so_is_sentencepiece(folder, split, legacy, tokenizer_class):
    transformers = pytest.importorskip("transformers")
    place = folder(split, "llama", tokenizer_class, legacy=legacy)
    text = "<s>".join(PROBE_TEXTS)
    theirs = transformers.AutoTokenizer.from_pretrained(place)(text, add_special_tokens=False)["input_ids"]
    same_ids = theirs == Backend.from_file(str(place / "tokenizer.json")).encode(text).ids
    differing_class = other_class(place, read_record(place / "tokenizer.json", ""), "")
    assert (differing_class is None) == same_ids


def test_a_run_says_so(folder, capsys):
    tokenizer = Tokenizer.load(folder("llama 3", "qwen2", "PreTrainedTokenizerFast"))
    assert tokenizer.other_class == "Qwen2Tokenizer"
    assert "by its Qwen2Tokenizer, so its tokens differ; r3lite follows tokenizer.json" in capsys.readouterr().err
    assert Tokenizer.load(folder("qwen2", "qwen2", None)).other_class is None
    assert capsys.readouterr().err == ""


def test_a_model_type_that_is_no_text_names_its_file(folder):
    with pytest.raises(R3LiteError, match=r"config\.json"):
        class_of(folder("gpt-2", ["qwen2"], None), Record({}, Source("tokenizer_config.json", "")))


def test_the_class_of_a_folder(folder):
    def name(*arguments) -> str:
        place = folder(*arguments)
        return class_of(place, read_record(place / "tokenizer_config.json", ""))

    assert name("gpt-2", "qwen2", "LlamaTokenizerFast") == "Qwen2Tokenizer"
    assert name("gpt-2", "qwen3", None) == "Qwen2Tokenizer"
    assert name("gpt-2", "qwen3", "LlamaTokenizerFast") == "LlamaTokenizer"
    assert name("gpt-2", "llama", None) == name("gpt-2", "mistral", "Qwen2Tokenizer") == ""
