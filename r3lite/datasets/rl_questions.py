"""The questions of RL. With --contexts and --balance-yes-no they are some of those in the data."""

import random
from collections.abc import Sequence

from r3lite.core.answer_match import exact_match, question_key
from r3lite.core.episode import ANSWERED, Episode, Question
from r3lite.core.errors import R3LiteError
from r3lite.datasets.sources import protocols_of, read_questions_of
from r3lite.datasets.trajectories import Trajectory, read_rows
from r3lite.settings import PpoConfig

YES_NO = ("yes", "no")
Demonstrations = dict[str, list[Trajectory]]  # by the id of their question


def read_rl_questions(config: PpoConfig) -> tuple[list[Question], Demonstrations]:
    """Returns the questions of a run, source after source, and the demonstrations in the files of --contexts, if any.

    With --contexts, these are the questions that have a demonstration. With --balance-yes-no, some of the questions
    answered by yes or no are left out of each source. Raises R3LiteError if nothing is left of a source.
    """
    questions = read_questions_of(config.data, config.mixture)
    demonstrations: Demonstrations = {}
    if config.rl.contexts:
        demonstrations = read_demonstrations(config, questions)
        demonstrated = [question for question in questions if question.id in demonstrations]
        _check_sources(
            questions,
            demonstrated,
            no_question="has a demonstration with every gold paragraph in --contexts",
            remedy="Pass demonstrations of these questions, or remove --contexts.",
        )
        questions = demonstrated
    if config.data.balance_yes_no:
        balanced_questions = balanced(questions)
        _check_sources(
            questions,
            balanced_questions,
            no_question="is left by --balance-yes-no: all are answered by one of the two",
            remedy="Remove --balance-yes-no.",
        )
        questions = balanced_questions
    return questions, demonstrations


def read_demonstrations(config: PpoConfig, questions: Sequence[Question]) -> Demonstrations:
    """Returns the demonstrations in the files of --contexts by the id of their question.

    A demonstration belongs to every question with the same text whose gold paragraphs are all among its documents, and
    whose answers have its answer: a question may be asked of several versions of its paragraphs. Raises R3LiteError if
    a file has conversations.
    """
    protocol = protocols_of(config.protocol, config.mixture)[""]  # of --format: with --contexts no source has another
    by_key: dict[str, list[Question]] = {}
    for question in questions:
        by_key.setdefault(question_key(question.text), []).append(question)
    demonstrations: Demonstrations = {}
    for file in config.rl.contexts:
        for row in read_rows(file, protocol, skip_bad_rows=config.data.skip_bad_rows):
            if not isinstance(row, Trajectory):
                raise R3LiteError(
                    f"--contexts {file} has conversations",
                    "Pass demonstrations, which have steps, as `python -m r3lite.collect` writes them.",
                    code="contexts-conversations",
                )
            for question in by_key.get(question_key(row.question), ()):
                episode = Episode(question, list(row.steps), ANSWERED)
                if episode.recall == 1.0 and exact_match(episode.prediction, question.answers):
                    demonstrations.setdefault(question.id, []).append(row)
    return demonstrations


def balanced(questions: Sequence[Question]) -> list[Question]:
    """Returns the questions in their order, without some of those answered by yes or no: as many questions of each
    source are answered by yes as by no.

    The choice depends on `questions` alone, not on --seed.
    """
    by_answer: dict[tuple[str, str], list[str]] = {}  # ids of the questions of a source and an answer
    for question in questions:
        key = (question.source, question.answers[0].strip().lower())
        by_answer.setdefault(key, []).append(question.id)
    left_out: set[str] = set()  # ids
    for source in dict.fromkeys(question.source for question in questions):
        ids_of_both = [by_answer.get((source, answer), []) for answer in YES_NO]
        count = min(map(len, ids_of_both))
        rng = random.Random("yes and no")
        for ids in ids_of_both:
            left_out |= set(ids) - set(rng.sample(ids, count))
    return [question for question in questions if question.id not in left_out]


def _check_sources(questions: Sequence[Question], chosen: Sequence[Question], no_question: str, remedy: str) -> None:
    """Raises R3LiteError if no question of a source was chosen. `no_question` follows "no question of the source"."""
    source = source_without(questions, chosen)
    if source is not None:
        raise R3LiteError(f"no question{in_words(source)} {no_question}", remedy, code="source-without-questions")


def source_without(questions: Sequence[Question], chosen: Sequence[Question]) -> str | None:
    """Returns the first source of `questions` of which no question was chosen; None if there is none."""
    sources = {question.source for question in chosen}
    for question in questions:
        if question.source not in sources:
            return question.source
    return None


def in_words(source: str) -> str:
    """Returns the words for a source in an error; without [[sources]] there are none."""
    return f" of the source {source}" if source else ""
