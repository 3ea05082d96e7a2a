"""Questions made from documents by rule: what they ask for, that each has one answer, and that they can be searched."""

import json
from pathlib import Path

import pytest

from r3lite import collect
from r3lite.core.answer_match import stands_in
from r3lite.core.episode import Document, folded
from r3lite.core.errors import R3LiteError
from r3lite.core.files import shipped
from r3lite.datasets.cloze import ClozeMaker, make_questions, names, sentences, spans, split
from r3lite.datasets.qa import read_questions
from r3lite.retrieval.corpus import read_corpus
from tests.collecting import lines, read_rows, write
from tests.errors import raises

HARBOUR = "Silent Harbour is a novel by Marta Lindqvist from 1987. It has 412 pages of prose."
LINDQVIST = "Marta Lindqvist was a Swedish novelist. She was born in Ljungby on 4 May 1941, and moved to Malmö at 19."
NOTES = (
    "In 2001 the Bank of England paid $1,250.50 to the firm. The firm has an office in Malmö, and one more in Malmö."
)
DOCUMENTS = [Document("h", "Silent Harbour (novel)", HARBOUR), Document("l", "Marta Lindqvist", LINDQVIST)]
DOCUMENTS.append(Document("n", "notes", NOTES))


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("Marta Lindqvist was born in Ljungby.", ["Ljungby"]),
        ("The Bank of England paid it on 3 March 2021.", ["3 March 2021", "Bank of England"]),
        ("It cost $1,250.50, or 12.5% of 2020-01-31.", ["2020-01-31", "$1,250.50", "12.5%"]),
        ("Version B2B of v1.2 is of no use in May.", []),
        ("Her book Jean-Luc and the Sea was sold by Per van Ek.", ["Jean-Luc", "Sea", "Per van Ek"]),
        ("日本語の文は2021年に書かれた。", []),
    ],
)
def test_dates_numbers_and_names_are_asked_for(sentence, expected):
    assert [sentence[start:end] for start, end in spans(sentence)] == expected


def test_what_begins_a_sentence_is_no_name():
    assert list(names("Weaving is old.")) == [] and list(names("In Oslo it rains.")) == [(3, 7)]


def test_items_of_a_list_are_sentences_without_their_bullets():
    text = "# Duties\nThe tenant\nkeeps it.  Dr. Moe pays.\n- one thing\n- two things\n\nThe end"
    assert sentences(text) == ["Duties The tenant keeps it.", "Dr. Moe pays.", "one thing", "two things", "The end"]


def test_questions_of_one_document_and_of_two_that_a_title_links():
    texts = {question.text: question.answer for question in ClozeMaker(DOCUMENTS).questions(0)}
    lead = 'What is (2)? "Silent Harbour is a novel by (1) from 1987." '
    linked = {text: answer for text, answer in texts.items() if text.startswith("What is (2)")}
    born = {
        f'{lead}(1): "She was born in (2) on 4 May 1941, and moved to Malmö at 19."': "Ljungby",
        f'{lead}(1): "She was born in Ljungby on (2), and moved to Malmö at 19."': "4 May 1941",
        f'{lead}(1): "She was born in Ljungby on 4 May 1941, and moved to (2) at 19."': "Malmö",
        f'{lead}(1): "She was born in Ljungby on 4 May 1941, and moved to Malmö at (2)."': "19",
        f'{lead}"(1) was a (2) novelist."': "Swedish",
    }
    assert len(linked) == 1 and linked.items() <= born.items()
    assert texts['What is (1)? Silent Harbour: "It has (1) pages of prose."'] == "412"


def test_titles_are_linked_in_the_order_of_the_sentence():
    """It was that of a set of texts, which another process has in another order: a seed gave other questions there."""
    towns = ["Ljungby", "Malmö", "Växjö", "Kalmar", "Ystad", "Lund"]
    documents = [Document(town, town, f"{town} is a small town.") for town in towns]
    road = Document("r", "Road", f"The old road leads from {', '.join(towns[:-1])} to {towns[-1]}.")
    linked = [title for gap, title in ClozeMaker([*documents, road]).links if gap.statement.passage.id == "r"]
    assert linked == [folded(town) for town in towns]


def test_each_gap_has_one_answer():
    """What a document has twice is not asked for, and a gap that two texts fill is not either."""
    workers = "The firm of the old harbour has an office in Malmö. Its workers live in {} on the coast."
    once, twice = (Document("w", "notes", workers.format(town)) for town in ("Lund", "Malmö"))
    assert len(ClozeMaker([once]).questions(0)) == 2 and ClozeMaker([twice]).questions(0) == []
    rain = Document("r", "Rain", "The weather on that day was (see 5) wet. It cost the town 90 pounds.")
    snow = Document("s", "Rain", "It cost the town 70 pounds. The other sentence (1) has a mark, see page 9.")
    assert not any("cost the town" in question.text for question in ClozeMaker([rain, snow]).questions(0))
    overlapping = [rain, Document("r2", "Rain", rain.text)]  # passages overlap
    assert any("cost the town (1) pounds" in question.text for question in ClozeMaker(overlapping).questions(0))


