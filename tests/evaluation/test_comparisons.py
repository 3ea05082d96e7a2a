import itertools
from dataclasses import replace

import numpy as np
import pytest

from r3lite.core.errors import R3LiteError
from r3lite.evaluation.comparisons import compare, compare_sets, valid_indices
from r3lite.evaluation.scores import Marks, scores
from tests.errors import raises


def marks(values, judged=None, **means):
    """An episode for each F1."""
    return [Marks(float(v == 1), float(v), None, 1, 1, 0, 2, judged, "", means) for v in values]


def test_the_difference_of_two_shares():
    # 100 questions; the second model loses none and gains 20: mean 0.2, standard error sqrt(0.2 * 0.8 / 100) = 0.04.
    first_em = [0.0] * 50 + [1.0] * 50
    second_em = [1.0] * 20 + first_em[20:]
    entry = compare(marks(first_em), marks(second_em))["em"]
    assert (entry["a"], entry["b"]) == (0.5, 0.7) and entry["difference"] == pytest.approx(0.2)
    assert entry["low"] == pytest.approx(0.2 - 1.96 * 0.04, abs=0.015)
    assert entry["high"] == pytest.approx(0.2 + 1.96 * 0.04, abs=0.015)
    assert entry["p"] == pytest.approx(2 / 10_001)  # no resample without a gain
    assert compare(marks(first_em), marks(second_em))["em"] == entry
    turned = compare(marks(second_em), marks(first_em))["em"]
    assert turned["difference"] == pytest.approx(-0.2) and turned["p"] == entry["p"]
    assert turned["low"] == pytest.approx(-entry["high"])


def test_no_difference_has_a_p_of_1():
    entry = compare(marks([0, 1, 0.5]), marks([0, 1, 0.5]))["f1"]
    assert entry == {"a": 0.5, "b": 0.5, "difference": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}


def test_sums_in_another_order_are_no_difference():
    """0.1 + 0.2 is not 0.3 in floats: p was the smallest that there is."""
    for a, b in ((0.1 + 0.2, 0.3), (0.3, 0.1 + 0.2)):
        entry = compare(marks([a]), marks([b]))["f1"]
        assert 0 < abs(entry["difference"]) < 1e-12 and entry["p"] == 1.0


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
    significant = []
    for shift in np.linspace(-0.1, 0.3, 21):
        a = draw.random(40)
        entry = compare(marks(a), marks(a + shift + draw.normal(0, 0.3, 40)))["f1"]
        significant.append(entry["p"] < 0.05)
        assert (entry["low"] > 0 or entry["high"] < 0) == significant[-1]
    assert 5 < sum(significant) < 16


def test_pairing_matters():
    # Questions differ much, the models little: an unpaired interval would be ten times as wide.
    easy = np.random.default_rng(0).random(200)
    entry = compare(marks(easy), marks(easy + 0.01))["f1"]
    assert (entry["difference"], entry["low"], entry["high"]) == pytest.approx((0.01, 0.01, 0.01))


def test_only_what_both_know_is_compared_question_by_question():
    a = [*marks([0, 1], judged=True, bleu=0.5), *marks([1], bleu=0.1, sp_f1=1.0)]
    b = [*marks([0, 1], judged=False, bleu=0.7), *marks([1], judged=True)]
    comparison = compare(a, b)
    assert comparison.keys() == {"em", "f1", "format_adherence", "mean_searches", "judge_accuracy", "bleu"}
    assert (comparison["bleu"]["a"], comparison["bleu"]["b"]) == pytest.approx((0.5, 0.7))
    assert (comparison["judge_accuracy"]["a"], comparison["judge_accuracy"]["b"]) == (1.0, 0.0)


def test_values_are_those_of_the_scores():
    a = [Marks(1, 1, 0.5, well, steps, well, hops) for well, steps, hops in ((1, 2, 2), (3, 3, 3), (0, 5, 4))]
    b = [Marks(0, 0.5, 1.0, 2, 3, 1, hops) for hops in (2, 3, 4)]
    comparison, ours, theirs = compare(a, b), scores(a), scores(b)
    for name, entry in comparison.items():
        assert (entry["a"], entry["b"]) == pytest.approx((ours[name]["value"], theirs[name]["value"]))
    assert comparison["format_adherence"]["a"] == 4 / 10  # of steps, not of episodes


def test_scores_without_their_pair_are_refused():
    with pytest.raises(AssertionError, match=r"\[2, 1\]"):
        compare(marks([1, 0]), marks([1]))
    with pytest.raises(AssertionError, match=r"\[0, 0\]"):
        compare([], [])


