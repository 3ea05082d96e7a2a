"""`conversations` of `from` and `value`, as ShareGPT's and OpenHermes-2.5's rows have them."""

from r3lite.core.records import Record
from r3lite.datasets.conversations.conversation import turn

ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


def read(row: Record) -> list[dict[str, str]]:
    said = row.records("conversations")
    return [turn(ROLES[m.choice("from", ROLES)], m.text("value", blank=True)) for m in said]
