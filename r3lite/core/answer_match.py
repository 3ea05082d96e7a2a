"""How right an answer is: exact match and F1 as the data sets' official scripts compute them, and ROUGE-L.

Also tells whether an answer occurs in a text, and where the sentences of a text end. Rewards, evaluation and data sets
share this file.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from r3lite.core.episode import Episode, Question

Rule = Literal["hotpotqa", "musique"]
PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")
# Matches the end of a sentence and the white space after it.
SENTENCE = re.compile(
    # After . ! or ?, with or without a closing quotation mark or bracket, ...
    r"(?:(?<=[.!?])|(?<=[.!?][\"')\]\u201d\u2019]))"
    # ... but not after an initial or an abbreviation; ...
    r"(?<!\b[A-Z]\.)(?<!\b(?:Mr|Ms|Dr|St|vs|cf)\.)(?<!\b(?:Mrs|Fig)\.)(?<!\bProf\.)(?<!\b[a-z]\.[a-z]\.)"
    # ... the next sentence begins with no small letter, or with an opening quotation mark or bracket.
    r"\s+(?=[^\Wa-z]|[\"'(\[\u201c\u2018])"
    # Or after a full stop, exclamation mark or question mark of Chinese or Japanese.
    r"|(?<=[\u3002\uff01\uff1f])"
    # Or at a blank line.
    r"|\n[^\S\n]*\n\s*"
)
# The characters of scripts that put no spaces between words: Thai, Lao, Burmese, Khmer, kana and Chinese characters.
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]"
)
VERDICTS = ("yes", "no", "noanswer")  # answers for which HotpotQA's script gives all of the credit or none


@dataclass(frozen=True)
class Overlap:
    """Precision (the share of a prediction that is right) and recall (the share of the answer that it has), 0 to 1."""

    precision: float
    recall: float

    @property
    def f1(self) -> float:
        """The harmonic mean of the two; 0 if either is 0 or negative, as only BERTScore's can be."""
        if min(self.precision, self.recall) <= 0:
            return 0.0
        return 2 * self.precision * self.recall / (self.precision + self.recall)


