"""`messages` of `role` and `content`, as OpenAI's API and most chat data sets have them."""

from r3lite.core.records import Record
from r3lite.datasets.conversations.conversation import turn
from r3lite.protocols.tokenizer import ROLES


def read(row: Record) -> list[dict[str, str]]:
    return [turn(m.choice("role", ROLES), m.text("content", blank=True)) for m in row.records("messages")]
