"""Validation during reinforcement learning: greedy answers to questions that are not trained on, scored as `evaluate`
scores them.

Draws no random number that training draws: a run's other numbers are the same with and without it.
"""

import random
import sys
from dataclasses import replace

from r3lite.assembly.rl_round import sample
from r3lite.core.answer_match import question_key
from r3lite.core.episode import CUT_OFF, MALFORMED, Question, Retrieve
from r3lite.datasets.qa import read_questions
from r3lite.devices.ranks import Ranks
from r3lite.evaluation.scores import Marks, scores
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.rollout.engine import Engine
from r3lite.rollout.sampling import Sampler
from r3lite.settings import PpoConfig

# Names of the metrics, which are logged as `eval/<name>`, and of the scores that they are.
METRICS = {name: name for name in ("em", "f1", "format_adherence", "retrieval_recall")} | {"searches": "mean_searches"}


def greedy(engine: Engine) -> Engine:
    """An engine with the same model that answers greedily, as `evaluate` does by default."""
    return replace(engine, sampler=Sampler(temperature=0.0), value_head=None)


class Validation:
    """Answers its questions with the engine of a run, whose model is used as it is at that moment."""

    def __init__(self, questions: list[Question], engine: Engine, retrieve: Retrieve, at_once: int, ranks: Ranks):
        """At most `at_once` episodes are sampled together, as the run's memory plan assumes."""
        self.questions, self.retrieve, self.at_once, self.ranks = questions, retrieve, at_once, ranks
        self.engine = greedy(engine)

    def measure(self) -> tuple[dict, list[float] | None]:
        """The metrics, without those that are unknown, and the F1 of each question.

        Questions at which the retriever failed are left out of the metrics, which count them. There are no F1s then:
        those of the others are not to be compared with another validation's.
        """
        episodes, run = [], self.engine.run
        for start in range(0, len(self.questions), self.at_once):
            some = self.questions[start : start + self.at_once]
            sequences = sample(self.engine, self.ranks, run, some, ["greedy"] * len(some), self.retrieve)
            episodes += [sequence.episode() for sequence in sequences]
        whole = [episode for episode in episodes if not episode.failure]
        failed = {"retrieval_failures": len(episodes) - len(whole)} if len(whole) < len(episodes) else {}
        if not whole:
            return failed, None
        marks = [Marks.of(episode) for episode in whole]
        found = scores(marks)
        metrics = {name: found[score]["value"] for name, score in METRICS.items() if found[score]["value"] is not None}
        unfinished = sum(episode.finish in (CUT_OFF, MALFORMED) for episode in whole)
        metrics |= {"unfinished_ratio": unfinished / len(whole)} | failed
        return metrics, None if failed else [m.f1 for m in marks]


def read_held_out(config: PpoConfig, trained_on: list[Question]) -> list[Question]:
    """The questions of --eval-data that are drawn; none without it. Warns of those that are trained on as well."""
    settings = config.validation
    if settings.eval_data is None:
        return []
    skip, seed = config.data.skip_bad_rows, settings.eval_seed
    return draw_from(settings.eval_data, settings.eval_questions, seed, skip, trained_on, "are also trained on")


def draw_from(
    eval_data: str, count: int, seed: int, skip_bad_rows: bool, others: list[Question], why_not: str
) -> list[Question]:
    """At most `count` questions of --eval-data, drawn by a seed. Warns of those that are among `others`, with a reason
    against that."""
    questions = read_questions(eval_data, None, skip_bad_rows)
    drawn = random.Random(f"{seed}/validation").sample(questions, min(count, len(questions)))
    known = {question_key(question.text) for question in others}
    if shared := sum(question_key(question.text) in known for question in drawn):
        print(f"warning: {shared} of {len(drawn)} questions of --eval-data {why_not}", file=sys.stderr)
    return drawn


def build_validation(
    config: PpoConfig, held_out: list[Question], engine: Engine, retrieve: Retrieve, ranks: Ranks
) -> Validation | None:
    """The validation on questions held out; None if there are none.

    It retrieves from the run's --corpus or --index, or from the paragraphs of its own questions.
    """
    if not held_out:
        return None
    if config.retrieval.from_questions:
        retrieve = build_retriever(Setup(config.retrieval, held_out, config.common.seed))
    return Validation(held_out, engine, retrieve, config.episodes_of_round, ranks)
