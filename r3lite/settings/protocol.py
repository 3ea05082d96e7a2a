"""Settings of the step format and the prompts."""

from dataclasses import dataclass
from typing import Literal

from r3lite.config import Section


@dataclass(frozen=True)
class ProtocolSettings(Section):
    """Step format and prompts."""

    format: Literal["r3"] = "r3"
    """r3: numbered steps of analysis and query or answer (arXiv 2505.23794)"""
    init_prompt: str | None = None
    """file that opens an episode, with {question} [prompts/init_prompt.txt as shipped]"""
    step_prompt: str | None = None
    """file that gives the documents of a query, with {documents} [prompts/step_prompt.txt as shipped]"""
    system_prompt: str | None = None
    """system message; default: the one of the model's chat markup"""
