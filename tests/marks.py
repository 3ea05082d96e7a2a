"""A request for a mark, as tests of the language-model client make it."""

from dataclasses import dataclass

from r3lite.llm.replies import Request

MARK = {"type": "object", "properties": {"mark": {"type": "number"}}, "required": ["mark"]}


@dataclass(frozen=True)
class Mark:
    mark: float


def read_mark(data):
    if not isinstance(data, dict) or not isinstance(data.get("mark"), (int, float)):
        raise ValueError(f"{data} has no mark")
    return Mark(data["mark"])


def ask(prompt, **fields):
    """A request for a mark."""
    return Request(prompt, schema=MARK, read=read_mark, **fields)


ASK = ask("How good?")
