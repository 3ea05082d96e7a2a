"""Encoders: the BERT one against the reference pipeline, E5's conventions, and hashing."""

import json
import os
import shutil

import numpy as np
import pytest
import torch

from r3lite.core.episode import Document
from r3lite.core.errors import R3LiteError
from r3lite.retrieval.conventions import style_of
from r3lite.retrieval.encoder import BertEncoder, HashingEncoder, make_encoder
from tests.built_index import encoder_settings
from tests.errors import raises

TEXTS = ["Blue Harbor is a film.", "x", "", "Ünïcode: 東京 ist groß — isn't it?", "a long one " * 300]


@pytest.fixture(scope="module")
def encoder(minilm):
    return BertEncoder(str(minilm), "plain", batch_size=2)


def reference(folder, texts, max_length, pooling="mean"):
    """The pipeline of the model's card: tokenizer and model of transformers, pooling, L2 norm."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    batch = tokenizer(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None].float()
    lengths = batch["attention_mask"].sum(1)
    pooled = {
        "mean": (hidden * mask).sum(1) / mask.sum(1),
        "cls": hidden[:, 0],
        "last": torch.stack([states[length - 1] for states, length in zip(hidden, lengths)]),
    }
    return torch.nn.functional.normalize(pooled[pooling], dim=-1).numpy()


def documents(texts, title=""):
    return [Document(str(i), title, text) for i, text in enumerate(texts)]


def test_equals_the_reference_pipeline(encoder, minilm):
    done = []
    ours = encoder.encode_passages(documents(TEXTS), done.append)
    assert ours.dtype == np.float32
    assert ours.shape == (5, 384)
    assert sum(done) == 5
    cosines = (ours * reference(minilm, TEXTS, 256)).sum(1)
    assert cosines.min() >= 0.99999
    # Queries go the same way, and what a text is batched with changes nothing but rounding.
    alone = np.concatenate([encoder.encode_queries([t]) for t in TEXTS])
    assert (alone * ours).sum(1).min() >= 0.99999


def test_length_is_that_of_sentence_bert_config(encoder):
    assert encoder.settings == {**encoder.settings, "style": "plain", "max_length": 256, "dimension": 384}
    encoding = encoder.tokenizer.encode(TEXTS[-1])
    assert len(encoding.ids) == 256
    assert encoding.tokens[-1] == "[SEP]"


def test_e5_style_prefixes_queries_and_passages(encoder, minilm, tmp_path):
    folder = tmp_path / "my-e5-small"
    shutil.copytree(minilm, folder)
    (folder / "sentence_bert_config.json").unlink()
    document = Document("1", "Blue Harbor", "A film.")
    e5 = make_encoder(encoder_settings(str(folder), "auto"), [document])
    assert e5.settings["style"] == "e5"
    assert e5.settings["max_length"] == 512
    plain = encoder.encode_queries(["query: who?", "passage: Blue Harbor A film."])
    ours = np.concatenate([e5.encode_queries(["who?"]), e5.encode_passages([document], lambda n: None)])
    assert (ours * plain).sum(1).min() >= 0.99999


def test_bf16_gives_nearly_the_same_vectors_of_length_one(minilm):
    texts = ["Where is Oslo?", "Ada lives in Rome with her friend Bob. " * 20, "", "1994"]
    exact = BertEncoder(str(minilm), "plain").encode_queries(texts)
    coarse = BertEncoder(str(minilm), "plain", dtype="bf16")
    coarse_vectors = coarse.encode_queries(texts)
    distances = np.linalg.norm(coarse_vectors - exact, axis=1)
    assert coarse_vectors.dtype == np.float32 and 0 < distances.max() < 0.02
    assert np.linalg.norm(coarse_vectors, axis=1) == pytest.approx(np.ones(4), abs=1e-6)
    assert coarse.settings["dtype"] == "bf16" and all(w.dtype == torch.bfloat16 for w in coarse.model.parameters())


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("intfloat/e5-base-v2", "e5"),
        ("intfloat/multilingual-e5-small", "e5"),
        ("models/my_e5/", "e5"),
        ("intfloat/multilingual-e5-large-instruct", "e5-instruct"),
        ("intfloat/e5-mistral-7b-instruct", "e5-instruct"),
        ("sentence-transformers/all-MiniLM-L6-v2", "plain"),
        ("someone/le5a", "plain"),
    ],
)
def test_style_follows_the_name(name, style):
    assert style_of(name) == style


POOLING = {  # files of a Pooling module, and what they ask for; None: what r3lite does not compute
    '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}': "cls",
    '{"pooling_mode_mean_tokens": false, "pooling_mode_lasttoken": true}': "last",
    '{"pooling_mode": "cls"}': "cls",
    '{"pooling_mode": "lasttoken", "include_prompt": true}': "last",
    '{"pooling_mode": "mean"}': "mean",
    '{"word_embedding_dimension": 384}': "mean",
    '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}': None,  # both, side by side
    '{"pooling_mode_cls_token": true}': None,  # the mean is on unless it is off
    '{"pooling_mode": "max"}': None,
    '{"pooling_mode": "mean", "include_prompt": false}': None,
}


@pytest.fixture(scope="module")
def pooled(minilm, tmp_path_factory):
    """A copy of the encoder whose file of Pooling each test writes."""
    return shutil.copytree(minilm, tmp_path_factory.mktemp("pooled") / "copy")


@pytest.mark.parametrize("file", POOLING)
def test_tokens_are_pooled_as_the_folder_says(pooled, file):
    (pooled / "1_Pooling" / "config.json").write_text(file)
    if POOLING[file] is None:
        with pytest.raises(R3LiteError, match=r"not a supported BERT encoder: it (uses|excludes)"):
            BertEncoder(str(pooled), "plain")
        return
    ours = BertEncoder(str(pooled), "plain", batch_size=2)
    assert ours.settings.get("pooling", "mean") == POOLING[file]
    vectors = ours.encode_queries(TEXTS)
    assert (vectors * reference(pooled, TEXTS, 256, POOLING[file])).sum(1).min() >= 0.99999


def test_a_tokenizer_that_cannot_be_read_is_refused(minilm, tmp_path):
    folder = copied(minilm, tmp_path)
    shutil.rmtree(folder / "1_Pooling")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(R3LiteError, match=r"tokenizer\.json: not JSON"):
        BertEncoder(str(folder), "plain")
    (folder / "tokenizer.json").unlink()
    with raises(R3LiteError, "file-unreadable", "tokenizer.json"):
        BertEncoder(str(folder), "plain")


def world(n=3000):
    """Short articles about films whose names share their words with other films' names."""
    first = ["Blue", "Red", "Silent", "Golden", "Broken", "Distant", "Hidden", "Last", "Wild", "Northern"]
    second = ["Harbor", "River", "Mirror", "Garden", "Winter", "Letter", "Bridge", "Tower", "Island", "Road"]
    names = [f"{a} {b}{'' if k == 0 else f' {k + 1}'}" for k in range(n // 100) for a in first for b in second]
    template = "{0} is a film. {0} was directed by Person{1}. It was made in {2}."
    return [Document(str(i), x, template.format(x, i * 7919 % n, 1900 + i % 100)) for i, x in enumerate(names)]


def test_hashing_finds_the_article_among_thousands():
    articles = world()
    encoder = HashingEncoder.fit(f"{d.title} {d.text}" for d in articles)
    vectors = encoder.encode_passages(articles, lambda n: None)
    assert vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    queries = [f"Who directed {d.title}?" for d in articles[:100]]
    best = (encoder.encode_queries(queries) @ vectors.T).argmax(1)
    assert [articles[i].title for i in best] == [d.title for d in articles[:100]]
    # A person is named in one article only, and nowhere in a title.
    best = (encoder.encode_queries([f"What did Person{k} direct?" for k in range(100)]) @ vectors.T).argmax(1)
    assert all(f"Person{k}." in articles[i].text for k, i in enumerate(best))


def test_hashing_of_unknown_words_is_zero_and_not_nan():
    encoder = HashingEncoder.fit(["one film", "two films"])
    assert not encoder.encode_queries(["", "?!", "zebra"]).any()
    assert encoder.encode_queries([]).shape == (0, encoder.dimension)


def test_hashing_is_the_same_in_every_process():
    """Python's hash() of a string is another one in each process: an index would be noise after a restart.

    The numbers were written down by another process; if they must change, index.VERSION must, too.
    """
    encoder = HashingEncoder.fit(["Käse film"])
    assert "version" not in encoder.settings  # a manifest has them beside the index's own version
    assert encoder.places.tolist() == [[1521, 477, 1996, 1672], [815, 1249, 654, 79]]
    assert encoder.signs.tolist() == [[1.0, 1.0, -1.0, 1.0], [1.0, 1.0, -1.0, -1.0]]


def test_hashing_is_kept_and_read_back(tmp_path):
    encoder = HashingEncoder.fit(["Blue Harbor is a film", "a road, a road"])
    encoder.save(tmp_path)
    restored = HashingEncoder.load(tmp_path)
    queries = ["film road", "a blue a"]
    assert np.array_equal(encoder.encode_queries(queries), restored.encode_queries(queries))
    (tmp_path / "words.json").write_text("{}")
    with pytest.raises(R3LiteError, match="passages is missing"):
        HashingEncoder.load(tmp_path)


def copied(minilm, tmp_path):
    return shutil.copytree(minilm, tmp_path / "copy")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("sentence_bert_config.json", {"max_seq_length": "256"}, "max_seq_length is '256', not a whole number"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length is 0"),
        ("sentence_bert_config.json", {"max_seq_length": 2}, "max_seq_length is 2"),
        ("sentence_bert_config.json", {"do_lower_case": "false"}, "do_lower_case is 'false', not true or false"),
        ("sentence_bert_config.json", [], "not a JSON object"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": "true"}, "pooling_mode_mean_tokens is 'true'"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean"]}, "pooling_mode is .*, not text"),
        ("modules.json", {}, "modules is .*, not a list"),
        ("modules.json", ["Pooling"], r"modules\[0\] is 'Pooling', not a JSON object"),
        ("modules.json", [{"type": 7}], r"modules\[0\]\.type is 7"),
        ("modules.json", [{"type": "a.Transformer", "path": "0_BERT"}], "must be empty for a Transformer"),
        ("modules.json", [{"type": "a.Pooling", "path": "../1_Pooling"}], "is not in the encoder's"),
        ("modules.json", [{"type": "a.Pooling", "path": ".."}], "is not in the encoder's"),
        ("modules.json", [{"type": "a.Pooling", "path": ""}], r"modules\[0\]\.path is blank"),
        ("config.json", {"model_type": 7}, "model_type is 7"),
        ("config_sentence_transformers.json", {"prompts": []}, "prompts is \\[\\], not a JSON object"),
        ("config_sentence_transformers.json", {"prompts": {"query": 7}}, "query is 7, not text"),
    ],
)
def test_files_of_sentence_transformers_with_wrong_values_are_refused(minilm, tmp_path, name, value, words):
    folder = copied(minilm, tmp_path)
    (folder / name).write_text(json.dumps(value))
    with pytest.raises(R3LiteError, match=words) as error:
        BertEncoder(str(folder), "plain")
    assert str(folder / name) in error.value.cause
    (folder / name).write_text("[" * 200_000)
    with pytest.raises(R3LiteError, match="nested more than"):
        BertEncoder(str(folder), "plain")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with raises(R3LiteError, "not-a-file", "pipe or device"):
        BertEncoder(str(folder), "plain")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t["model"]["vocab"].update(zebra_=40_000), "has token ids up to 40000, .* embedding has 30522 rows"),
        (lambda t: t.update(post_processor=None), r"does not put a text between \[CLS\] and \[SEP\]"),
        (lambda t: t.update(model=[]), "cannot be used"),
    ],
)
def test_a_tokenizer_that_does_not_fit_its_encoder_is_refused(minilm, tmp_path, change, words):
    folder = copied(minilm, tmp_path)
    value = json.loads((folder / "tokenizer.json").read_text())
    change(value)
    (folder / "tokenizer.json").write_text(json.dumps(value))
    with pytest.raises(R3LiteError, match=words):
        BertEncoder(str(folder), "plain")


