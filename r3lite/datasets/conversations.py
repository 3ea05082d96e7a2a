"""Conversations in the layouts that data sets publish, recognised by their keys, and what is refused in all of them.

A layout names the keys that it reads and those that it may leave unread. Any other key with something in it is refused,
in a row and in a message: what it says might change what is to be learned. To add a layout, write a function that makes
messages of a row, and add a line to LAYOUTS.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from r3lite.core.records import REQUIRED, InvalidRecord, Record, shown
from r3lite.protocols.chat_template import THINK, THOUGHT_END

SHAREGPT_ROLES = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "human": "user",
    "gpt": "assistant",
    # LLaMA-Factory's:
    "function_call": "assistant",
    "observation": "tool",
}
SYSTEM = ("system", "system_prompt")  # keys of a row, of any layout, that may hold the system message
WEIGHTS = ("weight", "train")  # keys of a message that may exclude it from training
CALL_KEYS = ("name", "arguments")
# The keys that a message of each role may have besides those of its role and its content.
MESSAGE_KEYS = {
    "system": WEIGHTS,
    "user": WEIGHTS,
    "assistant": (*WEIGHTS, "reasoning_content", "tool_calls"),
    "tool": (*WEIGHTS, "tool_call_id", "name"),
}
# Keys of a row that say nothing to learn: where it is from, what it is about, how it was made.
IGNORED = ("id", "source", "dataset", "category", "subcategory", "task", "topic", "language", "difficulty", "quality",
           "model", "model_name", "title", "idx", "index", "uuid", "hash", "url", "license", "views", "avatarUrl",
           "prompt_id", "text", "custom_instruction", "skip_prompt_formatting")  # fmt: skip
GLAIVE_ROLES = {"SYSTEM": "system", "USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "user"}
GLAIVE_END = "<|endoftext|>"
GLAIVE_HEADING = f"({'|'.join(GLAIVE_ROLES)}):"
GLAIVE_LINE_TURNS = re.compile(f"^{GLAIVE_HEADING}", re.M)
# For a text in which no line begins with `ASSISTANT:`: a turn may also begin within a line, after a space or `|>`.
GLAIVE_INLINE_TURNS = re.compile(rf"(?:(?<!\S)|(?<=\|>)){GLAIVE_HEADING}", re.M)


@dataclass(frozen=True)
class Conversation:
    """Chat messages with `role` and `content`; assistant messages are trained on unless their `train` is False.

    As in OpenAI's API, messages may have `tool_calls`, `tool_call_id` and `name`, and the chat may have `tools`.
    """

    id: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict, ...] = ()

    @property
    def question(self) -> str:
        """The user's messages before the first reply that is trained on, which answers them."""
        user_texts = []
        for message in self.messages:
            if is_trained(message):
                break
            if message["role"] == "user":
                user_texts.append(message["content"])
        return "\n".join(user_texts)

    @property
    def has_tools(self) -> bool:
        if self.tools:
            return True
        return any(message["role"] == "tool" or "tool_calls" in message for message in self.messages)


def is_trained(message: dict[str, Any]) -> bool:
    """Returns whether a message is a reply of the assistant that is trained on."""
    return message["role"] == "assistant" and message.get("train", True)


@dataclass(frozen=True)
class RowLayout:
    """How the messages of a row are read, and which keys it may have besides SYSTEM, IGNORED and those in LAYOUTS."""

    messages: Callable[[Record], list[dict]]
    reads: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()
    # In a layout of traces: the key of the question, which RL asks as it is, and the key of the answer. None: the rows
    # are conversations.
    question_and_answer: tuple[str, str] | None = None


def turn(role: str, content: str) -> dict[str, Any]:
    """Returns a message."""
    return {"role": role, "content": content}


def reply(reasoning: str, answer: str) -> dict[str, Any]:
    """Returns an assistant's turn with a thought. Some data sets keep the tags of the thought in `reasoning`."""
    reasoning = reasoning.strip().removeprefix(THINK).removesuffix(THOUGHT_END).strip()
    return turn("assistant", f"{THINK}\n{reasoning}\n{THOUGHT_END}\n\n{answer.strip()}")


def from_messages(row: Record) -> list[dict]:
    """Reads `messages` of `role` and `content`, as OpenAI's API and most chat data sets have them."""
    messages = []
    for record in row.records("messages"):
        role = record.choice("role", MESSAGE_KEYS)
        messages.append(_message(record, role, role_key="role", text_key="content"))
    return messages


