import numpy as np
import pytest

from r3lite.episode import ANSWERED, Document, Episode, Question, Step
from r3lite.evaluation.scores import METRICS, Marks, combined, hop_weight, paired_difference, scores, scores_by_hops

GOLD = tuple(Document(str(i), f"T{i}", f"Text {i}") for i in range(3))


def mark(em=0.0, f1=0.0, recall=None, well_formed=1, steps=1, searches=0, hops=2, judged=None):
    return Marks(em, f1, recall, well_formed, steps, searches, hops, judged)


def test_marks_of_an_episode():
    question = Question("1", "q", ("New York City",), gold=GOLD)
    steps = [
        Step("a", "b", (GOLD[0],)),
        Step("c", "d", (GOLD[0],), faults=("repeated_query",)),
        Step("e", answer="York"),
    ]
    marks = Marks.of(Episode(question, steps, ANSWERED), judged=True)
    assert marks == Marks(0.0, pytest.approx(0.5), pytest.approx(1 / 3), 2, 3, 2, 3, True)
    assert Marks.of(Episode(Question("1", "q", ("x",)))).recall is None


def test_combined_by_hand():
    assert combined(mark(em=1, f1=1, recall=1, hops=2)) == pytest.approx(0.92)
    assert combined(mark(em=0, f1=0.5, recall=0.5, hops=3)) == pytest.approx((0.8 * 0.15 + 0.1) * 1.5)
    assert combined(mark(em=1, f1=1, recall=1, hops=4)) == pytest.approx(1.84)
    assert combined(mark(em=1, f1=1)) is None
    assert [hop_weight(h) for h in (1, 2, 3, 4, 5)] == [1, 1, 1.5, 2, 2]


def test_means_by_hand():
    marks = [
        mark(em=1, f1=1, recall=0.5, well_formed=3, steps=3, searches=2, judged=True),
        mark(em=0, f1=0.5, recall=1.0, well_formed=0, steps=1, searches=0, judged=None),
        mark(em=0, f1=0, recall=None, well_formed=1, steps=4, searches=1, judged=False),
    ]
    found = scores(marks)
    values = {name: found[name]["value"] for name in METRICS}
    expected = {"em": 1 / 3, "f1": 0.5, "retrieval_recall": 0.75, "mean_searches": 1.0}
    expected["format_adherence"] = 4 / 8  # of steps, not of episodes
    expected["combined"] = (0.82 + 0.32) / 2
    assert values == pytest.approx(expected)
    assert found["n"] == 3
    assert found["judge_accuracy"]["value"] == 0.5  # a verdict that is missing is left out, not wrong
    for name in METRICS:
        assert found[name]["low"] <= found[name]["value"] <= found[name]["high"]


def test_what_nobody_knows_has_no_score():
    found = scores([mark(em=1), mark()])
    assert found["retrieval_recall"] == found["combined"] == {"value": None, "low": None, "high": None}
    assert "judge_accuracy" not in found


def test_intervals_of_a_share():
    # Of 400 questions half are right: the standard error is 0.025, so the interval is about 0.45 to 0.55.
    found = scores([mark(em=i % 2) for i in range(400)])["em"]
    assert found["value"] == 0.5
    assert found["low"] == pytest.approx(0.451, abs=0.008) and found["high"] == pytest.approx(0.549, abs=0.008)


def test_intervals_are_repeatable_and_one_question_has_none():
    marks = [mark(em=i % 3 == 0, f1=i / 30) for i in range(30)]
    assert scores(marks, seed=1) == scores(marks, seed=1)
    assert scores(marks, seed=1)["f1"] != scores(marks, seed=2)["f1"]
    assert scores([mark(em=1)])["em"] == {"value": 1.0, "low": 1.0, "high": 1.0}


def test_blocks_change_nothing(monkeypatch):
    marks = [mark(em=i % 3 == 0) for i in range(30)]
    whole = scores(marks)
    monkeypatch.setattr("r3lite.evaluation.scores.LARGEST_BLOCK", 100)
    assert scores(marks) == whole


def test_scores_by_hops():
    marks = [mark(em=1, hops=2), mark(em=0, hops=2), mark(em=1, hops=4)]
    by_hops = scores_by_hops(marks)
    assert list(by_hops) == ["2", "4"]
    assert by_hops["2"]["n"] == 2 and by_hops["2"]["em"]["value"] == 0.5
    assert by_hops["4"]["em"]["value"] == 1.0


def test_paired_difference():
    # 100 questions; the second model loses none and gains 20: mean 0.2, standard error sqrt(0.2 * 0.8 / 100) = 0.04.
    before = [0.0] * 50 + [1.0] * 50
    after = [1.0] * 20 + before[20:]
    value, low, high = paired_difference(after, before, seed=0)
    assert value == pytest.approx(0.2)
    assert low == pytest.approx(0.2 - 1.96 * 0.04, abs=0.015) and high == pytest.approx(0.2 + 1.96 * 0.04, abs=0.015)
    assert paired_difference(after, before, seed=0) == (value, low, high)
    assert paired_difference(before, before) == (0.0, 0.0, 0.0)
    assert paired_difference(before, after)[0] == pytest.approx(-0.2)


def test_pairing_matters():
    # Questions differ much, the models little: an unpaired interval would be ten times as wide.
    easy = np.random.default_rng(0).random(200)
    value, low, high = paired_difference(easy + 0.01, easy)
    assert (value, low, high) == pytest.approx((0.01, 0.01, 0.01))


def test_scores_without_their_pair_are_refused():
    with pytest.raises(ValueError, match="2 and 1"):
        paired_difference([1.0, 0.0], [1.0])
    with pytest.raises(ValueError, match="0 and 0"):
        paired_difference([], [])
