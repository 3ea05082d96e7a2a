"""A cache of what a teacher would have said along trajectories: a folder of safetensors and JSON.

Part files of PART rows are written one after the other, each whole or not at all, so that a run that was killed goes on
with the next one. The manifest is written last; it records what the cache was made from (see Origin) and its questions.
No model is loaded here.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from r3lite.core.errors import R3LiteError
from r3lite.core.files import names_in, read_record, write_json
from r3lite.core.records import Record
from r3lite.datasets.trajectories import Row
from r3lite.models.logprobs import TopTokens
from r3lite.models.tensor_files import opened, read_tensors, write_tensors

PART = 64  # rows of a part file
MANIFEST = "manifest.json"
TOKEN_BYTES = 8  # of a token of a distribution: its id and its log-probability
GO_ON = "Run the same `collect --teacher-logprobs` again; it continues from here."
ANOTHER = "Pass another --teacher-logprobs, or delete the folder."


@dataclass(frozen=True)
class Origin:
    """What a cache follows from: fingerprints of the teacher, the tokenizer and the trajectories in tokens."""

    teacher: str
    tokenizer: str
    trajectories: str
    top: str  # k


@dataclass(frozen=True)
class Lesson:
    """A trajectory in tokens, and what the teacher would have said at each that has loss."""

    row: Row
    teacher: TopTokens


def part_of(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.safetensors"


def parts_done(folder: Path, origin: Origin) -> int:
    """How many parts an earlier run has written; R3LiteError if the folder holds anything else or is of another run."""
    names, done = names_in(folder), 0
    while part_of(folder, done).name in names:
        _check_part(part_of(folder, done), origin, ANOTHER)
        done += 1
    if other := names - {part_of(folder, n).name for n in range(done)} - {MANIFEST}:
        raise R3LiteError(f"{folder} is not a cache of log-probabilities: it holds {min(other)}", ANOTHER)
    return done


def _check_part(path: Path, origin: Origin, remedy: str) -> None:
    """Refuses a part that another teacher, tokenizer or trajectories have made, naming what differs."""
    with opened(path, remedy) as file:
        kept = file.metadata() or {}
    for name, value in asdict(origin).items():
        if kept.get(name) != value:
            raise R3LiteError(f"{path} was made with another {name}: {kept.get(name)}, not {value}", ANOTHER)


def write_part(folder: Path, number: int, origin: Origin, rows: Sequence[Row], teacher: Sequence[TopTokens]) -> None:
    tensors = {"sizes": torch.tensor([len(row.tokens) for row in rows])}
    tensors["tokens"] = torch.tensor([token for row in rows for token in row.tokens], dtype=torch.int32)
    tensors["loss_mask"] = torch.tensor([flag for row in rows for flag in row.action_mask], dtype=torch.bool)
    tensors |= {part: torch.cat([getattr(of_row, part) for of_row in teacher]) for part in ("ids", "logprobs")}
    write_tensors(part_of(folder, number), tensors, asdict(origin))


def finish(folder: Path, origin: Origin, questions: Sequence[str]) -> None:
    """Makes the cache complete; `questions` are the ids of its rows' questions, in order."""
    write_json(folder / MANIFEST, asdict(origin) | {"questions": list(questions)})


def _manifest(folder: Path) -> tuple[Record, Origin]:
    if not (folder / MANIFEST).is_file():
        raise R3LiteError(f"{folder} is not a complete cache of log-probabilities: it has no {MANIFEST}", GO_ON)
    record = read_record(folder / MANIFEST, ANOTHER)
    return record, Origin(**{name: record.text(name) for name in Origin.__dataclass_fields__})


def identity(folder: Path) -> str:
    """What the cache follows from, in one line."""
    return " ".join(asdict(_manifest(folder)[1]).values())


def read_cache(folder: Path, tokenizer: str, longest: int) -> dict[str, Lesson]:
    """The first trajectory of each question, by its id; log-probabilities stay in the mapped files until they are used.

    Raises R3LiteError if the cache is not complete, of another tokenizer than that of the fingerprint `tokenizer`, or
    has a row of more than `longest` tokens.
    """
    record, origin = _manifest(folder)
    if origin.tokenizer != tokenizer:
        cause = f"the teacher of {folder} has another tokenizer ({origin.tokenizer}) than the policy ({tokenizer})"
        raise R3LiteError(cause, "Use a teacher of the policy's model family: both need the same tokenizer.")
    found: dict[str, Lesson] = {}
    questions = record.texts("questions")
    for number in range(-(-len(questions) // PART)):
        path = part_of(folder, number)
        _check_part(path, origin, GO_ON)
        for question, lesson in zip(questions[number * PART :], _read_part(path), strict=False):
            found.setdefault(question, lesson)
    size = max((len(lesson.row.tokens) for lesson in found.values()), default=0)
    if size > longest:
        raise R3LiteError(f"{folder} has a row of {size} tokens, but --max-length is {longest}", "Raise --max-length.")
    return found


def _read_part(path: Path) -> list[Lesson]:
    kept = read_tensors(path, GO_ON)
    sizes = kept["sizes"].tolist()
    pairs = zip(kept["tokens"].split(sizes), kept["loss_mask"].split(sizes), strict=True)
    rows = [Row(tokens=tokens.tolist(), action_mask=mask.tolist()) for tokens, mask in pairs]
    teacher = TopTokens(kept["ids"], kept["logprobs"]).split([row.loss_tokens for row in rows])
    return [Lesson(row, of_row) for row, of_row in zip(rows, teacher, strict=True)]
