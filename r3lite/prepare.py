"""Draws questions to train on, to choose by and to test on from a data set, once, into files of JSON lines."""

import hashlib
import random
import sys
from dataclasses import dataclass
from pathlib import Path

from r3lite.core import command
from r3lite.core.command import refuse_another_run
from r3lite.core.config import to_toml
from r3lite.core.errors import R3LiteError
from r3lite.core.files import check_writable, sole_writer, write_json, write_jsonl, write_text
from r3lite.datasets.hub import NAMED, files_of
from r3lite.datasets.qa import read_with_rows
from r3lite.settings import Common, PrepareSettings, QuestionSettings

PROCESSED = Path("data/processed")
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class PrepareConfig:
    """Draws train.jsonl, dev.jsonl and test.jsonl from a data set such as hotpotqa, 2wiki or musique, or from a file of
    your own, into data/processed/NAME (or --output): rows as they are in the data set, in its order, no question in two
    of them. manifest.json has the checksums of what they were drawn from. A folder that has it is left as it is.
    """

    common: Common = Common()
    data: QuestionSettings = QuestionSettings()
    prepare: PrepareSettings = PrepareSettings()


@dataclass(frozen=True)
class Row:
    """A question as it is asked, and its row."""

    question: str
    values: dict


def prepare(config: PrepareConfig) -> None:
    data = config.data.data
    output = Path(config.common.output or PROCESSED / Path(data).stem.split(",")[0])
    check_writable(output)
    with sole_writer(output):
        if (output / MANIFEST).exists():
            refuse_another_run(output / "config.toml", "prepare", config, output)
            print(f"{output} is prepared already")
        else:
            other = held_out(data, config.prepare.held_out)
            parts = draw(config, other)
            for name, rows in parts.items():
                write_jsonl(output / f"{name}.jsonl", (row.values for row in rows))
            counts = {name: len(rows) for name, rows in parts.items()}
            files = {str(path): sha256(path) for name in (data, other) if name for path in files_of(name)}
            write_text(output / "config.toml", to_toml(config, "prepare"))
            write_json(output / MANIFEST, {"rows": counts, "files": files})  # last: it says that all is there
            print(f"{output}: " + ", ".join(f"{count:,} questions in {name}.jsonl" for name, count in counts.items()))
    print(f"next: python -m r3lite.collect --data {output / 'train.jsonl'}")


def held_out(data: str, given: str | None) -> str | None:
    """What development and test questions are drawn from; None: from the same questions as those to train on."""
    name = data.partition(",")[0].strip()
    if given is None and name in NAMED and not Path(data).is_file():
        given = f"{name},validation"
    return None if given == data else given


def draw(config: PrepareConfig, other: str | None) -> dict[str, list[Row]]:
    """The rows of each part, in the order of their source; what is held out leaves what is to train on.

    All questions are held in memory at once, as their files are.
    """
    stream, sizes = random.Random(config.common.seed), config.prepare
    own = rows_of(config, config.data.data)
    pool = own if other is None else rows_of(config, other)
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


def rows_of(config: PrepareConfig, data: str) -> list[Row]:
    """All usable questions, no two asked alike."""

    def made(question, row) -> Row:
        # Else it would be called by its place in the new file.
        named = {} if "id" in row or "_id" in row else {"id": question.id}
        return Row(question.text, row.values | named)

    rows = read_with_rows(data, made, config.data.limit, config.data.skip_bad_rows)
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row.question, row)
    return list(first.values())


def sampled(stream: random.Random, rows: list[Row], count: int, asked: str) -> list[Row]:
    """So many of the rows, in their order; `asked` begins the error if there are fewer."""
    if count > len(rows):
        raise R3LiteError(f"{asked} {count:,} questions, and there are {len(rows):,}", "Ask for fewer.")
    return [rows[i] for i in sorted(stream.sample(range(len(rows)), count))]


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(argv: list[str] | None = None) -> int:
    return command.run("prepare", PrepareConfig(), prepare, argv)


if __name__ == "__main__":
    sys.exit(main())
