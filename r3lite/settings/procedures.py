"""Settings of procedures: which there are, and when one fits a question."""

from dataclasses import dataclass
from typing import Annotated, Literal

from r3lite.core.config import Bounds, Section


@dataclass(frozen=True)
class ProcedureSettings(Section):
    """Procedures."""

    procedures: str | None = None
    """JSON file of procedures (name, description, trigger, category, priority, steps); that which fits a question best
    stands before it, and where none fits, nothing does"""
    procedures_by: Literal["both", "triggers"] = "both"
    """what makes one fit: its trigger words in the question; both: these, or else a near description by --encoder"""
    procedures_floor: Annotated[float, Bounds(low=-1.0, high=1.0)] = 0.85
    """least cosine of a question with a description that is near; encoders differ: the command procedures shows them"""


@dataclass(frozen=True)
class ProcedureFileSettings(Section):
    """The file of procedures."""

    add: str | None = None
    """JSON file of further procedures, a list or a single one, that are written into --procedures"""
    match: str | None = None
    """show how well each procedure fits this question, and which one would stand before it"""
    encoder: str = "intfloat/e5-base-v2"
    """encoder of --match, as for --retriever semantic"""
    encoder_style: Literal["auto", "own", "e5", "plain"] = "auto"
    """its prompts, as for --retriever semantic"""
