"""Splits a data set into train.jsonl, dev.jsonl, test.jsonl and, if it is asked for, rl.jsonl."""

from pathlib import Path

from r3lite.core import command, run_files
from r3lite.core.earlier_output import check_output
from r3lite.core.files import check_writable, sole_writer, sweep, write_json, write_jsonl, write_text
from r3lite.core.invocation import to_toml
from r3lite.datasets.hub import files_of, sha256
from r3lite.datasets.splits import draw, held_out
from r3lite.settings import CommandConfig, PrepareSettings, QuestionSettings

PROCESSED = Path("data/processed")
MANIFEST = "manifest.json"


class PrepareConfig(CommandConfig):
    """Samples train.jsonl, dev.jsonl and test.jsonl, and with --rl-size rl.jsonl, from a data set such as hotpotqa,
    2wiki or musique, or from your own file, into data/processed/NAME (or --output). Rows are unchanged and in their
    original order; no question is in two files. manifest.json has the checksums of the sources. A folder that was
    prepared before is not changed.
    """

    data: QuestionSettings = QuestionSettings()
    prepare: PrepareSettings = PrepareSettings()


def prepare(config: PrepareConfig) -> None:
    """Writes the splits to the output folder, unless they are complete there."""
    output = output_of(config)
    check_writable(output)
    with sole_writer(output):
        names_in_output = check_output(output, "prepare", config)
        if MANIFEST in names_in_output:
            print(f"{output} is prepared already")
        else:
            write_splits(config, output)
    print(f"next: python -m r3lite.collect --data {output / 'train.jsonl'}")


def output_of(config: PrepareConfig) -> Path:
    """Returns the folder of the splits, by default one with the name of the data."""
    name = Path(config.data.data).stem.split(",")[0]
    return Path(config.common.output or PROCESSED / name)


def plan(config: PrepareConfig) -> str:
    """Checks --output, and returns whether it is prepared already, for `--dry-run`."""
    if not config.data.data:
        return ""
    output = output_of(config)
    names_in_output = check_output(output, "prepare", config)
    if MANIFEST in names_in_output:
        return f"{output} is prepared already"
    return f"to be written to {output}"


def write_splits(config: PrepareConfig, output: Path) -> None:
    """Draws the splits and writes them. The manifest is written last; where it is, the splits are complete."""
    held_out_data = held_out(config.data.data, config.prepare.held_out)
    splits = draw(config.data, config.prepare, config.common.seed, held_out_data)
    sweep(output)
    write_text(output / run_files.CONFIG, to_toml(config, "prepare"))  # from here on the folder is this run's
    for name, rows in splits.items():
        write_jsonl(output / f"{name}.jsonl", rows)
    counts = {name: len(rows) for name, rows in splits.items()}
    checksums = {}
    for data in (config.data.data, held_out_data):
        if data:  # there may be no held-out data
            checksums |= {str(path): sha256(path) for path in files_of(data)}
    write_json(output / MANIFEST, {"rows": counts, "files": checksums})
    files = ", ".join(f"{count:,} questions in {name}.jsonl" for name, count in counts.items())
    print(f"{output}: {files}")


main = command.Command("prepare", PrepareConfig(), work=prepare, plan=plan)

if __name__ == "__main__":
    raise SystemExit(main())
