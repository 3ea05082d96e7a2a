"""Balances the answers of questions, for --balance-yes-no."""

import random
from collections.abc import Sequence

from r3lite.core.episode import Question

YES_NO = ("yes", "no")


def balanced(questions: Sequence[Question]) -> list[Question]:
    """Returns the questions in their order, without some of those answered by yes or no: equally many of both stay.

    The choice depends on `questions` alone, not on --seed.
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
