"""Settings of the model that judges answers and steps, teaches, or criticizes prompts."""

import re
from typing import ClassVar, Literal

from r3lite.core.config import Basic, Count, Free, NonNegative, Positive, Section, Tokens, UsageError, Whole
from r3lite.core.needs import Needs, NeedsOthers
from r3lite.settings.addresses import check_address
from r3lite.settings.conditions import judges

GEMINI = "gemini-3.5-flash-lite"  # the default of --judge-model


class JudgeSettings(Section):
    """Judge."""

    needs: ClassVar = (
        NeedsOthers("", "--judge, or --source teacher in collect", judges, but="judge"),
        Needs("judge_quantize judge_max_length", "--judge local", lambda s: s.judge == "local"),
        Needs(
            "judge_base_url judge_rpm judge_concurrency judge_timeout judge_retries judge_thinking judge_max_cost "
            "judge_input_price judge_output_price",
            "--judge gemini or openai",
            lambda s: s.judge != "local",
        ),
    )

    judge: Basic[Literal["none", "gemini", "openai", "local"]] = "none"
    """model that judges answers and steps. gemini: key in GOOGLE_API_KEY or GEMINI_API_KEY; openai: OpenAI with the key
    in OPENAI_API_KEY, or any server with /chat/completions (vLLM, llama.cpp, Ollama), without a key; local: a model on
    this device, loaded for each use next to the run's own model, then unloaded"""
    judge_model: str = GEMINI
    """name of the judge's model; required for openai; for local: folder, hub id or tiny; default: --model"""
    judge_base_url: str | None = None
    """address of a compatible server, http(s)://..., which receives the key if one is set; for openai it ends in /v1"""
    judge_rpm: Free[Count] = 60
    """maximum requests per minute"""
    judge_concurrency: Free[Count] = 4
    """maximum concurrent requests"""
    judge_quantize: Literal["nf4", "none"] = "none"
    """quantization of the judge's model (local)"""
    judge_max_length: Tokens = 8192
    """maximum tokens of a request plus its reply; a longer request is not sent and counts as failed (local)"""
    judge_timeout: Free[Positive] = 60.0
    """seconds after which a request counts as failed"""
    judge_retries: Free[Whole] = 4
    """retries of a failed request, with backoff"""
    judge_temperature: NonNegative | None = None
    """sampling temperature of the judge or teacher; default: not sent, as newer Gemini models have a fixed one"""
    judge_thinking: bool = False
    """let the judge think first; thoughts count towards the output limit, so a reply may be cut"""
    judge_max_calls: Free[Count | None] = None
    """maximum requests, failed tries included, until the run ends or is resumed"""
    judge_max_cost: Free[Positive | None] = None
    """maximum US dollars until the run ends or is resumed, computed from --judge-input-price and -output-price"""
    judge_input_price: Free[NonNegative | None] = None
    """US dollars per million input tokens; default: 0.30 for gemini-3.5-flash-lite and gemini-2.5-flash"""
    judge_output_price: Free[NonNegative | None] = None
    """US dollars per million output tokens; default: 2.50 for gemini-3.5-flash-lite and gemini-2.5-flash"""
    judge_cache: Free[str | None] = None
    """folder that caches replies; default: judge-cache in the output folder; for collect, <output>.cache"""

    @property
    def local_model(self) -> str | None:
        """The model of --judge local; None: that of --model, as --judge-model is not set."""
        return None if self.judge_model == GEMINI else self.judge_model

    def check(self) -> None:
        if self.judge == "openai" and self.judge_model == GEMINI:
            raise UsageError(
                "--judge-model is missing: --judge openai needs the name of the server's model",
                code="judge-model-missing",
            )
        if self.judge != "local" and not re.fullmatch(r"[\w.:/@-]+", self.judge_model, re.ASCII):
            raise UsageError(
                f"--judge-model is {self.judge_model!r}, which is not a valid name", code="judge-model-name"
            )

    def __post_init__(self):
        if self.judge_base_url is not None:
            check_address("--judge-base-url", self.judge_base_url, "https://example.com")
