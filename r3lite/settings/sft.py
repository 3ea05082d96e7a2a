"""Settings of supervised fine-tuning."""

from dataclasses import dataclass
from typing import Annotated

from r3lite.core.config import Bounds, Count, Section, Tokens, Whole


@dataclass(frozen=True)
class SftSettings(Section):
    """Supervised fine-tuning."""

    batch_size: Annotated[int, Bounds(low=1, high=4096)] = 2
    """most rows of one backward pass, laid end to end"""
    gradient_accumulation: Annotated[int, Bounds(low=1, high=4096)] = 8
    """rows of one optimizer step, in units of --batch-size"""
    max_length: Tokens = 2048
    """most tokens of a row; longer ones get shorter documents, or are left out if that is not enough"""
    max_document_tokens: Tokens = 160
    """most tokens of one document; longer ones are cut"""
    validation_fraction: Annotated[float, Bounds(low=0, high=0.5)] = 0.05
    """share of the questions held out for the validation loss; at most half, as the rest is trained on"""
    validation_rows: Whole = 64
    """most rows held out; 0: none"""
    validate_every: Count = 50
    """steps between validation losses; one more at the end"""
