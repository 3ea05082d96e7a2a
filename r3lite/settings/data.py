"""Settings of the data that a command reads."""

from dataclasses import dataclass
from typing import Annotated

from r3lite.core.config import Count, Required, Section


@dataclass(frozen=True)
class DataSettings(Section):
    """Data."""

    data: str | None = None
    """trajectory file or question file of any supported format; hotpotqa, 2wiki or musique with ,train or ,validation
    after it; or a hub string name,subset,split"""
    limit: Count | None = None
    """only the first N questions or rows"""
    skip_bad_rows: bool = False
    """count malformed rows and go on, instead of stopping at the first"""


@dataclass(frozen=True)
class QuestionSettings(DataSettings):
    """Data."""

    data: Annotated[
        str | None, Required("a question file of any supported format, or name,subset,split", ("sources",))
    ] = None


@dataclass(frozen=True)
class NewQuestionSettings(QuestionSettings):
    """Data."""

    exclude: tuple[str, ...] | None = None
    """files whose questions are left out, by id and by text, with commas between: those to evaluate on, and those that
    the adapter was trained on, which it may answer from memory"""


@dataclass(frozen=True)
class TrajectorySettings(DataSettings):
    """Data."""

    data: Annotated[
        str | None, Required("a file of trajectories (see `python -m r3lite.collect`) or conversations", ("sources",))
    ] = None
