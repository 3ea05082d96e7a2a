"""`prompt` and `completion`, both text, as OpenAI's first fine-tuning files and TRL's standard format have them."""

from r3lite.core.records import Record
from r3lite.datasets.conversations.conversation import turn


def read(row: Record) -> list[dict[str, str]]:
    return [turn("user", row.text("prompt")), turn("assistant", row.text("completion").strip())]