def test_a_pooling_folder_of_another_name_is_read(minilm, tmp_path):
    folder = copied(minilm, tmp_path)
    (folder / "modules.json").write_text(json.dumps([{"type": "a.b.Pooling", "path": "pool"}]))
    (folder / "1_Pooling").rename(folder / "pool")
    BertEncoder(str(folder), "plain")
    (folder / "modules.json").write_text(json.dumps([{"type": "models.Dense", "path": "2"}]))
    with raises(R3LiteError, "encoder-unsupported", "it has a module Dense"):
        BertEncoder(str(folder), "plain")
    (folder / "modules.json").write_text(json.dumps([{"type": "a.b.Pooling", "path": "pool"}]))
    (folder / "pool" / "config.json").write_text('{"pooling_mode": "max"}')
    with raises(R3LiteError, "encoder-unsupported", "it uses max pooling"):
        BertEncoder(str(folder), "plain")


def test_an_encoder_that_wants_small_letters_gets_them(minilm, tmp_path):
    """do_lower_case was ignored; with a tokenizer that keeps capitals, other vectors came out."""
    folder = copied(minilm, tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for lowers in (False, True):
        (folder / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": lowers}))
        upper, lower = BertEncoder(str(folder), "plain").encode_queries(["Blue HARBOR", "blue harbor"])
        assert (upper == lower).all() == lowers
