"""The history of prompts: ranks, beams, what is left to do, and what of a file is refused."""

import json

import pytest

from r3lite.core.errors import R3LiteError
from r3lite.tuning.history import Candidate, History, RoundResult, most_prompts


def scored(value):
    return {"f1": {"value": value, "low": max(0, value - 0.1), "high": value + 0.1}}


@pytest.fixture
def history(tmp_path):
    """The first prompt with 0.3, and of it three new ones: 0.5, rejected, and 0.3."""
    prompt_history = History(tmp_path / "history.json", "origin", "f1", "{question}")
    prompt_history.score(prompt_history.candidates[0], scored(0.3))
    prompt_history.close(RoundResult(0, 0, 0.0, 0.0, 0.0, 1.0))
    prompt_history.add(Candidate(1, "a {question}", 1, 0, 1, "too short"))
    prompt_history.add(Candidate(2, "b", 1, 0, 3, "too long", "it lost {question}"))
    prompt_history.add(Candidate(3, "c {question}", 1, 0, 4, "too dull"))
    prompt_history.score(prompt_history.candidates[1], scored(0.5))
    prompt_history.score(prompt_history.candidates[3], scored(0.3))
    return prompt_history


def test_the_best_comes_first_and_of_equal_ones_the_older(history):
    assert [c.id for c in history.ranked()] == [1, 0, 3] and history.best.id == 1
    assert [c.id for c in history.ranked(before_round=1)] == [0]


def test_a_round_goes_on_from_the_beam_of_the_rounds_before(history):
    open_branches = [(parent.id, branches) for parent, branches in history.open_branches(1, beam=2, branch=4)]
    assert open_branches == [(0, [2])]
    open_branches = [(parent.id, branches) for parent, branches in history.open_branches(2, beam=2, branch=3)]
    assert open_branches == [(1, [1, 2, 3]), (0, [1, 2, 3])]


def test_what_waits_is_neither_scored_nor_rejected(history):
    assert history.waiting == []
    history.add(Candidate(4, "d {question}", 2, 1, 1, "x"))
    assert [c.id for c in history.waiting] == [4]
    assert history.same_as("d {question}").id == 4 and history.same_as("b") is None  # one that was rejected is nobody


def test_it_is_read_back_as_it_was(history):
    reread = History(history.path, "origin", "f1", "{question}")
    assert reread.candidates == history.candidates and reread.rounds == history.rounds
    history.close(RoundResult(1, 1, 0.2, 0.1, 0.3, 0.004))
    reread = History(history.path, "origin", "f1", "{question}")
    assert reread.rounds == history.rounds and reread.table() == history.table()
    assert reread.table().splitlines()[2:] == [
        "1             3         1     1   0.500 [0.400, 0.600]    +0.200 [+0.100, +0.300]",
        "rejected: 2, from 0: it lost {question}",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"origin": "other"}, "has another first prompt"),
        ({"candidates": []}, "are not numbered from 0"),
        ({"candidates": [{"id": 1, "prompt": "", "round": 0, "branch": 0, "critique": "", "rejected": ""}]}, "from 0"),
        ({"candidates": [{"id": 0, "prompt": 7}]}, "prompt is 7, not text"),
        ({"rounds": [{"number": 0, "best": 0, "gained": "much"}]}, "gained is 'much'"),
    ],
)
def test_what_is_no_history_is_refused(history, change, message):
    record = json.loads(history.path.read_text(encoding="utf-8")) | change
    history.path.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(R3LiteError, match=message):
        History(history.path, "origin", "f1", "{question}")


def test_the_most_that_a_run_does_by_hand():
    """Beam 4 and branch 4: one prompt is tried, then four and four; 4, 16 and 16 are made."""
    assert (most_prompts(3, 4, 4).tried, most_prompts(3, 4, 4).edited, most_prompts(3, 4, 4).scored) == (9, 36, 37)
    assert (most_prompts(2, 2, 4).tried, most_prompts(2, 2, 4).edited, most_prompts(2, 2, 4).scored) == (3, 12, 13)
    assert (most_prompts(2, 4, 1).tried, most_prompts(2, 4, 1).edited, most_prompts(2, 4, 1).scored) == (3, 3, 4)
