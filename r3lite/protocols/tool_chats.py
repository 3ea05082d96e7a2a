"""The tokens of a conversation with tools: those of the text that the chat template renders.

Every family writes calls and results in its own way, so the text is rendered whole, and what the assistant wrote is
found in it: from where a prompt would end, up to the token that ends the turn. Knows no particular template.
"""

import json
from collections.abc import Iterator, Sequence

from r3lite.core.errors import R3LiteError
from r3lite.protocols.chat_template import THINK, THOUGHT_END
from r3lite.protocols.tokenizer import Tokenizer

REMEDY = "Use a model whose chat template supports tools, such as Qwen2.5-Instruct, or remove such rows."


def tool_chat(tokenizer: Tokenizer, messages: Sequence[dict], tools: Sequence[dict]) -> tuple[list[int], list[bool]]:
    """Returns the tokens [T] of a conversation, and for each of them whether it is trained on [T], as `Tokenizer.chat`
    does without tools.

    Raises R3LiteError if the template leaves out a tool, a call, a result or a text, or changes earlier turns; also if
    one of these parts holds markup, which could not be distinguished from the template's.
    """
    template = tokenizer.template
    rendered = template.render(messages, tools=tools)
    _refuse_markup(tokenizer, messages, tools)
    ids: list[int] = []
    trained: list[bool] = []
    position = 0  # the tokens of the rendered text before this place are in `ids`
    parts = [("tools", tool.get("function", tool)["name"]) for tool in tools]  # what the next added text must have

    def add(end: int, is_trained: bool) -> None:
        """Adds the tokens of the rendered text from `position` to `end`."""
        nonlocal position
        text = rendered[position:end]
        position = end
        for key, part in parts:
            if part not in text and json.dumps(part, ensure_ascii=False)[1:-1] not in text:
                raise R3LiteError(
                    f"{template.where}: the chat template does not write {key} ({part[:60]!r})",
                    REMEDY,
                    code="template-tools",
                )
        parts.clear()
        tokens = tokenizer.encode_marked([text])
        ids.extend(tokens)
        trained.extend([is_trained] * len(tokens))

    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            parts += parts_of(message)
            continue
        prompt = template.render(messages[:number], prompt=True, tools=tools)
        if not rendered.startswith(prompt):
            # Without an empty thought, which a template may write in the last turn only.
            prompt = prompt.rpartition(THINK)[0]
        end = rendered.find(tokenizer.stop, len(prompt)) + len(tokenizer.stop)
        if not rendered.startswith(prompt) or not position < len(prompt) < end:
            raise R3LiteError(
                f"{template.where}: the chat template changes earlier turns with tools",
                REMEDY,
                code="template-rewrites-tools",
            )
        add(len(prompt), False)
        parts += parts_of(message)
        add(end, message.get("train", True))
    add(len(rendered), False)
    return ids, trained


def _refuse_markup(tokenizer: Tokenizer, messages: Sequence[dict], tools: Sequence[dict]) -> None:
    """Raises R3LiteError if a text, a call or a tool holds the model's markup."""
    calls = [message["tool_calls"] for message in messages if "tool_calls" in message]
    texts = [json.dumps([*calls, *tools], ensure_ascii=False)]
    for message in messages:
        texts += [part for _, part in parts_of(message)]
    for text in texts:
        markup = tokenizer.markup_in(text)
        if markup:
            raise R3LiteError(
                f"a conversation with tools contains the model's markup: {markup}",
                "Remove it.",
                code="markup-in-conversation",
            )


def parts_of(message: dict) -> Iterator[tuple[str, str]]:
    """Yields the texts of a message that a template must write, with the keys that they are from."""
    thought, _, text = message["content"].rpartition(THOUGHT_END)
    yield "content", text.strip()
    yield "reasoning_content", thought.removeprefix(THINK).strip()
    for call in message.get("tool_calls", ()):
        function = call["function"]
        yield "tool_calls", function["name"]
        for name in function["arguments"]:
            yield "tool_calls", name
        for value in function["arguments"].values():
            if isinstance(value, str):
                yield "tool_calls", value
