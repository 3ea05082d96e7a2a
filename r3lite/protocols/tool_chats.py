"""The tokens of a conversation with tools: those of the text that the chat template renders.

Every family writes calls and results in its own way, so the text is rendered whole, and what the assistant wrote is
found in it: from where a prompt would end, up to the token that ends the turn. Knows no template.
"""

import json
from collections.abc import Iterator, Sequence

from r3lite.core.errors import R3LiteError
from r3lite.protocols.chat_template import THINK, THOUGHT_END
from r3lite.protocols.tokenizer import Tokenizer

REMEDY = "Use a model whose chat template supports tools, such as Qwen2.5-Instruct, or remove such rows."


def tool_chat(tokenizer: Tokenizer, messages: Sequence[dict], tools: Sequence[dict]) -> tuple[list[int], list[bool]]:
    """Tokens of a conversation, and which of them are to be trained on, as `Tokenizer.chat` has them without tools.

    Raises R3LiteError if the template leaves out a tool, a call, a result or a text, or if one of these holds markup,
    which could not be distinguished from the template's.
    """
    template, ids, trained = tokenizer.template, [], []
    parts = [("tools", tool.get("function", tool)["name"]) for tool in tools]  # which the next text must have
    whole, done = template.render(messages, tools=tools), 0

    def add(end: int, is_trained: bool) -> None:
        nonlocal done
        text, done = whole[done:end], end
        for key, part in parts:
            if part not in text and json.dumps(part, ensure_ascii=False)[1:-1] not in text:
                raise R3LiteError(f"{template.where}: the chat template does not write {key} ({part[:60]!r})", REMEDY)
        parts.clear()
        tokens = tokenizer.encode_marked([text])
        ids.extend(tokens)
        trained.extend([is_trained] * len(tokens))

    calls = [message["tool_calls"] for message in messages if "tool_calls" in message]
    texts = [part for message in messages for _, part in parts_of(message)]
    for text in (json.dumps([*calls, *tools], ensure_ascii=False), *texts):
        if found := tokenizer.markup_in(text):
            raise R3LiteError(f"a conversation with tools contains the model's markup: {found}", "Remove it.")
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            start = template.render(messages[:number], True, tools)
            if not whole.startswith(start):
                start = start.rpartition(THINK)[0]  # an empty thought, which a template may write in its last turn only
            end = whole.find(tokenizer.stop, len(start)) + len(tokenizer.stop)
            if not whole.startswith(start) or not done < len(start) < end:
                raise R3LiteError(f"{template.where}: the chat template changes earlier turns with tools", REMEDY)
            add(len(start), False)
            parts += parts_of(message)
            add(end, message.get("train", True))
        else:
            parts += parts_of(message)
    add(len(whole), False)
    return ids, trained


def parts_of(message: dict) -> Iterator[tuple[str, str]]:
    """The texts of a message that a template must write, with the keys that they are from."""
    thought, _, text = message["content"].rpartition(THOUGHT_END)
    yield "content", text.strip()
    yield "reasoning_content", thought.removeprefix(THINK).strip()
    for call in message.get("tool_calls", ()):
        function = call["function"]
        said = [value for value in function["arguments"].values() if isinstance(value, str)]
        yield from (("tool_calls", part) for part in (function["name"], *function["arguments"], *said))
