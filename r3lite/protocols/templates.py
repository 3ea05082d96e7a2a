"""Prompt files: text with placeholders in braces, and perhaps with a worked example as turns of a chat."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from r3lite.core.errors import R3LiteError, reason
from r3lite.core.files import shipped
from r3lite.settings import ProtocolSettings


def prompt_file(settings: ProtocolSettings, which: str) -> str | None:
    """Returns the prompt file that the settings name, or the format's own; None if the format has no such prompt.

    `which` is the name of the setting: `init_prompt` or `step_prompt`.
    """
    named_file = getattr(settings, which)
    if named_file:
        return named_file
    folder = f"prompts/{settings.format}"
    if settings.format == "r3":
        folder = "prompts"
    elif settings.format == "tags" and settings.search_graph:
        folder = "prompts/tags/graph"
    path = f"{folder}/{which}.txt"
    if shipped(path).exists():
        return path
    return None


def read_template(name: str, placeholder: str, optional: tuple[str, ...] = ()) -> str:
    """Returns the text of a prompt file that has `placeholder` once and no other but the `optional` ones."""
    text = read_prompt(name)
    check_placeholders(f"prompt file {place_of(name)}", text, placeholder=placeholder, optional=optional)
    return text


def check_placeholders(name: str, text: str, placeholder: str, optional: tuple[str, ...] = ()) -> None:
    """Raises R3LiteError unless a prompt has `placeholder` once and no other but the `optional` ones."""
    present = placeholders(text)
    if present.count(placeholder) != 1 or set(present) - {placeholder, *optional}:
        allowed = "".join(f", optionally {{{word}}}" for word in optional)
        remedy = f"It must have {{{placeholder}}} exactly once{allowed}, and no other word in braces."
        raise R3LiteError(f"{name} has the placeholders {present or 'none'}", remedy, code="prompt-placeholders")


def place_of(name: str) -> Path:
    """Returns the path of a prompt file: a relative one is looked up in the current folder, then in the package."""
    if Path(name).exists():
        return Path(name)
    return shipped(name)


def read_prompt(name: str) -> str:
    """Returns the text of a prompt file, whatever its placeholders are."""
    remedy = "Pass a UTF-8 text file."
    try:
        return place_of(name).read_text(encoding="utf-8-sig").strip()
    except FileNotFoundError as error:
        raise R3LiteError(
            f"prompt file {name} cannot be read: no such file", remedy, code="prompt-unreadable"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise R3LiteError(
            f"prompt file {name} cannot be read: {reason(error)}", remedy, code="prompt-unreadable"
        ) from error


def messages(prompt: str) -> list[dict[str, str]]:
    """Returns the messages of a prompt that opens an episode: a worked example, if there is one, and a user message.

    A line [user] or [assistant] begins a message; the first and the last are the user's, and they take turns. Text
    before the first of these lines opens the first message: instructions, which also hold without the example.
    """
    instructions, *parts = re.split(r"^\[(user|assistant)\]\n", prompt, flags=re.MULTILINE)
    if not parts:
        return [{"role": "user", "content": prompt}]
    roles = parts[::2]
    texts = [text.strip() for text in parts[1::2]]
    alternating = ["user"] + ["assistant", "user"] * (len(roles) // 2)
    if roles != alternating:
        remedy = "Alternate [user] and [assistant], with [user] first and last."
        raise R3LiteError(
            "the lines [user] and [assistant] in the opening prompt do not alternate", remedy, code="prompt-turns"
        )
    if not all(texts):
        raise R3LiteError(
            "a message of the opening prompt is empty",
            "Write a text below each line [user] and [assistant].",
            code="prompt-message-empty",
        )
    texts[0] = f"{instructions.strip()}\n\n{texts[0]}".strip()
    if any("{question}" in text for text in texts[:-1]):
        raise R3LiteError(
            "the opening prompt has {question} in its example",
            "Move it to the last message.",
            code="prompt-example-question",
        )
    return [{"role": role, "content": text} for role, text in zip(roles, texts)]


def opening_prompt(prompt: str, settings: ProtocolSettings) -> str:
    """Returns an opening prompt as the settings want it: whole, or without its worked example."""
    if settings.worked_example:
        return prompt
    instructions, *parts = re.split(r"^\[user\]\n", prompt, flags=re.MULTILINE)
    if not parts:
        return prompt
    return f"{instructions.strip()}\n\n{parts[-1]}".strip()


def refuse_step_prompt(settings: ProtocolSettings) -> None:
    """Raises R3LiteError if a format that has no user turn for documents is given a prompt for it."""
    if settings.step_prompt is not None:
        cause = f"--step-prompt gives documents in a user turn, which --format {settings.format} does not have"
        raise R3LiteError(cause, "Remove it, or pass --format r3.", code="step-prompt-unsupported")


def filled(prompt: str, values: Mapping[str, str]) -> str:
    """Returns a prompt with values for some of its placeholders; a placeholder inside a value stays as it is."""
    return re.sub(r"\{(\w+)\}", lambda place: values.get(place[1], place[0]), prompt)


def placeholders(text: str) -> list[str]:
    """Returns the words in braces of a prompt, in their order."""
    return re.findall(r"\{(\w+)\}", text)


def unfit(text: str, first_prompt: str) -> str | None:
    """Returns why a text cannot take the place of the first prompt of a tuning; None if it can.

    It cannot if it lacks a placeholder of that prompt, repeats one or has another, or if its messages make no chat.
    """
    wanted = Counter(placeholders(first_prompt))
    present = Counter(placeholders(text))
    problems = [f"it lost {{{name}}}" for name in wanted if not present[name]]
    problems += [f"it has {{{name}}} {present[name]} times" for name in wanted if present[name] > wanted[name]]
    problems += [f"it has {{{name}}}, which the first prompt does not have" for name in present if name not in wanted]
    try:
        messages(text)
    except R3LiteError as error:
        problems.append(error.cause)
    return "; ".join(problems) or None
