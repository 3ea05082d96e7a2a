"""Checks the questions of RL, and warns if most are too easy or too hard to teach the adapter to search.

Too easy are the questions whose demonstrations the adapter has learned: it may answer them from memory. Too hard are
those for which `collect` could make no demonstration: for most of them, no search finds what the answer needs.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from r3lite.core.episode import Question
from r3lite.core.errors import R3LiteError
from r3lite.datasets.collected import rejected_ids
from r3lite.settings import PpoConfig
from r3lite.training.earlier_run import demonstrated, question_hash, result_of_run

MOSTLY = 0.5  # if more than this share of the questions is too easy or too hard, a warning is printed
REMEDY = "train on the rl.jsonl of `prepare --rl-size N`, or on one half of the questions and demonstrate the other"


def check(config: PpoConfig, questions: Sequence[Question]) -> None:
    """Raises R3LiteError if the settings need questions of another kind; prints the warnings of `warn_of_questions`."""
    warn_of_questions(config, questions)
    without_gold = sum(not question.gold for question in questions)
    if config.rl.expand_limit and without_gold == len(questions):
        cause = "--expand-limit needs gold paragraphs, but no question of --data or [[sources]] has any"
        raise R3LiteError(
            cause, "Remove it, or train on questions with supporting facts.", code="expand-without-paragraphs"
        )
    if config.rl.learn == "answer" and without_gold:  # their episodes could never give a context
        cause = f"--learn answer needs gold paragraphs, but {without_gold} of {len(questions)} questions have none"
        raise R3LiteError(
            cause,
            "Pass questions with supporting facts or paragraphs, or --learn episode and an algorithm that takes it.",
            code="answers-without-paragraphs",
        )


def warn_of_questions(config: PpoConfig, questions: Sequence[Question]) -> None:
    """Prints a warning if the adapter learned most of the questions, and one if `collect` rejected most of them.

    Prints none with --contexts, which takes demonstrations of the questions on purpose.
    """
    if config.rl.contexts:
        return
    for message in (learned_message(config, questions), rejected_message(config, questions)):
        if message:
            print(f"warning: {message}: {REMEDY}", file=sys.stderr)


def learned_message(config: PpoConfig, questions: Sequence[Question]) -> str:
    """Returns a message if the adapter learned demonstrations of most of the questions, else "".

    The message is also "" if the policy begins from a model that r3lite has not trained.
    """
    trained = result_of_run(config.model.model, config.model.adapter)  # an adapter, or a model of `sft --no-lora`
    if trained is None:
        return ""
    hashes = demonstrated(trained)
    count = sum(question_hash(question.text) in hashes for question in questions)
    if count <= MOSTLY * len(questions):
        return ""
    return f"{trained} has learned demonstrations of {count} of the {len(questions)} questions and may know the answers"


def rejected_message(config: PpoConfig, questions: Sequence[Question]) -> str:
    """Returns a message if `collect` rejected most of the questions, else "".

    If `collect` wrote the files of --exclude, these have the questions that it demonstrated, and a file beside each has
    the ids of those that it rejected.
    """
    ids: set[str] = set()
    for file in config.data.exclude or ():
        ids |= rejected_ids(Path(file))
    count = sum(id_in_file(question) in ids for question in questions)
    if count <= MOSTLY * len(questions):
        return ""
    return f"`collect` could make no demonstration of {count} of the {len(questions)} questions that --exclude leaves"


def id_in_file(question: Question) -> str:
    """Returns the id that a question has in its file: without the source's name, which `read_questions_of` adds."""
    if not question.source:
        return question.id
    return question.id.removeprefix(f"{question.source}/")
