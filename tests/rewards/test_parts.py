"""The rewards with flags of their own are entries of the registry, and a mixed reward is their sum to the last bit."""

import dataclasses
import inspect
import random

import pytest

from r3lite.core.answer_match import answer_scores
from r3lite.core.episode import ANSWERED, Episode, Step
from r3lite.protocols.base import BLANK_QUERY, REPEATED_QUERY
from r3lite.rewards.registry import FLAGGED, REWARDS, VERDICT, rewards_of
from r3lite.rewards.reward import score
from r3lite.rewards.verdict import StepVerdict, Verdict
from r3lite.settings import RewardSettings
from r3lite.settings.rewards import RewardEntry
from tests.rewards.episodes import ANOTHER, GOLD, OTHER, QUESTION, answered, search

NOTHING = RewardSettings(outcome_em=0.0, format_reward=0.0, gamma_correct=0.0, gamma_incorrect=0.0, gamma_fail=0.0)
STEPS = (
    search(OTHER, GOLD[0], query="where"),
    search(GOLD[1], query="Where", faults=(REPEATED_QUERY,)),
    search(GOLD[0], ANOTHER, query="when"),
)
OPINIONS = (StepVerdict(0.7, 0.4), StepVerdict(0.3, 0.9), StepVerdict(0.1, 0.2), StepVerdict(0.0, 0.6))
EPISODES = [answered(text, *STEPS) for text in ("Ada Byron", "Ada King", "Bob")]


def test_every_flag_is_a_parameter_of_one_entry():
    """But for `outcome_judge`, which also decides by whom process rewards take an answer to be right."""
    flags = [flag for function in FLAGGED.values() for flag in inspect.signature(function).parameters]
    flags = [flag for flag in flags if flag not in ("episode", VERDICT)]
    other_fields = {"rewards", "curriculum_rounds", "curriculum_switch"}
    assert set(flags) == {field.name for field in dataclasses.fields(RewardSettings)} - other_fields
    assert len(flags) == len(set(flags)) + 1
    assert not FLAGGED.keys() & REWARDS.keys()


def test_the_rewards_of_settings_are_in_the_order_of_their_sum():
    entries = (RewardEntry("answer_f1"), RewardEntry("gold_recall"))
    settings = RewardSettings(search_bonus=0.1, rewards=entries)
    names = [reward.name for reward in rewards_of(settings)]
    assert names == ["format", "process", "search", "answer_f1", "gold_recall", "outcome"]
    assert [reward.name for reward in rewards_of(NOTHING)] == ["format", "process", "outcome"]


@pytest.mark.parametrize(
    ("flag", "entry"),
    [
        ("outcome_em", "exact_match"),
        ("outcome_f1", "answer_f1"),
        ("outcome_judge", "judged_answer"),
        ("search_bonus", {"name": "search_count", "most": 100}),
        ("idle_query_penalty", {"name": "search_excess", "most": 100}),
        ("process_recall", "gold_recall"),
    ],
)
@pytest.mark.parametrize("episode", EPISODES, ids=lambda episode: episode.prediction)
def test_a_flag_equals_the_function_of_the_same_meaning(flag, entry, episode):
    verdict = Verdict(episode.prediction == "Ada King", OPINIONS)
    weight = 1.0 if flag == "process_recall" else 0.3
    named = RewardEntry({"name": entry, "weight": weight} if isinstance(entry, str) else {**entry, "weight": weight})
    by_flag = score(episode, dataclasses.replace(NOTHING, **{flag: weight}), verdict)
    by_name = score(episode, dataclasses.replace(NOTHING, rewards=(named,)), verdict)
    assert by_flag.by_step == by_name.by_step


def test_judged_steps_and_the_form_by_hand():
    verdict = Verdict(True, OPINIONS)
    gammas = {"gamma_correct": 0.6, "gamma_incorrect": -0.2, "gamma_fail": -0.1}
    judged = dataclasses.replace(NOTHING, process_judge=1.0, outcome_judge=1e-9, **gammas)
    means = [0.55, 0.6, 0.15]
    rewards = score(EPISODES[1], judged, verdict).by_step
    assert rewards[:3] == pytest.approx([1.6 * mean for mean in means])
    rewards = score(EPISODES[1], judged, Verdict(False, OPINIONS)).by_step
    assert rewards[:3] == pytest.approx([0.8 * mean for mean in means])
    form = score(EPISODES[0], dataclasses.replace(NOTHING, format_reward=0.3))
    assert form.by_step == [0.3 / 4, 0.0, 0.3 / 4, 0.3 / 4]


