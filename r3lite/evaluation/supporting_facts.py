"""Supporting facts, and the joint score of answer and facts, by HotpotQA's rules (arXiv 1809.09600, section 5.2).

A fact is anything that can be compared. HotpotQA's are pairs of a title and the number of a sentence, MuSiQue's are
paragraphs. What an r3lite model writes names neither, so the facts of an episode are the paragraphs that it retrieved.
"""

from collections.abc import Hashable, Set

from r3lite.core.answer_match import Overlap
from r3lite.core.episode import Episode

Match = tuple[float, Overlap]  # EM; precision and recall


def facts_match(predicted: Set[Hashable], gold: Set[Hashable]) -> Match:
    """Returns EM (1 if the sets are equal), precision and recall of the predicted facts of one question."""
    shared = len(predicted & gold)
    precision = 0.0
    if predicted:
        precision = shared / len(predicted)
    recall = 0.0
    if gold:
        recall = shared / len(gold)
    return float(predicted == gold), Overlap(precision, recall)


def joint(answer: Match, facts: Match) -> Match:
    """Returns the joint EM, precision and recall of one question: the products of the answer's and the facts'."""
    answer_em, answer_overlap = answer
    facts_em, facts_overlap = facts
    overlap = Overlap(
        precision=answer_overlap.precision * facts_overlap.precision,
        recall=answer_overlap.recall * facts_overlap.recall,
    )
    return answer_em * facts_em, overlap


def retrieved_facts(episode: Episode) -> tuple[Set[Hashable], Set[Hashable]]:
    """Returns the keys of the paragraphs that an episode retrieved, and the keys of the gold paragraphs.

    The key of a gold paragraph is its index in `question.gold`.
    """
    question = episode.question
    retrieved = set(map(question.paragraph_key, episode.documents))
    gold = set(range(len(question.gold)))
    return retrieved, gold
