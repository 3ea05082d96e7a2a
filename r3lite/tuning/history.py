"""The prompts that were tried: where each is from, its score, and the gain of each round; one file, always whole.

Decides what is still to be done, so that a run that was killed goes on where it was. Knows no model and no critic.
"""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from r3lite.core.errors import R3LiteError
from r3lite.core.files import read_record, write_json
from r3lite.core.records import Record
from r3lite.settings import TuningSettings

REMEDY = "Pass another --output; this one is not changed."
Score = dict[str, float]  # value, low, high


@dataclass(frozen=True)
class Candidate:
    """Holds a prompt. Number 0 is the first one; each other one answers critique `branch` of its `parent`."""

    id: int
    prompt: str
    round: int = 0
    parent: int | None = None
    branch: int = 0
    critique: str = ""
    rejected: str = ""  # why it is not scored; empty if it is, or will be
    scores: dict[str, Score] = field(default_factory=dict)  # by metric; empty until it is scored

    @staticmethod
    def from_json(record: Record) -> "Candidate":
        by_metric = record.record("scores")
        texts = {key: record.text(key, blank=True) for key in ("prompt", "critique", "rejected")}
        numbers = {key: record.whole(key) for key in ("id", "round", "branch")}
        return Candidate(
            **texts,
            **numbers,
            parent=record.whole("parent", None),
            scores={metric: _score_of(by_metric.record(metric)) for metric in by_metric.values},
        )


def _score_of(record: Record) -> Score:
    return {key: record.number(key) for key in ("value", "low", "high")}


@dataclass(frozen=True)
class RoundResult:
    """Holds the result of a round that is over.

    `best` is the id of the best prompt so far. `gained` is its score minus that of the best prompt before this round,
    over the same questions; `low` and `high` are its 95 % interval.
    """

    number: int
    best: int
    gained: float
    low: float
    high: float
    p: float  # two-sided


class History:
    """Holds all prompts of a run and its rounds, in a file that is written anew at each change.

    `origin` differs for runs that begin with another prompt or adapter, or have other questions.
    """

    def __init__(self, path: Path, origin: str, metric: str, prompt: str):
        self.path = path
        self.origin = origin
        self.metric = metric
        self.candidates = [Candidate(0, prompt)]
        self.rounds: list[RoundResult] = []
        if path.exists():
            self._read()

    def _read(self) -> None:
        record = read_record(self.path, REMEDY)
        if record.text("origin") != self.origin:
            raise R3LiteError(
                f"{self.path} has another first prompt, another adapter or other questions",
                REMEDY,
                code="history-differs",
            )
        self.candidates = [Candidate.from_json(candidate) for candidate in record.records("candidates")]
        ids = [candidate.id for candidate in self.candidates]
        if not ids or ids != list(range(len(ids))):
            raise record.error("the candidates are not numbered from 0")
        self.rounds = [_round_of(round) for round in record.records("rounds")]

    def _write(self) -> None:
        values = {
            "origin": self.origin,
            "metric": self.metric,
            "candidates": [asdict(candidate) for candidate in self.candidates],
            "rounds": [asdict(round) for round in self.rounds],
        }
        write_json(self.path, values)

    @property
    def waiting(self) -> list[Candidate]:
        """Returns the candidates that are still to be scored."""
        return [c for c in self.candidates if not c.scores and not c.rejected]

    def ranked(self, before_round: int | None = None) -> list[Candidate]:
        """Returns the scored candidates, the best first; the older first if scores are equal.

        With `before_round`, only candidates of earlier rounds count.
        """
        scored = [c for c in self.candidates if c.scores]
        if before_round is not None:
            scored = [c for c in scored if c.round < before_round]
        return sorted(scored, key=lambda c: (-c.scores[self.metric]["value"], c.id))

    @property
    def best(self) -> Candidate:
        return self.ranked()[0]

    def open_branches(self, number: int, beam: int, branch: int) -> list[tuple[Candidate, list[int]]]:
        """Returns those prompts of the beam of round `number` that have branches without a prompt, and these branches.

        The beam has up to `beam` prompts, and each has the branches 1 to `branch`.
        """
        done = {(c.parent, c.branch) for c in self.candidates if c.round == number}
        beam_with_branches = []
        for parent in self.ranked(before_round=number)[:beam]:
            branches = [b for b in range(1, branch + 1) if (parent.id, b) not in done]
            if branches:
                beam_with_branches.append((parent, branches))
        return beam_with_branches

    def same_as(self, prompt: str) -> Candidate | None:
        return next((c for c in self.candidates if c.prompt == prompt and not c.rejected), None)

    def add(self, candidate: Candidate) -> None:
        assert candidate.id == len(self.candidates)
        self.candidates.append(candidate)
        self._write()

    def score(self, candidate: Candidate, scores: dict[str, Score]) -> None:
        self.candidates[candidate.id] = replace(candidate, scores=scores)
        self._write()

    def close(self, finished: RoundResult) -> None:
        self.rounds.append(finished)
        self._write()

    def table(self) -> str:
        """Returns a table for people: the prompts and the gain of each round, and why prompts were rejected."""
        lines = [f"{'round':<7}{'prompts':>8}{'rejected':>10}{'best':>6}   {self.metric:<24}gained"]
        for round in self.rounds:
            candidates = [c for c in self.candidates if c.round == round.number]
            rejected = sum(bool(c.rejected) for c in candidates)
            gain = f"{round.gained:+.3f} [{round.low:+.3f}, {round.high:+.3f}]" if round.number else ""
            score = score_text(self.candidates[round.best].scores[self.metric])
            line = f"{round.number:<7}{len(candidates):>8}{rejected:>10}{round.best:>6}   {score:<24}{gain}"
            lines.append(line.rstrip())
        for candidate in self.candidates:
            if candidate.rejected:
                lines.append(f"rejected: {candidate.id}, from {candidate.parent}: {candidate.rejected}")
        return "\n".join(lines)


def _round_of(record: Record) -> RoundResult:
    gain = {key: record.number(key) for key in ("gained", "low", "high", "p")}
    return RoundResult(number=record.whole("number"), best=record.whole("best"), **gain)


def score_text(score: Score) -> str:
    return f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"


@dataclass(frozen=True)
class PromptCounts:
    """Counts the most that a run may do."""

    tried: int  # prompts of beams that are tried on --data, to be criticized
    edited: int  # new prompts made from them, each by two calls of the critic
    scored: int  # prompts that are scored, the first one included


def most_prompts(rounds: int, beam: int, branch: int) -> PromptCounts:
    """Returns the most that `rounds` rounds do: every prompt of a beam fails somewhere, and no new one is rejected."""
    tried = 0
    scored = 1
    for _ in range(rounds):
        parents = min(beam, scored)
        tried += parents
        scored += parents * branch
    return PromptCounts(tried, edited=tried * branch, scored=scored)


def all_episodes(tuning: TuningSettings, sampled: int, scored: int) -> int:
    """Returns the most episodes that a run samples; --data has `sampled` questions, and --eval-data `scored`."""
    prompts = most_prompts(tuning.rounds, tuning.beam, tuning.branch)
    to_criticize = prompts.tried * min(sampled, tuning.sampled_questions)
    to_score = prompts.scored * min(scored, tuning.eval_questions)
    return to_criticize + to_score
