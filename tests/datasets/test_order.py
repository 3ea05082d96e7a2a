"""Which rows and questions a step takes: every one once an epoch, with no memory of the steps before."""

from collections import Counter
from dataclasses import replace

from r3lite.core.episode import Question
from r3lite.datasets.order import QuestionOrder, rows_of_step


def test_every_epoch_reads_every_row_once_and_the_last_step_may_be_smaller():
    steps = [rows_of_step(step, 7, 4, seed=0, last=14) for step in range(1, 5)]
    assert [len(s) for s in steps] == [4, 4, 4, 2]
    flat = [i for step in steps for i in step]
    assert sorted(flat[:7]) == sorted(flat[7:]) == list(range(7))
    assert flat[:7] != flat[7:]
    assert flat[:7] != rows_of_step(1, 7, 7, seed=1, last=None)
    assert Counter(rows_of_step(1, 3, 9, seed=0, last=None)) == {0: 3, 1: 3, 2: 3}  # a step of several epochs


def test_rounds_draw_every_question_once_an_epoch_and_need_no_memory():
    order = QuestionOrder([Question(str(i), "?", ("a",)) for i in range(5)], generations=2, seed=0)
    drawn = [order.of_round(n, 2) for n in range(1, 6)]
    ids = [q.id for qs, _ in drawn for q in qs[::2]]
    assert sorted(ids[:5]) == sorted(ids[5:]) == list("01234") and ids[:5] != ids[5:]
    seeds = [s for _, ss in drawn for s in ss]
    assert len(set(seeds)) == len(seeds) == 20
    assert order.of_round(3, 2) == drawn[2] and replace(order, seed=1).of_round(3, 2) != drawn[2]


def test_a_refill_takes_other_questions_if_there_are_and_needs_no_memory():
    order = QuestionOrder([Question(str(i), "?", ("a",)) for i in range(5)], generations=2, seed=0)
    drawn = [order.of_refill(3, attempt, 2, {"0", "1", "4"}) for attempt in (1, 2, 3)]
    assert all([q.id for q in qs] in (list("2233"), list("3322")) for qs, _ in drawn)
    seeds = [s for _, ss in drawn for s in ss] + order.of_round(3, 2)[1]
    assert len(set(seeds)) == len(seeds) == 16
    assert order.of_refill(3, 2, 2, {"0", "1", "4"}) == drawn[1]
    assert order.of_refill(4, 2, 2, {"0", "1", "4"})[1] != drawn[1][1]
    # All have been drawn, or more are needed than there are: some come again.
    again, _ = replace(order, generations=1).of_refill(3, 1, 6, set("01234"))
    assert Counter(q.id for q in again).most_common()[0][1] == 2 and {q.id for q in again} == set("01234")
