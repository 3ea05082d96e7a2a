"""Settings of supervised fine-tuning."""

from dataclasses import dataclass

from r3lite.config import Count, Fraction, Section, Whole


@dataclass(frozen=True)
class SftSettings(Section):
    """Supervised fine-tuning."""

    batch_size: Count = 2
    """most rows of one backward pass, laid end to end"""
    gradient_accumulation: Count = 8
    """rows of one optimizer step, in units of --batch-size"""
    max_length: Count = 2048
    """most tokens of a row; longer ones get shorter documents, or are left out if that is not enough"""
    max_document_tokens: Count = 160
    """most tokens of one document; longer ones are cut"""
    validation_fraction: Fraction = 0.05
    """share of the questions held out for the validation loss"""
    validation_rows: Whole = 64
    """most rows held out; 0: none"""
    validate_every: Count = 50
    """steps between validation losses; one more at the end"""
