from dataclasses import replace

import pytest

from r3lite.core.episode import ANSWERED, MALFORMED, Document, Episode, Question, Step
from r3lite.core.errors import R3LiteError
from r3lite.core.records import Record, Source
from r3lite.evaluation.scores import FULL_RECALL_EM, MEANS, METRICS, Marks, combined, scores, scores_by, summary
from tests.errors import raises

GOLD = tuple(Document(str(i), f"T{i}", f"Text {i}") for i in range(3))


def mark(em=0.0, f1=0.0, recall=None, well_formed=1, steps=1, searches=0, hops=2, judged=None, type="", **means):
    return Marks(em, f1, recall, well_formed, steps, searches, hops, judged, type, means)


def episode():
    """Finds the first of three gold paragraphs twice, and another one; answers one word of three."""
    question = Question("1", "q", ("New York City", "NYC"), gold=GOLD, type="bridge")
    steps = [
        Step.asking("a", "b", (GOLD[0], Document("9", "Z", "Else"))),
        Step.asking("c", "d", (GOLD[0],), faults=("repeated_query",)),
        Step("e", answer="York"),
    ]
    return Episode(question, steps, ANSWERED, tokens_written=40)


def test_marks_of_an_episode():
    marks = Marks.of(episode(), judged=True, bert_score=0.7)
    assert marks == Marks(0.0, pytest.approx(0.5), pytest.approx(1 / 3), 2, 3, 2, 3, True, "bridge", marks.means)
    assert Marks.of(Episode(Question("1", "q", ("x",)))).recall is None


def test_means_of_an_episode_by_hand():
    means = Marks.of(episode(), bert_score=0.7).means
    # Facts: 1 of 2 paragraphs is right, 1 of 3 is found. Answer: 1 of 1 word is right, 1 of 3 is found.
    expected = {"sp_em": 0, "sp_precision": 1 / 2, "sp_recall": 1 / 3, "sp_f1": 2 / 5}
    expected |= {"joint_em": 0, "joint_f1": 2 * (1 / 2 * 1 / 9) / (1 / 2 + 1 / 9)}
    expected |= {"rouge_l": 0.5, "bert_score": 0.7, "reasoning_tokens": 40}
    expected["bleu"] = 1.0  # one word of one; NYC, as long as the prediction, takes off nothing
    assert means == pytest.approx(expected) and set(means) == set(MEANS) - {
        "reasoning_accuracy",
        "query_rationality",
    }  # of a judge


def test_what_is_unknown_is_no_mean():
    means = Marks.of(Episode(Question("1", "q", ("x",)), [Step(answer="x")])).means
    assert means == {"rouge_l": 1.0, "bleu": 1.0}


def test_without_an_answer_nothing_is_right():
    """A gold answer of no words equals a blank one, so that the joint F1 was 1 and the F1 0."""
    question = Question("1", "q", ("The The",), gold=GOLD[:1])
    marks = Marks.of(Episode(question, [Step.asking("a", "b", GOLD[:1])]))
    assert (marks.f1, marks.means["sp_f1"], marks.means["joint_f1"]) == (0.0, 1.0, 0.0)


def test_marks_come_back_from_a_line_of_predictions():
    marks = Marks.of(episode(), judged=False, bert_score=0.7)
    line = episode().to_json() | marks.to_json()
    assert Marks.from_json(Record(line, Source("x"))) == marks
    earlier = {key: line[key] for key in ("id", "question", "answers", "prediction", "steps", "finish", "em", "f1")}
    earlier_marks = Marks.from_json(Record(earlier | {"recall": None}, Source("x")))
    assert earlier_marks == Marks(marks.em, marks.f1, None, 2, 3, 2, 1)


def test_combined_by_hand():
    assert combined(mark(em=1, f1=1, recall=1, hops=2)) == pytest.approx(0.92)
    assert combined(mark(em=0, f1=0.5, recall=0.5, hops=3)) == pytest.approx((0.8 * 0.15 + 0.1) * 1.5)
    assert combined(mark(em=1, f1=1, recall=1, hops=4)) == pytest.approx(1.84)
    assert combined(mark(em=1, f1=1)) is None


def test_means_by_hand():
    marks = [
        mark(em=1, f1=1, recall=0.5, well_formed=3, steps=3, searches=2, judged=True),
        mark(em=0, f1=0.5, recall=1.0, well_formed=0, steps=1, searches=0, judged=None),
        mark(em=0, f1=0, recall=None, well_formed=1, steps=4, searches=1, judged=False),
    ]
    means = scores(marks)
    values = {name: means[name]["value"] for name in METRICS}
    expected = {"em": 1 / 3, "f1": 0.5, "retrieval_recall": 0.75, "mean_searches": 1.0}
    expected["format_adherence"] = 4 / 8  # of steps, not of episodes
    expected["combined"] = (0.82 + 0.32) / 2
    assert values == pytest.approx(expected)
    assert means["n"] == 3
    assert means["judge_accuracy"]["value"] == 0.5  # a verdict that is missing is left out, not wrong
    for name in METRICS:
        assert means[name]["low"] <= means[name]["value"] <= means[name]["high"]


def test_what_nobody_knows_has_no_score():
    means = scores([mark(em=1), mark()])
    assert means["retrieval_recall"] == means["combined"] == {"value": None, "low": None, "high": None}
    assert "judge_accuracy" not in means