def normalize(text: str) -> str:
    """Returns a text in lower case, without punctuation, without articles, with single spaces.

    The changes are made in this order (SQuAD, arXiv 1606.05250). Articles taken out before the punctuation would take
    the `a` of `a.m.` with them, and articles taken out after the spaces were collapsed would leave double spaces.
    """
    unpunctuated = text.lower().translate(PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", unpunctuated).split())


def question_key(text: str) -> str:
    """Returns a key that is equal for questions that ask the same: the normalized text, or the text if that is empty.

    The key decides whether a question is in two sets of questions. Ids cannot tell, since each file has its own.
    """
    return normalize(text) or " ".join(text.split())


def rule_of(question: Question) -> Rule:
    """Returns HotpotQA's rule if gold paragraphs are named by title (HotpotQA, 2Wiki), else MuSiQue's."""
    return "hotpotqa" if question.gold_by == "title" else "musique"


def exact_match(prediction: str, answers: Iterable[str]) -> float:
    """Returns 1 if the prediction equals any of the answers after normalization, else 0."""
    predicted = normalize(prediction)
    return float(any(predicted == normalize(answer) for answer in answers))


def f1(prediction: str, answers: Iterable[str], rule: Rule = "musique") -> float:
    """Returns the best F1 of the prediction's words over the answers, 0 without an answer; see `overlap`."""
    return max((overlap(prediction, answer, rule).f1 for answer in answers), default=0.0)


def overlap(prediction: str, answer: str, rule: Rule) -> Overlap:
    """Returns precision and recall of the prediction's words, each counted as often as it occurs.

    With `hotpotqa`, precision and recall are 0 if one text is yes, no or noanswer and the other text differs. With
    `musique`, they are 1 if neither text has words after normalization, and 0 if only one text has none.
    """
    prediction = normalize(prediction)
    answer = normalize(answer)
    has_verdict = prediction in VERDICTS or answer in VERDICTS
    if rule == "hotpotqa" and has_verdict and prediction != answer:
        return Overlap(0.0, 0.0)
    predicted_words = prediction.split()
    answer_words = answer.split()
    if rule == "musique" and not (predicted_words and answer_words):
        equality = float(predicted_words == answer_words)
        return Overlap(equality, equality)
    shared = (Counter(predicted_words) & Counter(answer_words)).total()
    if not shared:
        return Overlap(0.0, 0.0)
    return Overlap(shared / len(predicted_words), shared / len(answer_words))


def best_overlap(prediction: str, answers: Sequence[str], rule: Rule) -> Overlap:
    """Returns the best precision and the best recall, each over all answers, as 2WikiMultiHopQA's script does."""
    overlaps = [overlap(prediction, answer, rule) for answer in answers]
    return Overlap(max(o.precision for o in overlaps), max(o.recall for o in overlaps))


def answer_scores(episode: Episode) -> tuple[float, float]:
    """Returns EM and F1 of an episode's final answer; both are 0 if it gave none.

    They are 0 even if a gold answer normalizes to nothing: the official scripts would then call a blank answer right,
    but an episode without an answer is never right.
    """
    prediction = episode.prediction
    if not prediction.strip():
        return 0.0, 0.0
    answers = episode.question.answers
    return exact_match(prediction, answers), f1(prediction, answers, rule_of(episode.question))


def is_right(question: Question, answer: str, min_f1: float) -> bool:
    """Tells whether an answer is an exact match, or has at least this F1."""
    if exact_match(answer, question.answers) == 1:
        return True
    return f1(answer, question.answers, rule_of(question)) >= min_f1


def split_words(text: str) -> list[str]:
    """Returns the words of a text in lower case: runs of letters with their marks, digits and underscores.

    In scripts that put no spaces between words, each character is a word. An accent that is a character of its own is
    joined to its letter.
    """
    if text.isascii():
        return re.findall(r"\w+", text.lower())
    folded = unicodedata.normalize("NFC", text).casefold()
    return "".join(map(_spaced, folded)).split()


def _spaced(character: str) -> str:
    """Returns a character with spaces around it if it is a word by itself, unchanged if it is a part of a word.

    Returns a space for any other character.
    """
    if UNSPACED.match(character):
        return f" {character} "
    if character.isalnum() or character == "_":
        return character
    if unicodedata.category(character).startswith("M"):  # a mark, as Hindi writes most vowels
        return character
    return " "


def words(text: str) -> tuple[str, ...]:
    """Returns the words of a text in lower case, without articles.

    Hyphens and dashes divide words, unlike in `normalize`.
    """
    return tuple(word for word in split_words(text) if not ARTICLES.fullmatch(word))


def in_a_row(phrase: Sequence[str], text_words: Sequence[str]) -> bool:
    """Tells whether the words of a phrase stand in a text one after the other; False if the phrase has no words."""
    return bool(phrase) and f" {' '.join(phrase)} " in f" {' '.join(text_words)} "


def stands_in(answer: str, text: str) -> bool:
    """Tells whether a text contains the words of an answer, one after the other."""
    return in_a_row(words(answer), words(text))


def rouge_l(prediction: str, reference: str) -> Overlap:
    """Returns the longest common subsequence of words as shares of both texts.

    These are equations 2 to 4 of Lin 2004 (W04-1013), with beta 1. Words are runs of a to z and 0 to 9: texts
    in other scripts share nothing. The result equals that of the package rouge-score without stemming.
    """
    predicted_words = re.findall("[a-z0-9]+", prediction.lower())
    reference_words = re.findall("[a-z0-9]+", reference.lower())
    if not predicted_words or not reference_words:
        return Overlap(0.0, 0.0)
    # lengths[j]: the length of the longest subsequence that the predicted words so far share with the first j words of
    # the reference.
    lengths = [0] * (len(reference_words) + 1)
    for word in predicted_words:
        previous = lengths
        lengths = [0]
        for j, reference_word in enumerate(reference_words):
            if word == reference_word:
                lengths.append(previous[j] + 1)
            else:
                lengths.append(max(previous[j + 1], lengths[j]))
    return Overlap(lengths[-1] / len(predicted_words), lengths[-1] / len(reference_words))


def combined_score(em: float, f1: float, recall: float, hops: int) -> float:
    """Returns (0.8 (0.6 EM + 0.3 F1) + 0.2 recall of the gold paragraphs) times the hop weight: 0 to 1.84."""
    answer_score = 0.6 * em + 0.3 * f1
    return (0.8 * answer_score + 0.2 * recall) * hop_weight(hops)


def hop_weight(hops: int) -> float:
    """Returns the weight of a question by its hops: 1 up to two, 1.5 at three, 2 from four on."""
    return min(max(hops / 2, 1.0), 2.0)
