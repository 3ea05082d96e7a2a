import pytest

from r3lite.core.answer_match import Overlap, best_overlap
from r3lite.core.episode import ANSWERED, Document, Episode, Question, Step
from r3lite.evaluation.supporting_facts import facts_match, joint, retrieved_facts

GOLD = {("Neighbours", 1), ("Kate Ramsay", 0)}


@pytest.mark.parametrize(
    ("predicted", "em", "precision", "recall", "f1"),
    [
        (GOLD, 1, 1, 1, 1),
        ({("Neighbours", 1)}, 0, 1, 1 / 2, 2 / 3),
        ({("Neighbours", 1), ("Kate Ramsay", 1)}, 0, 1 / 2, 1 / 2, 1 / 2),  # the right title, the wrong sentence
        (GOLD | {("Ramsay Street", 0), ("Ramsay Street", 1)}, 0, 1 / 2, 1, 2 / 3),
        ({("Ramsay Street", 0)}, 0, 0, 0, 0),
        (set(), 0, 0, 0, 0),
    ],
)
def test_sentences_by_hand(predicted, em, precision, recall, f1):
    exact_match, overlap = facts_match(predicted, GOLD)
    assert (exact_match, overlap.precision, overlap.recall, overlap.f1) == pytest.approx((em, precision, recall, f1))


def test_joint_by_hand():
    # Answer: 2 of 3 words right, 2 of 2 found. Facts: 1 of 2 right, 1 of 1 found. P = 2/3 * 1/2 = 1/3, R = 1.
    em, both = joint((0.0, Overlap(2 / 3, 1.0)), (0.0, Overlap(1 / 2, 1.0)))
    assert em == 0.0 and (both.precision, both.recall, both.f1) == pytest.approx((1 / 3, 1.0, 1 / 2))
    assert joint((1.0, Overlap(1, 1)), (0.0, Overlap(1, 1 / 2)))[0] == 0.0
    assert joint((1.0, Overlap(1, 1)), (1.0, Overlap(1, 1))) == (1.0, Overlap(1.0, 1.0))
    assert joint((0.0, Overlap(0, 0)), (1.0, Overlap(1, 1)))[1].f1 == 0.0


def hotpot_metrics(prediction, answer, predicted_facts, gold_facts):
    """The joint EM and F1 of one question, worked out once more from counts, as the paper's section 5.2 says."""
    verdicts = {"yes", "no", "noanswer"}
    ours, theirs = prediction.lower().split(), answer.lower().split()
    unmatched = list(theirs)
    shared = 0
    for word in ours:
        if word in unmatched:
            unmatched.remove(word)
            shared += 1
    if ours != theirs and {" ".join(ours), " ".join(theirs)} & verdicts:
        shared = 0
    tp = sum(fact in gold_facts for fact in set(predicted_facts))
    fp, fn = len(set(predicted_facts)) - tp, sum(fact not in predicted_facts for fact in set(gold_facts))
    p = (shared / len(ours)) * (tp / (tp + fp)) if shared and tp else 0
    r = (shared / len(theirs)) * (tp / (tp + fn)) if shared and tp else 0
    return float(ours == theirs and fp + fn == 0), 2 * p * r / (p + r) if p + r else 0.0


@pytest.mark.parametrize("prediction", ["yes", "no", "reg watson", "watson", "sir reg watson", "neighbours"])
@pytest.mark.parametrize("answer", ["yes", "reg watson"])
@pytest.mark.parametrize("predicted", [[0, 1], [0], [0, 1, 2, 3], [4], [0, 4, 0]])
def test_joint_against_a_second_computation(prediction, answer, predicted):
    answered = float(prediction == answer), best_overlap(prediction, [answer], "hotpotqa")
    em, both = joint(answered, facts_match(set(predicted), {0, 1}))
    assert (em, both.f1) == pytest.approx(hotpot_metrics(prediction, answer, predicted, [0, 1]))


def episode(gold_by, *documents):
    gold = (Document("1", "Brenn", "A film by Ann Dahl."), Document("2", "Ann Dahl", "Born in Oslo."))
    question = Question("q", "?", ("Oslo",), gold=gold, gold_by=gold_by)
    steps = [Step.asking("a", "b", documents[:2]), Step.asking("c", "d", documents[2:]), Step("e", answer="Oslo")]
    return Episode(question, steps, ANSWERED)


def test_retrieved_paragraphs_are_facts_each_once():
    retrieved, gold = retrieved_facts(
        episode(
            "title",
            Document("9", "brenn", "A film"),  # cut, and written differently
            Document("8", "Oslo", "A city."),
            Document("8", "Oslo", "A city."),
            Document("7", "OSLO", "Another window of it."),
        )
    )
    assert retrieved == {0, "oslo"} and gold == {0, 1}
    assert facts_match(retrieved, gold) == (0.0, Overlap(0.5, 0.5))


def test_where_one_title_has_many_paragraphs_they_are_told_apart_by_id():
    retrieved, gold = retrieved_facts(
        episode("text", Document("1", "Brenn", "A film by Ann Dahl."), Document("5", "Ann Dahl", "She sang."))
    )
    assert retrieved == {0, "5"} and gold == {0, 1}
