"""--balance-yes-no: as many questions are answered by yes as by no."""

from r3lite.core.episode import Question
from r3lite.core.files import write_jsonl
from r3lite.datasets.balance import balanced
from r3lite.datasets.sources import read_questions_of
from r3lite.settings import RlQuestionSettings, SourceSettings


def questions(*answers: str) -> list[Question]:
    return [Question(str(i), f"{i}?", (answer,)) for i, answer in enumerate(answers)]


def test_the_more_frequent_answer_becomes_as_rare_as_the_other():
    chosen = balanced(questions("yes", "No", "no", "Rome", "no", "Yes "))
    answers = [question.answers[0] for question in chosen]
    assert sorted(answers) == sorted(["yes", "Yes ", "Rome", *[a for a in answers if a.lower() == "no"]])
    assert len(answers) == 5
    ids = [int(question.id) for question in chosen]
    assert ids == sorted(ids)
    assert balanced(questions("yes", "Rome", "noon")) == questions("yes", "Rome", "noon")[1:]
    assert balanced([]) == []


def test_each_source_is_balanced_by_itself(tmp_path):
    answers = {"a": ["yes", "no", "no"], "b": ["yes", "Rome"]}
    entries = []
    for name, of_source in answers.items():
        rows = [{"id": str(i), "question": f"{name}{i}?", "answer": answer} for i, answer in enumerate(of_source)]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
        entries.append({"file": str(tmp_path / f"{name}.jsonl"), "weight": 1.0, "name": name, "type": "qa"})
    mixture = SourceSettings(sources=tuple(entries))
    chosen = read_questions_of(RlQuestionSettings(balance_yes_no=True), mixture)
    pairs = [(question.source, question.answers[0]) for question in chosen]
    assert pairs == [("a", "yes"), ("a", "no"), ("b", "Rome")]
    assert len(read_questions_of(RlQuestionSettings(), mixture)) == 5
