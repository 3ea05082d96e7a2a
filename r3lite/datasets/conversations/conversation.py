"""What every layout of conversations becomes, and what is refused in all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from r3lite.core.records import Record


@dataclass(frozen=True)
class Conversation:
    """Chat messages with `role` and `content`; every assistant message is trained on."""

    id: str
    messages: tuple[dict[str, str], ...]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def conversation(row: Record, id: str, messages: Sequence[dict[str, str]]) -> Conversation:
    """The conversation of these messages; raises InvalidRecord if nothing in it can be trained on."""
    for number, message in enumerate(messages, 1):
        if message["role"] == "system" and number > 1:
            raise row.error(f"message {number} is a system message; only the first may be one")
        if message["role"] == "assistant" and not message["content"].strip():
            raise row.error(f"message {number} is an empty one of the assistant's: there is nothing to train on")
    if not any(message["role"] == "assistant" for message in messages):
        raise row.error("no assistant message: there is nothing to train on")
    return Conversation(id, tuple(messages))
