"""Settings of the step format and the prompts."""

from dataclasses import dataclass
from typing import Literal

from r3lite.config import Section


@dataclass(frozen=True)
class ProtocolSettings(Section):
    """Step format and prompts."""

    format: Literal["r3", "tags", "solution"] = "r3"
    """r3: numbered steps of analysis and query or answer (arXiv 2505.23794); tags: think, search and answer in tags,
    in one assistant turn (arXiv 2503.09516); solution: working-out and solution in tags, without search"""
    init_prompt: str | None = None
    """file that opens an episode, with {question} [prompts/init_prompt.txt, prompts/tags/init_prompt.txt or
    prompts/solution/init_prompt.txt as shipped]"""
    step_prompt: str | None = None
    """file that gives the documents of a query, with {documents} [prompts/step_prompt.txt as shipped] (r3)"""
    tags: Literal["strict", "lenient"] = "strict"
    """lenient: a query or answer that is clear counts in spite of tags in other letter case, missing closing tags,
    missing thinking or text outside tags, and these are no faults (tags, solution)"""
    information_open: str = "<information>"
    """tag before the documents of a query (tags)"""
    information_close: str = "</information>"
    """tag after them (tags)"""
    system_prompt: str | None = None
    """system message; default: the one of the model's chat markup"""