def test_intervals_of_a_share():
    # Of 400 questions half are right: the standard error is 0.025, so the interval is about 0.45 to 0.55.
    entry = scores([mark(em=i % 2) for i in range(400)])["em"]
    assert entry["value"] == 0.5
    assert entry["low"] == pytest.approx(0.451, abs=0.008) and entry["high"] == pytest.approx(0.549, abs=0.008)


def test_intervals_are_repeatable_and_one_question_has_none():
    marks = [mark(em=i % 3 == 0, f1=i / 30) for i in range(30)]
    assert scores(marks, seed=1) == scores(marks, seed=1)
    assert scores(marks, seed=1)["f1"] != scores(marks, seed=2)["f1"]
    assert scores([mark(em=1)])["em"] == {"value": 1.0, "low": 1.0, "high": 1.0}


def test_scores_by_group():
    marks = [mark(em=1, hops=2, type="bridge"), mark(em=0, hops=2, type="comparison"), mark(em=1, hops=4)]
    by_hops = scores_by(lambda m: m.hops, marks)
    assert list(by_hops) == ["2", "4"]
    assert by_hops["2"]["n"] == 2 and by_hops["2"]["em"]["value"] == 0.5
    assert by_hops["4"]["em"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    by_type = scores_by(lambda m: m.type, marks)
    assert {name: (group["n"], group["em"]["value"]) for name, group in by_type.items()} == {
        "bridge": (1, 1.0),
        "comparison": (1, 0.0),
    }


def test_means_are_over_the_questions_for_which_they_are_known():
    means = scores([mark(sp_f1=0.5, bleu=0.25), mark(bleu=0.75), mark()])
    assert means["sp_f1"]["value"] == 0.5 and means["bleu"]["value"] == 0.5
    assert means.keys() == {"n", *METRICS, FULL_RECALL_EM, "sp_f1", "bleu"}


def test_exact_match_of_the_episodes_that_found_every_gold_paragraph():
    """Of reading alone: an answer to what was not found, or to a question without gold paragraphs, does not count."""
    with_gold = [mark(em=1, recall=1.0), mark(em=0, recall=1.0), mark(em=1, recall=1.0)]
    without_gold = [mark(em=0, recall=0.5), mark(em=1, recall=0.0), mark(em=0, recall=None)]
    means = scores(with_gold + without_gold)
    assert means["em"]["value"] == 1 / 2
    entry = means[FULL_RECALL_EM]
    assert entry["value"] == pytest.approx(2 / 3) and entry["n"] == 3
    assert entry["low"] == 0.0 and entry["high"] == 1.0  # few resamples have less than all of the three right
    assert scores(without_gold)[FULL_RECALL_EM] is None
    by_hops = scores_by(lambda m: m.hops, [mark(em=1, recall=1.0), mark(recall=0.5, hops=3)])
    assert by_hops["2"][FULL_RECALL_EM]["n"] == 1 and by_hops["3"][FULL_RECALL_EM] is None


def test_the_interval_of_exact_match_with_full_recall_is_wider_than_that_of_all():
    # 100 of 400 questions: the standard error of a share of a half is 0.05, and not 0.025.
    marks = [mark(em=i % 2, recall=float(i < 100)) for i in range(400)]
    entry = scores(marks)[FULL_RECALL_EM]
    assert entry["low"] == pytest.approx(0.402, abs=0.015) and entry["high"] == pytest.approx(0.598, abs=0.015)


def test_a_question_whose_retriever_failed_counts_in_no_score():
    """Two of three are right; the fourth, at which the retriever failed, is neither right nor wrong."""
    valid = [mark(em=1, f1=1, recall=1.0), mark(em=1, f1=1, recall=0.0, type="a"), mark(bleu=0.5)]
    lost = replace(mark(recall=0.0, bleu=0.0, type="b", hops=4), failure="timed out")
    means = scores([*valid, lost])
    assert means == scores(valid)
    assert (means["n"], means["em"]["value"], means["retrieval_recall"]["value"]) == (3, pytest.approx(2 / 3), 0.5)
    assert list(scores_by(lambda m: m.type, [*valid, lost])) == ["a"]
    with raises(R3LiteError, "retriever-failed", "timed out"):
        scores([lost])


def test_the_failure_of_an_episode_is_in_its_marks_and_in_those_of_its_line():
    lost = Episode(Question("1", "q", ("x",)), [Step(answer="x")], ANSWERED, failure="timed out")
    marks = Marks.of(lost)
    assert marks.failure == "timed out"
    assert Marks.from_json(Record(lost.to_json() | marks.to_json(), Source("x"))) == marks


def test_all_counts_of_a_summary_are_of_the_same_questions():
    """`finish` and `faults` counted the questions that `n` and the means leave out."""
    question = Question("1", "q", ("x",))
    lost = Episode(question, [Step(faults=("no_query",))], MALFORMED, failure="timed out")
    episodes = [Episode(question, [Step(answer="x")], ANSWERED), lost]
    stats = summary(episodes, [Marks.of(episode) for episode in episodes], seed=0)
    assert (stats["n"], stats["finish"], stats["faults"], stats["retrieval_failures"]) == (1, {"answered": 1}, {}, 1)
