"""Questions to train on, to choose by and to test on, drawn from a data set: none of them is in two of the parts."""

import random
import sys
from dataclasses import dataclass
from pathlib import Path

from r3lite.core.errors import R3LiteError
from r3lite.datasets.hub import NAMED
from r3lite.datasets.qa import read_with_rows
from r3lite.settings import PrepareSettings, QuestionSettings


@dataclass(frozen=True)
class Row:
    """A question as it is asked, and its row."""

    question: str
    values: dict


def held_out(data: str, given: str | None) -> str | None:
    """What development and test questions are drawn from; None: from the same questions as those to train on."""
    name = data.partition(",")[0].strip()
    if given is None and name in NAMED and not Path(data).is_file():
        given = f"{name},validation"
    return None if given == data else given


def draw(data: QuestionSettings, sizes: PrepareSettings, seed: int, other: str | None) -> dict[str, list[Row]]:
    """The rows of each part, in the order of their source; what is held out leaves what is to train on.

    All questions are held in memory at once, as their files are.
    """
    stream = random.Random(seed)
    own = rows_of(data.data, data)
    pool = own if other is None else rows_of(other, data)
    chosen = sampled(stream, pool, sizes.dev_size + sizes.test_size, "--dev-size and --test-size want")
    of_dev = set(stream.sample(range(len(chosen)), sizes.dev_size))
    parts = {
        "dev": [row for i, row in enumerate(chosen) if i in of_dev],
        "test": [row for i, row in enumerate(chosen) if i not in of_dev],
    }
    kept_out = {row.question for row in chosen}
    left = [row for row in own if row.question not in kept_out]
    if other is not None and len(left) < len(own):
        print(f"{len(own) - len(left)} questions of --data are held out, and not trained on", file=sys.stderr)
    train = left if sizes.train_size is None else sampled(stream, left, sizes.train_size, "--train-size wants")
    if not train:
        raise R3LiteError("no question is left to train on", "Ask for fewer with --dev-size and --test-size.")
    return {"train": train} | parts


def rows_of(name: str, data: QuestionSettings) -> list[Row]:
    """All usable questions of a data set, no two asked alike."""

    def made(question, row) -> Row:
        # Else it would be called by its place in the new file.
        named = {} if "id" in row or "_id" in row else {"id": question.id}
        return Row(question.text, row.values | named)

    first: dict[str, Row] = {}
    for row in read_with_rows(name, made, data.limit, data.skip_bad_rows):
        first.setdefault(row.question, row)
    return list(first.values())


def sampled(stream: random.Random, rows: list[Row], count: int, asked: str) -> list[Row]:
    """So many of the rows, in their order; `asked` begins the error if there are fewer."""
    if count > len(rows):
        raise R3LiteError(f"{asked} {count:,} questions, and there are {len(rows):,}", "Ask for fewer.")
    return [rows[i] for i in sorted(stream.sample(range(len(rows)), count))]
