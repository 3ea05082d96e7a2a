"""Settings of the data that a command reads, from one file or from several sources.

The first line of the docstring of a section is its heading in --help. Commands have different sections of one heading.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, ClassVar

from r3lite.core.config import MOST, Basic, Count, InputPath, Required, Section
from r3lite.core.errors import UsageError, nearest
from r3lite.core.needs import NeedsOthers
from r3lite.settings.common import Weighted
from r3lite.settings.protocol import FORMATS

TYPES = ("qa", "chat", "coding", "function_calling", "r1")  # of sources
KEYS = ("file", "weight", "name", "type", "format")
DATA_SETS = ("hotpotqa", "2wiki", "musique")  # short names of data sets on the hub
DATA_REMEDY = f"Pass a file; {', '.join(DATA_SETS)} with ,train or ,validation; or name,subset,split of a hub data set."


def names_data_set(text: str) -> bool:
    """Tells whether a value of --data is a data set on the hub, by its form, and not a file."""
    return text.partition(",")[0].strip() in DATA_SETS or text.count(",") == 2


DATA_FILE = InputPath(remedy=DATA_REMEDY, is_name=names_data_set)
# On the command line a comma ends a file of the list, so that a data set with its split can only stand in a TOML file.
EXCLUDED_FILES = InputPath(
    remedy='Pass files; a data set with its split only works in a TOML file, as exclude = ["hotpotqa,validation"].',
    is_name=names_data_set,
)


class DataSettings(Section):
    """Data."""

    data: Basic[Annotated[str | None, DATA_FILE]] = None
    """trajectories or questions: a file or data set. Data sets are hotpotqa, 2wiki or musique followed by ,train or
    ,validation, or name,subset,split on the hub. Questions: JSON lines, JSON, CSV or parquet with question and answer,
    or the files of HotpotQA, 2WikiMultiHopQA and MuSiQue"""
    limit: Basic[Count | None] = None
    """use only the first N questions or rows"""
    skip_bad_rows: bool = False
    """skip and count malformed rows instead of stopping at the first"""


class QuestionSettings(DataSettings):
    """Data."""

    data: Basic[
        Annotated[
            str | None,
            DATA_FILE,
            Required("pass a question file in any supported format, or name,subset,split", ("sources",)),
        ]
    ] = None


# For commands that leave out the questions of --exclude.
class NewQuestionSettings(QuestionSettings):
    """Data."""

    exclude: Annotated[tuple[str, ...] | None, EXCLUDED_FILES] = None
    """comma-separated files whose questions are left out, matched by id and by text: those to evaluate on, and those
    that the adapter was trained on, whose answers it may have memorized"""


class RlQuestionSettings(NewQuestionSettings):
    """Data."""

    balance_yes_no: bool = False
    """of the questions of each source that are answered by yes or no, use as many of each: RL learns which answer is
    more frequent"""


class OptionalRlQuestionSettings(RlQuestionSettings):
    """Data."""

    data: Basic[Annotated[str | None, DATA_FILE]] = None


class CollectDataSettings(NewQuestionSettings):
    """Data."""

    needs: ClassVar = (
        NeedsOthers("data exclude", "a --source other than documents", lambda s: s.source != "documents"),
    )

    data: Basic[Annotated[str | None, DATA_FILE]] = None


class TrajectorySettings(DataSettings):
    """Data."""

    data: Basic[
        Annotated[
            str | None,
            DATA_FILE,
            Required("pass trajectories (see `python -m r3lite.collect`) or conversations", ("sources",)),
        ]
    ] = None


class SourceEntry(Weighted):
    """FILE=WEIGHT, or a table of file, weight, name, type and format

    Has `file`, `weight` (1 unless given) and `name` (that of the file unless given), and `type` and `format` if they
    are given.
    """

    def __init__(self, entry: Any):
        super().__init__(entry, "file")
        if unknown := [key for key in self if key not in KEYS]:
            source = self.get("name") or self.get("file") or "without a file"
            raise UsageError(
                f"the source {source} has no key {unknown[0]!r}{nearest(unknown[0], KEYS)}", code="source-key-unknown"
            )
        file = self.get("file")
        if not isinstance(file, str) or not file.strip() or "\0" in file:
            raise UsageError(f"a source has no file: {entry}", code="source-without-file")
        name_of_file = re.sub(r"[^\w-]+", "-", Path(file).stem).strip("-")
        name = self.setdefault("name", name_of_file[:64] or "data")
        if not isinstance(name, str) or not re.fullmatch(r"[\w-]{1,64}", name):
            raise UsageError(
                f"the source of {file} is named {name!r}; a name has letters, digits, - and _", code="source-name"
            )
        weight = self["weight"]
        if type(weight) not in (int, float) or not 0 < weight <= MOST:
            raise UsageError(
                f"the source {name} has the weight {weight!r}; it must be above 0 and at most {MOST:g}",
                code="source-weight",
            )
        for key, choices in (("type", TYPES), ("format", FORMATS)):
            if key not in self:
                continue
            value = self[key]
            if value not in choices:
                remedy = f"choose from {', '.join(choices)}{nearest(str(value), choices)}"
                raise UsageError(f"the source {name} has the {key} {value!r}; {remedy}", code="source-value-unknown")
        kind = self.get("type")
        if "format" in self and kind not in (None, "qa"):
            raise UsageError(
                f"the source {name} is of type {kind}, which has no steps: remove its format",
                code="source-without-steps",
            )


class SourceSettings(Section):
    """Sources."""

    sources: tuple[SourceEntry, ...] | None = None
    """several files instead of --data, sampled by weight: FILE=WEIGHT,...; in a TOML file, one [[sources]] table per
    file with file, weight, name, type and format (docs/sources.md)"""

    def __post_init__(self):
        for name, times in Counter(entry["name"] for entry in self.sources or ()).items():
            if times > 1:
                raise UsageError(f"{times} sources are named {name}: give each another name", code="source-name-twice")
