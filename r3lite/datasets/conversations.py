"""Conversations in the layouts that data sets publish, told apart by their keys, and what is refused in all of them.

To add a layout: a function that makes messages of a row, and a line in LAYOUTS.
"""

import re
from dataclasses import dataclass

from r3lite.core.records import Record
from r3lite.protocols.tokenizer import ROLES

SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
GLAIVE_TURN = re.compile(r"^(USER|ASSISTANT|FUNCTION RESPONSE):", re.MULTILINE)
GLAIVE_END = "<|endoftext|>"


@dataclass(frozen=True)
class Conversation:
    """Chat messages with `role` and `content`; every assistant message is trained on."""

    id: str
    messages: tuple[dict[str, str], ...]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def from_messages(row: Record) -> list[dict[str, str]]:
    """`messages` of `role` and `content`, as OpenAI's API and most chat data sets have them."""
    return [turn(m.choice("role", ROLES), m.text("content", blank=True)) for m in row.records("messages")]


def from_sharegpt(row: Record) -> list[dict[str, str]]:
    """`conversations` of `from` and `value`, as ShareGPT's and OpenHermes-2.5's rows have them."""
    said = row.records("conversations")
    return [turn(SHAREGPT_ROLES[m.choice("from", SHAREGPT_ROLES)], m.text("value", blank=True)) for m in said]


def from_glaive(row: Record) -> list[dict[str, str]]:
    """`system` and `chat`, one text of several turns each, as glaive-function-calling-v2's rows have them.

    `chat` is turns that open with `USER:`, `ASSISTANT:` or `FUNCTION RESPONSE:` at the start of a line; the assistant's
    end with `<|endoftext|>`. Calls stay as the assistant writes them, `<functioncall> {...}`; the response of a
    function is the next user turn, with its heading, as a chat has no other turn that is not trained on.
    """
    system, chat = row.text("system", blank=True), row.text("chat")
    before, *pieces = GLAIVE_TURN.split(chat)
    if before.strip() or not pieces:
        raise row.error("chat does not open with USER:, ASSISTANT: or FUNCTION RESPONSE:")
    system = system.strip().removeprefix("SYSTEM:").strip()
    messages = [turn("system", system)] if system else []
    for heading, text in zip(pieces[::2], pieces[1::2], strict=True):
        text = text.strip().removesuffix(GLAIVE_END).strip()
        if heading == "FUNCTION RESPONSE":
            text = f"{heading}: {text}"
        messages.append(turn("assistant" if heading == "ASSISTANT" else "user", text))
    return messages


def from_alpaca(row: Record) -> list[dict[str, str]]:
    """`instruction`, `output` and perhaps an `input`, as Alpaca's and Evol-Instruct's rows have them.

    The input follows the instruction in the user's turn. Alpaca's own frame ("Below is an instruction ...") is left
    out: a chat model has its chat template.
    """
    asked, given = row.text("instruction"), row.text("input", "", blank=True)
    asked = f"{asked}\n\n{given}" if given.strip() else asked
    return [turn("user", asked), turn("assistant", row.text("output").strip())]


def from_completion(row: Record) -> list[dict[str, str]]:
    """`prompt` and `completion`, both text, as OpenAI's first fine-tuning files and TRL's standard format have them."""
    return [turn("user", row.text("prompt")), turn("assistant", row.text("completion").strip())]


def from_r1(row: Record) -> list[dict[str, str]]:
    """`question`, `reasoning` and `answer`: traces of a model that reasons first, such as DeepSeek-R1 (arXiv
    2501.12948). The assistant writes the reasoning between `<think>` and `</think>`, then the answer."""
    reasoning, answer = row.text("reasoning").strip(), row.text("answer").strip()
    reasoning = reasoning.removeprefix("<think>").removesuffix("</think>").strip()
    return [turn("user", row.text("question")), turn("assistant", f"<think>\n{reasoning}\n</think>\n\n{answer}")]


# The keys that a row of a layout has, and what makes messages of it.
LAYOUTS = {
    ("messages",): from_messages,
    ("conversations",): from_sharegpt,
    ("system", "chat"): from_glaive,
    ("instruction", "output"): from_alpaca,
    ("prompt", "completion"): from_completion,
    ("question", "reasoning", "answer"): from_r1,
}


def layouts_of(row: Record) -> list[tuple[str, ...]]:
    """The layouts whose keys a row has."""
    return [keys for keys in LAYOUTS if all(key in row for key in keys)]


def read_conversation(row: Record, id: str, layout: tuple[str, ...]) -> Conversation:
    """The conversation of a row of that layout; raises InvalidRecord if nothing in it can be trained on."""
    messages = LAYOUTS[layout](row)
    for number, message in enumerate(messages, 1):
        if message["role"] == "system" and number > 1:
            raise row.error(f"message {number} is a system message; only the first may be one")
        if message["role"] == "assistant" and not message["content"].strip():
            raise row.error(f"message {number} is an empty one of the assistant's: there is nothing to train on")
    if not any(message["role"] == "assistant" for message in messages):
        raise row.error("no assistant message: there is nothing to train on")
    return Conversation(id, tuple(messages))
