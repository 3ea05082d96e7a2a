"""Balances the answers of questions, for --balance-yes-no."""

import random
from collections.abc import Sequence

from r3lite.core.episode import Question

YES_NO = ("yes", "no")


def balanced(questions: Sequence[Question]) -> list[Question]:
    """Returns the questions in their order, but as many that are answered by yes as by no.

    Which questions of the more frequent answer stay depends on `questions` alone.
    """
    by_answer = []
    for answer in YES_NO:
        by_answer.append([question.id for question in questions if question.answers[0].strip().lower() == answer])
    count = min(map(len, by_answer))
    rng = random.Random("yes and no")
    left_out: set[str] = set()
    for ids in by_answer:
        left_out |= set(ids) - set(rng.sample(ids, count))
    return [question for question in questions if question.id not in left_out]
