"""Conversations in the layouts that data sets publish, recognised by their keys, and what is refused in all of them.

A layout names the keys that it reads and those that it may leave unread. Any other key with something in it is refused,
in a row and in a message: what it says might change what is to be learned. To add a layout: a function that makes
messages of a row, and a line in LAYOUTS.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from r3lite.core.records import REQUIRED, InvalidRecord, Record, shown
from r3lite.protocols.chat_template import ROLES, THINK, THOUGHT_END

SHAREGPT_ROLES = {role: role for role in (*ROLES, "tool")} | {"human": "user", "gpt": "assistant"}
SHAREGPT_ROLES |= {"function_call": "assistant", "observation": "tool"}  # LLaMA-Factory's
SYSTEM, WEIGHTS, CALLED = ("system", "system_prompt"), ("weight", "train"), ("name", "arguments")
# Keys of a message of a role, beside those of its role and content.
MESSAGE_KEYS = {"system": WEIGHTS, "user": WEIGHTS, "assistant": (*WEIGHTS, "reasoning_content", "tool_calls")}
MESSAGE_KEYS["tool"] = (*WEIGHTS, "tool_call_id", "name")
# What data sets say of a row that is nothing to learn: where it is from, what it is about, how it was made.
IGNORED = ("id", "source", "dataset", "category", "subcategory", "task", "topic", "language", "difficulty", "quality",
           "model", "model_name", "title", "idx", "index", "uuid", "hash", "url", "license", "views", "avatarUrl",
           "prompt_id", "text", "custom_instruction", "skip_prompt_formatting")  # fmt: skip
GLAIVE_ROLES = {"SYSTEM": "system", "USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "user"}
GLAIVE_END = "<|endoftext|>"
# Turns begin lines; if none of the assistant's does, they follow any space.
GLAIVE_TURNS = [re.compile(rf"{start}({'|'.join(GLAIVE_ROLES)}):", re.M) for start in ("^", r"(?:(?<!\S)|(?<=\|>))")]


@dataclass(frozen=True)
class Conversation:
    """Chat messages with `role` and `content`; every assistant message is trained on whose `train` is not False.

    Messages may have `tool_calls`, `tool_call_id` and `name`, and the chat `tools`, as OpenAI's API has them.
    """

    id: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict, ...] = ()

    @property
    def question(self) -> str:
        """What the first reply that is trained on answers: the user's messages before it."""
        said = []
        for message in self.messages:
            if message["role"] == "assistant" and message.get("train", True):
                break
            if message["role"] == "user":
                said.append(message["content"])
        return "\n".join(said)

    @property
    def has_tools(self) -> bool:
        return bool(self.tools) or any(m["role"] == "tool" or "tool_calls" in m for m in self.messages)


@dataclass(frozen=True)
class RowLayout:
    """What makes messages of a row, and the keys that it reads, or may leave unread, beside its own and SYSTEM.

    `asks` are the keys of the question and the gold answer of a trace, which is asked in RL as it is.
    """

    messages: Callable[[Record], list[dict]]
    reads: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()
    asks: tuple[str, str] | None = None


def turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def reply(reasoning: str, answer: str) -> dict[str, Any]:
    """An assistant's turn with a thought, whose tags some data sets keep."""
    reasoning = reasoning.strip().removeprefix(THINK).removesuffix(THOUGHT_END).strip()
    return turn("assistant", f"{THINK}\n{reasoning}\n{THOUGHT_END}\n\n{answer.strip()}")


def from_messages(row: Record) -> list[dict]:
    """`messages` of `role` and `content`, as OpenAI's API and most chat data sets have them."""
    return [_message(m, "role", m.choice("role", MESSAGE_KEYS), "content") for m in row.records("messages")]


def from_sharegpt(row: Record) -> list[dict]:
    """`conversations` of `from` and `value`, as ShareGPT's, OpenHermes-2.5's and LLaMA-Factory's rows have them."""
    said = row.records("conversations")
    return [_message(m, "from", SHAREGPT_ROLES[m.choice("from", SHAREGPT_ROLES)], "value") for m in said]


def from_glaive(row: Record, key: str) -> list[dict]:
    """`chat` beside `system`, or `sample` with both: one text of several turns, as Glaive's function calling has them.

    Turns open with `USER:`, `ASSISTANT:`, ...; the assistant's end with `<|endoftext|>`. Calls stay as the assistant
    writes them, `<functioncall> {...}`; the response of a function is the next user turn, with its heading, as these
    chats name no tool.
    """
    splits = [turns.split(row.text(key).strip()) for turns in GLAIVE_TURNS]
    before, *pieces = splits["ASSISTANT" not in splits[0]]
    if before or not pieces:
        raise row.error(f"{key} does not start with USER:, ASSISTANT: or FUNCTION RESPONSE:")
    messages = []
    for heading, text in zip(pieces[::2], pieces[1::2], strict=True):
        text = text.strip().removesuffix(GLAIVE_END).strip()
        if GLAIVE_END in text:
            raise row.error(f"{key} has text after {GLAIVE_END} on the same line; turns must start on a new line")
        messages.append(turn(GLAIVE_ROLES[heading], f"{heading}: {text}" if heading == "FUNCTION RESPONSE" else text))
    return messages