def from_sharegpt(row: Record) -> list[dict]:
    """Reads `conversations` of `from` and `value`, as ShareGPT's, OpenHermes-2.5's and LLaMA-Factory's rows have
    them."""
    messages = []
    for record in row.records("conversations"):
        role = SHAREGPT_ROLES[record.choice("from", SHAREGPT_ROLES)]
        messages.append(_message(record, role, role_key="from", text_key="value"))
    return messages


def from_glaive(row: Record, key: str) -> list[dict]:
    """Reads `chat`, beside which the row has `system`, or `sample`, which includes the system message. Each is one text
    of several turns, as in Glaive's function-calling data.

    Turns open with `USER:`, `ASSISTANT:`, ...; the assistant's end with `<|endoftext|>`. Calls stay as the assistant
    writes them, `<functioncall> {...}`; the response of a function is the next user turn, with its heading, as these
    chats name no tool.
    """
    chat = row.text(key).strip()
    pieces = GLAIVE_LINE_TURNS.split(chat)
    if "ASSISTANT" not in pieces:
        pieces = GLAIVE_INLINE_TURNS.split(chat)
    preamble, *turns = pieces  # `turns` has headings and texts alternately
    if preamble or not turns:
        raise row.error(f"{key} does not start with {', '.join(f'{heading}:' for heading in GLAIVE_ROLES)}")
    headings = turns[::2]
    texts = turns[1::2]
    messages = []
    for heading, text in zip(headings, texts, strict=True):
        text = text.strip().removesuffix(GLAIVE_END).strip()
        if GLAIVE_END in text:
            raise row.error(f"{key} has text after {GLAIVE_END} on the same line; turns must start on a new line")
        if heading == "FUNCTION RESPONSE":
            text = f"{heading}: {text}"
        messages.append(turn(GLAIVE_ROLES[heading], text))
    return messages


def from_alpaca(row: Record) -> list[dict]:
    """Reads `instruction`, `output` and perhaps an `input`, as Alpaca's and Evol-Instruct's rows have them, and a
    `history` of pairs of earlier turns, as LLaMA-Factory's.

    The input follows the instruction in the user's turn. Alpaca's own frame ("Below is an instruction ...") is left
    out: a chat model has its chat template.
    """
    messages = []
    for pair in row.items("history", ()):
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise row.wrong("history", "a list of pairs of user message and reply")
        user, assistant = pair
        messages += [turn("user", user), turn("assistant", assistant.strip())]
    request = row.text("instruction")
    input_text = row.text("input", "", blank=True)
    if input_text.strip():
        request = f"{request}\n\n{input_text}"
    output = row.text("output").strip()
    return [*messages, turn("user", request), turn("assistant", output)]


def from_completion(row: Record) -> list[dict]:
    """Reads `prompt` and `completion`, both text, as OpenAI's first fine-tuning files and TRL's standard format have
    them."""
    prompt = row.text("prompt")
    completion = row.text("completion").strip()
    return [turn("user", prompt), turn("assistant", completion)]


def from_r1(row: Record) -> list[dict]:
    """Reads `question`, `reasoning` and `answer`: traces of a model that reasons first, such as DeepSeek-R1 (arXiv
    2501.12948). The assistant writes the reasoning between `<think>` and `</think>`, then the answer."""
    question = row.text("question")
    reasoning = row.text("reasoning")
    answer = row.text("answer")
    return [turn("user", question), reply(reasoning, answer)]


def from_s1(row: Record) -> list[dict]:
    """Reads `question`, `thinking_trajectories` (one) and `attempt`, as s1K's rows have them (arXiv 2501.19393)."""
    thoughts = row.texts("thinking_trajectories")
    if len(thoughts) != 1 or not thoughts[0].strip():
        raise row.wrong("thinking_trajectories", "a list of one text")
    question = row.text("question")
    attempt = row.text("attempt")
    return [turn("user", question), reply(thoughts[0], attempt)]


