"""Supporting facts, and the joint score of answer and facts, by HotpotQA's rules (arXiv 1809.09600, section 5.2).

A fact is anything that can be compared. HotpotQA's are pairs of a title and the number of a sentence, MuSiQue's are
paragraphs. What an r3lite model writes names neither, so the facts of an episode are the paragraphs that it retrieved.
"""

from collections.abc import Hashable, Set

from r3lite.core.answer_match import Overlap
from r3lite.core.episode import Episode


def facts_match(predicted: Set[Hashable], gold: Set[Hashable]) -> tuple[float, Overlap]:
    """EM (1 if the sets are equal), and precision and recall; all three for one question."""
    found = len(predicted & gold)
    overlap = Overlap(found / len(predicted) if predicted else 0.0, found / len(gold) if gold else 0.0)
    return float(predicted == gold), overlap


def joint(answer: tuple[float, Overlap], facts: tuple[float, Overlap]) -> tuple[float, Overlap]:
    """EM, precision and recall of an answer and its facts together: the products of both, for one question."""
    (answer_em, a), (facts_em, f) = answer, facts
    return answer_em * facts_em, Overlap(a.precision * f.precision, a.recall * f.recall)


def retrieved_facts(episode: Episode) -> tuple[Set[Hashable], Set[Hashable]]:
    """The paragraphs that an episode retrieved, each once, and the gold ones."""
    question = episode.question
    return set(map(question.paragraph, episode.documents)), set(range(len(question.gold)))
