"""Questions of RL: those with a demonstration, as many yes as no, and what is refused."""

from pathlib import Path

import pytest

from r3lite.core.episode import Question
from r3lite.core.errors import R3LiteError
from r3lite.core.files import write_jsonl
from r3lite.core.invocation import resolve
from r3lite.datasets.rl_questions import balanced, read_demonstrations, read_rl_questions
from r3lite.settings import PpoConfig

ROME = {"title": "Rome", "text": "Rome lies on the Tiber."}
MILAN = {"title": "Milan", "text": "Milan lies on the Olona."}


def answered(*answers: str, source: str = "") -> list[Question]:
    return [Question(f"{source}{i}", f"{source}{i}?", (answer,), source=source) for i, answer in enumerate(answers)]


def test_the_more_frequent_answer_becomes_as_rare_as_the_other():
    questions = balanced(answered("yes", "No", "no", "Rome", "no", "Yes "))
    answers = [question.answers[0] for question in questions]
    assert sorted(map(str.lower, answers)) == ["no", "no", "rome", "yes", "yes "]
    ids = [int(question.id) for question in questions]
    assert ids == sorted(ids)
    assert balanced(answered("yes", "Rome", "noon")) == answered("yes", "Rome", "noon")[1:]
    assert balanced([]) == []


def test_each_source_is_balanced_by_itself():
    questions = [*answered("yes", "no", "no", source="a"), *answered("yes", "Rome", source="b")]
    pairs = [(question.source, question.answers[0]) for question in balanced(questions)]
    assert pairs == [("a", "yes"), ("a", "no"), ("b", "Rome")]


def row(text: str, answer: str) -> dict:
    """A question whose gold paragraph is that of Rome."""
    context = [[paragraph["title"], [paragraph["text"]]] for paragraph in (ROME, MILAN)]
    return {"_id": text, "question": text, "answer": answer, "context": context, "supporting_facts": [["Rome", 0]]}


def demonstration(text: str, answer: str, paragraph: dict = ROME) -> dict:
    documents = [{"id": "d", **paragraph}]
    steps = [
        {"analysis": "To be found.", "query": "Where?", "documents": documents},
        {"analysis": "It is there.", "answer": answer},
    ]
    return {"id": "any", "question": text, "answers": [answer], "steps": steps}


def config_of(folder: Path, questions: list[dict], demonstrations: list[dict], *flags: str) -> PpoConfig:
    write_jsonl(folder / "questions.jsonl", questions)
    write_jsonl(folder / "gold.jsonl", demonstrations)
    arguments = ["--algorithm", "verifree", "--contexts", str(folder / "gold.jsonl"), *flags]
    return resolve("ppo", PpoConfig(), [*arguments, "--data", str(folder / "questions.jsonl")])


def test_questions_are_those_with_a_demonstration_that_has_every_gold_paragraph(tmp_path):
    questions = [row("Where is Rome?", "Tiber"), row("What is Rome?", "a city"), row("Who?", "Ann")]
    demonstrations = [
        demonstration("where is Rome", "Tiber", MILAN),
        demonstration("where is Rome", "the Po"),  # a wrong answer to the first question, of other paragraphs
        demonstration("where is Rome", "The Tiber"),  # asks the same as the first question
        demonstration("What is Rome?", "a city", MILAN),
        demonstration("Which river?", "Tiber"),  # of no question
    ]
    config = config_of(tmp_path, questions, demonstrations)
    rl_questions, _ = read_rl_questions(config)
    assert [question.text for question in rl_questions] == ["Where is Rome?"]
    ((id, of_question),) = read_demonstrations(config, rl_questions).items()
    assert id == rl_questions[0].id
    assert [trajectory.steps[-1].answer for trajectory in of_question] == ["The Tiber"]
    assert [trajectory.steps[0].searches[0].documents[0].title for trajectory in of_question] == ["Rome"]


def test_yes_and_no_are_balanced_among_the_demonstrated_questions(tmp_path):
    """All were balanced, of which those answered by no had no demonstration: ten yes and no no were left."""
    answers = ["yes"] * 5 + ["no"] * 9 + ["Rome"]
    questions = [row(f"Question {i}?", answer) for i, answer in enumerate(answers)]
    demonstrations = [demonstration(f"Question {i}?", answers[i]) for i in (0, 1, 2, 3, 4, 5, 6, 14)]
    config = config_of(tmp_path, questions, demonstrations, "--balance-yes-no")
    rl_answers = [question.answers[0] for question in read_rl_questions(config)[0]]
    assert sorted(rl_answers) == ["Rome", "no", "no", "yes", "yes"]


@pytest.mark.parametrize(
    ("demonstrated", "flags", "cause"),
    [
        (MILAN, [], "no question has a demonstration with every gold paragraph in --contexts"),
        (ROME, ["--balance-yes-no"], "no question is left by --balance-yes-no"),
    ],
)
def test_no_question_left_is_an_error(tmp_path, demonstrated, flags, cause):
    questions = [row("Is it Rome?", "yes")]
    config = config_of(tmp_path, questions, [demonstration("Is it Rome?", "yes", demonstrated)], *flags)
    with pytest.raises(R3LiteError, match=cause):
        read_rl_questions(config)


def test_a_source_without_questions_is_named(tmp_path):
    config_of(tmp_path, [row("Is it Rome?", "yes")], [demonstration("Is it Rome?", "yes")])
    write_jsonl(tmp_path / "other.jsonl", [row("Who?", "Ann")])
    sources = f"{tmp_path / 'questions.jsonl'}=1,{tmp_path / 'other.jsonl'}=1"
    flags = ["--algorithm", "verifree", "--contexts", str(tmp_path / "gold.jsonl"), "--sources", sources]
    with pytest.raises(R3LiteError, match="no question of the source other has a demonstration"):
        read_rl_questions(resolve("ppo", PpoConfig(), flags))


def test_conversations_are_refused_and_bad_rows_are_skipped_on_request(tmp_path):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    config = config_of(tmp_path, [row("Is it Rome?", "yes")], [{"messages": messages}])
    with pytest.raises(R3LiteError, match=r"gold\.jsonl has conversations"):
        read_rl_questions(config)
    rows = [{"steps": "none"}, demonstration("Is it Rome?", "yes")]
    with pytest.raises(R3LiteError, match="steps"):
        read_rl_questions(config_of(tmp_path, [row("Is it Rome?", "yes")], rows))
    assert len(read_rl_questions(config_of(tmp_path, [row("Is it Rome?", "yes")], rows, "--skip-bad-rows"))[0]) == 1
