"""Settings of a cache of a teacher's log-probabilities."""

from dataclasses import dataclass

from r3lite.config import Section, Tokens
from r3lite.settings.rl import Top


@dataclass(frozen=True)
class TeacherCacheSettings(Section):
    """Log-probabilities of a teacher."""

    teacher_logprobs: str | None = None
    """folder to write, for `ppo --algorithm dgpo`: the distributions of --model, with --adapter, along the trajectories
    of --data; the same command goes on where it was stopped"""
    teacher_top: Top = 32
    """how many of the likeliest tokens of a distribution are kept"""
    max_length: Tokens = 4096
    """most tokens of a trajectory; longer ones get shorter documents, or are left out if that is not enough"""
    max_document_tokens: Tokens = 160
    """most tokens of one document; longer ones are cut"""