def from_alpaca(row: Record) -> list[dict]:
    """`instruction`, `output` and perhaps an `input`, as Alpaca's and Evol-Instruct's rows have them, and a `history`
    of pairs of earlier turns, as LLaMA-Factory's.

    The input follows the instruction in the user's turn. Alpaca's own frame ("Below is an instruction ...") is left
    out: a chat model has its chat template.
    """
    messages = []
    for pair in row.items("history", ()):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise row.wrong("history", "a list of pairs of user message and reply")
        messages += [turn("user", pair[0]), turn("assistant", pair[1].strip())]
    asked, given = row.text("instruction"), row.text("input", "", blank=True)
    asked = f"{asked}\n\n{given}" if given.strip() else asked
    return [*messages, turn("user", asked), turn("assistant", row.text("output").strip())]


def from_completion(row: Record) -> list[dict]:
    """`prompt` and `completion`, both text, as OpenAI's first fine-tuning files and TRL's standard format have them."""
    return [turn("user", row.text("prompt")), turn("assistant", row.text("completion").strip())]


def from_r1(row: Record) -> list[dict]:
    """`question`, `reasoning` and `answer`: traces of a model that reasons first, such as DeepSeek-R1 (arXiv
    2501.12948). The assistant writes the reasoning between `<think>` and `</think>`, then the answer."""
    return [turn("user", row.text("question")), reply(row.text("reasoning"), row.text("answer"))]


def from_s1(row: Record) -> list[dict]:
    """`question`, `thinking_trajectories` (one) and `attempt`, as s1K's rows have them (arXiv 2501.19393)."""
    thoughts = row.texts("thinking_trajectories")
    if len(thoughts) != 1 or not thoughts[0].strip():
        raise row.wrong("thinking_trajectories", "a list of one text")
    return [turn("user", row.text("question")), reply(thoughts[0], row.text("attempt"))]


def from_openr1(row: Record) -> list[dict]:
    """`problem` and `generations`, as OpenR1-Math-220k's rows have them: the first that is complete, and right by
    Math-Verify or the judge, if the row has their verdicts."""
    generations = row.texts("generations")
    verdicts = {key: row.items(key) for key in OPENR1_VERDICTS if key in row}
    if wrong := next((key for key, flags in verdicts.items() if len(flags) != len(generations)), None):
        raise row.wrong(wrong, f"a list of {len(generations)}, one for each generation")
    complete = verdicts.pop("is_reasoning_complete", [True] * len(generations))
    for i, generation in enumerate(generations):
        thought, _, answer = generation.partition(THOUGHT_END)
        is_right = not verdicts or any(flags[i] is True for flags in verdicts.values())
        if complete[i] is True and is_right and answer.strip():
            return [turn("user", row.text("problem")), reply(thought, answer)]
    raise row.error("no generation is complete, correct by the verdicts, and has an answer after </think>")


OPENR1_VERDICTS = ("is_reasoning_complete", "correctness_math_verify", "correctness_llama")
OPENR1_IGNORED = "solution", "problem_type", "question_type", "finish_reasons", "correctness_count", "messages"
OPENR1_ASKS, S1_ASKS = ("problem", "answer"), ("question", "solution")
S1_IGNORED = "cot", "cot_type", "source_type", "metadata"
# The keys that a row of a layout has, and what is made of it.
LAYOUTS = {
    ("messages",): RowLayout(from_messages, ("tools",), ("prompt",)),
    ("conversations",): RowLayout(from_sharegpt, ("tools",)),
    ("chat",): RowLayout(partial(from_glaive, key="chat")),
    ("sample",): RowLayout(partial(from_glaive, key="sample")),
    ("instruction", "output"): RowLayout(from_alpaca, ("input", "history")),
    ("prompt", "completion"): RowLayout(from_completion),
    ("question", "reasoning", "answer"): RowLayout(from_r1, asks=("question", "answer")),
    ("question", "thinking_trajectories", "attempt"): RowLayout(from_s1, ("solution",), S1_IGNORED, S1_ASKS),
    ("problem", "generations"): RowLayout(from_openr1, ("answer", *OPENR1_VERDICTS), OPENR1_IGNORED, OPENR1_ASKS),
}
KNOWN_LAYOUTS = "; ".join(", ".join(keys) for keys in LAYOUTS)  # for errors