def from_openr1(row: Record) -> list[dict]:
    """Reads `problem` and `generations`, as OpenR1-Math-220k's rows have them.

    The reply is the first generation that has an answer, is complete, and is right by Math-Verify or by the judge.
    Without verdicts in the row, every generation counts as complete and right.
    """
    generations = row.texts("generations")
    verdicts = {key: row.items(key) for key in OPENR1_VERDICTS if key in row}
    for key, flags in verdicts.items():
        if len(flags) != len(generations):
            raise row.wrong(key, f"a list of {len(generations)}, one for each generation")
    complete = verdicts.pop("is_reasoning_complete", [True] * len(generations))
    correct = list(verdicts.values())  # the flags of Math-Verify and of the judge, as far as the row has them
    for i, generation in enumerate(generations):
        thought, _, answer = generation.partition(THOUGHT_END)
        is_right = not correct or any(flags[i] is True for flags in correct)
        if complete[i] is True and is_right and answer.strip():
            return [turn("user", row.text("problem")), reply(thought, answer)]
    raise row.error("no generation is complete, correct by the verdicts, and has an answer after </think>")


OPENR1_VERDICTS = ("is_reasoning_complete", "correctness_math_verify", "correctness_llama")
# The layouts, by the keys that every row of the layout has.
LAYOUTS = {
    ("messages",): RowLayout(from_messages, reads=("tools",), ignores=("prompt",)),
    ("conversations",): RowLayout(from_sharegpt, reads=("tools",)),
    ("chat",): RowLayout(partial(from_glaive, key="chat")),
    ("sample",): RowLayout(partial(from_glaive, key="sample")),
    ("instruction", "output"): RowLayout(from_alpaca, reads=("input", "history")),
    ("prompt", "completion"): RowLayout(from_completion),
    ("question", "reasoning", "answer"): RowLayout(from_r1, question_and_answer=("question", "answer")),
    ("question", "thinking_trajectories", "attempt"): RowLayout(
        from_s1,
        reads=("solution",),
        ignores=("cot", "cot_type", "source_type", "metadata"),
        question_and_answer=("question", "solution"),
    ),
    ("problem", "generations"): RowLayout(
        from_openr1,
        reads=("answer", *OPENR1_VERDICTS),
        ignores=("solution", "problem_type", "question_type", "finish_reasons", "correctness_count", "messages"),
        question_and_answer=("problem", "answer"),
    ),
}
KNOWN_LAYOUTS = "; ".join(", ".join(keys) for keys in LAYOUTS)  # for errors


def _message(record: Record, role: str, role_key: str, text_key: str) -> dict:
    """Returns a message with `role` and `content` of a record that has them under `role_key` and `text_key`."""
    _refuse_unknown(record, (role_key, text_key, *MESSAGE_KEYS[role]))
    calls = _objects(record, "tool_calls")
    default_text = REQUIRED
    if calls:
        default_text = ""
    text = record.text(text_key, default_text, blank=True)
    if record.values[role_key] == "function_call":  # the text is the call, as JSON
        text = ""
        calls = _objects(record, text_key)
    message = turn(role, text)
    thought = record.text("reasoning_content", "", blank=True).strip()
    if thought:
        if text.lstrip().startswith(THINK) or not (calls or text.strip()):
            cause = f"{record.path}reasoning_content needs a {text_key} that is not blank and has no thought"
            raise record.error(cause)
        message = reply(thought, text)
    is_excluded = _is_excluded(record, role)
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    if is_excluded:
        message["train"] = False
    for name in ("tool_call_id", "name"):
        if name in record:
            message[name] = record.text(name)
    return message


def _is_excluded(record: Record, role: str) -> bool:
    """Returns whether a message has a weight of 0 or false.

    Raises InvalidRecord if its weights differ, or if its role may not have one of them: 0 and false are allowed in all
    roles, 1 and true only in the assistant's.
    """
    weights = {f"{record.path}{name}": record.values[name] for name in WEIGHTS if name in record}
    allowed = [0]  # also allows False, which equals 0, as True equals 1
    if role == "assistant":
        allowed.append(1)
    are_allowed = all(weight in allowed for weight in weights.values())
    if not are_allowed or len(set(weights.values())) > 1:
        causes = " and ".join(f"{name} is {shown(weight)}" for name, weight in weights.items())
        raise record.error(f"{causes}: 0 and false exclude a message from training; 1 and true are for the assistant's")
    return 0 in weights.values()


def _call(call: Record) -> dict:
    """Returns a call of a function as chat templates want it; raises InvalidRecord if its arguments are no object."""
    if "function" in call:
        function = call.record("function")
        _refuse_unknown(call, ("id", "type", "index", "function"))
        _refuse_unknown(function, CALL_KEYS)
    else:
        function = call
        _refuse_unknown(call, ("id", "type", "index", *CALL_KEYS))
    arguments = Record(function.parsed("arguments") or {}, call.source, f"{function.path}arguments.")
    values: dict[str, Any] = {}
    if "id" in call:
        values["id"] = call.text("id")
    values["type"] = call.choice("type", ("function",), "function")
    values["function"] = {"name": function.text("name"), "arguments": arguments.values}
    return values


