import dataclasses
import math

import pytest

from r3lite.core.answer_match import answer_scores
from r3lite.core.episode import ANSWERED, CUT_OFF, MALFORMED, Document, Episode, Question, Search, Step
from r3lite.core.errors import R3LiteError
from r3lite.protocols.registry import build_protocol
from r3lite.rewards.reward import EpisodeReward, score
from r3lite.rewards.verdict import StepVerdict, Verdict
from r3lite.settings import ProtocolSettings, RewardSettings
from tests.errors import raises

GOLD = tuple(Document(str(i), f"Title {i}", f"Text {i}.") for i in range(2))
OTHER = Document("9", "Other", "Nothing.")
QUESTION = Question("q", "Who?", ("Ada Byron", "Ada"), GOLD, GOLD)
PLAIN = RewardSettings(
    outcome_em=1.0,
    outcome_f1=0.5,
    process_recall=0.4,
    format_reward=0.1,
    gamma_correct=0.6,
    gamma_incorrect=-0.2,
    gamma_fail=-0.1,
)


def search(*documents, query="where", faults=()):
    return Step.asking("I need it.", query, documents, faults=faults)


def answer(text, faults=()):
    return Step("So.", answer=text, faults=faults)


def test_a_right_episode_by_hand():
    episode = Episode(
        QUESTION, [search(GOLD[0], OTHER), search(GOLD[0], GOLD[1], query="then"), answer("Ada Byron")], ANSWERED
    )
    scored = score(episode, PLAIN)
    # A half of the gold at each query: 0.1 / 3 + 1.6 * 0.4 / 2; then format, EM and F1.
    assert scored.by_step == pytest.approx([0.32 + 0.1 / 3, 0.32 + 0.1 / 3, 0.1 / 3 + 1.0 + 0.5])
    assert scored.parts == pytest.approx(
        {"format": 0.1, "process": 0.64, "outcome": 1.5, "em": 1.0, "f1": 1.0, "recall": 1.0}
    )
    assert scored.total == pytest.approx(sum(scored.parts[k] for k in ("format", "process", "outcome")))


def test_an_episodes_signal_is_what_its_answer_is_paid():
    """EM 0 and F1 2/3 at weights 1 and 0.5, whatever was found; the total if no answer is paid."""
    poor = Episode(QUESTION, [search(OTHER), answer("Ada King")], ANSWERED)
    rich = Episode(QUESTION, [search(*GOLD), answer("Ada King")], ANSWERED)
    assert [score(e, PLAIN).signal for e in (poor, rich)] == pytest.approx([1 / 3, 1 / 3])
    unpaid = dataclasses.replace(PLAIN, outcome_em=0.0, outcome_f1=0.0)
    assert [score(e, unpaid).signal for e in (poor, rich)] == pytest.approx([0.1, 0.1 + 0.8 * 0.4])
    assert score(Episode(QUESTION), PLAIN).signal == 0.0


def test_an_episode_whose_retriever_failed_has_no_reward():
    """A model would be paid for answering without documents, or punished for finding none."""
    steps = [search(), answer("Ada Byron")]
    assert score(Episode(QUESTION, steps, ANSWERED, failure="no room"), PLAIN) is None
    assert score(Episode(QUESTION, steps, ANSWERED), PLAIN) is not None


def test_trajectory_factors():
    steps = [search(*GOLD)]
    wrong = score(Episode(QUESTION, [*steps, answer("Bob")], ANSWERED), PLAIN)
    failed = score(Episode(QUESTION, [*steps, Step(faults=("no_step_heading",))], MALFORMED), PLAIN)
    assert wrong.parts["process"] == pytest.approx(0.8 * 0.4)
    assert failed.parts["process"] == pytest.approx(0.9 * 0.4)


def test_a_later_step_is_not_paid_for_an_earlier_hit():
    # Documents were accumulated over the episode, so that every later query was paid for the first one's hit.
    episode = Episode(QUESTION, [search(GOLD[0]), search(GOLD[0], query="again"), search(OTHER, GOLD[0], query="more")])
    assert episode.new_gold() == [{0}, set(), set()]
    assert score(episode, RewardSettings(format_reward=0.0, process_recall=1.0, gamma_fail=0.0)).by_step == [
        0.5,
        0.0,
        0.0,
    ]
    assert episode.recall == 0.5


