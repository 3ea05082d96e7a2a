"""Settings of a cache of a teacher's log-probabilities."""

from dataclasses import dataclass

from r3lite.core.config import Section
from r3lite.settings.rl import Top


@dataclass(frozen=True)
class TeacherCacheSettings(Section):
    """Log-probabilities of a teacher."""

    teacher_logprobs: str | None = None
    """folder to write, for `ppo --algorithm dgpo`: the distributions of --model, with --adapter, along the trajectories
    of --data; the same command goes on where it was stopped. A trajectory that is longer than --max-length gets shorter
    documents, or is left out if that is not enough"""
    teacher_top: Top = 32
    """how many of the likeliest tokens of a distribution are kept"""
