"""docs/scaling.md says what the code predicts now, and what the simulation of ranks counts."""

import pytest

from bench import clusters
from tests.bench import claims


def test_the_page_is_what_the_code_says_now():
    """If it fails after a change of the formulas, the table of cards or a load: python -m bench.clusters >
    docs/scaling.md"""
    assert (claims.ROOT / "docs" / "scaling.md").read_text(encoding="utf-8") == clusters.page()


def test_an_all_reduce_by_hand():
    rented = clusters.Rented("x", 1.0, inside=10e9, between=1e9)
    assert clusters.all_reduce(8e9, 1, rented) == 0
    assert clusters.all_reduce(8e9, 8, rented) == pytest.approx(2 * 7 / 8 * 0.8 + 14 * clusters.LATENCY)
    assert clusters.all_reduce(8e9, 16, rented) == pytest.approx(2 * 15 / 16 * 8 + 30 * clusters.LATENCY)


def test_the_episodes_are_those_that_were_measured():
    every = [episode for group in clusters.lengths() for episode in group]
    assert len(every) == 640 and all(tokens > sampled > 0 and turns >= 1 for tokens, sampled, turns in every)
