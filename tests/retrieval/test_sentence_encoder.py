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
from r3lite.retrieval.conventions import KEYS_OF_MODEL_FILE, read_conventions
from r3lite.retrieval.encoder import BertEncoder, SentenceEncoder, local_dimension, make_encoder
from tests.built_index import encoder_settings, save
from tests.errors import raises

DOCUMENTS = [Document(str(i), title, text) for i, (title, text) in enumerate([("Oslo", "a city in Norway"), ("", "x")])]
QUERIES = ["which city is in Norway", "x", "", "a " * 300]
WORDS = ["<s>", "<pad>", "</s>", "<unk>", *"a b city in is which norway oslo query passage : x".split()]  # noqa: SIM905


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory):
    """Makes the folder of a small encoder with random weights, as sentence-transformers writes it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from transformers import AutoModel, ModernBertConfig, PreTrainedTokenizerFast, XLMRobertaConfig

    kinds = {"modernbert": ModernBertConfig, "xlm-roberta": XLMRobertaConfig}
    sizes = {"vocab_size": len(WORDS), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}

    def make(kind: str, pooling: str, prompts: dict | None = None, normalized: bool = True, **options):
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
        modules = [transformer, Pooling(32, pooling_mode=pooling)]
        if normalized:
            modules.append(Normalize())
        theirs = SentenceTransformer(modules=modules, prompts=prompts, device="cpu", **options)
        out = tmp_path_factory.mktemp(f"{kind}-{pooling}")
        theirs.save_pretrained(str(out))
        return out, theirs

    return make


def assert_equal(ours, theirs, prefixes=("", "")):
    progress, (of_query, of_passage) = [], prefixes
    passages = ours.encode_passages(DOCUMENTS, progress.append)
    assert sum(progress) == len(DOCUMENTS) and passages.dtype == np.float32
    expected = theirs.encode([f"{d.title} {d.text}".strip() for d in DOCUMENTS], prompt=of_passage)
    assert passages == pytest.approx(expected, abs=1e-5)
    assert ours.encode_queries(QUERIES) == pytest.approx(theirs.encode(QUERIES, prompt=of_query), abs=1e-5)
    assert ours.encode_queries([]).shape == (0, ours.dimension)


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_xlm_r_is_our_own_network(encoder_folder, pooling):
    """Its positions begin at 2, its padding is 1 and it has one segment."""
    folder, theirs = encoder_folder("xlm-roberta", pooling)
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


def test_a_tokenizer_without_a_limit_and_settings_of_its_own(encoder_folder):
    folder, _ = encoder_folder("xlm-roberta", "mean")
    limits = folder / "tokenizer_config.json"
    limits.write_text(json.dumps(json.loads(limits.read_text()) | {"model_max_length": 10**30}))
    assert BertEncoder(str(folder), "plain").settings["max_length"] == 64  # its positions
    file = folder / "sentence_bert_config.json"
    overrides = {"processing_kwargs": {"text": {"max_length": 8}}}
    file.write_text(json.dumps(json.loads(file.read_text()) | overrides))
    ours = make_encoder(encoder_settings(str(folder), "auto"), [])  # which the package itself computes
    assert isinstance(ours, SentenceEncoder)


@pytest.mark.parametrize("prompts", [None, {"query": "query : ", "document": "passage : "}])
def test_another_network_is_that_of_sentence_transformers(encoder_folder, prompts):
    folder, theirs = encoder_folder("modernbert", "cls", prompts)
    ours = make_encoder(encoder_settings(str(folder), "auto"), [], batch_size=2)
    assert isinstance(ours, SentenceEncoder) and ours.settings["style"] == ("own" if prompts else "plain")
    assert_equal(ours, theirs, ("query : ", "passage : ") if prompts else ("", ""))


def test_another_network_in_bf16(encoder_folder):
    folder, _ = encoder_folder("modernbert", "mean")
    exact, coarse = (make_encoder(encoder_settings(str(folder), "auto", dtype=dtype), []) for dtype in ("fp32", "bf16"))
    wanted = exact.encode_queries(QUERIES)
    vectors = coarse.encode_queries(QUERIES)
    assert vectors.dtype == np.float32 and coarse.settings["dtype"] == "bf16"
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(len(QUERIES)), abs=1e-6)
    assert 0 < np.linalg.norm(vectors - wanted, axis=1).max() < 0.1


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("options", [{"truncate_dim": 12}, {"similarity_fn_name": "dot"},
                                     {"truncate_dim": 12, "similarity_fn_name": "dot"}])  # fmt: skip
@pytest.mark.parametrize("kind", ["xlm-roberta", "modernbert"])
def test_vectors_are_cut_and_compared_as_the_folder_says(encoder_folder, kind, options, normalized):
    """64 dimensions were wanted and 384 made; those for dot products were compared by their cosine."""
    folder, theirs = encoder_folder(kind, "mean", normalized=normalized, **options)
    ours = make_encoder(encoder_settings(str(folder), "auto"), [], batch_size=2)
    vectors, of_queries = ours.encode_passages(DOCUMENTS, lambda n: None), ours.encode_queries(QUERIES)
    texts = [f"{d.title} {d.text}".strip() for d in DOCUMENTS]
    expected = theirs.similarity(theirs.encode(QUERIES), theirs.encode(texts)).numpy()
    assert of_queries @ vectors.T == pytest.approx(expected, abs=1e-4)
    assert (
        ours.dimension == ours.settings["dimension"] == local_dimension(str(folder)) == options.get("truncate_dim", 32)
    )
    as_they_are = "similarity_fn_name" in options and (not normalized or "truncate_dim" in options)
    assert ("similarity" in ours.settings) == as_they_are
    if as_they_are:
        assert vectors == pytest.approx(theirs.encode(texts), abs=1e-4)


def test_an_index_of_dot_products(encoder_folder, tmp_path):
    folder, theirs = encoder_folder("xlm-roberta", "cls", normalized=False, similarity_fn_name="dot")
    texts = ["oslo", "a city in norway", "x x x x", "which city is in oslo b", "b b a"]
    documents = [Document(str(i), "", text) for i, text in enumerate(texts)]
    save(tmp_path / "i", documents, str(folder))
    assert json.loads((tmp_path / "i" / "manifest.json").read_text())["similarity"] == "dot"
    opened = index.load(tmp_path / "i", encoder_settings(str(folder)))
    (ranked,) = opened.search(["which city"], 5)
    products = theirs.similarity(theirs.encode(["which city"]), theirs.encode(texts)).numpy()[0]
    assert [int(document.id) for document in ranked] == np.argsort(-products).tolist()
    assert [document.score for document in ranked] == pytest.approx(sorted(products, reverse=True), rel=1e-4)
    manifest = tmp_path / "i" / "manifest.json"
    cosine = {key: value for key, value in json.loads(manifest.read_text()).items() if key != "similarity"}
    manifest.write_text(json.dumps(cosine))  # as an index of before has it
    with raises(R3LiteError, "index-setting-differs", "similarity None, not dot"):
        index.load(tmp_path / "i", encoder_settings(str(folder)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"similarity_fn_name": "euclidean"}, "similarity_fn_name is 'euclidean', not one of cosine, dot"),
        ({"similarity_fn_name": "maxsim"}, "similarity_fn_name is 'maxsim'"),
        ({"truncate_dim": 0}, "truncate_dim is 0"),
        ({"model_type": "SparseEncoder"}, "model_type is 'SparseEncoder', not one of SentenceTransformer"),
        ({"of_next_year": {"a": 1}}, "of_next_year is .*, which r3lite does not support"),
    ],
)
def test_what_a_folder_says_and_nothing_here_does_is_refused(encoder_folder, tmp_path, change, words):
    folder = shutil.copytree(encoder_folder("xlm-roberta", "mean")[0], tmp_path / "changed")
    path = folder / "config_sentence_transformers.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(R3LiteError, match=words):
        make_encoder(encoder_settings(str(folder), "auto"), [])


def test_every_key_that_sentence_transformers_writes_is_known_or_left_to_it(encoder_folder, tmp_path):
    """A key that nobody read changed vectors in silence: a test of each key that the writer has."""
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    folder, theirs = encoder_folder("xlm-roberta", "mean")
    assert {*theirs._get_model_config(), "truncate_dim"} <= {*KEYS_OF_MODEL_FILE["SentenceTransformer"]}
    folder = shutil.copytree(folder, tmp_path / "changed")
    assert read_conventions(str(folder)).unsupported is None
    kinds = {"sentence_bert_config.json": Transformer, "1_Pooling/config.json": Pooling}
    kinds["2_Normalize/config.json"] = Normalize
    read_here = {"pooling_mode", "include_prompt", "embedding_dimension"}
    for name, module in kinds.items():
        config = json.loads((folder / name).read_text())
        assert {*config} <= {*module.config_keys}
        for key in [*module.config_keys, "of_next_year"]:
            if key not in read_here:
                (folder / name).write_text(json.dumps(config | {key: {"x": 1}}))
                assert read_conventions(str(folder)).unsupported == f"it has {key}"
        (folder / name).write_text(json.dumps(config))
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([modules[0] | {"kwargs": ["task"]}, *modules[1:]]))
    assert read_conventions(str(folder)).unsupported == "it has kwargs of its module Transformer"


def test_an_instruct_model_of_e5_has_its_own_prefixes(encoder_folder, tmp_path):
    """It got "query: " and "passage: " by its name, which are not its own (cosine .67)."""
    folder, theirs = encoder_folder("xlm-roberta", "mean")
    place = shutil.copytree(folder, tmp_path / "multilingual-e5-large-instruct")
    ours = make_encoder(encoder_settings(str(place), "auto"), [])
    task = "Given a web search query, retrieve relevant passages that answer the query"
    assert ours.settings["style"] == "e5-instruct"
    assert_equal(ours, theirs, (f"Instruct: {task}\nQuery: ", ""))
    assert make_encoder(encoder_settings(str(place), "e5"), []).prefixes == ("query: ", "passage: ")


def test_without_its_package_an_encoder_names_the_extra(encoder_folder, monkeypatch):
    folder, _ = encoder_folder("modernbert", "mean")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with raises(R3LiteError, "package-missing", "its model_type is modernbert") as error:
        make_encoder(encoder_settings(str(folder), "auto"), [])
    assert "pip install 'r3lite[encoders]'" in error.value.remedy


@pytest.mark.parametrize("change", [{"architectures": 7, "hidden_size": 33}, {"num_attention_heads": 0}])
def test_what_the_package_cannot_load_is_told_with_its_reason(encoder_folder, tmp_path, change):
    folder = shutil.copytree(encoder_folder("modernbert", "mean")[0], tmp_path / "broken")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with raises(R3LiteError, "encoder-unloadable"):
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
def test_prompts_are_those_that_the_folder_names(encoder_folder, tmp_path, file, prefixes):
    from sentence_transformers import SentenceTransformer

    folder = shutil.copytree(encoder_folder("xlm-roberta", "mean")[0], tmp_path / "prompted")
    (folder / "config_sentence_transformers.json").write_text(json.dumps(file))
    ours = make_encoder(encoder_settings(str(folder), "auto"), [])
    assert (ours.settings["style"], ours.prefixes) == (("own", prefixes) if prefixes else ("plain", ("", "")))
    assert_equal(ours, SentenceTransformer(str(folder), device="cpu"), ours.prefixes)
    if not prefixes:
        with raises(R3LiteError, "encoder-without-prompts"):
            make_encoder(encoder_settings(str(folder), "own"), [])


def test_an_index_remembers_pooling_and_prompts(encoder_folder, tmp_path):
    folder, _ = encoder_folder("xlm-roberta", "cls", {"query": "query : ", "document": "passage : "})
    save(tmp_path / "i", DOCUMENTS, str(folder), "auto")
    manifest = json.loads((tmp_path / "i" / "manifest.json").read_text())
    assert {key: manifest[key] for key in ("style", "pooling", "query_prefix", "passage_prefix")} == {
        "style": "own", "pooling": "cls", "query_prefix": "query : ", "passage_prefix": "passage : "
    }  # fmt: skip
    opened = index.load(tmp_path / "i", encoder_settings(str(folder)))
    assert opened.encoder.prefixes == ("query : ", "passage : ")
    [[nearest]] = opened.search(["oslo a city in norway"], 1)
    assert nearest.title == "Oslo"
    with raises(R3LiteError, "index-setting-differs", "style own, not plain"):
        index.load(tmp_path / "i", encoder_settings(str(folder), "plain"))
    config = json.loads((folder / "config_sentence_transformers.json").read_text())
    copied = shutil.copytree(folder, tmp_path / "other")
    config["prompts"]["query"] = "which "
    (copied / "config_sentence_transformers.json").write_text(json.dumps(config))
    with raises(R3LiteError, "index-setting-differs", "query_prefix query : , not which"):
        index.load(tmp_path / "i", encoder_settings(str(copied)))
