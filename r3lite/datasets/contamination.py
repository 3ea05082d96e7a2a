"""Keeps the questions that a model is evaluated on out of what it is trained on."""

import sys
from collections.abc import Iterable

from r3lite.core.answer_match import normalize
from r3lite.core.episode import Question
from r3lite.core.errors import R3LiteError
from r3lite.core.records import Record
from r3lite.datasets.qa import read_questions, read_with_rows
from r3lite.settings import NewQuestionSettings


def new_questions(data: NewQuestionSettings) -> list[Question]:
    """The questions of --data that stand in no file of --exclude."""
    return without(read_questions(data.data, data.limit, data.skip_bad_rows), data.exclude, data.skip_bad_rows)


def without(questions: list[Question], files: Iterable[str] | None, skip_bad_rows: bool = False) -> list[Question]:
    """The questions that stand in none of `files`, neither by id nor by normalized text; prints how many do.

    Of a file's ids only those count that its rows name: others are places in the file.
    """
    if not files:
        return questions

    def names(question: Question, row: Record) -> tuple[str | None, str]:
        return question.id if "id" in row or "_id" in row else None, normalize(question.text)

    known = [pair for file in files for pair in read_with_rows(file, names, None, skip_bad_rows)]
    known_ids, texts = {id for id, _ in known}, {text for _, text in known}
    others = [q for q in questions if q.id not in known_ids]
    left = [q for q in others if normalize(q.text) not in texts]
    by_id, by_text = len(questions) - len(others), len(others) - len(left)
    message = f"--exclude: {by_id + by_text} of {len(questions)} questions left out ({by_id} by id, {by_text} by text)"
    print(message, file=sys.stderr)
    if not left:
        raise R3LiteError("every question of the data is in the files of --exclude", "Name other questions.")
    return left
