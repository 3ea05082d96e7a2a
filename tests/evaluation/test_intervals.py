import numpy as np
import pytest

from r3lite.evaluation.intervals import interval, ratios, resampled_sums


def test_the_first_sums_are_those_of_all_questions_and_the_others_of_as_many():
    table = np.stack([np.arange(5.0), np.ones(5)], axis=1)[None]  # [1, 5, 2]
    sums = resampled_sums(table, seed=0, resamples=50)
    assert sums.shape == (51, 1, 2)
    assert sums[0, 0].tolist() == [10.0, 5.0]
    assert (sums[1:, 0, 1] == 5).all() and len(set(sums[1:, 0, 0])) > 5


def test_all_metrics_see_the_same_draws():
    values = np.random.default_rng(0).random((1, 20, 2))
    sums = resampled_sums(np.concatenate([values, 2 * values]), seed=3, resamples=20)
    assert np.allclose(2 * sums[:, 0], sums[:, 1])


def test_blocks_change_nothing(monkeypatch):
    table = np.random.default_rng(0).integers(9, size=(2, 30, 2)).astype(float)
    expected = resampled_sums(table, 0, 100)
    monkeypatch.setattr("r3lite.evaluation.intervals.LARGEST_BLOCK", 100)
    assert np.array_equal(resampled_sums(table, 0, 100), expected)


def test_an_interval_of_what_is_unknown_is_none():
    assert ratios(np.array([[0.0, 0.0]]))[0] != ratios(np.array([[0.0, 0.0]]))[0]  # nan
    assert interval(np.array([np.nan, np.nan])) == {"value": None, "low": None, "high": None}
    entry = interval(np.array([7.0, *np.arange(1001.0), np.nan]))
    assert entry == {"value": 7.0, "low": 25.0, "high": pytest.approx(975.0)}
