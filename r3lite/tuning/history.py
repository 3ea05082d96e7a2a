"""The prompts that were tried: where each is from, its score, and what each round gained; one file, always whole.

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
    """A prompt. Number 0 is the first one; each other has a `parent`, of whose `branch`-th critique it was made."""

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
        kept, ends = record.record("scores"), ("value", "low", "high")
        scores = {name: {end: kept.record(name).number(end) for end in ends} for name in kept.values}
        texts = {key: record.text(key, blank=True) for key in ("prompt", "critique", "rejected")}
        numbers = {key: record.whole(key) for key in ("id", "round", "branch")}
        return Candidate(**texts, **numbers, parent=record.whole("parent", None), scores=scores)


@dataclass(frozen=True)
class Round:
    """The result of a round that is over: the best prompt so far, and the difference of its score from that of the
    best before it, over the same questions, with a 95 % interval."""

    number: int
    best: int
    gained: float
    low: float
    high: float
    p: float  # two-sided


class History:
    """All prompts of a run and its rounds, in a file that is written anew at each change.

    `origin` differs for runs on other prompts or questions.
    """

    def __init__(self, path: Path, origin: str, metric: str, prompt: str):
        self.path, self.origin, self.metric = path, origin, metric
        self.candidates, self.rounds = [Candidate(0, prompt)], []
        if path.exists():
            self._read()

    def _read(self) -> None:
        record = read_record(self.path, REMEDY)
        if record.text("origin") != self.origin:
            raise R3LiteError(f"{self.path} has another first prompt or other questions", REMEDY)
        self.candidates = [Candidate.from_json(c) for c in record.records("candidates")]
        if [c.id for c in self.candidates] != list(range(max(1, len(self.candidates)))):
            raise record.error("the candidates are not numbered from 0")
        numbers, rounds = ("gained", "low", "high", "p"), record.records("rounds")
        self.rounds = [Round(r.whole("number"), r.whole("best"), *map(r.number, numbers)) for r in rounds]

    def _write(self) -> None:
        made = {"candidates": [asdict(c) for c in self.candidates], "rounds": [asdict(r) for r in self.rounds]}
        write_json(self.path, {"origin": self.origin, "metric": self.metric} | made)

    @property
    def waiting(self) -> list[Candidate]:
        """Those that are still to be scored."""
        return [c for c in self.candidates if not c.scores and not c.rejected]

    def ranked(self, before: int | None = None) -> list[Candidate]:
        """Those that are scored, the best first, of equal ones the older; only those of rounds `before` one."""
        scored = [c for c in self.candidates if c.scores and (before is None or c.round < before)]
        return sorted(scored, key=lambda c: (-c.scores[self.metric]["value"], c.id))

    @property
    def best(self) -> Candidate:
        return self.ranked()[0]

    def open_branches(self, number: int, beam: int, branch: int) -> list[tuple[Candidate, list[int]]]:
        """Of the beam that a round goes on from, each prompt with those of its branches that have made none yet."""
        done = {(c.parent, c.branch) for c in self.candidates if c.round == number}
        parents = self.ranked(before=number)[:beam]
        left = [(p, [b for b in range(1, branch + 1) if (p.id, b) not in done]) for p in parents]
        return [(parent, branches) for parent, branches in left if branches]

    def same_as(self, prompt: str) -> Candidate | None:
        return next((c for c in self.candidates if c.prompt == prompt and not c.rejected), None)

    def add(self, candidate: Candidate) -> None:
        assert candidate.id == len(self.candidates)
        self.candidates.append(candidate)
        self._write()

    def score(self, candidate: Candidate, scores: dict[str, Score]) -> None:
        self.candidates[candidate.id] = replace(candidate, scores=scores)
        self._write()

    def close(self, finished: Round) -> None:
        self.rounds.append(finished)
        self._write()

    def table(self) -> str:
        """For people: what each round made and gained, and why prompts were rejected."""
        lines = [f"{'round':<7}{'prompts':>8}{'rejected':>10}{'best':>6}   {self.metric:<24}gained"]
        for over in self.rounds:
            of_round = [c for c in self.candidates if c.round == over.number]
            rejected = sum(bool(c.rejected) for c in of_round)
            gained = f"{over.gained:+.3f} [{over.low:+.3f}, {over.high:+.3f}]" if over.number else ""
            score = shown(self.candidates[over.best].scores[self.metric])
            line = f"{over.number:<7}{len(of_round):>8}{rejected:>10}{over.best:>6}   {score:<24}{gained}"
            lines.append(line.rstrip())
        lines += [f"rejected: {c.id}, from {c.parent}: {c.rejected}" for c in self.candidates if c.rejected]
        return "\n".join(lines)


def shown(score: Score) -> str:
    return f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"


@dataclass(frozen=True)
class Most:
    """The most that a run may do."""

    tried: int  # prompts of beams that are tried on --data, to be criticized
    made: int  # prompts made of them, each by two calls
    scored: int  # prompts, with the first one


def most(rounds: int, beam: int, branch: int) -> Most:
    """The most that `rounds` rounds do: every prompt of a beam fails somewhere, and no new one is rejected."""
    tried, scored = 0, 1
    for _ in range(rounds):
        parents = min(beam, scored)
        tried, scored = tried + parents, scored + parents * branch
    return Most(tried, tried * branch, scored)


def all_episodes(tuning: TuningSettings, sampled: int, scored: int) -> int:
    """The most episodes that a run over these numbers of questions of --data and of --eval-data samples."""
    made = most(tuning.rounds, tuning.beam, tuning.branch)
    return made.tried * min(sampled, tuning.sampled_questions) + made.scored * min(scored, tuning.eval_questions)
