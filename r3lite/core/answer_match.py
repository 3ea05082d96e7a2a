"""How right an answer is: exact match and F1 as the data sets' official scripts compute them, and ROUGE-L; whether
it stands in a text, and where a text's sentences end.

Rewards, evaluation and data sets share it.
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
# After a full stop, unless of an abbreviation or before a small letter; after an ideographic one; at a blank line.
SENTENCE = re.compile(
    r"(?:(?<=[.!?])|(?<=[.!?][\"')\]\u201d\u2019]))"
    r"(?<!\b[A-Z]\.)(?<!\b(?:Mr|Ms|Dr|St|vs|cf)\.)(?<!\b(?:Mrs|Fig)\.)(?<!\bProf\.)(?<!\b[a-z]\.[a-z]\.)"
    r"\s+(?=[^\Wa-z]|[\"'(\[\u201c\u2018])"
    r"|(?<=[\u3002\uff01\uff1f])|\n[^\S\n]*\n\s*"
)
# Thai, Lao, Burmese, Khmer, kana, and Chinese characters, also in Japanese.
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]"
)
VERDICTS = ("yes", "no", "noanswer")  # answers that share no credit with others in HotpotQA


@dataclass(frozen=True)
class Overlap:
    """How much of a prediction is right, and how much of what is right it has; 0 to 1."""

    precision: float
    recall: float

    @property
    def f1(self) -> float:
        """The harmonic mean of the two; 0 if either is, or is below, which only a mean of cosines can be."""
        if min(self.precision, self.recall) <= 0:
            return 0.0
        return 2 * self.precision * self.recall / (self.precision + self.recall)


def normalize(text: str) -> str:
    """Lower case, without punctuation, without articles, single spaces: in this order (SQuAD, arXiv 1606.05250).

    Articles go last but one: taken out before the punctuation they would leave `"A" Team` with its article, and
    taken out after the spaces were collapsed they would leave double ones.
    """
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def question_key(text: str) -> str:
    """What questions that ask the same have in common: the normalized text, or the text if nothing is left of it.

    It decides whether a question is in two sets of questions. Ids cannot: each file has its own.
    """
    return normalize(text) or " ".join(text.split())


def rule_of(question: Question) -> Rule:
    """HotpotQA's rule for data sets whose gold paragraphs go by title (HotpotQA, 2Wiki), else MuSiQue's."""
    return "hotpotqa" if question.gold_by == "title" else "musique"


def exact_match(prediction: str, answers: Iterable[str]) -> float:
    """1 if the prediction equals any of the answers after normalization, else 0."""
    predicted = normalize(prediction)
    return float(any(predicted == normalize(a) for a in answers))


def f1(prediction: str, answers: Iterable[str], rule: Rule = "musique") -> float:
    """The best F1 of the prediction's words over the answers; see `overlap`."""
    return max((overlap(prediction, answer, rule).f1 for answer in answers), default=0.0)


def overlap(prediction: str, answer: str, rule: Rule) -> Overlap:
    """Precision and recall of the prediction's words, as often as each occurs.

    `hotpotqa`: 0 if only one side is yes, no or noanswer. `musique`: no such rule, but where either side has no words
    left, both are equality.
    """
    predicted, answer = normalize(prediction), normalize(answer)
    if rule == "hotpotqa" and predicted != answer and (predicted in VERDICTS or answer in VERDICTS):
        return Overlap(0.0, 0.0)
    ours, theirs = predicted.split(), answer.split()
    if rule == "musique" and not (ours and theirs):
        return Overlap(float(ours == theirs), float(ours == theirs))
    shared = (Counter(ours) & Counter(theirs)).total()
    return Overlap(shared / len(ours), shared / len(theirs)) if shared else Overlap(0.0, 0.0)


def best_overlap(prediction: str, answers: Sequence[str], rule: Rule) -> Overlap:
    """The best precision and the best recall over the answers, each by itself, as 2WikiMultiHopQA's script has them."""
    overlaps = [overlap(prediction, answer, rule) for answer in answers]
    return Overlap(max(o.precision for o in overlaps), max(o.recall for o in overlaps))


def answer_scores(episode: Episode) -> tuple[float, float]:
    """EM and F1 of an episode's final answer; both 0 if it gave none, even if a gold answer normalizes to nothing.

    The official scripts would call a blank answer right there; an episode without an answer is never right.
    """
    prediction, answers = episode.prediction, episode.question.answers
    if not prediction.strip():
        return 0.0, 0.0
    return exact_match(prediction, answers), f1(prediction, answers, rule_of(episode.question))


def is_right(question: Question, answer: str, min_f1: float) -> bool:
    """Whether an answer is an exact match, or has at least this F1."""
    return exact_match(answer, question.answers) == 1 or f1(answer, question.answers, rule_of(question)) >= min_f1


def split_words(text: str) -> list[str]:
    """The words of a text in lower case: runs of letters with their marks, digits and underscores.

    In scripts that put no spaces between words, each character is one. A letter with an accent is the same whether the
    accent is a character of its own or not.
    """
    if text.isascii():
        return re.findall(r"\w+", text.lower())
    folded = unicodedata.normalize("NFC", text).casefold()
    return "".join(f" {c} " if UNSPACED.match(c) else c if _is_of_word(c) else " " for c in folded).split()


def _is_of_word(character: str) -> bool:
    """Whether it is a letter, a digit, an underscore or a mark, as Hindi writes most vowels."""
    return character.isalnum() or character == "_" or unicodedata.category(character).startswith("M")


def words(text: str) -> tuple[str, ...]:
    """The words of a text in lower case, without articles; hyphens and dashes divide words, unlike in `normalize`."""
    return tuple(word for word in split_words(text) if not ARTICLES.fullmatch(word))


def in_a_row(wanted: Sequence[str], words: Sequence[str]) -> bool:
    """Whether words stand among others, one after the other; no words do not."""
    return bool(wanted) and f" {' '.join(wanted)} " in f" {' '.join(words)} "


def stands_in(answer: str, text: str) -> bool:
    """Whether a text has the words of an answer, one after the other."""
    return in_a_row(words(answer), words(text))


def rouge_l(prediction: str, reference: str) -> Overlap:
    """The longest common subsequence of words, as shares of both texts (Lin 2004, W04-1013, equations 2 to 4, beta 1).

    Words are runs of a to z and 0 to 9: in other scripts nothing is alike. It equals the package rouge-score without
    stemming.
    """
    ours, theirs = (re.findall("[a-z0-9]+", text.lower()) for text in (prediction, reference))
    if not ours or not theirs:
        return Overlap(0.0, 0.0)
    lengths = [0] * (len(theirs) + 1)  # of the longest one of our words so far with the first j of theirs
    for word in ours:
        before = lengths
        lengths = [0]
        for j, other in enumerate(theirs):
            lengths.append(before[j] + 1 if word == other else max(before[j + 1], lengths[j]))
    return Overlap(lengths[-1] / len(ours), lengths[-1] / len(theirs))


def combined_score(em: float, f1: float, recall: float, hops: int) -> float:
    """0.8 (0.6 EM + 0.3 F1) + 0.2 recall of the gold paragraphs, times the hop weight: up to 1.84."""
    return (0.8 * (0.6 * em + 0.3 * f1) + 0.2 * recall) * hop_weight(hops)


def hop_weight(hops: int) -> float:
    """1 up to two hops, 1.5 at three, 2 from four on."""
    return min(max(hops / 2, 1.0), 2.0)