def test_two_answers_are_no_well_formed_step():
    # A step with two answers counted as one right answer when either was right.
    text = "Step 1:\nThe problem analysis: So.\nThe final answer: Bob\nThe final answer: Ada Byron"
    step = build_protocol(ProtocolSettings()).parse(text, [])
    scored = score(Episode(QUESTION, [step], ANSWERED), PLAIN)
    assert scored.parts["format"] == 0.0 and scored.parts["em"] == 0.0
    scored = score(Episode(QUESTION, [answer("Bob or Ada Byron")], ANSWERED), PLAIN)
    assert scored.parts["em"] == 0.0


def test_only_faultless_steps_are_paid_for_format():
    episode = Episode(
        QUESTION, [search(faults=("repeated_query",)), search(query="x"), Step(faults=("cut_off",))], CUT_OFF
    )
    scored = score(episode, PLAIN)
    assert scored.by_step == pytest.approx([0.0, 0.1 / 3, 0.0])
    assert scored.parts["outcome"] == scored.parts["em"] == 0.0


def test_an_episode_without_steps_has_nowhere_to_be_paid():
    scored = score(Episode(QUESTION), PLAIN)
    assert scored.by_step == [] and scored.total == 0
    assert scored.parts == {"format": 0, "process": 0, "outcome": 0, "em": 0.0, "f1": 0.0, "recall": 0.0}


def test_no_answer_is_not_the_empty_answer():
    # The letter "A" is an article: normalized it is empty, and so is a missing prediction.
    episode = Episode(Question("q", "Which vitamin?", ("A",)), [search()], CUT_OFF)
    assert answer_scores(episode) == (0.0, 0.0)


def test_recall_is_missing_where_no_gold_is_known():
    scored = score(Episode(Question("q", "Who?", ("Ada",)), [search(OTHER), answer("Ada")], ANSWERED), PLAIN)
    assert scored.parts["recall"] is None
    assert scored.by_step == pytest.approx([0.05, 1.55])


def test_yes_and_no_follow_the_data_set():
    settings = RewardSettings(outcome_em=0.0, outcome_f1=1.0, format_reward=0.0)
    for gold_by, expected in (("title", 0.0), ("text", pytest.approx(0.5))):
        question = Question("q", "Is it?", ("yes",), gold_by=gold_by)
        assert score(Episode(question, [answer("yes it is")], ANSWERED), settings).total == expected


JUDGED = RewardSettings(outcome_em=0.0, outcome_judge=1.0, process_recall=0.0, process_judge=0.5, format_reward=0.0)


def test_a_judge_pays_right_answers_and_steps():
    episode = Episode(QUESTION, [search(GOLD[0]), answer("Lady Lovelace")], ANSWERED)
    verdict = Verdict(True, (StepVerdict(0.8, 0.4), StepVerdict(0.0, 1.0)))
    scored = score(episode, JUDGED, verdict)
    # 1.6 because the judge, who pays the outcome, calls it right; the answering step has no query to be paid for.
    assert scored.by_step == pytest.approx([1.6 * 0.5 * 0.6, 1.0])
    assert scored.parts["judge"] == 1.0 and scored.parts["em"] == 0.0
    wrong = score(episode, JUDGED, Verdict(False, verdict.steps))
    assert wrong.by_step == pytest.approx([0.8 * 0.5 * 0.6, 0.0])


def test_a_failed_judge_is_a_missing_reward_not_a_zero():
    episode = Episode(QUESTION, [answer("Ada")], ANSWERED)
    assert score(episode, JUDGED) is None
    assert score(episode, RewardSettings(outcome_judge=0.1)) is None
    assert isinstance(score(episode, RewardSettings()), EpisodeReward)  # no weight asks for a judge


def test_a_judge_cannot_call_a_missing_answer_right():
    verdict = Verdict(True, (StepVerdict(0.0, 0.0),))
    assert score(Episode(QUESTION, [search()], CUT_OFF), JUDGED, verdict).total == 0.0


