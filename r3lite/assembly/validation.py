"""Validation during reinforcement learning: greedy answers to questions that are not trained on, scored as `evaluate`
scores them.

Draws no random number that training draws: a run's other numbers are the same with and without it.
"""

import random
import sys
from dataclasses import replace

from r3lite.assembly.rl_round import sample_on_ranks
from r3lite.core.answer_match import question_key
from r3lite.core.episode import CUT_OFF, MALFORMED, Episode, Question, Retrieve
from r3lite.datasets.qa import read_questions
from r3lite.devices.ranks import Ranks
from r3lite.evaluation.scores import Marks, scores
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.rollout.engine import Engine
from r3lite.rollout.sampling import Sampler
from r3lite.settings import PpoConfig

# The metrics by name, logged as `eval/<name>`, with the names of the scores that they take.
METRICS = {
    "em": "em",
    "f1": "f1",
    "format_adherence": "format_adherence",
    "retrieval_recall": "retrieval_recall",
    "searches": "mean_searches",
}


def greedy(engine: Engine) -> Engine:
    """Returns an engine with the same model that answers greedily, as `evaluate` does by default."""
    return replace(engine, sampler=Sampler(temperature=0.0), value_head=None)


class Validation:
    """Answers its questions with the engine of a run, whose model is used as it is at that moment."""

    def __init__(
        self, questions: list[Question], engine: Engine, retrieve: Retrieve, questions_at_once: int, ranks: Ranks
    ):
        """At most `questions_at_once` episodes are sampled together, as the run's memory plan assumes."""
        self.questions = questions
        self.engine = greedy(engine)
        self.retrieve = retrieve
        self.questions_at_once = questions_at_once
        self.ranks = ranks

    def measure(self) -> tuple[dict, list[float] | None]:
        """Returns the metrics, without those that are unknown, and the F1 of each question.

        Questions at which the retriever failed are left out of the means; `retrieval_failures` counts them. If there
        are any, None is returned in place of the F1s: those of the other questions must not be compared with the F1s of
        another validation.
        """
        episodes = self._sample()
        retrieved = [episode for episode in episodes if not episode.failure]
        failures = {}
        if len(retrieved) < len(episodes):
            failures["retrieval_failures"] = len(episodes) - len(retrieved)
        if not retrieved:
            return failures, None
        marks = [Marks.of(episode) for episode in retrieved]
        means = scores(marks)
        metrics = {}
        for name, score in METRICS.items():
            if means[score]["value"] is not None:
                metrics[name] = means[score]["value"]
        unfinished = sum(episode.finish in (CUT_OFF, MALFORMED) for episode in retrieved)
        metrics["unfinished_ratio"] = unfinished / len(retrieved)
        if failures:
            return metrics | failures, None
        return metrics, [mark.f1 for mark in marks]

    def _sample(self) -> list[Episode]:
        """Returns the episode of each question."""
        episodes = []
        for start in range(0, len(self.questions), self.questions_at_once):
            questions = self.questions[start : start + self.questions_at_once]
            sequences = sample_on_ranks(
                self.engine,
                ranks=self.ranks,
                sample=self.engine.run,
                starts=questions,
                seeds=["greedy"] * len(questions),
                retrieve=self.retrieve,
            )
            episodes += [sequence.episode() for sequence in sequences]
        return episodes


def read_held_out(config: PpoConfig, trained_on: list[Question]) -> list[Question]:
    """Returns the questions of --eval-data that are drawn; none without it. Warns of those that are trained on as
    well."""
    settings = config.validation
    if settings.eval_data is None:
        return []
    return draw_from(
        settings.eval_data,
        count=settings.eval_questions,
        seed=settings.eval_seed,
        skip_bad_rows=config.data.skip_bad_rows,
        training_questions=trained_on,
        warning="are also trained on",
    )


def draw_from(
    eval_data: str,
    count: int,
    seed: int,
    skip_bad_rows: bool,
    training_questions: list[Question],
    warning: str,
) -> list[Question]:
    """Returns at most `count` questions of --eval-data, drawn by a seed. Warns of those that are among
    `training_questions` too, with the words `warning`."""
    questions = read_questions(eval_data, None, skip_bad_rows)
    drawn = random.Random(f"{seed}/validation").sample(questions, min(count, len(questions)))
    training_keys = {question_key(question.text) for question in training_questions}
    shared = sum(question_key(question.text) in training_keys for question in drawn)
    if shared:
        print(f"warning: {shared} of {len(drawn)} questions of --eval-data {warning}", file=sys.stderr)
    return drawn


def build_validation(
    config: PpoConfig, held_out: list[Question], engine: Engine, retrieve: Retrieve, ranks: Ranks
) -> Validation | None:
    """Returns the validation on questions held out; None if there are none.

    It retrieves from the run's --corpus or --index, or from the paragraphs of its own questions.
    """
    if not held_out:
        return None
    if config.retrieval.from_questions:
        retrieve = build_retriever(Setup(config.retrieval, held_out, config.common.seed))
    return Validation(
        held_out,
        engine=engine,
        retrieve=retrieve,
        questions_at_once=config.episodes_of_round,
        ranks=ranks,
    )
