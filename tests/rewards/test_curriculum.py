"""Weights that change from round to round: by hand, and what a run makes of them."""

import pytest

from r3lite.assembly import rl_guidance
from r3lite.core.config import UsageError
from r3lite.core.episode import Search, Step
from r3lite.core.invocation import resolve
from r3lite.rewards.registry import metrics_of_weights, needs_verdict, settings_of_round, weights_change_at
from r3lite.rewards.reward import score
from r3lite.rewards.verdict import StepVerdict, Verdict
from r3lite.settings import PpoConfig, RewardSettings
from r3lite.settings.rewards import RewardEntry
from tests.errors import raises
from tests.rewards.episodes import GOLD, answered

FORM = {"name": "all_tags", "weight": 0.25, "first_weight": 0.4, "documents": True}
ANSWER = {"name": "exact_match", "weight": 0.5, "first_weight": -0.3}
ALWAYS = {"name": "answer_f1", "weight": 2.0}


def settings(**curriculum) -> RewardSettings:
    return RewardSettings(rewards=tuple(map(RewardEntry, (FORM, ANSWER, ALWAYS))), **curriculum)


def weights(of: RewardSettings, number: int) -> list[float]:
    return [entry["weight"] for entry in settings_of_round(of, number).rewards]


def test_the_hard_switch_comes_after_the_last_round_of_the_curriculum():
    r_search = settings()
    assert [weights(r_search, n) for n in (1, 30)] == [[0.4, -0.3, 2.0]] * 2
    assert [weights(r_search, n) for n in (31, 1000)] == [[0.25, 0.5, 2.0]] * 2
    assert [n for n in range(1, 100) if weights_change_at(r_search, n)] == [31]


def test_the_linear_switch_goes_on_in_equal_parts():
    linear = settings(curriculum_rounds=4, curriculum_switch="linear")
    answer_weights = [weights(linear, n)[1] for n in range(1, 8)]
    assert answer_weights == pytest.approx([-0.3, -0.1, 0.1, 0.3, 0.5, 0.5, 0.5])
    assert [n for n in range(1, 9) if weights_change_at(linear, n)] == [2, 3, 4, 5]
    assert metrics_of_weights(linear, 2) == {
        "rewards/all_tags/weight": pytest.approx(0.3625), "rewards/exact_match/weight": pytest.approx(-0.1)
    }  # fmt: skip


@pytest.mark.parametrize("switch", ["hard", "linear"])
def test_without_rounds_or_first_weights_nothing_changes(switch):
    off = settings(curriculum_rounds=0, curriculum_switch=switch)
    assert weights(off, 1) == [0.25, 0.5, 2.0]
    assert metrics_of_weights(off, 1) == {} and not weights_change_at(off, 2)
    plain = RewardSettings(rewards=(RewardEntry(ALWAYS),), curriculum_switch=switch)
    assert settings_of_round(plain, 1) == plain and metrics_of_weights(plain, 1) == {}
    assert settings_of_round(RewardSettings(), 1) == RewardSettings() and not weights_change_at(RewardSettings(), 2)


@pytest.mark.parametrize("weight", ["much", True, float("nan"), float("inf"), [1.0]])
def test_a_first_weight_is_a_finite_number(weight):
    with pytest.raises(ValueError):
        RewardEntry({"name": "answer_f1", "first_weight": weight})


def test_r_search_pays_by_the_round_in_an_episode_with_a_plan():
    """0.2 + 0.4 + 0.4 for the first 30 rounds, then 0.5 + 0.25 + 0.25; what the judge says is always asked for."""
    config = resolve("ppo", PpoConfig(), ["--preset", "r-search-dag"])
    assert config.protocol.format == "dag" and needs_verdict(settings_of_round(config.reward, 1))
    plan = Step("Nodes: ...", (Search("Who?", (GOLD[0],), "General"),))
    episode = answered("Ada Lovelace", plan)
    for correct, totals in ((True, (1.0, 1.0)), (False, (0.8, 0.5))):
        verdict = Verdict(correct, (StepVerdict(0.0, 0.0),) * 2)
        paid = [score(episode, settings_of_round(config.reward, n), verdict) for n in (30, 31)]
        assert [p.total for p in paid] == pytest.approx(totals)
    assert paid[0].parts["valid_plan"] == 0.4 and paid[1].parts["valid_plan"] == 0.25


def test_what_was_paid_in_other_rounds_does_not_join_a_curriculum():
    flags = ["--preset", "r-search-dag", "--algorithm", "exgrpo", "--outcome-em", "1"]
    with raises(UsageError, "curriculum-weights", "exgrpo reuses the rewards of earlier rounds"):
        rl_guidance.check(resolve("ppo", PpoConfig(), flags))
    rl_guidance.check(resolve("ppo", PpoConfig(), [*flags, "--curriculum-rounds", "0"]))
