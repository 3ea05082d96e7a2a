"""A cross-encoder's scores against transformers, and what becomes of the candidates."""

import json
import shutil

import pytest
import torch

from r3lite.core.episode import Document, Question
from r3lite.core.errors import R3LiteError
from r3lite.retrieval.conventions import KEYS_OF_MODEL_FILE
from r3lite.retrieval.reranker import CrossEncoder, Reranked
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.settings import RetrievalSettings
from tests.errors import raises

PAIRS = [
    ("Who directed Blue Harbor?", "Blue Harbor is a film directed by Ann Lee."),
    ("x", ""),
    ("Who directed Blue Harbor?", "Oslo is the capital of Norway. " * 200),
    ("Ünïcode 東京?", "Tokyo"),
    ("a very long query " * 200, "a very long passage " * 200),
]


@pytest.fixture(scope="module")
def folder(minilm, tmp_path_factory):
    """A cross-encoder with the vocabulary of a real model, one layer and random weights."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    model = BertForSequenceClassification(BertConfig(vocab_size=30522, num_labels=1, **sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("LayerNorm.weight") else 0.0, 0.3)
    folder = tmp_path_factory.mktemp("cross")
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(minilm / name, folder / name)
    return folder


@torch.no_grad()
def test_scores_are_those_of_transformers(folder):
    from transformers import AutoTokenizer, BertForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(*map(list, zip(*PAIRS)), padding=True, truncation=True, max_length=512, return_tensors="pt")
    theirs = BertForSequenceClassification.from_pretrained(folder).eval()(**batch).logits[:, 0]
    ours = CrossEncoder(str(folder), batch_size=2).scores(PAIRS)
    assert torch.tensor(ours) == pytest.approx(theirs, abs=1e-4)
    assert len({round(score, 3) for score in ours}) == len(PAIRS)
    assert CrossEncoder(str(folder)).scores([]) == []


def test_pairs_are_cut_where_sentence_transformers_cuts_them(folder, tmp_path):
    from sentence_transformers import CrossEncoder as Theirs

    theirs = Theirs(str(folder), device="cpu", max_length=32)
    theirs.save_pretrained(str(tmp_path / "saved"))
    logits = theirs.predict(PAIRS, activation_fn=torch.nn.Identity())
    assert CrossEncoder(str(tmp_path / "saved")).scores(PAIRS) == pytest.approx(logits.tolist(), abs=1e-4)


def saved(folder, tmp_path, **options):
    """The cross-encoder as sentence-transformers writes it."""
    from sentence_transformers import CrossEncoder as Theirs

    theirs = Theirs(str(folder), device="cpu", **options)
    theirs.save_pretrained(str(tmp_path / "saved"))
    return tmp_path / "saved", theirs


def test_the_default_prompt_stands_before_the_query(folder, tmp_path):
    """It was left out, and scores were those of other texts."""
    prompts = {"search": "Find what answers: ", "other": "x"}
    place, theirs = saved(folder, tmp_path, prompts=prompts, default_prompt_name="search")
    logits = theirs.predict(PAIRS, activation_fn=torch.nn.Identity())
    assert CrossEncoder(str(place)).scores(PAIRS) == pytest.approx(logits.tolist(), abs=1e-4)


def update_json(place, name: str, **changes) -> None:
    path = place / name
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def test_every_key_of_a_cross_encoder_is_read_or_refused(folder, tmp_path):
    from sentence_transformers.base.modules import Transformer

    place, theirs = saved(folder, tmp_path)
    assert {*theirs._get_model_config()} <= {*KEYS_OF_MODEL_FILE["CrossEncoder"]}
    file = "sentence_bert_config.json"
    config = json.loads((place / file).read_text(encoding="utf-8"))
    for key in Transformer.config_keys:
        if key in ("unpad_inputs",):
            continue
        update_json(place, file, **{key: {"x": 1}})
        with pytest.raises(R3LiteError, match=f"{key} is "):
            CrossEncoder(str(place))
        (place / file).write_text(json.dumps(config), encoding="utf-8")
    CrossEncoder(str(place))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("config_sentence_transformers.json", {"activation_fn": "torch.nn.GELU"}, "activation_fn is GELU"),
        ("config.json", {"sentence_transformers": {"activation_fn": "a.Softmax"}}, "activation_fn is Softmax"),
        ("config_sentence_transformers.json", {"model_type": "SentenceTransformer"}, "model_type is 'SentenceTransf"),
        ("config_sentence_transformers.json", {"of_next_year": 1}, "of_next_year is 1, which r3lite does not support"),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "prompts.x is missing"),
    ],
)
def test_another_cross_encoder_is_refused(folder, tmp_path, name, changes, words):
    place, _ = saved(folder, tmp_path)
    update_json(place, name, **changes)
    with pytest.raises(R3LiteError, match=words):
        CrossEncoder(str(place))


def test_in_bf16_scores_are_nearly_the_same(folder):
    exact, coarse = torch.tensor(CrossEncoder(str(folder)).scores(PAIRS)), CrossEncoder(str(folder), "bf16")
    assert all(weight.dtype == torch.bfloat16 for weight in coarse.model.parameters())
    scores = torch.tensor(coarse.scores(PAIRS))
    assert 0 < (scores - exact).abs().max() < 0.05 * exact.abs().max()
    settings = RetrievalSettings(rerank=str(folder), encoder_dtype="bf16")
    assert Setup(settings, []).reranker.scores(PAIRS) == scores.tolist()


class Lengths:
    """A reranker that likes long passages."""

    scored_pairs = ()

    def scores(self, pairs):
        self.scored_pairs = pairs
        return [float(len(passage)) for _, passage in pairs]


def test_the_best_candidates_are_kept_and_each_pair_is_read_once():
    documents = [Document(str(n), "", "x" * n, 1.0, "lexical") for n in (2, 9, 5, 7)]
    reranker = Lengths()
    reranked = Reranked(lambda pairs: [documents, [], documents[:1], documents], reranker, top_k=2)
    one, two = Question("1", "?", ("a",)), Question("2", "?", ("a",))
    rankings = reranked([(one, "q"), (one, "none"), (one, "p"), (two, "q")])
    assert [[(d.id, d.score, d.source) for d in row] for row in rankings] == [
        [("9", 9.0, "lexical"), ("7", 7.0, "lexical")], [], [("2", 2.0, "lexical")],
        [("9", 9.0, "lexical"), ("7", 7.0, "lexical")],
    ]  # fmt: skip
    assert len(reranker.scored_pairs) == 5
    assert Reranked(lambda pairs: [], reranker, 2)([]) == []


def test_three_times_as_many_candidates_are_asked_for(folder):
    documents = tuple(Document(str(i), f"Harbor {i}", "A harbor." + " And more." * i) for i in range(20))
    question = Question("q", "harbor", ("a",), documents)

    def retrieve(**changes):
        settings = RetrievalSettings(retriever="lexical", encoder="hashing", **changes)
        return build_retriever(Setup(settings, [question]))([(question, "Which harbor?")])[0]

    reranked, candidates = retrieve(top_k=4, rerank=str(folder)), retrieve(top_k=12)
    scores = CrossEncoder(str(folder)).scores([("Which harbor?", f"{d.title} {d.text}") for d in candidates])
    best = sorted(zip(scores, candidates, strict=True), key=lambda pair: -pair[0])[:4]
    assert reranked == [d for _, d in best] != retrieve(top_k=4)
    assert [d.score for d in reranked] == pytest.approx([score for score, _ in best], abs=1e-5)


def test_what_is_no_cross_encoder_is_refused(folder, minilm, tmp_path):
    with pytest.raises(R3LiteError, match=r"classifier\.weight is missing"):
        CrossEncoder(str(minilm))
    with pytest.raises(R3LiteError, match="no such model folder") as error:
        CrossEncoder(str(tmp_path / "gone"))
    assert "pass --rerank FOLDER" in error.value.remedy
    copied = shutil.copytree(folder, tmp_path / "copy")
    value = json.loads((copied / "tokenizer.json").read_text())
    value["post_processor"]["pair"] = value["post_processor"]["pair"][:-1]
    (copied / "tokenizer.json").write_text(json.dumps(value))
    with raises(R3LiteError, "tokenizer-not-bert"):
        CrossEncoder(str(copied))
