"""How alike two texts are: BLEU and BERTScore. Pure functions; 0 to 1, where others show 0 to 100.

They equal the packages sacrebleu (with its defaults) and bert-score (without idf and without rescaling to a baseline).
ROUGE-L, which rewards need, too, is in `answer_match.py`.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from r3lite.core.answer_match import Overlap

ORDERS = 4  # BLEU counts n-grams of one to four words
ENTITIES = {"&quot;": '"', "&amp;": "&", "&lt;": "<", "&gt;": ">"}
ALWAYS_APART = re.compile("([" + re.escape("".join(c for c in string.punctuation if c not in "',-.")) + "])")
AFTER_NO_DIGIT, BEFORE_NO_DIGIT = re.compile(r"([^0-9])([.,])"), re.compile(r"([.,])([^0-9])")
AFTER_DIGIT = re.compile(r"([0-9])(-)")


class _Counts(NamedTuple):
    """What BLEU is made of: n-grams that match and all n-grams, by n - 1; words of predictions and of references."""

    matched: np.ndarray
    all: np.ndarray
    words: int
    reference_words: int


def sentence_bleu(prediction: str, references: Sequence[str]) -> float:
    """BLEU of one text: the n-grams that it is long enough for, with exponential smoothing."""
    counts = _counts(prediction, references)
    return _bleu(counts, orders=min(ORDERS, counts.words))


def corpus_bleu(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """BLEU of a set of texts, from sums over it (Papineni et al. 2002, P02-1040), with exponential smoothing."""
    parts = [_counts(*pair) for pair in zip(predictions, references, strict=True)]
    return _bleu(_Counts(*map(sum, zip(*parts))), ORDERS)


def _counts(prediction: str, references: Sequence[str]) -> _Counts:
    """An n-gram counts as often as the reference has it that has it most; the reference of nearest length counts."""
    words, others = _words(prediction), [_words(reference) for reference in references]
    matched, of_all = np.zeros(ORDERS), np.zeros(ORDERS)
    for n in range(1, ORDERS + 1):
        ours, most = _ngrams(words, n), Counter()
        for other in others:
            most |= _ngrams(other, n)
        matched[n - 1], of_all[n - 1] = (ours & most).total(), ours.total()
    _, nearest = min((abs(len(other) - len(words)), len(other)) for other in others)
    return _Counts(matched, of_all, len(words), nearest)


def _ngrams(words: list[str], n: int) -> Counter:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def _bleu(counts: _Counts, orders: int) -> float:
    """Geometric mean of the precisions, times the brevity penalty.

    The k-th precision that is 0 becomes 1 / (2^k n-grams): the smoothing of NIST's mteval-v13a, method 3 of Chen and
    Cherry 2014 (W14-3346).
    """
    if not counts.matched.any() or not counts.all[:orders].all():
        return 0.0
    logs, none_matched = 0.0, 0
    for matched, of_all in zip(counts.matched[:orders], counts.all[:orders]):
        none_matched += not matched
        logs += math.log((matched or 2.0**-none_matched) / of_all)
    return math.exp(logs / orders + min(0.0, 1 - counts.reference_words / counts.words))


def _words(text: str) -> list[str]:
    """Words and marks, as NIST's mteval-v13a parts them: `1,000.5` is one word, `end.` is two."""
    text = text.rstrip().replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity, character in ENTITIES.items():
        text = text.replace(entity, character)
    text = ALWAYS_APART.sub(r" \1 ", f" {text} ")
    text = BEFORE_NO_DIGIT.sub(r" \1 \2", AFTER_NO_DIGIT.sub(r"\1 \2 ", text))
    return AFTER_DIGIT.sub(r"\1 \2 ", text).split()


def bert_score(prediction: np.ndarray, reference: np.ndarray) -> Overlap:
    """BERTScore (arXiv 1904.09675, section 3), from token vectors [T, C] of both texts with [CLS] and [SEP].

    Precision is the mean over the prediction's tokens of the cosine to the most similar token of the reference, recall
    the same the other way round. [CLS] and [SEP] may be most similar, but do not count themselves. No idf weights, no
    rescaling. A text without tokens scores 0.
    """
    if len(prediction) <= 2 or len(reference) <= 2:
        return Overlap(0.0, 0.0)
    ours, theirs = ((x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float64) for x in (prediction, reference))
    cosines = ours @ theirs.T
    return Overlap(float(cosines.max(1)[1:-1].mean()), float(cosines.max(0)[1:-1].mean()))
