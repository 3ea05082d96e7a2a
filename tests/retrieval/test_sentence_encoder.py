"""Encoders that are no BERT, and prompts that a folder names, against sentence-transformers itself."""

import json
import shutil
import sys

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from r3lite.core.episode import Document
from r3lite.core.errors import R3LiteError
from r3lite.retrieval import index
from r3lite.retrieval.encoder import BertEncoder, SentenceEncoder, make_encoder
from tests.built_index import encoder_settings, save

DOCUMENTS = [Document(str(i), title, text) for i, (title, text) in enumerate([("Oslo", "a city in Norway"), ("", "x")])]
QUERIES = ["which city is in Norway", "x", "", "a " * 300]
WORDS = ["<s>", "<pad>", "</s>", "<unk>", *"a b city in is which norway oslo query passage : x".split()]  # noqa: SIM905


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Makes the folder of a small encoder with random weights, as sentence-transformers writes it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from transformers import AutoModel, ModernBertConfig, PreTrainedTokenizerFast, XLMRobertaConfig

    kinds = {"modernbert": ModernBertConfig, "xlm-roberta": XLMRobertaConfig}
    sizes = {"vocab_size": len(WORDS), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}

    def make(kind: str, pooling: str, prompts: dict | None = None):
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp(kind)
        words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
        names = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>", "unk_token": "<unk>"}
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", **names).save_pretrained(folder)
        config = kinds[kind](**sizes, **special, intermediate_size=48, max_position_embeddings=66)
        model = AutoModel.from_config(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "orm.weight" in name else 0.0, 0.3)
        model.save_pretrained(folder)
        transformer = Transformer(str(folder), max_seq_length=64)
        modules = [transformer, Pooling(32, pooling_mode=pooling), Normalize()]
        theirs = SentenceTransformer(modules=modules, prompts=prompts, device="cpu")
        out = tmp_path_factory.mktemp(f"{kind}-{pooling}")
        theirs.save_pretrained(str(out))
        return out, theirs

    return make


def assert_equal(ours, theirs, prefixes=("", "")):
    told, (of_query, of_passage) = [], prefixes
    passages = ours.encode_passages(DOCUMENTS, told.append)
    assert sum(told) == len(DOCUMENTS) and passages.dtype == np.float32
    expected = theirs.encode([f"{d.title} {d.text}".strip() for d in DOCUMENTS], prompt=of_passage)
    assert passages == pytest.approx(expected, abs=1e-5)
    assert ours.encode_queries(QUERIES) == pytest.approx(theirs.encode(QUERIES, prompt=of_query), abs=1e-5)
    assert ours.encode_queries([]).shape == (0, ours.dimension)


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_xlm_r_is_our_own_network(made, pooling):
    """Its positions begin at 2, its padding is 1 and it has one segment."""
    folder, theirs = made("xlm-roberta", pooling)
    ours = make_encoder(encoder_settings(str(folder), "auto"), [], batch_size=2)
    assert isinstance(ours, BertEncoder) and ours.settings["max_length"] == 64
    assert_equal(ours, theirs)


@pytest.mark.parametrize("length", [64, 256])
def test_the_length_is_where_its_writer_puts_it(minilm, tmp_path, length):
    """Since 5.4 it is the limit of the tokenizer: long texts were read to 512 tokens, and their vectors differed."""
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(minilm), device="cpu")
    theirs.max_seq_length = length
    theirs.save_pretrained(str(tmp_path / "saved"))
    assert "max_seq_length" not in json.loads((tmp_path / "saved" / "sentence_bert_config.json").read_text())
    ours = BertEncoder(str(tmp_path / "saved"), "plain")
    assert ours.settings["max_length"] == length
    long = [f"{word} lies in Norway, and the river there is long. " * 60 for word in ("Oslo", "Bergen")]
    assert ours.encode_queries(long) == pytest.approx(theirs.encode(long), abs=1e-5)


def test_a_tokenizer_without_a_limit_and_settings_of_its_own(made):
    folder, _ = made("xlm-roberta", "mean")
    limits = folder / "tokenizer_config.json"
    limits.write_text(json.dumps(json.loads(limits.read_text()) | {"model_max_length": 10**30}))
    assert BertEncoder(str(folder), "plain").settings["max_length"] == 64  # its positions
    file = folder / "sentence_bert_config.json"
    own = {"processing_kwargs": {"text": {"max_length": 8}}}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    ours = make_encoder(encoder_settings(str(folder), "auto"), [])  # which the package itself computes
    assert isinstance(ours, SentenceEncoder)


