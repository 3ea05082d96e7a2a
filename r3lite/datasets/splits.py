"""Questions to train on, to choose by and to test on, so that none is in two of the parts: drawn from a data set, or
kept out of what is trained on."""

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


def held_out(data: str, given: str | None) -> str | None:
    """What development and test questions are drawn from; None: from the same questions as those to train on."""
    name = data.partition(",")[0].strip()
    if given is None and name in NAMED and not Path(data).is_file():
        given = f"{name},validation"
    return None if given == data else given


def draw(data: QuestionSettings, sizes: PrepareSettings, seed: int, other: str | None) -> dict[str, list[dict]]:
    """The rows of each part, in the order of their source; what is held out leaves what is to train on.

    All questions are held in memory at once, as their files are.
    """
    stream = random.Random(seed)
    own = rows_of(data.data, data)
    pool = own if other is None else rows_of(other, data)
    chosen = sampled(stream, list(pool), sizes.dev_size + sizes.test_size, "--dev-size and --test-size together are")
    set_apart, of_dev = set(chosen), set(stream.sample(range(len(chosen)), sizes.dev_size))
    dev = [pool[question] for i, question in enumerate(chosen) if i in of_dev]
    test = [pool[question] for i, question in enumerate(chosen) if i not in of_dev]
    left = [question for question in own if question not in set_apart]
    if other is not None and len(left) < len(own):
        print(f"{len(own) - len(left)} questions of --data are held out of train.jsonl", file=sys.stderr)
    train, rl = drawn_to_train(stream, left, sizes)
    parts = {"train": [own[question] for question in train], "dev": dev, "test": test}
    return parts | ({"rl": [own[question] for question in rl]} if rl else {})


def drawn_to_train(stream: random.Random, left: list[str], sizes: PrepareSettings) -> tuple[list[str], list[str]]:
    """The questions of train.jsonl, and those of rl.jsonl, none of which is in train.jsonl.

    train.jsonl is drawn first: --rl-size adds a file and changes no other, unless train.jsonl has all other questions.
    """
    rl_size = sizes.rl_size or 0
    train = left
    if sizes.train_size is not None:
        train = sampled(stream, left, sizes.train_size, "--train-size is")
    elif rl_size:
        train = sampled(stream, left, max(0, len(left) - rl_size), "")
    if not train:
        raise R3LiteError("no question is left for train.jsonl", "Lower --dev-size, --test-size or --rl-size.")
    others = set(left).difference(train)
    rest = [question for question in left if question in others]
    return train, sampled(stream, rest, rl_size, "--rl-size is")


def rows_of(name: str, data: QuestionSettings) -> dict[str, dict]:
    """The rows of all usable questions of a data set, by the key of the question: no two ask alike."""

    def made(question: Question, row: Record) -> tuple[str, dict]:
        # Else it would be called by its place in the new file.
        return question_key(question.text), row.values | ({} if "id" in row or "_id" in row else {"id": question.id})

    first: dict[str, dict] = {}
    for question, values in read_with_rows(name, made, data.limit, data.skip_bad_rows):
        first.setdefault(question, values)
    return first


def sampled(stream: random.Random, questions: list[str], count: int, asked: str) -> list[str]:
    """A sample of `count` questions, in their order; `asked` begins the error if there are fewer."""
    if count > len(questions):
        raise R3LiteError(f"{asked} {count:,}, but there are only {len(questions):,} questions", "Pass a smaller size.")
    return [questions[i] for i in sorted(stream.sample(range(len(questions)), count))]


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
        return question.id if "id" in row or "_id" in row else None, question_key(question.text)

    known = [pair for file in files for pair in read_with_rows(file, names, None, skip_bad_rows)]
    known_ids, texts = {id for id, _ in known}, {text for _, text in known}
    others = [q for q in questions if q.id not in known_ids]
    left = [q for q in others if question_key(q.text) not in texts]
    by_id, by_text = len(questions) - len(others), len(others) - len(left)
    message = f"--exclude: left out {by_id + by_text} of {len(questions)} questions ({by_id} by id, {by_text} by text)"
    print(message, file=sys.stderr)
    if not left:
        raise R3LiteError("--exclude leaves no question", "Pass other questions or fewer files to --exclude.")
    return left