def test_sets_and_seeds_by_hand():
    """Means over the seeds of each question, then over the questions of a set, then over sets."""
    first_seed = marks([0, 1]), marks([1, 1])
    second_seed = marks([0, 0]), marks([1, 0])
    other_set = marks([0, 0, 0.5]), marks([1, 0, 0])
    result = compare_sets([[first_seed, second_seed], [other_set]])
    first, second = result["sets"]
    # EM of the first set: a has 0 and 1/2, b 1 and 1/2. Of the second: a has none of three, b one.
    assert (first["em"]["a"], first["em"]["b"], first["em"]["difference"]) == (0.25, 0.75, 0.5)
    assert (second["em"]["a"], second["em"]["b"]) == pytest.approx((0, 1 / 3))
    assert result["metrics"]["em"]["a"] == 0.125
    assert result["metrics"]["em"]["difference"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert result["metrics"]["f1"]["difference"] == pytest.approx((1 / 2 + (1 / 3 - 1 / 6)) / 2)
    # Resamples of the first set have a difference of 0, 1/2 or 1, a quarter, a half and a quarter of them.
    assert (first["em"]["low"], first["em"]["high"]) == (0.0, 1.0)
    assert first["em"]["p"] == pytest.approx(1 / 2, abs=0.03)


def bootstrap(differences_of_sets, resamples=20_000):
    """The percentile interval of the mean over sets, written apart: one loop over resamples, sets one after another."""
    draw = np.random.default_rng(123)
    means = []
    for _ in range(resamples):
        of_sets = [draw.choice(differences, size=len(differences)).mean() for differences in differences_of_sets]
        means.append(np.mean(of_sets))
    return np.percentile(means, [2.5, 97.5])


def test_the_interval_of_the_mean_of_sets_is_that_of_a_bootstrap_written_apart_and_of_its_standard_error():
    draw = np.random.default_rng(5)
    sets, differences_of_sets = [], []
    for n, share in ((400, 0.18), (250, 0.18), (200, 0.09)):
        a, b = np.zeros((2, n)), np.zeros((2, n))
        for seed in range(2):
            a[seed] = draw.random(n) < 0.3
            b[seed] = np.where(draw.random(n) < share, 1 - a[seed], a[seed])
        sets.append([(marks(a[seed]), marks(b[seed])) for seed in range(2)])
        differences_of_sets.append((b - a).mean(axis=0))
    entry = compare_sets(sets)["metrics"]["em"]
    assert entry["difference"] == pytest.approx(np.mean([d.mean() for d in differences_of_sets]))
    assert (entry["low"], entry["high"]) == pytest.approx(bootstrap(differences_of_sets), abs=0.0012)
    error = np.sqrt(sum(d.var() / len(d) for d in differences_of_sets)) / 3
    assert entry["high"] - entry["low"] == pytest.approx(2 * 1.96 * error, rel=0.05)


def test_the_same_answers_twice_are_not_more_answers():
    """Seeds in one row of questions would have made the interval of two equal seeds narrower by the root of two."""
    pair = marks([0.0] * 60 + [1.0] * 40), marks([1.0] * 20 + [0.0] * 35 + [1.0] * 45)
    one_seed = compare_sets([[pair]])
    two_seeds = compare_sets([[pair, pair]])
    assert one_seed == two_seeds
    alone = compare(*pair)["em"]
    assert one_seed["sets"][0]["em"]["low"] == pytest.approx(alone["low"], abs=0.011)
    assert one_seed["sets"][0]["em"]["high"] == pytest.approx(alone["high"], abs=0.011)


def test_sets_are_resampled_independently_and_weigh_the_same():
    """With the same draws for both, the mean of two equal sets would have the interval of one."""
    pair = marks([0.0] * 100), marks([1.0] * 50 + [0.0] * 50)
    one, two = compare_sets([[pair]])["metrics"]["em"], compare_sets([[pair], [pair]])["metrics"]["em"]
    width = one["high"] - one["low"]
    assert two["high"] - two["low"] == pytest.approx(width / np.sqrt(2), rel=0.08)
    small, large = (marks([0.0] * 10), marks([1.0] * 10)), (marks([0.0] * 200), marks([0.0] * 200))
    assert compare_sets([[small], [large]])["metrics"]["em"]["difference"] == 0.5


def test_a_question_at_which_either_retriever_failed_counts_in_neither():
    """Equal answers, 10 of 30 of one side lost to an outage: the difference was -.167 with a p of .009."""
    a = marks([i % 2 for i in range(30)])
    b = [replace(m, em=0.0, f1=0.0, failure="status 503") if i < 10 else m for i, m in enumerate(a)]
    for ours, theirs in ((a, b), (b, a)):
        assert valid_indices([ours, theirs]) == list(range(10, 30))
        assert compare(ours, theirs) == compare(a[10:], a[10:])
    with raises(R3LiteError, "retriever-failed", "10"):
        compare(a[:10], b[:10])


def test_in_a_mean_over_seeds_a_question_counts_if_no_retriever_failed_on_it_at_all():
    """The scores of a question are averaged over seeds: one that lacks a seed would have another mean."""
    a = marks([0, 1, 1])
    b = marks([1, 1, 0])
    lost = [replace(b[0], em=0.0, failure="status 503"), *b[1:]]
    assert compare_sets([[(a, b), (a, lost)]]) == compare_sets([[(a[1:], b[1:]), (a[1:], b[1:])]])
