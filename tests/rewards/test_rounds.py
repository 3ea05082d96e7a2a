"""The metrics of a round of rollouts, and the records of its episodes."""

import pytest

from r3lite.core.episode import Episode, Question, Step
from r3lite.rewards.reward import EpisodeReward
from r3lite.rewards.rounds import episode_records, mixed_groups, round_metrics


def test_means_of_parts_leave_out_what_is_not_known():
    """A question without gold paragraphs has no recall: no zero in its mean."""
    episode = Episode(Question("q", "q?", ("a",)), [Step("x", answer="a")], "answered")
    scored = [EpisodeReward([1.0], {"recall": None, "em": 1.0}), EpisodeReward([0.0], {"recall": 0.5, "em": 0.0}), None]
    measured = round_metrics([episode] * 3, scored, turns=[[[1]], [[2]], [[3, 4], [5, 6]]], logprobs=[[-1.0]] * 3)
    assert measured["rewards/recall/mean"] == 0.5 and measured["rewards/em/mean"] == 0.5
    assert measured["reward"] == 0.5 and measured["missing_rewards"] == 1
    assert measured["completions/mean_length"] == 2


def test_the_share_of_groups_with_right_and_wrong_answers():
    """Group 0 has both, group 1 wrong ones only whatever they are paid, group 2 one reward: of two groups, one."""
    right, wrong, found_more = (
        EpisodeReward([1.0], {"em": 1.0}),
        EpisodeReward([0.1], {"em": 0.0}),
        EpisodeReward([0.2], {"em": 0.0}),
    )
    scored = [right, wrong, wrong, found_more, right, None]
    assert mixed_groups(scored, [0, 0, 1, 1, 2, 2]) == {"groups/mixed": 0.5}
    assert mixed_groups(scored[4:], [2, 2]) == {}


def test_how_likely_right_episodes_were_to_the_model():
    """Means of -0.2 and -0.5 over their tokens; the wrong one, and the one without a reward, do not count."""
    right, wrong = EpisodeReward([1.0], {"em": 1.0}), EpisodeReward([0.5], {"em": 0.0})
    logprobs = [[-0.1, -0.3], [-9.0], [-0.4, -0.5, -0.5, -0.6], [-9.0]]
    episode = Episode(Question("q", "q?", ("a",)), [Step("x", answer="a")], "answered")
    measured = round_metrics([episode] * 4, [right, wrong, right, None], [[[1]]] * 4, logprobs)
    assert measured["completions/right"] == 2 and measured["logps/right"] == pytest.approx(-0.35)
    measured = round_metrics([episode], [wrong], [[[1]]], [[-9.0]])
    assert measured["completions/right"] == 0 and measured["logps/right"] is None


def test_an_episode_is_recorded_with_what_it_was_paid():
    episode = Episode(Question("q", "q?", ("a",)), [Step("x", answer="a")], "answered")
    paid, missing = episode_records(7, [episode] * 2, [EpisodeReward([1.0], {"em": 1.0}), None])
    assert (paid["step"], paid["id"], paid["rewards"], paid["step_rewards"]) == (7, "q", {"em": 1.0}, [1.0])
    assert missing["rewards"] is None and missing["step_rewards"] is None


def test_where_some_groups_are_left_out_each_episode_says_whether_it_was_learned_from():
    episode = Episode(Question("q", "q?", ("a",)), [Step("x", answer="a")], "answered")
    records = episode_records(7, [episode] * 2, [EpisodeReward([1.0])] * 2, learned=[False, True])
    assert [record["learned"] for record in records] == [False, True]
    assert "learned" not in episode_records(7, [episode], [EpisodeReward([1.0])])[0]
