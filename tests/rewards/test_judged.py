import pytest

from r3lite.core.episode import CUT_OFF, Episode
from r3lite.rewards.judged import coherence, judged_answer, query_rationality, relevance
from r3lite.rewards.verdict import StepVerdict, Verdict
from tests.rewards.episodes import GOLD, QUESTION, answered, search

RIGHT = Verdict(True, (StepVerdict(0.8, 0.4), StepVerdict(0.3, 1.0)))
WRONG = Verdict(False, RIGHT.steps)
EPISODE = answered("Lady Lovelace", search(GOLD[0]))
R3 = {"gamma_correct": 0.6, "gamma_incorrect": -0.2, "gamma_fail": -0.1}


def test_a_judged_answer():
    assert judged_answer(EPISODE, RIGHT) == 1 and judged_answer(EPISODE, WRONG) == 0
    assert judged_answer(Episode(QUESTION, [search(), search()], CUT_OFF), RIGHT) == 0


def test_relevance_is_paid_at_queries_and_times_the_trajectory_factor():
    assert relevance(EPISODE, RIGHT) == [0.8, 0]
    assert relevance(EPISODE, RIGHT, **R3) == pytest.approx([1.6 * 0.8, 0])
    assert relevance(EPISODE, WRONG, **R3) == pytest.approx([0.8 * 0.8, 0])
    unanswered = Episode(QUESTION, [search(), search()], CUT_OFF)
    assert relevance(unanswered, WRONG, **R3) == pytest.approx([0.9 * 0.8, 0.9 * 0.3])


def test_rationality_is_a_mean_over_the_steps_that_ask():
    verdict = Verdict(True, (StepVerdict(0.8, 0.4, 0.5), StepVerdict(0.3, 1.0, 0.25), StepVerdict(0.0, 1.0)))
    assert query_rationality(answered("x", search(), search()), verdict) == pytest.approx(0.375)
    assert query_rationality(answered("x"), Verdict(True, (StepVerdict(0.0, 1.0),))) == 0


def test_coherence_is_a_mean_over_steps():
    assert coherence(EPISODE, RIGHT) == pytest.approx(0.7)
