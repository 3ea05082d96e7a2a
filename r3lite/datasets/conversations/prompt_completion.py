"""`prompt` and `completion`, both text, as OpenAI's first fine-tuning files and TRL's standard format have them."""

from r3lite.datasets.conversations.conversation import turn
from r3lite.records import Record


def read(row: Record) -> list[dict[str, str]]:
    return [turn("user", row.text("prompt")), turn("assistant", row.text("completion").strip())]
