"""Exact match and F1 of an answer against the gold answers, as the data sets' official scripts compute them.

Rewards and evaluation share it. Knows no weights.
"""

import re
import string
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from r3lite.episode import Episode, Question

Rule = Literal["hotpotqa", "musique"]
PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")
VERDICTS = ("yes", "no", "noanswer")  # answers that share no credit with others in HotpotQA


def normalize(text: str) -> str:
    """Lower case, without punctuation, without articles, single spaces: in this order (SQuAD, arXiv 1606.05250).

    Articles go last but one: taken out before the punctuation they would leave `"A" Team` with its article, and
    taken out after the spaces were collapsed they would leave double ones.
    """
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def rule_of(question: Question) -> Rule:
    """HotpotQA's rule for data sets whose gold paragraphs go by title (HotpotQA, 2Wiki), else MuSiQue's."""
    return "hotpotqa" if question.gold_by == "title" else "musique"


def exact_match(prediction: str, answers: Iterable[str]) -> float:
    """1 if the prediction equals any of the answers after normalization, else 0."""
    predicted = normalize(prediction)
    return float(any(predicted == normalize(a) for a in answers))


def f1(prediction: str, answers: Iterable[str], rule: Rule = "musique") -> float:
    """The best F1 of the prediction's words over the answers.

    `hotpotqa`: 0 if only one side is yes, no or noanswer. `musique`: no such rule, but where either side has no words
    left, F1 is equality.
    """
    return max((_f1(normalize(prediction), normalize(a), rule) for a in answers), default=0.0)


def _f1(predicted: str, answer: str, rule: Rule) -> float:
    if rule == "hotpotqa" and predicted != answer and (predicted in VERDICTS or answer in VERDICTS):
        return 0.0
    ours, theirs = predicted.split(), answer.split()
    if rule == "musique" and not (ours and theirs):
        return float(ours == theirs)
    shared = (Counter(ours) & Counter(theirs)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(ours), shared / len(theirs)
    return 2 * precision * recall / (precision + recall)


def answer_scores(episode: Episode) -> tuple[float, float]:
    """EM and F1 of an episode's final answer; both 0 if it gave none, even if a gold answer normalizes to nothing."""
    prediction, answers = episode.prediction, episode.question.answers
    if not prediction.strip():
        return 0.0, 0.0
    return exact_match(prediction, answers), f1(prediction, answers, rule_of(episode.question))