def _message(record: Record, role_key: str, role: str, key: str) -> dict:
    """A message of ours from one that has its role and content under other keys."""
    _refuse_others(record, (role_key, key, *MESSAGE_KEYS[role]))
    calls = _objects(record, "tool_calls")
    text = record.text(key, "" if calls else REQUIRED, blank=True)
    if record.values[role_key] == "function_call":
        text, calls = "", _objects(record, key)
    made = turn(role, text)
    if thought := record.text("reasoning_content", "", blank=True).strip():
        if text.lstrip().startswith(THINK) or not (calls or text.strip()):
            raise record.error(f"{record.path}reasoning_content needs a {key} that is not blank and has no thought")
        made = reply(thought, text)
    weights = {f"{record.path}{name}": record.values[name] for name in WEIGHTS if name in record}
    known = (0, 1) if role == "assistant" else (0,)
    if any(weight not in known for weight in weights.values()) or len(set(weights.values())) > 1:
        given = " and ".join(f"{name} is {shown(weight)}" for name, weight in weights.items())
        raise record.error(f"{given}: 0 and false exclude a message from training; 1 and true are for the assistant's")
    made |= {"tool_calls": [_call(call) for call in calls]} if calls else {}
    made |= {"train": False} if 0 in weights.values() else {}
    return made | {name: record.text(name) for name in ("tool_call_id", "name") if name in record}


def _call(call: Record) -> dict:
    """A call of a function, with its arguments as an object, as chat templates want it."""
    function = call.record("function") if "function" in call else call
    _refuse_others(call, ("id", "type", "index", *(CALLED if function is call else ["function"])))
    _refuse_others(function, CALLED if function is not call else call.values)
    arguments = Record(function.parsed("arguments") or {}, call.source, f"{function.path}arguments.").values
    named = {"id": call.text("id")} if "id" in call else {}
    kind = call.choice("type", ("function",), "function")
    return named | {"type": kind, "function": {"name": function.text("name"), "arguments": arguments}}


def _objects(record: Record, key: str) -> list[Record]:
    """The objects of a list, or one alone."""
    value = record.parsed(key) or []
    values = value if isinstance(value, list) else [value]
    return [Record(each, record.source, f"{record.path}{key}[{i}].") for i, each in enumerate(values)]


def _refuse_others(record: Record, known: Iterable[str]) -> None:
    """Raises InvalidRecord, which names it, if a record has a key with something in it that is not `known`."""
    for key, value in record.values.items():
        if key not in known and value not in (None, [], {}) and not (isinstance(value, str) and not value.strip()):
            cause = f"{record.source.where}: {record.path}{key} is {shown(value)}, but the key is unknown here"
            raise InvalidRecord(cause, f"Remove the key if it is not needed. Known keys: {', '.join(known)}.")


def layout_of(row: Record, others: Iterable[str] = ()) -> tuple[str, ...] | None:
    """The keys of the row's layout, or None; raises InvalidRecord at several, or one beside a key of `others`.

    Keys that another layout of the row knows, too, make no layout of their own.
    """
    found = [keys for keys in LAYOUTS if all(key in row for key in keys)]
    found = [keys for keys in found if not any(keys != one and set(keys) <= set(declared(one)) for one in found)]
    if len(both := [*found, *((key,) for key in others if key in row)]) > 1:
        raise row.error(f"the keys fit more than one layout: {'; '.join(', '.join(keys) for keys in both)}")
    return found[0] if found else None


def declared(keys: tuple[str, ...]) -> tuple[str, ...]:
    """All keys that a row of a layout may have."""
    return (*keys, *SYSTEM, *LAYOUTS[keys].reads, *LAYOUTS[keys].ignores, *IGNORED)


def read_conversation(row: Record, id: str, keys: tuple[str, ...]) -> Conversation:
    """The conversation of a row of that layout; raises InvalidRecord if nothing in it can be trained on."""
    _refuse_others(row, declared(keys))
    messages = LAYOUTS[keys].messages(row)
    first = [m["content"] for m in messages[:1] if m["role"] == "system"]
    given = [row.text(key, "", blank=True).strip().removeprefix("SYSTEM:").strip() for key in SYSTEM]
    if len(systems := list(dict.fromkeys([*first, *filter(None, given)]))) > 1:
        raise row.error(f"two different system messages, {shown(systems[0])} and {shown(systems[1])}")
    messages = [*(turn("system", text) for text in systems), *messages[len(first) :]]
    trained = [m for m in messages if m["role"] == "assistant" and m.get("train", True)]
    for number, message in enumerate(messages, 1):
        if message["role"] == "system" and number > 1:
            raise row.error(f"message {number} is a system message; only message 1 can be one")
        if message in trained and not (message["content"].strip() or "tool_calls" in message):
            raise row.error(f"message {number}, of the assistant, is empty: nothing to train on")
    if not trained:
        raise row.error("no assistant message with a weight other than 0: nothing to train on")
    tools = _objects(row, "tools")
    for tool in tools:  # what a chat template calls it by
        tool.choice("type", ("function",), "function")
        (tool.record("function") if "function" in tool else tool).text("name")
    return Conversation(id, tuple(messages), tuple(tool.values for tool in tools))
