import itertools
from dataclasses import replace

import numpy as np
import pytest

from r3lite.core.errors import R3LiteError
from r3lite.evaluation.comparisons import compare, pairs
from r3lite.evaluation.scores import Marks, scores


def marks(values, judged=None, **means):
    """An episode for each F1."""
    return [Marks(float(v == 1), float(v), None, 1, 1, 0, 2, judged, "", means) for v in values]


def test_the_difference_of_two_shares():
    # 100 questions; the second model loses none and gains 20: mean 0.2, standard error sqrt(0.2 * 0.8 / 100) = 0.04.
    before = [0.0] * 50 + [1.0] * 50
    after = [1.0] * 20 + before[20:]
    found = compare(marks(before), marks(after))["em"]
    assert (found["a"], found["b"]) == (0.5, 0.7) and found["difference"] == pytest.approx(0.2)
    assert found["low"] == pytest.approx(0.2 - 1.96 * 0.04, abs=0.015)
    assert found["high"] == pytest.approx(0.2 + 1.96 * 0.04, abs=0.015)
    assert found["p"] == pytest.approx(2 / 10_001)  # no resample without a gain
    assert compare(marks(before), marks(after))["em"] == found
    turned = compare(marks(after), marks(before))["em"]
    assert turned["difference"] == pytest.approx(-0.2) and turned["p"] == found["p"]
    assert turned["low"] == pytest.approx(-found["high"])


def test_no_difference_has_a_p_of_1():
    same = compare(marks([0, 1, 0.5]), marks([0, 1, 0.5]))["f1"]
    assert same == {"a": 0.5, "b": 0.5, "difference": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}


def test_sums_in_another_order_are_no_difference():
    """0.1 + 0.2 is not 0.3 in floats: p was the smallest that there is."""
    for a, b in ((0.1 + 0.2, 0.3), (0.3, 0.1 + 0.2)):
        found = compare(marks([a]), marks([b]))["f1"]
        assert 0 < abs(found["difference"]) < 1e-12 and found["p"] == 1.0


def test_p_of_all_resamples():
    """Of five questions all 3,125 resamples can be gone through: the exact significance, and ours of 10,000 drawn."""
    a, b = [0, 0, 0, 1, 0.5], [1, 0.5, 0, 0.8, 0.6]
    differences = np.subtract(b, a)
    means = np.array([np.mean(drawn) for drawn in itertools.product(differences, repeat=5)])
    exact = 2 * min((means <= 1e-12).mean(), (means >= -1e-12).mean())
    assert 0.05 < exact < 0.5
    assert compare(marks(a), marks(b))["f1"]["p"] == pytest.approx(exact, abs=0.02)


def test_p_is_below_5_percent_where_the_interval_leaves_0_out():
    draw = np.random.default_rng(0)
    for shift in np.linspace(-0.1, 0.3, 21):
        a = draw.random(40)
        found = compare(marks(a), marks(a + shift + draw.normal(0, 0.3, 40)))["f1"]
        assert (found["low"] > 0 or found["high"] < 0) == (found["p"] < 0.05)


def test_pairing_matters():
    # Questions differ much, the models little: an unpaired interval would be ten times as wide.
    easy = np.random.default_rng(0).random(200)
    found = compare(marks(easy), marks(easy + 0.01))["f1"]
    assert (found["difference"], found["low"], found["high"]) == pytest.approx((0.01, 0.01, 0.01))


def test_only_what_both_know_is_compared_question_by_question():
    a = [*marks([0, 1], judged=True, bleu=0.5), *marks([1], bleu=0.1, sp_f1=1.0)]
    b = [*marks([0, 1], judged=False, bleu=0.7), *marks([1], judged=True)]
    found = compare(a, b)
    assert found.keys() == {"em", "f1", "format_adherence", "mean_searches", "judge_accuracy", "bleu"}
    assert (found["bleu"]["a"], found["bleu"]["b"]) == pytest.approx((0.5, 0.7))
    assert (found["judge_accuracy"]["a"], found["judge_accuracy"]["b"]) == (1.0, 0.0)


def test_values_are_those_of_the_scores():
    a = [Marks(1, 1, 0.5, well, steps, well, hops) for well, steps, hops in ((1, 2, 2), (3, 3, 3), (0, 5, 4))]
    b = [Marks(0, 0.5, 1.0, 2, 3, 1, hops) for hops in (2, 3, 4)]
    found, ours, theirs = compare(a, b), scores(a), scores(b)
    for name, entry in found.items():
        assert (entry["a"], entry["b"]) == pytest.approx((ours[name]["value"], theirs[name]["value"]))
    assert found["format_adherence"]["a"] == 4 / 10  # of steps, not of episodes


def test_scores_without_their_pair_are_refused():
    with pytest.raises(AssertionError, match="2 and 1"):
        compare(marks([1, 0]), marks([1]))
    with pytest.raises(AssertionError, match="0 and 0"):
        compare([], [])


def test_a_question_at_which_either_retriever_failed_counts_in_neither():
    """Equal answers, 10 of 30 of one side lost to an outage: the difference was -.167 with a p of .009."""
    a = marks([i % 2 for i in range(30)])
    b = [replace(m, em=0.0, f1=0.0, failure="status 503") if i < 10 else m for i, m in enumerate(a)]
    for ours, theirs in ((a, b), (b, a)):
        assert len(pairs(ours, theirs)) == 20
        assert compare(ours, theirs) == compare(a[10:], a[10:])
    with pytest.raises(R3LiteError, match="at each of the 10 questions the retriever failed"):
        compare(a[:10], b[:10])