def _objects(record: Record, key: str) -> list[Record]:
    """Returns the objects of the list under a key, or the one object there; none if the value is missing or empty."""
    objects = record.parsed(key) or []
    if not isinstance(objects, list):
        objects = [objects]
    return [Record(value, record.source, f"{record.path}{key}[{i}].") for i, value in enumerate(objects)]


def _refuse_unknown(record: Record, allowed: Iterable[str]) -> None:
    """Raises InvalidRecord, which names the key, if a key that is not in `allowed` has a value that is not blank."""
    for key, value in record.values.items():
        if key in allowed or value in (None, [], {}):
            continue
        if isinstance(value, str) and not value.strip():
            continue
        cause = f"{record.source.where}: {record.path}{key} is {shown(value)}, but the key is unknown here"
        raise InvalidRecord(
            cause, f"Remove the key if it is not needed. Known keys: {', '.join(allowed)}.", code="unknown-row-key"
        )


Keys = tuple[str, ...]  # the keys in LAYOUTS by which a layout is recognised


def layout_of(row: Record, other_keys: Iterable[str] = ()) -> Keys | None:
    """Returns the keys of the row's layout; None if it has none.

    Raises InvalidRecord if the row fits several layouts, or one and also has a key of `other_keys`. A layout does not
    count if another layout that the row fits declares all its keys.
    """
    fitting = [keys for keys in LAYOUTS if all(key in row for key in keys)]
    layouts = [keys for keys in fitting if not _is_covered(keys, fitting)]
    rivals = layouts + [(key,) for key in other_keys if key in row]
    if len(rivals) > 1:
        raise row.error(f"the keys fit more than one layout: {'; '.join(', '.join(keys) for keys in rivals)}")
    if not layouts:
        return None
    return layouts[0]


def _is_covered(keys: Keys, layouts: list[Keys]) -> bool:
    """Returns whether another one of `layouts` declares all of these keys."""
    return any(keys != other and set(keys) <= set(declared(other)) for other in layouts)


def declared(keys: Keys) -> Keys:
    """Returns all keys that a row of the layout with these keys may have."""
    return (*keys, *SYSTEM, *LAYOUTS[keys].reads, *LAYOUTS[keys].ignores, *IGNORED)


def read_conversation(row: Record, id: str, keys: Keys) -> Conversation:
    """Returns the conversation of a row of the layout with these keys.

    Raises InvalidRecord if the row is malformed, or if nothing in it can be trained on.
    """
    _refuse_unknown(row, declared(keys))
    messages = _with_system(row, LAYOUTS[keys].messages(row))
    trained = [message for message in messages if is_trained(message)]
    for number, message in enumerate(messages, 1):
        if message["role"] == "system" and number > 1:
            raise row.error(f"message {number} is a system message; only message 1 can be one")
        if message in trained and not (message["content"].strip() or "tool_calls" in message):
            raise row.error(f"message {number}, of the assistant, is empty: nothing to train on")
    if not trained:
        raise row.error("no assistant message with a weight other than 0: nothing to train on")
    tools = _objects(row, "tools")
    for tool in tools:
        _check_tool(tool)
    return Conversation(id, tuple(messages), tuple(tool.values for tool in tools))


def _with_system(row: Record, messages: list[dict]) -> list[dict]:
    """Returns the messages with the row's system message first, if it has one.

    The system message may be the first of `messages` or stand under a key of SYSTEM. Raises InvalidRecord if there are
    two that differ.
    """
    systems = []
    if messages and messages[0]["role"] == "system":
        system, *messages = messages
        systems.append(system["content"])
    for key in SYSTEM:
        text = row.text(key, "", blank=True).strip()
        text = text.removeprefix("SYSTEM:").strip()
        if text:
            systems.append(text)
    systems = list(dict.fromkeys(systems))
    if len(systems) > 1:
        raise row.error(f"two different system messages, {shown(systems[0])} and {shown(systems[1])}")
    return [turn("system", text) for text in systems] + messages


def _check_tool(tool: Record) -> None:
    """Raises InvalidRecord unless a tool has a name, by which a chat template calls it."""
    tool.choice("type", ("function",), "function")
    function = tool
    if "function" in tool:
        function = tool.record("function")
    function.text("name")
