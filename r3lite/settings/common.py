"""Settings that every command has, and how NAME=WEIGHT and amounts of memory are read."""

import math
import re
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, ClassVar

from r3lite.core.config import Basic, Bounds, Free, Frozen, OfRun, Origin, Section, UsageError, sections
from r3lite.core.needs import NeedsOthers, check_used
from r3lite.settings.conditions import writes_file

# Bytes of each unit of memory.
UNITS = {
    "GIB": 1 << 30,
    "MIB": 1 << 20,
    "GB": 10**9,
    "MB": 10**6,
}


class Common(Section):
    """General."""

    needs: ClassVar = (NeedsOthers("output", "commands that write a file", writes_file),)

    # Free, because a run's file has all settings that came from the preset.
    preset: Basic[Free[OfRun[str]]] = "laptop-4gb"
    """built-in set of defaults: hop-weighted, hotpotqa, laptop-4gb, laptop-4gb-1.5b, laptop-4gb-3b, r-search,
    r-search-dag, r3-rag, search-bonus, search-r1, solution or tiny"""
    config: Basic[Free[str | None]] = None
    """TOML file of settings, such as a run's config.toml"""
    output: Basic[Free[str | None]] = None
    """folder or file to write. Default: as said above, else runs/<command>-<time>"""
    seed: Basic[Annotated[int, Bounds(low=0, high=2**63 - 1)]] = 0
    """random seed"""
    dry_run: Basic[Free[bool]] = False
    """check settings, inputs and output, print the plan"""


class CommandConfig(Frozen):
    """Base of the settings of every command."""

    # The command's conditions for settings in sections that other commands have, too.
    needs: ClassVar[tuple[NeedsOthers, ...]] = ()

    common: Common = Common()
    # Where the user has set each setting whose value would be another otherwise, by name; filled by `resolve`.
    set_by_user: Mapping[str, Origin] = field(default_factory=dict, kw_only=True, compare=False)
    # The index or the adapters that a setting's value was taken from, by name; filled by `resolve` (core/inherited.py).
    inherited: Mapping[str, str] = field(default_factory=dict, kw_only=True, compare=False)

    def check_settings(self, command: str) -> None:
        """Raises UsageError if settings contradict each other, or if a setting that the user has set has no effect.

        `command` is the name of the command's table in a TOML file.
        """
        for section in sections(self).values():
            section.check()
        check_used(command, self)


class Weighted(dict):
    """NAME=WEIGHT, or a table whose weight is 1 unless it is given. A dict, so that JSON and TOML files can hold it.

    An equals sign before a slash belongs to NAME, which may be a path such as runs/lr=1e-4/gold.jsonl.
    """

    def __init__(self, entry: Any, key: str):
        """`entry` is the text or the table; `key` is the table's key for NAME."""
        if isinstance(entry, str):
            name, equals, weight = entry.rpartition("=")
            if equals and not re.search(r"[/\\]", weight):
                entry = {key: name.strip(), "weight": float(weight)}
            else:
                entry = {key: entry}
        super().__init__({key: "", "weight": 1.0} | dict(entry))

    def __repr__(self) -> str:
        text = f"{self['name']}={self['weight']:g}"
        parameters = [f"{key}={value!r}" for key, value in self.items() if key not in ("name", "weight")]
        if parameters:
            text += f" ({', '.join(parameters)})"
        return text


def rounded_up(number: float) -> int:
    """Returns a number rounded up, but not because of a rounding error: as a float, 0.55 x 100 is 55.00000000000001."""
    return math.ceil(number * (1 - 1e-12))


def budget_bytes(text: str, setting: str = "--vram-budget") -> int:
    """Returns the bytes of an amount such as 4GiB, 1300MiB or 3.5 GB; raises UsageError, which names the setting."""
    size = 0.0
    amount = re.fullmatch(r"(\d+\.?\d*|\.\d+)(GIB|MIB|GB|MB)", text.upper().replace(" ", ""))
    if amount:
        size = float(amount[1]) * UNITS[amount[2]]
    if not 0 < size < math.inf:
        raise UsageError(
            f"{setting} {text} is not an amount of memory: write it as 4GiB or 1300MiB", code="bad-memory-size"
        )
    return int(size)
