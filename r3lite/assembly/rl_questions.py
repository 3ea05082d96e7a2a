"""Warns if the questions of RL are not of natural difficulty for the adapter to start from.

The adapter answers the questions of its demonstrations from memory, and most questions that `collect` rejected are
answered by no search: neither kind teaches the adapter to search.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from r3lite.core.episode import Question
from r3lite.datasets.collected import rejected_ids
from r3lite.settings import PpoConfig
from r3lite.training.earlier_run import demonstrated, question_hash, result_of_run

MOSTLY = 0.5  # share of the questions above which a warning is printed
REMEDY = "train on the rl.jsonl of `prepare --rl-size N`, or on one half of the questions and demonstrate the other"


def warn_of_questions(config: PpoConfig, questions: Sequence[Question]) -> None:
    """Warns of questions that the adapter has mostly learned, or that `collect` has mostly rejected."""
    for message in (learned(config, questions), rejected(config, questions)):
        if message:
            print(f"warning: {message}: {REMEDY}", file=sys.stderr)


def learned(config: PpoConfig, questions: Sequence[Question]) -> str:
    """Returns a message that most questions are those of the adapter's demonstrations, or "".

    The message is also "" if the questions of the adapter are not known.
    """
    adapter = result_of_run(config.model.model, config.model.adapter)
    if adapter is None:
        return ""
    hashes = demonstrated(adapter)
    count = sum(question_hash(question.text) in hashes for question in questions)
    if count <= MOSTLY * len(questions):
        return ""
    return f"{adapter} has learned demonstrations of {count} of the {len(questions)} questions and may know the answers"


def rejected(config: PpoConfig, questions: Sequence[Question]) -> str:
    """Returns a message that --exclude leaves mostly questions that `collect` rejected when it wrote the files of
    --exclude, or ""."""
    ids: set[str] = set()
    for file in config.data.exclude or ():
        ids |= rejected_ids(Path(file))
    count = sum(id_in_file(question) in ids for question in questions)
    if count <= MOSTLY * len(questions):
        return ""
    return f"`collect` could make no demonstration of {count} of the {len(questions)} questions that --exclude leaves"


def id_in_file(question: Question) -> str:
    """Returns the id of a question in its file: without its source's name, if there are several (read_questions_of)."""
    if not question.source:
        return question.id
    return question.id.removeprefix(f"{question.source}/")
