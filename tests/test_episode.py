"""Questions, steps and episodes."""

import json

import pytest

from r3lite.core.episode import ANSWERED, Document, Episode, Hop, Question, Step
from r3lite.core.records import Record, Source

PARIS = Document("1", "Paris", "Paris is the capital of France. It lies on the Seine.")
OTHER_PARIS = Document("2", "Paris", "Paris is a prince of Troy.")
ROME = Document("3", "Rome", "Rome is the capital of Italy.")


def question(**changes):
    return Question(**({"id": "q", "text": "Which?", "answers": ("a",), "gold": (PARIS, ROME)} | changes))


def test_gold_by_title_alone():
    q = question(gold_by="title")
    assert q.gold_index(Document("9", " paris ", "anything")) == 0
    assert q.gold_indices([ROME, ROME, Document("8", "Oslo", "")]) == {1}


def test_gold_by_text_where_a_title_has_many_paragraphs():
    """MuSiQue has several paragraphs of one title; the wrong one is no find."""
    q = question()
    assert q.gold_index(PARIS) == 0
    assert q.gold_index(OTHER_PARIS) is None
    assert q.gold_index(Document("x", "Paris", "Paris  is the capital\nof France.")) == 0  # cut at its end
    assert q.gold_index(Document("x", "Paris", f"Before. {PARIS.text} After.")) == 0  # a longer window
    assert q.gold_index(Document("x", "Paris", "")) is None
    assert q.gold_index(Document("x", "Lutetia", PARIS.text)) is None


def test_two_gold_paragraphs_of_one_title_are_told_apart():
    q = question(gold=(PARIS, OTHER_PARIS))
    assert q.gold_indices([OTHER_PARIS]) == {1}
    assert q.gold_indices([PARIS, OTHER_PARIS]) == {0, 1}


def test_hop_count():
    hop = Hop("Who?", "him")
    assert question(hops=(hop, hop, hop)).hop_count == 3
    assert question().hop_count == 2
    assert question(gold=()).hop_count == 1


@pytest.mark.parametrize(
    "step",
    [
        Step.asking("a", "q", (PARIS, ROME)),
        Step.asking("a", "q"),
        Step("a", answer="yes"),
        Step("", faults=("cut_off",)),
        Step.asking("ünïcode", "東京\u2028?", (Document("4", "", ""),), faults=("repeated_query",)),
    ],
)
def test_a_step_survives_json(step):
    assert Step.from_json(Record(json.loads(json.dumps(step.to_json())), Source(""))) == step


def test_keys_of_a_step_s_record():
    """Collected trajectories promise them: documents come with every query, even where it found nothing."""
    assert Step.asking("a", "q").to_json() == {"analysis": "a", "query": "q", "documents": []}
    assert Step("a", answer="x").to_json() == {"analysis": "a", "answer": "x"}
    documents = Step.asking("a", "q", (ROME,)).to_json()["documents"]
    assert documents == [{"id": "3", "title": "Rome", "text": ROME.text}]


def test_an_episode_s_answer_documents_and_record():
    steps = [Step.asking("a", "q1", (PARIS,)), Step.asking("b", "q2", (ROME, PARIS)), Step("c", answer="Rome")]
    episode = Episode(question(), steps, ANSWERED)
    assert episode.prediction == "Rome"
    assert episode.documents == [PARIS, ROME, PARIS]
    assert episode.search_count == 2
    record = episode.to_json()
    assert set(record) >= {"id", "question", "answers", "prediction", "steps", "finish"}
    assert (record["finish"], len(record["steps"])) == ("answered", 3)
    assert Episode(question(), steps[:2]).prediction == ""
    assert Episode(question()).finish is None


def test_of_two_gold_paragraphs_one_of_which_begins_the_other_each_is_recognized():
    short = Document("a", "Brenn", "Brenn is a film.")
    long = Document("b", "Brenn", "Brenn is a film. Ann Dahl directed it.")
    for gold in ((short, long), (long, short)):
        question = Question("1", "q", ("x",), gold=gold)
        assert [question.gold_index(document) for document in gold] == [0, 1]
        assert question.gold_index(Document("c", "Brenn", "Ann Dahl directed it.")) == gold.index(long)
