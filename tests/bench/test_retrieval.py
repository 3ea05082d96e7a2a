"""The bench of indexes measures what it says, and the memory of building is what was predicted."""

import numpy as np
import pytest

from bench import retrieval


@pytest.mark.parametrize("kind", ["flat", "ivf-sq8"])
def test_memory_of_building_is_predicted_within_a_quarter_and_recall_is_that_of_brute_force(tmp_path, kind):
    count, d = 40_000, 128
    retrieval.prepare(tmp_path, count, d)
    queries = np.load(tmp_path / "queries.npy")
    vectors = np.fromfile(tmp_path / "flat", dtype=np.float32).reshape(count, d)
    truth = np.argsort(-(queries[:20] @ vectors.T), axis=1)[:, :10]
    assert np.array_equal(np.sort(truth), np.sort(np.load(tmp_path / "nearest.npy")[:20]))
    built = retrieval.in_new_process(retrieval.build, tmp_path, kind, d)
    predicted = retrieval.estimate(kind, count, d).build / retrieval.MIB
    assert built["build_peak_mib"] == pytest.approx(predicted, rel=0.25)
    searched = retrieval.in_new_process(retrieval.search, tmp_path, kind)
    assert searched["recall_at_10"] >= {"flat": 0.999, "ivf-sq8": 0.9}[kind] and searched["queries_per_s"] > 0