def test_a_link_has_no_gap_that_a_name_without_a_document_fills_too():
    """Whoever read the other sentence found another person, and another answer."""
    berg = Document("1", "Anna Berg", "She was born in Ljungby on a farm.")
    book = Document("2", "Silent Harbour", "It was written by Anna Berg.")
    assert [title for _, title in ClozeMaker([berg, book]).links] == ["anna berg"]
    namesake = Document("3", "Silent Harbour", "It was written by Carl Roe.")
    assert ClozeMaker([berg, book, namesake]).links == []


def test_a_title_stands_before_a_sentence_that_has_it_only_within_a_word():
    """Without it both asked the same, and the answer was that of one of them."""
    text = "Adapters were first sold by the company in {} to all."
    documents = [Document("1", "Ada", text.format(1981)), Document("2", "Apt", text.format(1992))]
    quoted = '"Adapters were first sold by the company in (1) to all."'
    expected = {f"What is (1)? Ada: {quoted}": "1981", f"What is (1)? Apt: {quoted}": "1992"}
    assert {question.text: question.answer for question in ClozeMaker(documents).questions(0)} == expected
    documents = [Document("1", "", "It was first sold in 1981")]
    assert [q.text for q in ClozeMaker(documents).questions(0)] == ['What is (1)? "It was first sold in (1)"']


def test_what_another_document_says_in_a_gap_counts_also_if_it_says_it_twice():
    text = "The company in the valley has {} employees on its list."
    first = Document("1", "Report (2019)", text.format(512))
    second = Document("2", "Report (2020)", f"{text.format(600)} There were 600 of them in the winter.")
    assert ClozeMaker([first, second]).questions(0) == []


def test_no_question_of_the_world_tells_its_answer_and_the_same_seed_makes_the_same():
    passages = read_corpus(shipped("data", "world", "corpus.jsonl"))[-200:]
    questions = make_questions(passages, 3, 60)
    assert questions == make_questions(passages, 3, 60)
    assert questions != make_questions(passages, 4, 60)
    assert len(questions) == 60 and sum(len(question.statements) == 2 for question in questions) == 30
    for question in questions:
        assert not stands_in(question.answer, question.text)
        first, last = question.statements[0], question.statements[-1]
        assert stands_in(question.answer, last.text)
        if first != last:
            assert stands_in(last.name, first.text) and not stands_in(last.name, question.text)
    training, testing = split(questions, 0.2, 0)
    answered = [{question.statements[-1].passage.title for question in part} for part in (training, testing)]
    assert not answered[0] & answered[1] and 0 < len(testing) < len(training)
    assert split(questions, 0.0, 0) == (questions, []) and split(questions, 1.0, 0) == ([], questions)
    assert all(split(questions[:2], share, 0)[0] for share in (0.01, 0.99))
    assert split(questions[:1], 0.99, 0) == (questions[:1], [])


def test_passages_without_names_and_numbers_are_refused():
    with raises(R3LiteError, "no-cloze-questions", 1):
        make_questions([Document("1", "Notes", "nothing of this is a name or a number")], 0, None)


def gather(output: Path, *arguments: str) -> int:
    corpus = output.with_name("corpus.txt")
    write(corpus, [passage.to_json() for passage in read_corpus(shipped("data", "world", "corpus.jsonl"))[-200:]])
    fixed = ["--source", "documents", "--encoder", "hashing", "--top-k", "3", "--limit", "40"]
    return collect.main([*fixed, "--corpus", str(corpus), "--output", str(output), *arguments])


def test_one_command_makes_questions_and_their_demonstrations(tmp_path, capsys):
    output = tmp_path / "steps.jsonl"
    assert gather(output) == 0
    questions = {question.id: question for question in read_questions(tmp_path / "steps.questions.jsonl")}
    tests = read_questions(tmp_path / "steps.test.jsonl")
    assert len(questions) + len(tests) == 40 and not questions.keys() & {question.id for question in tests}
    rows = read_rows(output)
    assert {row.id for row in rows} <= questions.keys() and len(rows) > 20
    hops = {len(questions[row.id].hops) for row in rows}
    assert hops == {1, 2} and any(len(row.steps) == 3 for row in rows)
    for row in rows:
        question = questions[row.id]
        assert row.steps[0].queries == (question.text,) and row.steps[-1].answer == question.answers[0]
        retrieved = [document for step in row.steps for document in step.documents]
        assert question.gold_indices(retrieved) == set(range(len(question.gold)))
    assert "of two documents" in capsys.readouterr().out


def test_the_questions_of_a_run_that_was_killed_are_written_again_and_others_are_not(tmp_path, capsys):
    output, questions = tmp_path / "steps.jsonl", tmp_path / "steps.questions.jsonl"
    assert gather(output) == 0
    first = output.read_bytes()
    assert gather(output) == 1 and "exists and is not empty" in capsys.readouterr().err
    output.unlink()
    assert gather(output) == 0 and output.read_bytes() == first
    output.unlink()
    questions.write_text(json.dumps(lines(questions)[0]) + "\n", encoding="utf-8")
    assert gather(output) == 1
    assert f"{questions} exists and is not empty" in capsys.readouterr().err and not output.exists()


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--source", "documents"], "--index is missing"),
        (["--source", "documents", "--data", "x", "--corpus", "y"], "it needs a --source other than documents"),
        (["--data", "x", "--test-share", "0.5"], "it needs --source documents"),
    ],
)
def test_settings_that_do_not_fit_are_refused(arguments, cause, capsys):
    assert collect.main(arguments) == 2
    assert cause in capsys.readouterr().err
