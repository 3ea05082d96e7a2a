"""Questions to train on, to develop with and to test on: no question is in two of these parts. `draw` draws the parts
from a data set; `without` leaves out the questions that stand in other files."""

import random
import sys
from collections.abc import Iterable
from pathlib import Path

from r3lite.core.answer_match import question_key
from r3lite.core.episode import Question
from r3lite.core.errors import R3LiteError
from r3lite.core.records import Record
from r3lite.datasets.hub import NAMED
from r3lite.datasets.qa import read_questions, read_with_rows
from r3lite.settings import NewQuestionSettings, PrepareSettings, QuestionSettings


def held_out(data: str, setting: str | None) -> str | None:
    """Returns the data set from which development and test questions are drawn; None: from `data`, as the others are.

    It is the data set that `setting` names. If `setting` is None and `data` is a short name (`hub.NAMED`), it is the
    validation split.
    """
    name = data.partition(",")[0].strip()
    if setting is None and name in NAMED and not Path(data).is_file():
        setting = f"{name},validation"
    if setting == data:
        return None
    return setting


def draw(
    data: QuestionSettings,
    sizes: PrepareSettings,
    seed: int,
    held_out: str | None,
) -> dict[str, list[dict]]:
    """Returns the rows of each part, in the order of their source.

    Development and test questions are drawn from the data set `held_out`, if there is one; they are never trained on.
    All questions are in memory at once.
    """
    stream = random.Random(seed)
    rows = rows_of(data.data, data)
    pool = rows  # the rows of development and test
    if held_out is not None:
        pool = rows_of(held_out, data, prefix="held-out-")
    size = sizes.dev_size + sizes.test_size
    drawn_keys = sampled(stream, list(pool), size, setting="--dev-size and --test-size together are")
    dev_places = set(stream.sample(range(len(drawn_keys)), sizes.dev_size))
    dev = []
    test = []
    for i, key in enumerate(drawn_keys):
        if i in dev_places:
            dev.append(pool[key])
        else:
            test.append(pool[key])
    excluded_keys = set(drawn_keys)
    remaining_keys = [key for key in rows if key not in excluded_keys]
    if held_out is not None and len(remaining_keys) < len(rows):
        print(f"{len(rows) - len(remaining_keys)} questions of --data are held out of train.jsonl", file=sys.stderr)
    train_keys, rl_keys = drawn_to_train(stream, remaining_keys, sizes)
    parts = {"train": [rows[key] for key in train_keys], "dev": dev, "test": test}
    if rl_keys:
        parts["rl"] = [rows[key] for key in rl_keys]
    return parts


def drawn_to_train(
    stream: random.Random,
    questions: list[str],
    sizes: PrepareSettings,
) -> tuple[list[str], list[str]]:
    """Returns the keys of the questions of train.jsonl and of rl.jsonl; no question is in both.

    train.jsonl is drawn first. So --rl-size does not change it, unless there is no --train-size: then train.jsonl has
    all questions that are in no other file.
    """
    rl_size = sizes.rl_size or 0
    train = questions
    if sizes.train_size is not None:
        train = sampled(stream, questions, sizes.train_size, setting="--train-size is")
    elif rl_size:
        train = sampled(stream, questions, max(0, len(questions) - rl_size), setting="")
    if not train:
        raise R3LiteError(
            "no question is left for train.jsonl",
            "Lower --dev-size, --test-size or --rl-size.",
            code="split-leaves-nothing",
        )
    in_train = set(train)
    remaining = [question for question in questions if question not in in_train]
    return train, sampled(stream, remaining, rl_size, setting="--rl-size is")


def rows_of(name: str, data: QuestionSettings, prefix: str = "") -> dict[str, dict]:
    """Returns the rows of the usable questions of a data set by `question_key`; of several with one key, the first.

    Rows without an id get one. It begins with `prefix`, because files of different data sets may have the same name.
    """

    def keyed(question: Question, row: Record) -> tuple[str, dict]:
        values = row.values
        if not _has_id(row):  # else its place in the new file would be read as its id
            values = values | {"id": f"{prefix}{question.id}"}
        return question_key(question.text), values

    rows: dict[str, dict] = {}
    for key, values in read_with_rows(name, keyed, limit=data.limit, skip_bad_rows=data.skip_bad_rows):
        rows.setdefault(key, values)
    return rows


def _has_id(row: Record) -> bool:
    return "id" in row or "_id" in row


def sampled(stream: random.Random, questions: list[str], count: int, setting: str) -> list[str]:
    """Returns `count` random questions, in the order of `questions`; `setting` begins the error if there are fewer."""
    if count > len(questions):
        cause = f"{setting} {count:,}, but there are only {len(questions):,} questions"
        raise R3LiteError(cause, "Pass a smaller size.", code="too-few-questions")
    places = sorted(stream.sample(range(len(questions)), count))
    return [questions[place] for place in places]


def new_questions(data: NewQuestionSettings) -> list[Question]:
    """Returns the questions of --data that stand in no file of --exclude."""
    questions = read_questions(data.data, data.limit, data.skip_bad_rows)
    return without(questions, data.exclude, data.skip_bad_rows)


def without(
    questions: list[Question],
    files: Iterable[str] | None,
    skip_bad_rows: bool = False,
) -> list[Question]:
    """Returns the questions that are in none of `files`, by id or by normalized text; prints how many are in one.

    A row of `files` that has no id is compared by its text alone: the id that it gets is only its place in the file.
    Raises R3LiteError if no question is left.
    """
    if not files:
        return questions

    def id_and_key(question: Question, row: Record) -> tuple[str | None, str]:
        id = None
        if _has_id(row):
            id = question.id
        return id, question_key(question.text)

    excluded_ids: set[str | None] = set()  # has None if a row has no id; this excludes no question
    excluded_keys: set[str] = set()
    for file in files:
        for id, key in read_with_rows(file, id_and_key, limit=None, skip_bad_rows=skip_bad_rows):
            excluded_ids.add(id)
            excluded_keys.add(key)
    without_ids = [question for question in questions if question.id not in excluded_ids]
    remaining = [question for question in without_ids if question_key(question.text) not in excluded_keys]
    by_id = len(questions) - len(without_ids)
    by_text = len(without_ids) - len(remaining)
    message = f"--exclude: left out {by_id + by_text} of {len(questions)} questions ({by_id} by id, {by_text} by text)"
    print(message, file=sys.stderr)
    if not remaining:
        raise R3LiteError(
            "--exclude leaves no question",
            "Pass other questions or fewer files to --exclude.",
            code="exclude-leaves-nothing",
        )
    return remaining
