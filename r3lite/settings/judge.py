"""Settings of the remote model that judges answers and steps, or teaches."""

from dataclasses import dataclass
from typing import Literal

from r3lite.config import Count, Free, NonNegative, Positive, Section, Whole


@dataclass(frozen=True)
class JudgeSettings(Section):
    """Judge."""

    judge: Literal["none", "gemini"] = "none"
    """who judges answers and steps; the key is read from GOOGLE_API_KEY or GEMINI_API_KEY"""
    judge_model: str = "gemini-2.5-flash"
    """name of the judging model"""
    judge_base_url: str | None = None
    """address of a compatible server"""
    judge_rpm: Free[Count] = 60
    """most requests a minute"""
    judge_concurrency: Free[Count] = 4
    """most requests under way at once"""
    judge_timeout: Free[Positive] = 60.0
    """seconds before a request counts as failed"""
    judge_retries: Free[Whole] = 4
    """tries after the first, with backoff"""
    judge_thinking: bool = False
    """let the model think first; thoughts count against the output limit, which can cut the reply"""
    judge_max_calls: Free[Count | None] = None
    """most requests, tries that failed included, from one start of the run to its end"""
    judge_max_cost: Free[Positive | None] = None
    """most US dollars in the same time, by --judge-input-price and --judge-output-price"""
    judge_input_price: Free[NonNegative] = 0.30
    """US dollars per million input tokens"""
    judge_output_price: Free[NonNegative] = 2.50
    """US dollars per million output tokens"""
    judge_cache: Free[str | None] = None
    """folder of cached replies; default: judge-cache in the output folder, and for collect <output>.cache"""
