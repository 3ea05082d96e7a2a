"""`system` and `chat`, one text of several turns each, as glaive-function-calling-v2's rows have them.

`chat` is turns that open with `USER:`, `ASSISTANT:` or `FUNCTION RESPONSE:` at the start of a line; the assistant's end
with `<|endoftext|>`. Calls stay as the assistant writes them, `<functioncall> {...}`; the response of a function is the
next user turn, with its heading, as a chat has no other turn that is not trained on.
"""

import re

from r3lite.core.records import Record
from r3lite.datasets.conversations.conversation import turn

TURN = re.compile(r"^(USER|ASSISTANT|FUNCTION RESPONSE):", re.MULTILINE)
END = "<|endoftext|>"


def read(row: Record) -> list[dict[str, str]]:
    system, chat = row.text("system", blank=True), row.text("chat")
    before, *pieces = TURN.split(chat)
    if before.strip() or not pieces:
        raise row.error("chat does not open with USER:, ASSISTANT: or FUNCTION RESPONSE:")
    system = system.strip().removeprefix("SYSTEM:").strip()
    messages = [turn("system", system)] if system else []
    for heading, text in zip(pieces[::2], pieces[1::2], strict=True):
        text = text.strip().removesuffix(END).strip()
        if heading == "FUNCTION RESPONSE":
            text = f"{heading}: {text}"
        messages.append(turn("assistant" if heading == "ASSISTANT" else "user", text))
    return messages
