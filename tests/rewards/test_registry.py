"""Rewards by name: which function, which parameters, what it may return; a user's own from a folder elsewhere."""

import math
import sys

import pytest

from r3lite.core.config import UsageError
from r3lite.core.episode import CUT_OFF, Episode, Question
from r3lite.core.errors import R3LiteError
from r3lite.core.invocation import resolve
from r3lite.rewards import answers, searching
from r3lite.rewards.registry import REWARDS, SEARCH_REWARDS, named_rewards, needs_verdict
from r3lite.rewards.reward import EpisodeReward, score, score_all
from r3lite.rewards.verdict import StepVerdict, Verdict
from r3lite.settings import PpoConfig, RewardSettings
from r3lite.settings.rewards import RewardEntry
from tests.errors import raises
from tests.rewards.episodes import ANOTHER, GOLD, OTHER, QUESTION, answered, search


def settings(*entries, **weights) -> RewardSettings:
    """Named rewards, and nothing else that is paid unless it is said."""
    weights = {"outcome_em": 0.0, "format_reward": 0.0} | weights
    return RewardSettings(**weights, rewards=tuple(map(RewardEntry, entries)))


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    """Writes a module into a folder that has nothing to do with the package, and makes that the current folder."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    modules = []

    def write(text: str, name: str = "own_rewards") -> None:
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        modules.append(name)

    yield write
    for name in modules:
        sys.modules.pop(name, None)


def test_every_function_is_known_by_its_own_name():
    assert REWARDS["rouge_l"] is answers.rouge_l and REWARDS["gold_recall"] is searching.gold_recall
    assert [function.__name__ for function in REWARDS.values()] == list(REWARDS)
    # Parts that are always there, and what is logged beside them.
    assert not REWARDS.keys() & {"format", "process", "outcome", "search", "em", "f1", "recall", "judge"}
    assert {searching.gold_recall} < set(SEARCH_REWARDS) < set(REWARDS.values())


EPISODE = answered("Ada Lovelace", search(OTHER, GOLD[0]), search(GOLD[1], ANOTHER))


def test_weights_parameters_and_where_each_part_is_paid():
    reward_settings = settings(
        {"name": "answer_f1", "weight": 2.0},  # F1 is 2/3
        {"name": "gold_recall", "weight": 0.5},  # a half at each query
        {"name": "search_excess", "weight": 0.3, "most": 1},  # -1 at the second query
        {"name": "rouge_l_levels", "weight": -1, "low": 0.7},  # ROUGE-L is 2/3: -1
    )
    scored = score(EPISODE, reward_settings)
    assert scored.by_step == pytest.approx([0.25, 0.25 - 0.3, 4 / 3 + 1])
    parts = {"answer_f1": 4 / 3, "gold_recall": 0.5, "search_excess": -0.3, "rouge_l_levels": 1}
    assert {name: scored.parts[name] for name in parts} == pytest.approx(parts)
    paid = sum(scored.parts[name] for name in ("format", "process", "outcome", *parts))
    assert scored.total == pytest.approx(paid)


def test_named_rewards_are_paid_beside_the_weights():
    plain = score(EPISODE, RewardSettings())
    both = score(EPISODE, RewardSettings(rewards=(RewardEntry("answer_f1"),)))
    assert both.total == pytest.approx(plain.total + 2 / 3) and "answer_f1" not in plain.parts
    assert both.parts == plain.parts | {"answer_f1": pytest.approx(2 / 3)}


def test_the_signal_has_the_named_rewards_of_answers_and_ones_own(write_module):
    """Of 0.5 F1, 2 exact_match and 0.25 recall the first two are of the answer; a user's own function may be, too."""
    write_module("def always(episode):\n    return 1.0\n")
    half = answered("Ada King", search(*GOLD))
    entries = {"answer_f1": 0.5, "exact_match": 2.0, "gold_recall": 0.25}
    f1 = 2 / 3

    def signal(**weights: float) -> float:
        named = [{"name": name.replace("__", ":"), "weight": weight} for name, weight in weights.items()]
        return score(half, settings(*named)).signal

    assert signal(**entries) == pytest.approx(0.5 * f1)
    assert signal(gold_recall=0.25) == pytest.approx(0.25)  # nothing else is paid
    assert signal(gold_recall=0.25, answer_f1=0.0) == pytest.approx(0.25)  # nor here
    assert signal(gold_recall=0.25, own_rewards__always=3.0) == pytest.approx(3.0)


def test_a_missing_part_is_a_missing_reward():
    unknown = Question("q", "Who?", ("Ada",))
    reward_settings = settings("gold_recall", "exact_match")
    assert score(answered("Ada", search(OTHER), question=unknown), reward_settings) is None
    assert isinstance(score(answered("Ada", search(OTHER)), reward_settings), EpisodeReward)