@pytest.mark.parametrize("paid", [math.nan, math.inf, -math.inf, 1e16, -1e16])
def test_a_reward_that_cannot_be_learned_from_is_refused(paid):
    """It would become a metric that is no number, and then gradients that are none."""
    with pytest.raises(R3LiteError, match=r"the reward of a step is .*; it must be finite .*\n  Lower the weights"):
        EpisodeReward([0.5, paid])
    assert EpisodeReward([1e15, -1e15]).total == 0


def test_weights_that_add_up_to_infinity_are_refused():
    with raises(R3LiteError, "reward-out-of-range", "inf"):
        score(Episode(QUESTION, [answer("Ada")], ANSWERED), RewardSettings(outcome_em=1e308, outcome_f1=1e308))


REPEATS = [search(GOLD[0]), search(faults=("repeated_query",)), answer("Ada")]


def test_the_search_policy_by_hand():
    """0.05 for the first query, 0.3 off for the second; format is 0.1 / 3 at the first and third step."""
    policy = dataclasses.replace(PLAIN, process_recall=0.0, search_bonus=0.05, idle_query_penalty=0.3)
    scored = score(Episode(QUESTION, REPEATS, ANSWERED), policy)
    assert scored.by_step == pytest.approx([0.1 / 3 + 0.05, -0.3, 0.1 / 3 + 1.5])
    assert scored.parts["search"] == pytest.approx(-0.25)
    assert scored.total == pytest.approx(sum(scored.parts[k] for k in ("format", "process", "outcome", "search")))
    blank = [search(GOLD[0]), Step("So.", faults=("blank_query",))]
    assert score(Episode(QUESTION, blank, MALFORMED), policy).by_step == pytest.approx([0.05 + 0.05, -0.3])
    assert score(Episode(QUESTION, [answer("Bob")], ANSWERED), policy).parts["search"] == 0


def test_an_episode_may_be_paid_less_than_nothing():
    policy = RewardSettings(format_reward=0.0, idle_query_penalty=0.5)
    assert score(Episode(QUESTION, [search(faults=("repeated_query",))] * 2, MALFORMED), policy).total == -1


def test_too_few_different_searches_leave_the_outcome_unpaid():
    for min_searches, outcome in ((0, 1.5), (1, 1.5), (2, 0.0)):
        policy = dataclasses.replace(PLAIN, least_searches=min_searches)
        scored = score(Episode(QUESTION, REPEATS, ANSWERED), policy)
        assert scored.parts["outcome"] == outcome and scored.parts["em"] == 1
        assert scored.total == pytest.approx(sum(scored.parts[k] for k in ("format", "process", "outcome")))


def test_without_a_search_policy_nothing_is_different():
    scored = score(Episode(QUESTION, REPEATS, ANSWERED), PLAIN)
    assert "search" not in scored.parts
    assert scored.by_step == pytest.approx([0.1 / 3 + 1.6 * 0.4 / 2, 0.0, 0.1 / 3 + 1.5])


def several(*queries, faults=()):
    """A step that asks several queries at once."""
    return Step("I need them.", tuple(map(Search, queries)), faults=faults)


def test_every_new_query_of_a_step_is_a_search():
    """Three queries in one step counted as one, for the bonus and for the least number of searches."""
    steps = [several("Alvik", "Brenna", "Lom"), answer("Ada")]
    repeated = several("alvik", "Olm", "  OLM", faults=("repeated_query",))  # one of the three is new
    policy = dataclasses.replace(PLAIN, process_recall=0.0, search_bonus=0.1, idle_query_penalty=0.5)
    assert score(Episode(QUESTION, steps, ANSWERED), policy).parts["search"] == pytest.approx(0.3)
    assert score(Episode(QUESTION, [steps[0], repeated, answer("Ada")], ANSWERED), policy).by_step[:2] == pytest.approx(
        [0.1 / 3 + 0.3, 0.1 - 0.5]
    )
    for min_searches, outcome in ((3, 1.5), (4, 0.0)):
        policy = dataclasses.replace(PLAIN, least_searches=min_searches)
        assert score(Episode(QUESTION, steps, ANSWERED), policy).parts["outcome"] == outcome
