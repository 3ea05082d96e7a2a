"""Settings of the model that judges answers and steps, teaches, or criticizes prompts."""

import re
from typing import Literal

from r3lite.core.config import Count, Free, NonNegative, Positive, Section, Tokens, UsageError, Whole
from r3lite.settings.common import check_address

GEMINI = "gemini-3.5-flash-lite"


class JudgeSettings(Section):
    """Judge."""

    judge: Literal["none", "gemini", "openai", "local"] = "none"
    """which model judges answers and steps; gemini: key in GOOGLE_API_KEY or GEMINI_API_KEY; openai: key in
    OPENAI_API_KEY, or any server with /chat/completions (vLLM, llama.cpp, Ollama), which needs no key; local: a model
    on this device, loaded beside the run's own for each use and unloaded after it"""
    judge_model: str = GEMINI
    """name of the judging model; required for openai; for local a folder, a hub id or tiny, by default --model"""
    judge_base_url: str | None = None
    """address of a compatible server, http(s)://..., which gets the key if there is one; for openai it ends in /v1"""
    judge_rpm: Free[Count] = 60
    """most requests a minute"""
    judge_concurrency: Free[Count] = 4
    """most concurrent requests"""
    judge_quantize: Literal["nf4", "none"] = "none"
    """quantization of the judging model (local)"""
    judge_max_length: Tokens = 8192
    """most tokens of a request and its reply together; a longer request is not sent and counts as failed (local)"""
    judge_timeout: Free[Positive] = 60.0
    """seconds after which a request counts as failed"""
    judge_retries: Free[Whole] = 4
    """tries after the first, with backoff"""
    judge_temperature: NonNegative | None = None
    """sampling temperature of the judge or teacher; by default not sent, because newer Gemini models fix it"""
    judge_thinking: bool = False
    """let the model think first; thoughts count against the output limit, which can cut the reply"""
    judge_max_calls: Free[Count | None] = None
    """most requests, with failed tries, between a start of the run and its end"""
    judge_max_cost: Free[Positive | None] = None
    """most US dollars in the same time, computed from --judge-input-price and --judge-output-price"""
    judge_input_price: Free[NonNegative | None] = None
    """US dollars per million input tokens; default: 0.30 for gemini-3.5-flash-lite and gemini-2.5-flash"""
    judge_output_price: Free[NonNegative | None] = None
    """US dollars per million output tokens; default: 2.50 for the same two"""
    judge_cache: Free[str | None] = None
    """folder of cached replies; default: judge-cache in the output folder, and for collect <output>.cache"""

    @property
    def local_model(self) -> str | None:
        """The model of --judge local; None: that of --model."""
        return None if self.judge_model == GEMINI else self.judge_model

    def check(self) -> None:
        if self.judge == "openai" and self.judge_model == GEMINI:
            raise UsageError("--judge-model is missing: with --judge openai it names the model of that server")
        if self.judge != "local" and not re.fullmatch(r"[\w.:/@-]+", self.judge_model, re.ASCII):
            raise UsageError(f"judge_model is {self.judge_model!r}, which no model is named")

    def __post_init__(self):
        if self.judge_base_url is not None:
            check_address("judge_base_url", self.judge_base_url, "https://example.com")
