"""Questions of evaluation files are kept out of what is trained on."""

import json

from r3lite.core.episode import Question
from r3lite.core.errors import R3LiteError
from r3lite.datasets.sources import read_questions_of
from r3lite.datasets.splits import new_questions, without
from r3lite.settings import NewQuestionSettings, SourceSettings
from r3lite.settings.data import SourceEntry
from tests.errors import raises


def question_of(id, text):
    return Question(id, text, ("x",))


def write(path, *rows):
    path.write_text("".join(json.dumps(row | {"answer": "x"}) + "\n" for row in rows))
    return str(path)


def test_a_question_is_refused_by_its_id_and_by_its_words(tmp_path, capsys):
    a = write(tmp_path / "a.jsonl", {"id": "1", "question": "Who?"}, {"question": "Who made the film Brenn?"})
    b = write(tmp_path / "b.jsonl", {"_id": "7", "question": "Which?"})
    questions = [
        question_of("1", "another text"),
        question_of("2", "who made the  film: BRENN"),
        question_of("3", "Who made Olm?"),
        question_of("7", "When?"),
        question_of("a-2", "Where?"),  # the row at this place of a.jsonl is not called so
    ]
    assert [q.id for q in without(questions, [a, b])] == ["3", "a-2"]
    assert capsys.readouterr().err == "--exclude: left out 3 of 5 questions (2 by id, 1 by text)\n"


def test_questions_of_trajectories_and_of_sources_are_left_out(tmp_path):
    """What `collect` wrote names the questions that a model was trained on."""
    step = {"analysis": "a", "answer": "x"}
    collected = write(tmp_path / "gold.jsonl", {"id": "1", "question": "Who?", "answers": ["x"], "steps": [step]})
    train = write(tmp_path / "train.jsonl", {"id": "1", "question": "Who?"}, {"id": "2", "question": "Where?"})
    data = NewQuestionSettings(data=train, exclude=(collected,))
    assert [q.id for q in new_questions(data)] == ["2"]
    mixture = SourceSettings(sources=(SourceEntry({"name": "one", "file": train}),))
    assert [q.id for q in read_questions_of(NewQuestionSettings(exclude=(collected,)), mixture)] == ["one/2"]
    assert len(read_questions_of(NewQuestionSettings(data=train), SourceSettings())) == 2


def test_nothing_left_is_an_error(tmp_path):
    with raises(R3LiteError, "exclude-leaves-nothing"):
        without([question_of("1", "Who?")], [write(tmp_path / "a.jsonl", {"question": "Who?"})])
