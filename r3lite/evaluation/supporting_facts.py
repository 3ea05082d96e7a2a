"""Supporting facts, and the joint score of answer and facts, by HotpotQA's rules (arXiv 1809.09600, section 5.2).

A fact is anything that can be compared. HotpotQA's are pairs of a title and the number of a sentence, MuSiQue's are
paragraphs. What an r3lite model writes names neither, so the facts of an episode are the paragraphs that it retrieved.
"""

from collections.abc import Hashable, Set

from r3lite.core.answer_match import Overlap
from r3lite.core.episode import Episode

Match = tuple[float, Overlap]  # EM, and precision and recall


def facts_match(predicted: Set[Hashable], gold: Set[Hashable]) -> Match:
    """Returns EM (1 if the sets are equal), and precision and recall; all three for one question."""
    shared = len(predicted & gold)
    precision = shared / len(predicted) if predicted else 0.0
    recall = shared / len(gold) if gold else 0.0
    return float(predicted == gold), Overlap(precision, recall)


def joint(answer: Match, facts: Match) -> Match:
    """Returns EM, precision and recall of an answer and its facts together: the products of both, for one question."""
    answer_em, answer_overlap = answer
    facts_em, facts_overlap = facts
    overlap = Overlap(
        precision=answer_overlap.precision * facts_overlap.precision,
        recall=answer_overlap.recall * facts_overlap.recall,
    )
    return answer_em * facts_em, overlap


def retrieved_facts(episode: Episode) -> tuple[Set[Hashable], Set[Hashable]]:
    """Returns the paragraphs that an episode retrieved, each once, and the gold ones."""
    question = episode.question
    retrieved = set(map(question.paragraph_key, episode.documents))
    gold = set(range(len(question.gold)))
    return retrieved, gold
