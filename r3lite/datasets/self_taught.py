"""Trajectories of a model's own: right episodes, in well-formed steps, whose answer rests on what they retrieved.

Rejection sampling, as in STaR (arXiv 2203.14465) and RFT (arXiv 2308.01825). Is handed a function that samples, and
knows no model.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from r3lite.core.answer_match import VERDICTS, is_right, normalize, stands_in, words
from r3lite.core.episode import CUT_OFF, Episode, Question
from r3lite.core.errors import R3LiteError
from r3lite.core.files import append_jsonl, write_jsonl
from r3lite.core.records import Record, Source
from r3lite.datasets.collected import Earlier, Tally, rejections_of
from r3lite.datasets.trajectories import Trajectory, check_steps, row_from_json
from r3lite.protocols.base import ANSWER_WAS_FORCED, NO_ROOM, Protocol
from r3lite.settings import CollectConfig, CollectSettings

BLOCK = 32  # questions that are sampled together, and written together
# From questions, which may repeat, and the seed of each one's random stream to their episodes.
Sample = Callable[[list[Question], list[str]], list[Episode]]
Chosen = tuple[list[Episode], Counter[str]]  # the episodes that are kept, and how many others are not, by the reason


@dataclass
class Harvest:
    """What a file has of a model's own trajectories, and of each question that is done what was rejected and why.

    A question is done once it stands in `<output>.rejected.jsonl`. Its trajectories are written before: those of a
    question that does not stand there are left of a run that was killed.
    """

    output: Path
    questions: dict[str, Question]  # by id
    kept: list[Trajectory]
    rejected: dict[str, Counter[str]]  # by the question's id: reason -> episodes
    failed: list[str] = field(default_factory=list)  # why the retriever failed, of each question that it failed at

    @staticmethod
    def after(earlier: Earlier, questions: list[Question], protocol: Protocol, output: Path) -> "Harvest":
        """What earlier runs have kept; what one was killed at is removed from the file."""
        rejected = {str(record["id"]): Counter(record["reasons"]) for record in earlier.rejected}
        whole = [record for record in earlier.kept if str(record["id"]) in rejected]
        if len(whole) < len(earlier.kept):
            write_jsonl(output, whole)
        source = Source(str(output), "Pass another --output.")
        kept = [row_from_json(Record(record, source), protocol) for record in whole]
        return Harvest(output, {q.id: q for q in questions}, kept, rejected)

    @property
    def waiting(self) -> list[Question]:
        return [q for id, q in self.questions.items() if id not in self.rejected]

    def gather(self, sample: Sample, config: CollectConfig, protocol: Protocol) -> None:
        """Samples of the questions that wait, a block at a time, and adds what is kept of it to the file.

        Those at which the retriever fails go on waiting.
        """
        waiting, total, n, seed = self.waiting, len(self.questions), config.collect.num_generations, config.common.seed
        retrieves = protocol.searches and config.retrieval.retriever != "none"
        with tqdm(total=total, initial=total - len(waiting), desc="self", disable=None) as bar:
            for start in range(0, len(waiting), BLOCK):
                block = waiting[start : start + BLOCK]
                drawn = [(q, f"{seed}/self/{q.id}/{k}") for q in block for k in range(n)]
                episodes = sample([q for q, _ in drawn], [stream for _, stream in drawn])
                groups = {q.id: episodes[i * n : (i + 1) * n] for i, q in enumerate(block)}
                failures = {id: e.failure for id, group in groups.items() for e in group if e.failure}
                if len(failures) == len(block):
                    raise R3LiteError(f"the retriever failed: {failures[block[0].id]}", "Fix that, and run it again.")
                self.failed += failures.values()
                whole = [id for id in groups if id not in failures]
                self._add({id: chosen(groups[id], protocol, config.collect, retrieves) for id in whole})
                bar.update(len(block))
                some = len({row.id for row in self.kept})
                bar.set_postfix({"kept": len(self.kept), "yield": f"{some} of {len(self.rejected)} questions"})

    def _add(self, found: dict[str, Chosen]) -> None:
        new = [Trajectory.of(e.question, e.steps, "self") for kept, _ in found.values() for e in kept]
        reasons = {id: reasons for id, (_, reasons) in found.items()}
        append_jsonl(self.output, [trajectory.to_json() for trajectory in new])
        append_jsonl(rejections_of(self.output), [{"id": id, "reasons": why} for id, why in reasons.items()])
        self.kept += new
        self.rejected |= reasons

    def tally(self, per_question: int) -> Tally:
        """Counts of the questions of now, whichever run sampled their episodes; the yield is by hops."""
        done = [q for id, q in self.questions.items() if id in self.rejected]
        of_id = Counter(row.id for row in self.kept)
        tally = Tally(len(self.questions), extra={"episodes sampled": per_question * len(done)})
        for row in (row for row in self.kept if row.id in self.questions):
            tally.keep_retrieved(self.questions[row.id], row.steps)
        for question in done:
            tally.rejected.update(self.rejected[question.id])
        tally.rejected.update(["the retriever failed (will be retried)"] * len(self.failed))
        for hops in sorted({q.hop_count for q in done}):
            kept = [of_id[q.id] for q in done if q.hop_count == hops]
            some = sum(map(bool, kept))
            message = f"{some} of {len(kept)} questions ({some / len(kept):.2f}), {sum(kept)} trajectories"
            tally.extra[f"yield at {hops} hop{'s' * (hops > 1)}"] = message
        return tally


def chosen(episodes: Iterable[Episode], protocol: Protocol, settings: CollectSettings, retrieves: bool) -> Chosen:
    """At most --keep of one question's episodes, those in which the model wrote least first; why the others are not.

    Two that ask the same queries in the same order are alike, and the shorter one stays.
    """
    kept: dict[tuple, Episode] = {}
    reasons: Counter[str] = Counter()
    for episode in sorted(episodes, key=lambda e: e.tokens_written):
        way = tuple(map(words, episode.queries or [step.analysis for step in episode.steps]))
        if reason := fault(episode, protocol, settings.min_f1, retrieves):
            reasons[reason] += 1
        elif way in kept:
            reasons["same queries as a shorter one"] += 1
        elif len(kept) == settings.keep:
            reasons[f"more than --keep {settings.keep}"] += 1
        else:
            kept[way] = episode
    return list(kept.values()), reasons


def fault(episode: Episode, protocol: Protocol, min_f1: float, retrieves: bool) -> str | None:
    """Why an episode is not to be learned from, or None; `retrieves`: there is a retriever, whose documents count."""
    faults = [name for step in episode.steps for name in step.faults]
    if ANSWER_WAS_FORCED in faults or NO_ROOM in faults:
        return "forced answer"
    if CUT_OFF in (episode.finish, *faults):
        return "cut off"
    if faults:
        return f"malformed step ({faults[0]})"
    if problem := check_steps(episode.steps, protocol):
        return problem
    if not is_right(episode.question, episode.prediction, min_f1):
        return "wrong answer"
    return ungrounded(episode) if retrieves else None


def ungrounded(episode: Episode) -> str | None:
    """Why an answer does not rest on the documents that were retrieved, or None.

    It must stand in one of them, unless it is yes or no. Those, and answers that the question names, such as one of two
    films, are often right by chance: for them every gold paragraph must have been retrieved, if any is known.
    """
    answer, documents = episode.prediction, episode.documents
    if not documents:
        return "nothing retrieved"
    verdict = normalize(answer) in VERDICTS
    if not (verdict or any(stands_in(answer, f"{d.title} {d.text}") for d in documents)):
        return "answer not in the documents"
    if (verdict or stands_in(answer, episode.question.text)) and episode.recall not in (None, 1):
        return "guessed: a gold paragraph was not retrieved"
    return None
