"""How alike two texts are: BLEU and BERTScore, as pure functions. Scores are 0 to 1; other programs may show 0 to 100.

They equal those of the packages sacrebleu (with its defaults) and bert-score (without idf and without rescaling to a
baseline). ROUGE-L, which rewards need, too, is in `answer_match.py`.
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
# Punctuation marks that count as words: most of them anywhere, the others depending on the characters around them.
ALWAYS_SEPARATE = "".join(character for character in string.punctuation if character not in "',-.")
SEPARATE_MARK = re.compile(f"([{re.escape(ALWAYS_SEPARATE)}])")
POINT_AFTER_NO_DIGIT = re.compile(r"([^0-9])([.,])")
POINT_BEFORE_NO_DIGIT = re.compile(r"([.,])([^0-9])")
DASH_AFTER_DIGIT = re.compile(r"([0-9])(-)")


class _Counts(NamedTuple):
    """The numbers that BLEU is computed from, of one or more predictions."""

    matches: np.ndarray  # [ORDERS]: the number of n-grams that match, at index n - 1
    ngrams: np.ndarray  # [ORDERS]: the number of all n-grams, at index n - 1
    words: int
    reference_words: int  # words of the references


def sentence_bleu(prediction: str, references: Sequence[str]) -> float:
    """Returns BLEU of one text with exponential smoothing (see `_bleu`); n-grams longer than the text do not count."""
    counts = _counts(prediction, references)
    return _bleu(counts, orders=min(ORDERS, counts.words))


def corpus_bleu(
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
) -> float:
    """Returns BLEU of a set of texts, from counts summed over all texts (Papineni et al. 2002, P02-1040), with
    exponential smoothing."""
    pairs = zip(predictions, references, strict=True)
    counts = [_counts(prediction, answers) for prediction, answers in pairs]
    total = _Counts(
        matches=sum(text.matches for text in counts),
        ngrams=sum(text.ngrams for text in counts),
        words=sum(text.words for text in counts),
        reference_words=sum(text.reference_words for text in counts),
    )
    return _bleu(total, ORDERS)


def _counts(prediction: str, references: Sequence[str]) -> _Counts:
    """Returns the counts of a text and its references.

    An n-gram matches at most as often as it stands in a single reference. `reference_words` is the length of the
    reference whose length is nearest to the text's.
    """
    words = _words(prediction)
    reference_words = [_words(reference) for reference in references]
    matches = np.zeros(ORDERS)
    ngram_counts = np.zeros(ORDERS)
    for n in range(1, ORDERS + 1):
        ngrams = _ngrams(words, n)
        reference_ngrams: Counter = Counter()
        for reference in reference_words:
            reference_ngrams |= _ngrams(reference, n)  # the larger count of each n-gram
        matches[n - 1] = (ngrams & reference_ngrams).total()
        ngram_counts[n - 1] = ngrams.total()
    lengths = [len(reference) for reference in reference_words]
    # Of two lengths that are equally near, the shorter one counts.
    nearest_length = min(lengths, key=lambda length: (abs(length - len(words)), length))
    return _Counts(
        matches=matches,
        ngrams=ngram_counts,
        words=len(words),
        reference_words=nearest_length,
    )


def _ngrams(words: list[str], n: int) -> Counter:
    starts = range(len(words) - n + 1)
    return Counter(tuple(words[start : start + n]) for start in starts)


def _bleu(counts: _Counts, orders: int) -> float:
    """Returns the geometric mean of the precisions of n-grams of 1 to `orders` words, times the brevity penalty.

    The k-th precision that is 0 becomes 1 / (2^k N), where N is the number of its n-grams: the smoothing of NIST's
    mteval-v13a, method 3 of Chen and Cherry 2014 (W14-3346).
    """
    order_matches = counts.matches[:orders]
    order_ngrams = counts.ngrams[:orders]
    if not counts.matches.any() or not order_ngrams.all():
        return 0.0
    log_sum = 0.0
    zero_precisions = 0
    for matches, ngrams in zip(order_matches, order_ngrams):
        if not matches:
            zero_precisions += 1
            matches = 2.0**-zero_precisions
        log_sum += math.log(matches / ngrams)
    log_brevity_penalty = min(0.0, 1 - counts.reference_words / counts.words)
    return math.exp(log_sum / orders + log_brevity_penalty)


def _words(text: str) -> list[str]:
    """Returns words and marks, as NIST's mteval-v13a separates them: `1,000.5` is one word, `end.` is two."""
    text = text.rstrip().replace("<skipped>", "")
    text = text.replace("-\n", "").replace("\n", " ")
    for entity, character in ENTITIES.items():
        text = text.replace(entity, character)
    text = SEPARATE_MARK.sub(r" \1 ", f" {text} ")
    text = POINT_AFTER_NO_DIGIT.sub(r"\1 \2 ", text)
    text = POINT_BEFORE_NO_DIGIT.sub(r" \1 \2", text)
    text = DASH_AFTER_DIGIT.sub(r"\1 \2 ", text)
    return text.split()


def bert_score(prediction: np.ndarray, reference: np.ndarray) -> Overlap:
    """Returns BERTScore (arXiv 1904.09675, section 3), from token vectors [T, C] of both texts with [CLS] and [SEP].

    Precision is the mean over the prediction's tokens of the cosine to the most similar token of the reference; recall
    is the same with the two texts exchanged. [CLS] and [SEP] may be the most similar token, but are not in the means.
    There are no idf weights and no rescaling. A text without tokens scores 0.
    """
    if len(prediction) <= 2 or len(reference) <= 2:
        return Overlap(0.0, 0.0)
    cosines = _unit_vectors(prediction) @ _unit_vectors(reference).T  # [T of the prediction, T of the reference]
    precision = cosines.max(1)[1:-1].mean()
    recall = cosines.max(0)[1:-1].mean()
    return Overlap(float(precision), float(recall))


def _unit_vectors(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / lengths).astype(np.float64)
