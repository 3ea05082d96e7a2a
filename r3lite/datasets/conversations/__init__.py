"""Conversations in the layouts that data sets publish, told apart by their keys; one file a layout."""

from r3lite.core.records import Record
from r3lite.datasets.conversations import alpaca, glaive, messages, prompt_completion, r1, sharegpt
from r3lite.datasets.conversations.conversation import Conversation, conversation

# The keys that a row of a layout has, and what makes messages of it.
LAYOUTS = {
    ("messages",): messages.read,
    ("conversations",): sharegpt.read,
    ("system", "chat"): glaive.read,
    ("instruction", "output"): alpaca.read,
    ("prompt", "completion"): prompt_completion.read,
    ("question", "reasoning", "answer"): r1.read,
}


def layouts_of(row: Record) -> list[tuple[str, ...]]:
    """The layouts whose keys a row has."""
    return [keys for keys in LAYOUTS if all(key in row for key in keys)]


def read_conversation(row: Record, id: str, layout: tuple[str, ...]) -> Conversation:
    """The conversation of a row of that layout; raises InvalidRecord."""
    return conversation(row, id, LAYOUTS[layout](row))
