"""Recall of a retriever by hand; tests/test_index_and_retrieve.py has it as `retrieve` measures it."""

from r3lite.core.episode import Document, Question
from r3lite.retrieval.recall import mean_recall


def test_recall_of_questions_that_bring_nothing_is_zero():
    gold = Document("1", "T", "x")
    questions = [
        Question("q", "zebra?", ("a",), (gold,), gold=(gold,)),
        Question("p", "x?", ("a",), (gold,), gold=(gold,)),
    ]
    assert mean_recall(questions, [[], [gold]], 2) == 0.5
