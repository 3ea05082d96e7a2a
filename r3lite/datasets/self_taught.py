"""Trajectories that the model itself has sampled: right episodes, in well-formed steps, whose answer rests on what they
retrieved.

This is rejection sampling, as in STaR (arXiv 2203.14465) and RFT (arXiv 2308.01825). The module is handed a function
that samples, and knows no model.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from r3lite.core.answer_match import VERDICTS, is_right, normalize, stands_in, words
from r3lite.core.bars import TimedLines
from r3lite.core.episode import CUT_OFF, Episode, Question
from r3lite.core.errors import R3LiteError
from r3lite.core.files import append_jsonl, write_jsonl
from r3lite.core.records import Record, Source
from r3lite.datasets.collected import Earlier, Tally, rejections_of
from r3lite.datasets.trajectories import Trajectory, check_steps, row_from_json
from r3lite.protocols.base import ANSWER_WAS_FORCED, COPIED_EXAMPLE, NO_ROOM, Protocol
from r3lite.settings import CollectConfig, CollectSettings

BLOCK = 32  # questions that are sampled together, and written together
# Takes questions, which may repeat, and a seed for the random stream of each; returns their episodes in this order.
Sample = Callable[[list[Question], list[str]], list[Episode]]
Selection = tuple[list[Episode], Counter[str]]  # the kept episodes, and by reason how many are rejected


@dataclass
class Harvest:
    """The model's own trajectories in a file, and for each question that is done, how many episodes are rejected.

    A question is done once it has a record in `<output>.rejected.jsonl`, which is written after its trajectories:
    trajectories of a question without such a record were left by a run that was killed.
    """

    output: Path
    questions: dict[str, Question]  # by id
    accepted: list[Trajectory]
    rejected: dict[str, Counter[str]]  # by the question's id: reason -> episodes
    failed: list[str] = field(default_factory=list)  # why the retriever failed, once for each question with a failure

    @staticmethod
    def after(earlier: Earlier, questions: list[Question], protocol: Protocol, output: Path) -> "Harvest":
        """Returns the harvest of earlier runs; removes from the file trajectories of questions that are not done."""
        rejected = {str(record["id"]): Counter(record["reasons"]) for record in earlier.rejected}
        done = [record for record in earlier.accepted if str(record["id"]) in rejected]
        if len(done) < len(earlier.accepted):
            write_jsonl(output, done)
        source = Source(str(output), "Pass another --output.")
        return Harvest(
            output,
            questions={question.id: question for question in questions},
            accepted=[row_from_json(Record(record, source), protocol) for record in done],
            rejected=rejected,
        )

    @property
    def waiting(self) -> list[Question]:
        """The questions that are not done."""
        return [question for id, question in self.questions.items() if id not in self.rejected]

    def gather(self, sample: Sample, config: CollectConfig, protocol: Protocol) -> None:
        """Samples episodes of the waiting questions, a block at a time, and adds the selected episodes to the file.

        Questions at which the retriever fails go on waiting.
        """
        waiting = self.waiting
        total = len(self.questions)
        retrieves = protocol.can_search and config.retrieval.retriever != "none"
        with tqdm(total=total, initial=total - len(waiting), desc="self", disable=None) as bar:
            lines = TimedLines(bar, "self", "questions")
            for start in range(0, len(waiting), BLOCK):
                block = waiting[start : start + BLOCK]
                groups = _sample_groups(block, sample, config)
                failures = _failures(groups)
                if len(failures) == len(block):
                    raise R3LiteError(
                        f"the retriever failed: {failures[block[0].id]}",
                        "Fix that, and run it again.",
                        code="retriever-failed",
                    )
                self.failed += failures.values()
                selections = {}
                for id, group in groups.items():
                    if id not in failures:
                        selections[id] = select(group, protocol, settings=config.collect, retrieves=retrieves)
                self._add(selections)
                lines.update(len(block))
                questions_with_rows = len({row.id for row in self.accepted})
                success = f"{questions_with_rows} of {len(self.rejected)} questions"
                bar.set_postfix({"kept": len(self.accepted), "yield": success})

    def _add(self, selections: dict[str, Selection]) -> None:
        """Adds the selected episodes to the file, and then the counts of rejected episodes to the file of rejections.

        `selections` are by the questions' ids.
        """
        trajectories = []
        reasons = {}
        records = []
        for id, (episodes, reasons_of_question) in selections.items():
            for episode in episodes:
                trajectories.append(Trajectory.of(episode.question, episode.steps, "self"))
            reasons[id] = reasons_of_question
            records.append({"id": id, "reasons": reasons_of_question})
        append_jsonl(self.output, [trajectory.to_json() for trajectory in trajectories])
        append_jsonl(rejections_of(self.output), records)
        self.accepted += trajectories
        self.rejected |= reasons

    def tally(self, per_question: int) -> Tally:
        """Returns the counts of this run's questions, whichever run sampled their episodes.

        `per_question` is the number of episodes of a question. Further lines of the table are the number of sampled
        episodes and the yield by the number of hops.
        """
        done = [question for id, question in self.questions.items() if id in self.rejected]
        row_counts = Counter(row.id for row in self.accepted)
        tally = Tally(len(self.questions), extra={"episodes sampled": per_question * len(done)})
        for row in self.accepted:
            if row.id in self.questions:
                tally.keep_retrieved(self.questions[row.id], row.steps)
        for question in done:
            tally.rejected.update(self.rejected[question.id])
        tally.rejected.update(["the retriever failed (will be retried)"] * len(self.failed))
        for hops in sorted({question.hop_count for question in done}):
            counts = [row_counts[question.id] for question in done if question.hop_count == hops]
            with_rows = sum(count > 0 for count in counts)
            success = f"{with_rows} of {len(counts)} questions ({with_rows / len(counts):.2f})"
            noun = "hop"
            if hops > 1:
                noun = "hops"
            tally.extra[f"yield at {hops} {noun}"] = f"{success}, {sum(counts)} trajectories"
        return tally


def _sample_groups(block: list[Question], sample: Sample, config: CollectConfig) -> dict[str, list[Episode]]:
    """Returns the episodes of each question of a block, by its id."""
    size = config.collect.num_generations
    questions = []
    seeds = []
    for question in block:
        questions += [question] * size
        seeds += [f"{config.common.seed}/self/{question.id}/{k}" for k in range(size)]
    episodes = sample(questions, seeds)
    groups = {}
    for i, question in enumerate(block):
        groups[question.id] = episodes[i * size : (i + 1) * size]
    return groups


def _failures(groups: dict[str, list[Episode]]) -> dict[str, str]:
    """Returns why the retriever failed, by the ids of the questions at which it failed."""
    failures = {}
    for id, group in groups.items():
        for episode in group:
            if episode.failure:
                failures[id] = episode.failure
    return failures


def select(episodes: Iterable[Episode], protocol: Protocol, settings: CollectSettings, retrieves: bool) -> Selection:
    """Returns at most --keep of one question's episodes, and counts of the others by the reason of their rejection.

    Episodes in which the model wrote fewer tokens are preferred. Of episodes that ask the same queries in the same
    order, only the shortest is kept; episodes without queries are compared by their analyses instead.
    """
    selected: dict[tuple, Episode] = {}  # by the words of each query, or of each analysis
    reasons: Counter[str] = Counter()
    for episode in sorted(episodes, key=lambda episode: episode.tokens_written):
        texts = episode.queries or [step.analysis for step in episode.steps]
        key = tuple(map(words, texts))
        reason = fault(episode, protocol, min_f1=settings.min_f1, retrieves=retrieves)
        if reason:
            reasons[reason] += 1
        elif key in selected:
            reasons["same queries, or analyses, as a shorter one"] += 1
        elif len(selected) == settings.keep:
            reasons[f"more than --keep {settings.keep}"] += 1
        else:
            selected[key] = episode
    return list(selected.values()), reasons


def fault(episode: Episode, protocol: Protocol, min_f1: float, retrieves: bool) -> str | None:
    """Returns why an episode is not to be learned from; None if it may be.

    With `retrieves` there is a retriever, and the answer must rest on its documents.
    """
    faults = [name for step in episode.steps for name in step.faults]
    if ANSWER_WAS_FORCED in faults or NO_ROOM in faults:
        return "forced answer"
    if episode.finish == CUT_OFF or CUT_OFF in faults:
        return "cut off"
    if COPIED_EXAMPLE in faults:
        return "answer copied from the prompt's worked example"
    if faults:
        return f"malformed step ({faults[0]})"
    problem = check_steps(episode.steps, protocol)
    if problem:
        return problem
    if not is_right(episode.question, episode.prediction, min_f1):
        return "wrong answer"
    if not retrieves:
        return None
    return ungrounded(episode)


def ungrounded(episode: Episode) -> str | None:
    """Returns why an answer does not rest on the documents that were retrieved; None if it does.

    The answer must stand in one of the documents, unless it is in VERDICTS, such as yes or no. Verdicts, and answers
    that the question names, such as one of two films, are often right by chance: for such an answer every gold
    paragraph must have been retrieved, if any is known.
    """
    answer = episode.prediction
    if not episode.documents:
        return "nothing retrieved"
    is_verdict = normalize(answer) in VERDICTS
    texts = (f"{document.title} {document.text}" for document in episode.documents)
    if not is_verdict and not any(stands_in(answer, text) for text in texts):
        return "answer not in the documents"
    may_be_guessed = is_verdict or stands_in(answer, episode.question.text)
    if may_be_guessed and episode.recall not in (None, 1):
        return "guessed: a gold paragraph was not retrieved"
    return None
