"""Reading corpora, gathering them from questions, and their fingerprint."""

import json

import pytest

from r3lite.core.episode import Document, Question
from r3lite.core.errors import R3LiteError
from r3lite.retrieval.corpus import fingerprint, from_questions, read_corpus
from tests.errors import raises


def write(path, *lines):
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines), encoding="utf-8")
    return path


def test_reads_the_common_spellings(tmp_path):
    path = write(
        tmp_path / "c.jsonl",
        {"id": "a", "title": "Blue Harbor", "text": "A film."},
        {"_id": 7, "title": "", "text": "No title."},
        "",
        {"id": "c", "contents": '"Café"\nA place\nto sit.'},
    )
    assert read_corpus(path) == [
        Document("a", "Blue Harbor", "A film."),
        Document("7", "", "No title."),
        Document("c", "Café", "A place\nto sit."),
    ]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ('{"id": 1, ', "not JSON"),
        ("[1]", "not a JSON object"),
        ({"title": "T", "text": "x"}, "id is missing"),
        ({"id": True, "text": "x"}, "id is True"),
        ({"id": "b", "title": ["T"], "text": "x"}, "title is ['T'], not text"),
        ({"id": "b", "title": "T"}, "text is missing"),
        ({"id": "b", "text": "  "}, "text is blank"),
        ({"id": "a", "text": "x"}, "duplicate id"),
        ('{"id": "b", "text": "\\ud83d"}', "half of a surrogate pair"),
    ],
)
def test_a_bad_line_is_named_or_counted(tmp_path, capsys, bad, reason):
    """One bad line of a corpus stopped everything, --skip-bad-rows or not."""
    path = write(tmp_path / "c.jsonl", {"id": "a", "text": "fine"}, "", bad)
    with pytest.raises(R3LiteError) as error:
        read_corpus(path)
    assert f"{path}, line 3: " in error.value.cause
    assert reason in error.value.cause
    assert "--skip-bad-rows" in error.value.remedy
    assert read_corpus(path, skip_bad_rows=True) == [Document("a", "", "fine")]
    assert f"skipped 1 bad lines; the first: {path}, line 3: " in capsys.readouterr().err


def test_an_empty_or_absent_corpus_is_refused(tmp_path):
    with raises(R3LiteError, "corpus-empty"):
        read_corpus(write(tmp_path / "c.jsonl", ""))
    with raises(R3LiteError, "corpus-empty"):
        read_corpus(write(tmp_path / "c.jsonl", "[1]"), skip_bad_rows=True)
    with raises(R3LiteError, "file-unreadable"):
        read_corpus(tmp_path / "none.jsonl")


def test_questions_paragraphs_are_there_once():
    original = Document("q1/0", "T", "x")
    duplicate = Document("q2/3", "T", "x")
    distinct = Document("q2/4", "T", "y")
    questions = [
        Question("q1", "?", ("a",), documents=(original,)),
        Question("q2", "?", ("a",), documents=(duplicate, distinct)),
    ]
    assert from_questions(questions) == [original, distinct]


def test_fingerprint_sees_every_field_and_the_order():
    a, b = Document("1", "T", "x"), Document("2", "T", "y")
    variants = [[a, b], [b, a], [a], [Document("1", "Tx", ""), b], [Document("3", "T", "x"), b]]
    assert len({fingerprint(v) for v in variants}) == len(variants)
    assert fingerprint([a, b]) == fingerprint([Document("1", "T", "x"), b])


@pytest.mark.parametrize(
    ("questions", "corpus", "gold_by"),
    [
        ("hotpotqa/train_100.json", "hotpotqa/corpus_994.jsonl", "title"),
        ("musique/train_100.jsonl", "musique/corpus_1890.jsonl", "text"),
    ],
)
def test_real_corpora_are_the_paragraphs_of_their_questions(shared, questions, corpus, gold_by):
    from r3lite.datasets.qa import read_questions

    qa_items = read_questions(shared / "data" / questions)
    gathered = from_questions(qa_items)
    read = read_corpus(shared / "data" / corpus)
    assert {d.title for d in gathered} == {d.title for d in read}
    assert all(q.gold_by == gold_by and len(q.gold_indices(read)) == len(q.gold) > 0 for q in qa_items[:20])
