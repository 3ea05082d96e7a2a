"""A cache of a teacher's distributions along trajectories: a folder of safetensors and JSON.

Part files of ROWS_PER_PART rows are written one after the other, each whole or not at all, so that after a kill another
run continues with the next part. The manifest is written last; it records the origin of the cache and the ids of its
questions. No model is loaded here.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from r3lite.core.errors import R3LiteError
from r3lite.core.files import names_in, read_record, write_json
from r3lite.core.records import Record
from r3lite.datasets.trajectories import Row
from r3lite.models.logprobs import TopTokens
from r3lite.models.tensor_files import opened, read_tensors, write_tensors

ROWS_PER_PART = 64
MANIFEST = "manifest.json"
TOKEN_BYTES = 8  # for each token of a distribution: its id and its log-probability
# Remedies.
GO_ON = "Run the same `collect --teacher-logprobs` again; it continues from here."
ANOTHER = "Pass another --teacher-logprobs, or delete the folder."


@dataclass(frozen=True)
class CacheOrigin:
    """What determines a cache: the fingerprints of teacher, tokenizer and tokenized trajectories, and `top`."""

    teacher: str
    tokenizer: str
    trajectories: str
    top: str  # number of tokens of a distribution, as text


@dataclass(frozen=True)
class Lesson:
    """A trajectory in tokens, and the teacher's distribution at each token that has loss."""

    row: Row
    teacher: TopTokens


def part_of(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.safetensors"


def parts_done(folder: Path, origin: CacheOrigin) -> int:
    """Returns how many parts an earlier run has written.

    Raises R3LiteError if the folder holds anything else, or if a part is of another origin.
    """
    names = names_in(folder) - {MANIFEST}
    count = 0
    while part_of(folder, count).name in names:
        part = part_of(folder, count)
        _check_part(part, origin, ANOTHER)
        names.remove(part.name)
        count += 1
    if names:
        raise R3LiteError(
            f"{folder} is not a cache of log-probabilities: it holds {min(names)}",
            ANOTHER,
            code="not-a-logprob-cache",
        )
    return count


def _check_part(path: Path, origin: CacheOrigin, remedy: str) -> None:
    """Raises R3LiteError if a part cannot be read (with `remedy`), or if it is of another origin (with ANOTHER)."""
    with opened(path, remedy) as file:
        metadata = file.metadata() or {}
    for name, value in asdict(origin).items():
        value_of_part = metadata.get(name)
        if value_of_part != value:
            raise R3LiteError(
                f"{path} was made with another {name}: {value_of_part}, not {value}", ANOTHER, code="logprobs-differ"
            )


def write_part(
    folder: Path,
    number: int,
    origin: CacheOrigin,
    rows: Sequence[Row],
    teacher: Sequence[TopTokens],
) -> None:
    """Writes rows, and the teacher's distributions along each of them, as part `number` (0, 1, ...)."""
    tokens = [token for row in rows for token in row.tokens]
    loss_mask = [has_loss for row in rows for has_loss in row.action_mask]
    tensors = {
        "sizes": torch.tensor([len(row.tokens) for row in rows]),
        "tokens": torch.tensor(tokens, dtype=torch.int32),
        "loss_mask": torch.tensor(loss_mask, dtype=torch.bool),
        "ids": torch.cat([of_row.ids for of_row in teacher]),
        "logprobs": torch.cat([of_row.logprobs for of_row in teacher]),
    }
    write_tensors(part_of(folder, number), tensors, asdict(origin))


def write_manifest(folder: Path, origin: CacheOrigin, questions: Sequence[str]) -> None:
    """Writes the manifest, which makes the cache complete; `questions` has the id of the question of each row."""
    write_json(folder / MANIFEST, asdict(origin) | {"questions": list(questions)})


def _manifest(folder: Path) -> tuple[Record, CacheOrigin]:
    """Returns the manifest and the origin in it; raises R3LiteError if there is none."""
    if not (folder / MANIFEST).is_file():
        raise R3LiteError(
            f"{folder} is not a complete cache of log-probabilities: it has no {MANIFEST}",
            GO_ON,
            code="logprobs-incomplete",
        )
    record = read_record(folder / MANIFEST, ANOTHER)
    values = {field.name: record.text(field.name) for field in fields(CacheOrigin)}
    return record, CacheOrigin(**values)


def identity(folder: Path) -> str:
    """Returns the origin of a cache in one line."""
    _, origin = _manifest(folder)
    return " ".join(asdict(origin).values())


def read_cache(folder: Path, tokenizer: str, longest: int) -> dict[str, Lesson]:
    """Returns the first trajectory of each question, by the question's id; log-probabilities stay in the mapped files
    until they are used.

    Raises R3LiteError if the cache is not complete, if its tokenizer does not have the fingerprint `tokenizer`, or if
    one of these trajectories has more than `longest` tokens.
    """
    record, origin = _manifest(folder)
    if origin.tokenizer != tokenizer:
        cause = f"the teacher of {folder} has another tokenizer ({origin.tokenizer}) than the policy ({tokenizer})"
        raise R3LiteError(
            cause,
            "Use a teacher of the policy's model family: both need the same tokenizer.",
            code="teacher-tokenizer-differs",
        )
    lessons: dict[str, Lesson] = {}
    questions = record.texts("questions")
    for start in range(0, len(questions), ROWS_PER_PART):
        path = part_of(folder, start // ROWS_PER_PART)
        _check_part(path, origin, GO_ON)
        questions_of_part = questions[start : start + ROWS_PER_PART]
        for question, lesson in zip(questions_of_part, _read_part(path), strict=False):
            lessons.setdefault(question, lesson)
    size = max((len(lesson.row.tokens) for lesson in lessons.values()), default=0)
    if size > longest:
        raise R3LiteError(
            f"{folder} has a row of {size} tokens, but --max-length is {longest}",
            "Raise --max-length.",
            code="logprob-row-too-long",
        )
    return lessons


def _read_part(path: Path) -> list[Lesson]:
    tensors = read_tensors(path, GO_ON)
    sizes = tensors["sizes"].tolist()
    tokens_of_rows = tensors["tokens"].split(sizes)
    masks_of_rows = tensors["loss_mask"].split(sizes)
    rows = []
    for tokens, mask in zip(tokens_of_rows, masks_of_rows, strict=True):
        rows.append(Row(tokens=tokens.tolist(), action_mask=mask.tolist()))
    top_tokens = TopTokens(tensors["ids"], tensors["logprobs"])
    distributions = top_tokens.split([row.loss_tokens for row in rows])
    return [Lesson(row, teacher) for row, teacher in zip(rows, distributions, strict=True)]