def test_too_few_searches_leave_the_outcome_unrewarded():
    for min_searches, outcome in ((2, 0.3), (3, 0.0)):
        settings = dataclasses.replace(NOTHING, outcome_em=0.3, least_searches=min_searches)
        assert score(EPISODES[0], settings).parts["outcome"] == outcome


def drawn_episode(draw: random.Random) -> tuple[Episode, Verdict]:
    """An episode of up to four searches, some without queries or with faults, with an answer or without one."""
    documents = (*GOLD, OTHER, ANOTHER)
    steps = []
    for number in range(draw.randint(0, 4)):
        faults = draw.choice([(), (), (REPEATED_QUERY,), (BLANK_QUERY,)])
        query = f"query {number}" if not faults else ""
        steps.append(search(*draw.sample(documents, draw.randint(0, 3)), query=query, faults=faults))
    text = draw.choice(["Ada Byron", "Ada King", "Bob", "the Ada", None])
    steps.append(Step("So.", answer=text) if text else Step("So.", faults=("no_step_heading",)))
    opinions = tuple(StepVerdict(round(draw.random(), 1), round(draw.random(), 1)) for _ in steps)
    return Episode(QUESTION, steps, ANSWERED), Verdict(draw.random() < 0.5, opinions)


def drawn_settings(draw: random.Random) -> RewardSettings:
    weights = {
        name: draw.choice([0.0, draw.random(), 0.1, 0.3])
        for name in ("outcome_em", "outcome_f1", "outcome_judge", "process_recall", "process_judge", "format_reward")
    }
    weights |= {name: draw.choice([0.0, draw.random()]) for name in ("search_bonus", "idle_query_penalty")}
    weights |= {name: draw.uniform(-1.5, 1.5) for name in ("gamma_correct", "gamma_incorrect", "gamma_fail")}
    entries = (
        RewardEntry({"name": "gold_recall", "weight": draw.random()}),
        RewardEntry({"name": "answer_f1", "weight": draw.random()}),
        RewardEntry({"name": "search_excess", "weight": draw.random(), "most": 1}),
    )
    return RewardSettings(**weights, least_searches=draw.randint(0, 2), rewards=draw.choice([None, entries]))


def steps_by_hand(episode: Episode, settings: RewardSettings, verdict: Verdict) -> list[float]:
    """The rewards of an episode's steps in plain arithmetic, in the order of sums that runs depend on."""
    em, f1 = answer_scores(episode)
    correct = verdict.correct and bool(episode.prediction)
    right = correct if settings.outcome_judge else em == 1.0
    gamma = settings.gamma_correct if right else settings.gamma_incorrect
    if not episode.prediction:
        gamma = settings.gamma_fail
    rewards, new_queries, first_found = [], [], set()
    for step, opinion in zip(episode.steps, verdict.steps, strict=True):
        form = 0.0 if step.faults else settings.format_reward / len(episode.steps)
        new_gold = {i for i, gold in enumerate(GOLD) if gold in step.documents} - first_found
        first_found |= new_gold
        process = 0.0
        if step.searches:
            process = settings.process_recall * len(new_gold) / len(GOLD)
            process += settings.process_judge * (opinion.relevance + opinion.coherence) / 2
            process *= 1 + gamma
        is_idle = bool({REPEATED_QUERY, BLANK_QUERY} & set(step.faults))
        new_queries.append(len(step.searches) if not is_idle else 0)
        policy = settings.search_bonus * new_queries[-1] - settings.idle_query_penalty * is_idle
        reward = form + process + policy
        if settings.rewards:
            recall, last, excess = (entry["weight"] for entry in settings.rewards)
            reward += recall * (len(new_gold) / len(GOLD))
            reward += last * f1 if step is episode.steps[-1] else 0.0
            beyond = max(0, sum(new_queries) - max(sum(new_queries[:-1]), 1))
            reward += excess * (-float(beyond) - float(is_idle))
        rewards.append(reward)
    outcome = settings.outcome_em * em + settings.outcome_f1 * f1 + settings.outcome_judge * correct
    if sum(new_queries) >= settings.least_searches:
        rewards[-1] += outcome
    return rewards


@pytest.mark.parametrize("seed", range(200))
def test_a_mixed_reward_is_the_sum_of_its_parts_to_the_last_bit(seed):
    draw = random.Random(seed)
    episode, verdict = drawn_episode(draw)
    settings = drawn_settings(draw)
    scored = score(episode, settings, verdict)
    assert scored.by_step == steps_by_hand(episode, settings, verdict)
    names = [reward.name for reward in rewards_of(settings)]
    assert scored.total == pytest.approx(sum(scored.parts[name] for name in names))
    assert list(scored.parts)[:3] == ["format", "process", "outcome"]
