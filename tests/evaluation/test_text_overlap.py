"""ROUGE-L, BLEU and BERTScore against the packages that define them, and against numbers worked by hand."""

import itertools
import math
import random

import numpy as np
import pytest

from r3lite.core.answer_match import rouge_l
from r3lite.datasets.qa import read_questions
from r3lite.evaluation.text_overlap import bert_score, corpus_bleu, sentence_bleu

WORDS = "the a cat sat on mat, Mat. 1,000.5 3-4 U.S. end... (a) &amp; it's Zürich 東京 <b> - x-y re-~read".split()  # noqa: SIM905
ODD = [("", ""), ("", "a"), ("a", ""), ("the", "The."), ("東京", "東京"), ("a-\n", "a"), ("...", ".."), ("3-4", "3 -4")]


def made_pairs(number, seed=0):
    """Pairs of texts with much in common, marks, numbers and other scripts among them."""
    draw = random.Random(seed)
    pairs = list(ODD)
    while len(pairs) < number:
        text = [draw.choice(WORDS) for _ in range(draw.randint(1, 30))]
        variant = [w if draw.random() < 0.7 else draw.choice(WORDS) for w in text if draw.random() < 0.9]
        pairs.append(tuple(" ".join(words).replace("~", "\n") for words in (text, variant)))
    return pairs


@pytest.fixture(scope="session")
def real_pairs(shared):
    """Answers, questions and paragraphs of real data, each beside the next one, or beside two thirds of itself."""
    texts = []
    for name in ("hotpotqa/train_100.json", "musique/train_100.jsonl"):
        for question in read_questions(shared / "data" / name):
            texts += [question.answers[0], question.text, question.gold[0].text[:240], question.gold[-1].text[:120]]
    pairs = list(itertools.pairwise(texts))
    return random.Random(0).sample(pairs, 120) + [(t, t[: 2 * len(t) // 3]) for t in texts[:80]]


@pytest.fixture(params=["made", "real"])
def pairs(request):
    return made_pairs(200) if request.param == "made" else request.getfixturevalue("real_pairs")


def test_rouge_l_equals_rouge_score(pairs):
    scorer = pytest.importorskip("rouge_score.rouge_scorer", reason="extra test").RougeScorer(["rougeL"])
    assert len(pairs) == 200
    for prediction, reference in pairs:
        theirs, ours = scorer.score(reference, prediction)["rougeL"], rouge_l(prediction, reference)
        assert (ours.precision, ours.recall, ours.f1) == pytest.approx(tuple(theirs), abs=1e-6), (prediction, reference)


def test_sentence_bleu_equals_sacrebleu(pairs):
    sacrebleu = pytest.importorskip("sacrebleu", reason="extra test")
    for prediction, reference in pairs:
        for references in ([reference], [reference, "the cat sat on it", prediction[: len(prediction) // 2]]):
            theirs = sacrebleu.sentence_bleu(prediction, references).score / 100
            assert sentence_bleu(prediction, references) == pytest.approx(theirs, abs=1e-6), (prediction, references)


def test_corpus_bleu_equals_sacrebleu(pairs):
    sacrebleu = pytest.importorskip("sacrebleu", reason="extra test")
    for subset in (pairs, pairs[:8], pairs[8:12], pairs[50:51]):
        predictions, references = zip(*subset)
        theirs = sacrebleu.corpus_bleu(list(predictions), [list(references)]).score / 100
        assert corpus_bleu(predictions, [[r] for r in references]) == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize("source", ["made", "real"])
def test_bert_score_equals_the_package_with_our_encoder(source, request, minilm):
    package = pytest.importorskip("bert_score", reason="extra test")
    from r3lite.retrieval.encoder import BertEncoder

    pairs = made_pairs(50) if source == "made" else request.getfixturevalue("real_pairs")
    pairs = [pair for pair in pairs if all(text.strip() for text in pair)]
    predictions, references = map(list, zip(*pairs))
    # One pair a batch: the package takes padding of a batch for tokens whose cosine is 0.
    theirs = package.score(predictions, references, model_type=str(minilm), num_layers=6, batch_size=1, device="cpu")
    encoder = BertEncoder(str(minilm), "plain")
    vectors = dict(zip([*predictions, *references], encoder.encode_tokens([*predictions, *references])))
    for prediction, reference, *expected in zip(predictions, references, *(x.tolist() for x in theirs)):
        ours = bert_score(vectors[prediction], vectors[reference])
        assert (ours.precision, ours.recall) == pytest.approx(expected[:2], abs=1e-6), (prediction, reference)
        # Of a negative and a positive number the package takes a harmonic mean, too, which may be anything.
        assert ours.f1 == pytest.approx(expected[2] if min(expected) > 0 else 0.0, abs=1e-6), (prediction, reference)


def test_rouge_l_by_hand():
    # police kill the gunman / police killed the gunman: 3 of 4 in order. With the words turned round only 2 are.
    overlap = rouge_l("police kill the gunman", "police killed the gunman")
    assert (overlap.precision, overlap.recall, overlap.f1) == (0.75, 0.75, 0.75)
    assert rouge_l("the gunman kill police", "police killed the gunman").f1 == 0.5
    assert rouge_l("Oslo", "Oslo, Norway").recall == 0.5 and rouge_l("東京", "東京").f1 == 0.0


def test_bleu_by_hand():
    # 3 of 4 words, 1 of 3 pairs; no triple of 2 and no four of 1 matches: 1 / (2 * 2) and 1 / (4 * 1).
    expected = (3 / 4 * 1 / 3 * 1 / 4 * 1 / 4) ** 0.25
    assert sentence_bleu("a b x d", ["a b c d"]) == pytest.approx(expected)
    # Two words match of two, but three are wanted: exp(1 - 3 / 2); there are no triples in it, and they do not count.
    assert sentence_bleu("a b", ["a b c"]) == pytest.approx(math.exp(-0.5))
    assert sentence_bleu("Oslo", ["Paris", "Oslo"]) == 1.0 and sentence_bleu("x", ["y"]) == 0.0
    assert corpus_bleu(["a b"], [["a b"]]) == 0.0  # no triple in the whole set


def test_bert_score_by_hand():
    x, y, mark = [1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 1.0]  # lengths do not matter
    overlap = bert_score(np.array([mark, x, y, mark]), np.array([mark, x, mark]))
    assert bert_score(np.array([mark, [-1.0, 0.0, -0.1], mark]), np.array([mark, x, mark])).f1 == 0.0  # not negative
    # x finds x; y finds nothing like it: (1 + 0) / 2. The one token of the reference finds itself.
    assert (overlap.precision, overlap.recall, overlap.f1) == pytest.approx((0.5, 1.0, 2 / 3))
    turned = bert_score(np.array([mark, x, mark]), np.array([mark, x, y, mark]))
    assert (turned.precision, turned.recall) == pytest.approx((1.0, 0.5))
    assert bert_score(np.array([mark, mark]), np.array([mark, x, mark])).f1 == 0.0