def test_a_reward_that_is_missing_for_all_questions_stops_the_run():
    """Every episode was left out of the update, round after round, and nothing said so."""
    episodes = [answered("Ada", question=Question(str(i // 2), "Who?", ("Ada",))) for i in range(16)]
    with raises(R3LiteError, "reward-missing", "gold_recall", "16"):
        score_all(episodes, settings("exact_match", "gold_recall"), None, {""})
    # Of seven questions: it may happen.
    assert score_all(episodes[:14], settings("gold_recall"), None, {""}) == [None] * 14
    # The questions of a run's other data set may have gold paragraphs: a refill may ask those of one alone.
    assert score_all(episodes, settings("gold_recall"), None, {"", "musique"}) == [None] * 16
    failed = [Episode(e.question, e.steps, e.finish, failure="no room") for e in episodes]
    assert score_all(failed, settings("exact_match"), None, {""}) == [None] * 16  # for another reason


def test_a_reward_that_takes_a_verdict_needs_a_judge():
    reward_settings = settings({"name": "judged_answer", "weight": 0.5}, {"name": "coherence", "weight": 0.1})
    assert needs_verdict(reward_settings) and not needs_verdict(settings("exact_match"))
    verdict = Verdict(True, (StepVerdict(0.5, 1.0), StepVerdict(0.5, 0.5), StepVerdict(0.0, 0.0)))
    assert score(EPISODE, reward_settings) is None
    assert score(EPISODE, reward_settings, verdict).by_step == pytest.approx([0, 0, 0.5 + 0.1 * 0.5])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("rouge", r"unknown reward 'rouge' \(did you mean rouge_l\?\); see docs/rewards.md"),
        (
            {"name": "rouge_l_levels", "hihg": 0.8},
            r"the reward rouge_l_levels has no parameter 'hihg' \(did you ",
        ),
        ({"name": "chat", "most": 1}, "the reward chat has no parameter 'most'; it has none"),
        ({"name": "judged_answer", "verdict": 1}, "the reward judged_answer has no parameter 'verdict'"),
        ({"name": "search_count", "most": "3"}, "most of the reward search_count is '3'; it must be a number"),
        ({"name": "search_count", "most": True}, "most of the reward search_count is True; it must be a number"),
        ({"name": "all_tags", "query": 1}, "query of the reward all_tags is 1; it must be true or false"),
        ({"name": "function_calling", "tools": "f"}, "tools of the reward function_calling is 'f'; it must be a list"),
        ("no_such_module_here:f", "no_such_module_here:f: no module no_such_module_here in "),
        ("json.nothing:f", "json.nothing:f: no module json.nothing in "),
        ("json:dump_", r"json has no dump_ \(did you mean dumps?\?\)"),
        ("string:digits", "the reward string:digits is '0123456789', not a function of an episode"),
    ],
)
def test_what_a_config_cannot_mean_is_told_before_anything_runs(entry, message):
    with pytest.raises(UsageError, match=message):
        named_rewards(settings(entry))


OWN = '''
def brevity(episode, most=10):
    """Minus the words of the answer beyond `most`."""
    return -max(len(episode.prediction.split()) - most, 0)

def each(episode, *, bonus):
    return [bonus * number for number, _ in enumerate(episode.steps)]

def sometimes(episode, verdict=None):
    return None if episode.search_count else 1
'''


def test_a_users_own_functions(write_module):
    write_module(OWN)
    reward_settings = settings(
        {"name": "own_rewards:brevity", "weight": 0.5, "most": 1}, {"name": "own_rewards:each", "bonus": 0.25}
    )
    scored = score(EPISODE, reward_settings)
    assert scored.by_step == pytest.approx([0, 0.25, 0.5 - 0.5])
    assert scored.parts["own_rewards:brevity"] == -0.5 and scored.parts["own_rewards:each"] == 0.75
    assert score(EPISODE, settings("own_rewards:sometimes"), Verdict(True, (StepVerdict(0, 0),) * 3)) is None
    with raises(UsageError, "reward-parameter-missing", "own_rewards:each", "bonus"):
        named_rewards(settings("own_rewards:each"))
    # The name and the weight are the entry's own, and are not handed to the function.
    write_module("def weighed(episode, weight):\n    return weight\n", "weighed_rewards")
    with raises(UsageError, "reward-parameter-missing", "weighed_rewards:weighed", "weight"):
        named_rewards(settings("weighed_rewards:weighed"))


def test_a_module_in_a_package_of_the_current_folder(write_module, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    write_module("def one(episode):\n    return 1", "mine/words")
    assert score(EPISODE, settings("mine.words:one")).total == 1
    for name in ("mine", "mine.words"):
        sys.modules.pop(name)


@pytest.mark.parametrize(
    ("returned", "quoted"),
    [
        ("math.nan", "nan"),
        ("-math.inf", "-inf"),
        ("10**400", "1000"),
        ("'1'", "'1'"),
        ("[1.0, 2.0]", "[1.0, 2.0]"),
        ("[1.0, None, 2.0]", "[1.0, None, 2.0]"),
        ("[1.0, math.nan, 2.0]", "[1.0, nan, 2.0]"),
        ("{}", "{}"),
    ],
)
def test_what_cannot_be_paid_names_the_reward(write_module, returned, quoted):
    write_module(f"import math\ndef f(episode):\n    return {returned}")
    with raises(R3LiteError, "reward-invalid", "own_rewards:f returned", quoted, "for an episode of 3 steps", "q"):
        score(EPISODE, settings("own_rewards:f"))


def test_numbers_of_other_types_are_numbers(write_module):
    write_module("import numpy as np\ndef f(episode):\n    return [np.float32(0.5), True, 1]")
    assert score(EPISODE, settings("own_rewards:f")).by_step == [0.5, 1.0, 1.0]


def test_a_function_that_fails_is_named_with_its_line(write_module, tmp_path):
    write_module("import json\n\ndef f(episode):\n    return json.loads(episode.prediction)")
    with raises(R3LiteError, "reward-failed", "own_rewards:f", "q", "JSONDecodeError", "Expecting") as info:
        score(EPISODE, settings("own_rewards:f"))
    assert info.value.remedy.startswith(f"Fix {tmp_path / 'own_rewards.py'}, line 4.")
    write_module("def g():\n    return 1", "takes_nothing")
    with raises(R3LiteError, "reward-failed", "takes_nothing:g", "q", "TypeError"):
        score(EPISODE, settings("takes_nothing:g"))


def test_a_module_that_cannot_be_imported_is_not_called_missing(write_module):
    write_module("import no_such_module_at_all\n")
    with raises(R3LiteError, "reward-module-broken", "own_rewards:f", "ModuleNotFoundError", "No module named"):
        named_rewards(settings("own_rewards:f"))
    write_module("1 / 0\n", "raises_at_once")
    with raises(R3LiteError, "reward-module-broken", "raises_at_once:f", "ZeroDivisionError"):
        named_rewards(settings("raises_at_once:f"))


def test_an_episode_without_steps_has_nowhere_to_be_paid(write_module):
    write_module("def last(episode):\n    return float(episode.steps[-1].answer is not None)")
    scored = score(Episode(QUESTION), settings("own_rewards:last", "gold_recall"))
    assert scored.by_step == [] and scored.parts["own_rewards:last"] == scored.parts["gold_recall"] == 0


def test_weights_that_are_too_large_together_are_refused():
    with raises(R3LiteError, "reward-out-of-range"):
        score(EPISODE, settings({"name": "rouge_l_levels", "weight": 1e9, "low": 0.0, "high": 0.0, "pay_high": 1e9}))


PRESETS = {
    # 0.6 of 1.6 is relevance with R3's factor, 1 the judged answer, 0.1 three well-formed steps.
    "r3-rag": 1.6 * (0.5 + 0.1) + 1 + 0.1,
    "r-search": 0.5 + 0.25,
    "r-search-dag": 0.5 + 0.25,  # its searches name no source: there was no plan
    # Half for `Ada` in the answer, a tenth for having searched, two for `because`, a tenth for the form.
    "search-bonus": 0.5 + 0.1 + 0.2 + 0.1,
    # F1 2/3, both paragraphs found, two hops.
    "hop-weighted": 0.8 * 0.3 * 2 / 3 + 0.2,
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_of_other_systems_by_hand(name):
    preset = resolve("ppo", PpoConfig(), ["--preset", name]).reward
    steps = [search(OTHER, GOLD[0]), search(GOLD[1])]
    episode = answered("Ada Lovelace", *steps)
    episode.steps[-1] = type(steps[0])("Because.", answer="Ada Lovelace")
    verdict = Verdict(True, (StepVerdict(0.5, 0.2), StepVerdict(0.1, 0.2), StepVerdict(0.0, 1.0)))
    assert score(episode, preset, verdict).total == pytest.approx(PRESETS[name])


def test_the_preset_for_solution_tags_by_hand():
    preset = resolve("ppo", PpoConfig(), ["--preset", "solution"]).reward
    paid = {text: score(answered(text), preset).total for text in ("Ada", "Ada, she", "Bob")}
    # 3 and 0.5 for the form; ROUGE-L is 1, 2/3 and 0.
    assert paid == {"Ada": 8.5, "Ada, she": 3.5, "Bob": 2.5}
    assert score(Episode(QUESTION, [search()], CUT_OFF), preset).total == -1 and math.isfinite(sum(paid.values()))
