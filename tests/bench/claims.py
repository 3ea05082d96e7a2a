"""What documents claim of speed and memory, held to the committed runs of bench.throughput and bench.memory.

Three kinds of claim are read: rows of tables that have a column "times faster", cells of other tables that end in
MiB, and "between LOW and HIGH in N runs".
"""

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from bench import memory, options, records, throughput

ROOT = Path(__file__).parents[2]
BENCHES = (throughput.SPEED, memory.MEMORY)
COUNTS = dict(zip(("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"), range(2, 11)))
RANGE = re.compile(r"between ([\d.]+)\s+and\s+([\d.]+)\s+in\s+(\w+)(?:\s+runs)?")
NUMBER = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?")


def without_result(text: str) -> list[str]:
    """The claims that no committed run bears out: the first cell of a row, or the words of a range."""
    rows = [name for name, numbers in rows_of(text) if not any(holds(run, numbers) for run in runs())]
    return rows + [" ".join(m.group().split()) for m in RANGE.finditer(text) if not is_a_range(*m.groups())]


def rows_of(text: str) -> Iterator[tuple[str, list[str]]]:
    """The first cell of each row that claims something, and the numbers that it claims."""
    for block in re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.strip("| ").split("|")] for line in block.splitlines())
        for name, *cells in rows:
            claims = cells if "times faster" in head else [cell for cell in cells if cell.endswith("MiB")]
            if numbers := [number for cell in claims for number in NUMBER.findall(cell)]:
                yield name, numbers


def runs() -> list[dict]:
    runs_by_file = (records.read(path) for b in BENCHES for path in sorted(options.RESULTS.glob(f"{b.name}-*.json")))
    return list(chain.from_iterable(runs_by_file))


def holds(run: dict, numbers: list[str]) -> bool:
    """Whether all numbers are figures of this one run, rounded as they are written."""
    values = [v for record in run["records"] for v in record.values() if isinstance(v, int | float)]

    def is_a_figure(number: str) -> bool:
        step = 10.0 ** -len(number.partition(".")[2])
        return any(abs(float(number.replace(",", "")) - value) <= 0.5001 * step for value in values)

    return all(map(is_a_figure, numbers))


def is_a_range(low: str, high: str, count: str) -> bool:
    """Whether these are the ends of a range over exactly so many runs: over all there are."""
    number = COUNTS.get(count) or (int(count) if count.isdigit() else None)
    sections = {(run["section"]) for run in runs()}
    rows = chain.from_iterable(
        records.ranges(throughput.SPEED, [r for r in runs() if r["section"] == s]) for s in sections
    )
    wanted = (float(low), float(high))
    return any(row["runs"] == number and wanted == ends(value) for row in rows for value in row.values())


def ends(value: object) -> tuple[float, ...]:
    """The ends of a range as `records.ranges` writes it; nothing of another cell."""
    return tuple(map(float, value.split(" to "))) if re.fullmatch(r"[\d.]+ to [\d.]+", str(value)) else ()