@pytest.mark.parametrize("prompts", [None, {"query": "query : ", "document": "passage : "}])
def test_another_network_is_that_of_sentence_transformers(made, prompts):
    folder, theirs = made("modernbert", "cls", prompts)
    ours = make_encoder(encoder_settings(str(folder), "auto"), [], batch_size=2)
    assert isinstance(ours, SentenceEncoder) and ours.settings["style"] == ("own" if prompts else "plain")
    assert_equal(ours, theirs, ("query : ", "passage : ") if prompts else ("", ""))


def test_another_network_in_bf16(made):
    folder, _ = made("modernbert", "mean")
    exact, coarse = (make_encoder(encoder_settings(str(folder), "auto", dtype=dtype), []) for dtype in ("fp32", "bf16"))
    wanted, found = exact.encode_queries(QUERIES), coarse.encode_queries(QUERIES)
    assert found.dtype == np.float32 and coarse.settings["dtype"] == "bf16"
    assert np.linalg.norm(found, axis=1) == pytest.approx(np.ones(len(QUERIES)), abs=1e-6)
    assert 0 < np.linalg.norm(found - wanted, axis=1).max() < 0.1


def test_without_its_package_an_encoder_names_the_extra(made, monkeypatch):
    folder, _ = made("modernbert", "mean")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(R3LiteError, match=r"its model_type is modernbert\) needs the package") as error:
        make_encoder(encoder_settings(str(folder), "auto"), [])
    assert "pip install 'r3lite[encoders]'" in error.value.remedy


@pytest.mark.parametrize("change", [{"architectures": 7, "hidden_size": 33}, {"num_attention_heads": 0}])
def test_what_the_package_cannot_load_is_told_with_its_reason(made, tmp_path, change):
    folder = shutil.copytree(made("modernbert", "mean")[0], tmp_path / "broken")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(R3LiteError, match="sentence-transformers cannot load the encoder"):
        make_encoder(encoder_settings(str(folder), "plain"), [])


@pytest.mark.parametrize(
    ("file", "prefixes"),
    [
        ({"prompts": {"query": "q: ", "passage": "p: "}}, ("q: ", "p: ")),
        ({"prompts": {"query": "q: "}, "default_prompt_name": None}, ("q: ", "")),
        ({"prompts": {"corpus": "c: ", "x": "d: "}, "default_prompt_name": "x"}, ("d: ", "c: ")),
        ({"prompts": {"document": "d: ", "passage": "p: ", "query": ""}}, ("", "d: ")),
        ({"prompts": {"x": "d: "}}, None),
        ({"prompts": {"query": "", "document": ""}}, None),  # as sentence-transformers writes where there are none
        ({"prompts": {}}, None),
        ({}, None),
    ],
)
def test_prompts_are_those_that_the_folder_names(made, tmp_path, file, prefixes):
    from sentence_transformers import SentenceTransformer

    folder = shutil.copytree(made("xlm-roberta", "mean")[0], tmp_path / "prompted")
    (folder / "config_sentence_transformers.json").write_text(json.dumps(file))
    ours = make_encoder(encoder_settings(str(folder), "auto"), [])
    assert (ours.settings["style"], ours.prefixes) == (("own", prefixes) if prefixes else ("plain", ("", "")))
    assert_equal(ours, SentenceTransformer(str(folder), device="cpu"), ours.prefixes)
    if not prefixes:
        with pytest.raises(R3LiteError, match="has no prompts"):
            make_encoder(encoder_settings(str(folder), "own"), [])


def test_an_index_remembers_pooling_and_prompts(made, tmp_path):
    folder, _ = made("xlm-roberta", "cls", {"query": "query : ", "document": "passage : "})
    save(tmp_path / "i", DOCUMENTS, str(folder), "auto")
    manifest = json.loads((tmp_path / "i" / "manifest.json").read_text())
    assert {key: manifest[key] for key in ("style", "pooling", "query_prefix", "passage_prefix")} == {
        "style": "own", "pooling": "cls", "query_prefix": "query : ", "passage_prefix": "passage : "
    }  # fmt: skip
    opened = index.load(tmp_path / "i", encoder_settings(str(folder)))
    assert opened.encoder.prefixes == ("query : ", "passage : ")
    assert [d.title for d in opened.search(["oslo a city in norway"], 1)[0]]
    with pytest.raises(R3LiteError, match="was built with style own, not plain"):
        index.load(tmp_path / "i", encoder_settings(str(folder), "plain"))
    other = json.loads((folder / "config_sentence_transformers.json").read_text())
    copied = shutil.copytree(folder, tmp_path / "other")
    other["prompts"]["query"] = "which "
    (copied / "config_sentence_transformers.json").write_text(json.dumps(other))
    with pytest.raises(R3LiteError, match="was built with query_prefix query : , not which "):
        index.load(tmp_path / "i", encoder_settings(str(copied)))
