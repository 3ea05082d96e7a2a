"""Conversations in the layouts of published data sets: rows as these have them, and what is wrong with others."""

import json

import pytest

from r3lite.core.errors import R3LiteError
from r3lite.core.records import InvalidRecord, Record, Source
from r3lite.datasets.conversations import LAYOUTS, declared, layout_of
from r3lite.datasets.trajectories import Conversation, read_rows, row_from_json
from r3lite.protocols.registry import build_protocol
from r3lite.settings import ProtocolSettings
from tests.errors import raises

FORMAT = build_protocol(ProtocolSettings())
MESSAGES = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where is Oslo?"},
        {"role": "assistant", "content": "In Norway."},
    ],
    "source": "x",
}
SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "Name a fjord.", "weight": None},
        {"from": "gpt", "value": "Sognefjord", "weight": 1.0},
        {"from": "human", "value": "Another?"},
        {"from": "gpt", "value": "Hardangerfjord"},
    ],
    "source": "airoboros2.2",
    "system_prompt": None,
}
ALPACA = {
    "instruction": "Name the odd one out.",
    "input": "Oslo, Bergen, Rome",
    "output": "Rome",
    "text": "Below is ...",
}
EVOL = {"instruction": "Add 1 and 2 in Python.", "output": "print(1 + 2)\n"}
PROMPT = {"prompt": "The sky is", "completion": " blue."}
GLAIVE = {
    "system": "SYSTEM: You may use this function:\n{\n    \"name\": \"rate\"\n}\n",
    "chat": "USER: How many kroner is a dollar?\n\n\n"
    "ASSISTANT: <functioncall> {\"name\": \"rate\", \"arguments\": '{\"of\": \"USD\"}'} <|endoftext|>\n\n\n"
    "FUNCTION RESPONSE: {\"rate\": 10.5}\n\n\n"
    "ASSISTANT: About 10.5.\nUSER is not meant here: nor is this. <|endoftext|>\n\n\n",
}  # fmt: skip
R1 = {"question": "What is 2 + 2?", "reasoning": "Two and two\nmake four.", "answer": "4"}


def turns_of(row):
    conversation = row_from_json(Record(row, Source("x.jsonl, line 1")), FORMAT, "x-1")
    assert isinstance(conversation, Conversation) and conversation.id == "x-1"
    return [(m["role"], m["content"]) for m in conversation.messages]


def test_messages():
    assert turns_of(MESSAGES) == [("system", "Be brief."), ("user", "Where is Oslo?"), ("assistant", "In Norway.")]


def test_sharegpt():
    assert turns_of(SHAREGPT) == [
        ("user", "Name a fjord."),
        ("assistant", "Sognefjord"),
        ("user", "Another?"),
        ("assistant", "Hardangerfjord"),
    ]
    opened = {"conversations": [{"from": "system", "value": "Be kind."}, *SHAREGPT["conversations"]]}
    assert turns_of(opened)[0] == ("system", "Be kind.")


def test_alpaca():
    assert turns_of(ALPACA) == [("user", "Name the odd one out.\n\nOslo, Bergen, Rome"), ("assistant", "Rome")]
    assert turns_of(ALPACA | {"input": ""})[0] == ("user", "Name the odd one out.")
    assert turns_of(EVOL) == [("user", "Add 1 and 2 in Python."), ("assistant", "print(1 + 2)")]


def test_prompt_and_completion():
    assert turns_of(PROMPT) == [("user", "The sky is"), ("assistant", "blue.")]


def test_glaive():
    assert turns_of(GLAIVE) == [
        ("system", 'You may use this function:\n{\n    "name": "rate"\n}'),
        ("user", "How many kroner is a dollar?"),
        ("assistant", '<functioncall> {"name": "rate", "arguments": \'{"of": "USD"}\'}'),
        ("user", 'FUNCTION RESPONSE: {"rate": 10.5}'),
        ("assistant", "About 10.5.\nUSER is not meant here: nor is this."),
    ]
    assert turns_of(GLAIVE | {"system": " "})[0] == ("user", "How many kroner is a dollar?")


def test_r1():
    expected = [("user", "What is 2 + 2?"), ("assistant", "<think>\nTwo and two\nmake four.\n</think>\n\n4")]
    assert turns_of(R1) == expected
    # Some sets keep the tags.
    assert turns_of(R1 | {"reasoning": "<think>\nTwo and two\nmake four.\n</think>"}) == expected


S1 = {"question": "2 + 2?", "thinking_trajectories": ["Two and two\nmake four."], "attempt": "4", "solution": "four"}
OPENR1 = {
    "problem": "2 + 2?",
    "solution": "It is 4.",
    "answer": "4",
    "source": "olympiads",
    "generations": [
        "<think>\na\n</think>\n\n5",
        "<think>\nb",
        "<think>\nc\n</think>\n\n4",
        "<think>\nd\n</think>\n\nfour",
    ],
    "is_reasoning_complete": [True, False, True, True],
    "correctness_math_verify": [False, True, True, True],
    "messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "<think>\nc\n</think>\n\n4"}],
}
SAMPLE = {"sample": f"{GLAIVE['system']}\n{GLAIVE['chat']}"}
ROWS = [MESSAGES, SHAREGPT, GLAIVE, SAMPLE, ALPACA, PROMPT, R1, S1, OPENR1]
THOUGHT = "<think>\nTwo and two\nmake four.\n</think>\n\n"


def test_every_layout_is_read_from_one_file(tmp_path):
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    ids = [f"mixed-{i}" for i in range(1, len(ROWS) + 1)]
    assert [row.id for row in read_rows(tmp_path / "mixed.jsonl", FORMAT)] == ids
    assert [layout_of(Record(row, Source(""))) for row in ROWS] == list(LAYOUTS)


def read(row) -> Conversation:
    return row_from_json(Record(row, Source("x.jsonl, line 1")), FORMAT, "x-1")


def with_key(messages: list[dict], number: int, key: str, value) -> list[dict]:
    return [*messages[:number], messages[number] | {key: value}, *messages[number + 1 :]]


@pytest.mark.parametrize("row", ROWS, ids=map(" ".join, LAYOUTS))
@pytest.mark.parametrize("value", ["x", 0, False, [0], {"a": None}])
def test_a_key_that_a_layout_does_not_declare_is_refused_by_name(row, value):
    """It was dropped, whatever it said of the training."""
    with raises(InvalidRecord, "unknown-row-key", f"line 1: trainable is {value!r}, but"):
        read(row | {"trainable": value})
    assert read(row | {"trainable": None, "loss": "", "more": [], "other": {}}) == read(row)  # as tables fill columns


@pytest.mark.parametrize(("keys", "row"), list(zip(LAYOUTS, ROWS, strict=True)))
def test_every_key_that_a_layout_declares_is_read(keys, row):
    tool = {"type": "function", "function": {"name": "rate", "parameters": {}}}
    values = {"system": "Be brief.", "system_prompt": "Be brief.", "tools": [tool], "history": [["Hi", "Hello"]]}
    values |= {"input": "Oslo", "correctness_llama": [False] * 4}
    without = {"sample": GLAIVE["chat"]} if keys == ("sample",) else {}
    full_row = {key: values.get(key, "x") for key in declared(keys)} | row | without | {"system": "Be brief."}
    conversation = read(full_row)
    assert layout_of(Record(full_row, Source(""))) == keys
    assert conversation.messages[0] == {"role": "system", "content": "Be brief."}
    assert conversation.tools == ((tool,) if "tools" in declared(keys) else ())
    assert tuple(m["content"] for m in conversation.messages[1:3]) == ("Hi", "Hello") or "history" not in declared(keys)


@pytest.mark.parametrize(("key", "of"), [("messages", MESSAGES), ("conversations", SHAREGPT)])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("unknown", ["trainable", "loss_weight", "name", "function_call", "refusal"])
def test_a_key_of_a_message_that_is_not_known_is_refused_by_name(key, of, number, unknown):
    with raises(InvalidRecord, "unknown-row-key", f"line 1: {key}[{number}].{unknown} is 0.5"):
        read(of | {key: with_key(of[key], number, unknown, 0.5)})


@pytest.mark.parametrize(("key", "of", "number"), [("messages", MESSAGES, 2), ("conversations", SHAREGPT, 1)])
def test_weights_say_which_replies_are_trained_on(key, of, number):
    """A message of weight 0 was trained on."""
    of = of | {key: [{k: v for k, v in message.items() if k != "weight"} for message in of[key]]}
    longer = of | {key: [*of[key], *of[key][-2:]]}
    for name, value in (("weight", 0), ("weight", 0.0), ("train", False), ("train", 0)):
        assert [
            m.get("train", True) for m in read(longer | {key: with_key(longer[key], number, name, value)}).messages
        ] == [i != number for i in range(len(longer[key]))]
    for name, value in (("weight", 1), ("weight", 1.0), ("train", True)):
        assert all(m.get("train", True) for m in read(of | {key: with_key(of[key], number, name, value)}).messages)
    assert read(of | {key: with_key(of[key], number - 1, "weight", 0)}).messages[number - 1]["role"] == "user"
    with raises(InvalidRecord, "bad-record", "weight"):
        read(MESSAGES | {"messages": with_key(MESSAGES["messages"], 2, "weight", 0)})


@pytest.mark.parametrize("field", [{"weight": 0.5}, {"weight": 2}, {"weight": "1"}, {"train": "yes"}, {"weight": [1]}])
def test_weights_that_no_loss_has_are_refused_by_name(field):
    (key,) = field
    with raises(InvalidRecord, "bad-record", f"messages[2].{key} is {field[key]!r}"):
        read(MESSAGES | {"messages": [*MESSAGES["messages"][:2], MESSAGES["messages"][2] | field]})


def test_weights_that_say_two_things_or_are_not_the_assistants_are_refused():
    both = {"weight": 1, "train": False}
    with raises(InvalidRecord, "bad-record", "messages[2].weight is 1", "messages[2].train is False"):
        read(MESSAGES | {"messages": [*MESSAGES["messages"][:2], MESSAGES["messages"][2] | both]})
    with raises(InvalidRecord, "bad-record", "messages[1].weight is 1", "assistant"):
        read(MESSAGES | {"messages": with_key(MESSAGES["messages"], 1, "weight", 1)})


def test_the_system_message_may_be_a_column():
    for row in (SHAREGPT, ALPACA, PROMPT, R1, S1, OPENR1, MESSAGES | {"messages": MESSAGES["messages"][1:]}):
        assert turns_of(row | {"system": "Be brief."}) == [("system", "Be brief."), *turns_of(row)]
        assert turns_of(row | {"system": " "}) == turns_of(row)
    assert turns_of(MESSAGES | {"system": "Be brief."}) == turns_of(MESSAGES)
    with raises(InvalidRecord, "bad-record", "system", "'Be brief.'", "'Be kind.'"):
        turns_of(MESSAGES | {"system": "Be kind."})


def test_alpacas_history_stands_before_the_instruction():
    earlier = [("user", "Hi"), ("assistant", "Hello"), ("user", "And?"), ("assistant", "Well.")]
    assert turns_of(ALPACA | {"history": [["Hi", "Hello"], ["And?", "Well."]]}) == [*earlier, *turns_of(ALPACA)]
    for wrong in ([["Hi"]], [["Hi", 3]], ["Hi"], [["a", "b", "c"]]):
        with raises(InvalidRecord, "bad-record", "history is ", wrong):
            turns_of(ALPACA | {"history": wrong})


def test_reasoning_content_is_a_thought():
    reasoned = {"messages": with_key(MESSAGES["messages"], 2, "reasoning_content", "Two and two\nmake four.\n")}
    assert turns_of(reasoned)[-1] == ("assistant", THOUGHT + "In Norway.")
    for content in ("", "<think>\na\n</think>\n\nb"):
        with raises(InvalidRecord, "bad-record", "messages[2].reasoning_content", "content"):
            turns_of({"messages": with_key(reasoned["messages"], 2, "content", content)})
    with raises(InvalidRecord, "unknown-row-key", "messages[1].reasoning_content", "x"):
        turns_of({"messages": with_key(MESSAGES["messages"], 1, "reasoning_content", "x")})


def test_calls_of_tools_and_what_they_bring():
    arguments = {"of": "USD", "n": 2}
    call = {"id": "c1", "type": "function", "function": {"name": "rate", "arguments": json.dumps(arguments)}}
    result = {"role": "tool", "tool_call_id": "c1", "name": "rate", "content": "10.5"}
    user_message, reply = MESSAGES["messages"][1:]
    calls = {"role": "assistant", "content": None, "tool_calls": [call]}
    tools = [{"type": "function", "function": {"name": "rate", "parameters": {}}}]
    conversation = read({"messages": [user_message, calls, result, reply], "tools": json.dumps(tools)})
    parsed_call = call | {"function": {"name": "rate", "arguments": arguments}}
    assert conversation.messages == (
        user_message,
        {"role": "assistant", "content": "", "tool_calls": [parsed_call]},
        result,
        reply,
    )
    assert conversation.tools == tuple(tools) and conversation.has_tools and not read(MESSAGES).has_tools
    flat = read({"messages": [user_message, calls | {"content": "I look.", "tool_calls": [parsed_call["function"]]}]})
    assert flat.messages[1]["content"] == "I look."  # beside the call, which was dropped
    assert flat.messages[1]["tool_calls"] == [{"type": "function", "function": parsed_call["function"]}]
    dialogue = [
        ("human", "?"),
        ("function_call", json.dumps(parsed_call["function"])),
        ("observation", "10.5"),
        ("gpt", "So."),
    ]
    turns = [{"from": role, "value": value} for role, value in dialogue]
    factory = read({"conversations": turns, "tools": json.dumps(tools)})
    assert [m["role"] for m in factory.messages] == ["user", "assistant", "tool", "assistant"] and factory.has_tools
    assert factory.messages[1] == {"role": "assistant", "content": "", "tool_calls": flat.messages[1]["tool_calls"]}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"function": {"name": "x", "arguments": "{"}}, r"messages\[0\].tool_calls\[0\].function.arguments: not JSON"),
        (
            {"function": {"name": "x", "arguments": [1]}},
            r"tool_calls\[0\].function.arguments is \[1\], not a JSON object",
        ),
        ({"function": {"name": "x"}, "name": "y"}, r"tool_calls\[0\].name is 'y', but the key is unknown"),
        (
            {"function": {"name": "x", "strict": True}},
            r"tool_calls\[0\].function.strict is True, but the key is unknown",
        ),
        ({"function": {}}, r"tool_calls\[0\].function.name is missing"),
        ("rate()", r"tool_calls\[0\] is 'rate\(\)', not a JSON object"),
    ],
)
def test_a_call_that_no_template_can_write_is_refused_by_name(call, message):
    with pytest.raises(InvalidRecord, match=message):
        read({"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]})


def test_glaive_on_one_line():
    """Turns had to begin lines."""
    line = " ".join(GLAIVE["chat"].replace("\nUSER is not meant here: nor is this", "").split())
    expected = turns_of(GLAIVE | {"chat": GLAIVE["chat"].replace("\nUSER is not meant here: nor is this", "")})
    assert turns_of(GLAIVE | {"chat": line}) == expected
    system = " ".join(GLAIVE["system"].split())
    flat = [("system", system.removeprefix("SYSTEM: ")), *expected[1:]]
    for key in ("chat", "sample"):
        assert turns_of({key: f"{system} {line}"}) == flat
        assert turns_of({key: f"{system}\n{line.replace('<|endoftext|> ', '<|endoftext|>')}"}) == flat
    with pytest.raises(InvalidRecord, match=r"chat has text after <.endoftext.>"):
        turns_of({"chat": "USER: a\nASSISTANT: b <|endoftext|> USER: c ASSISTANT: d"})


def test_traces_of_s1_and_openr1():
    turn = ("user", "2 + 2?")
    assert turns_of(S1) == [turn, ("assistant", THOUGHT + "4")]
    # The first that is complete and right.
    assert turns_of(OPENR1) == [turn, ("assistant", "<think>\nc\n</think>\n\n4")]
    del_verdicts = {k: v for k, v in OPENR1.items() if k not in ("is_reasoning_complete", "correctness_math_verify")}
    assert turns_of(del_verdicts)[1][1].endswith("5")
    assert turns_of(OPENR1 | {"correctness_llama": [True, True, False, False]})[1][1].endswith("5")
    for row, message in [
        (OPENR1 | {"correctness_math_verify": [False] * 4}, "no generation is complete, correct"),
        (OPENR1 | {"correctness_math_verify": [True]}, "correctness_math_verify is .* not a list of 4"),
        (S1 | {"thinking_trajectories": ["a", "b"]}, "thinking_trajectories is .*, not a list of one text"),
    ]:
        with pytest.raises(InvalidRecord, match=message):
            turns_of(row)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (MESSAGES | ALPACA, "the keys fit more than one layout: messages; instruction, output"),
        (MESSAGES | {"steps": []}, "the keys fit more than one layout: messages; steps"),
        (
            SHAREGPT | {"conversations": [{"from": "bot", "value": "x"}]},
            r"conversations\[0\].from is 'bot', not one of",
        ),
        (SHAREGPT | {"conversations": [{"from": "human", "value": "x"}]}, "no assistant message"),
        (SHAREGPT | {"conversations": [{"from": "gpt", "value": " "}]}, "message 1, of the assistant, is empty"),
        (ALPACA | {"output": " "}, "output is blank"),
        (ALPACA | {"input": 3}, "input is 3, not text"),
        (PROMPT | {"prompt": [{"role": "user", "content": "x"}]}, "prompt is .* not text"),
        (GLAIVE | {"chat": "Hello"}, "chat does not start with SYSTEM:, USER:"),
        (GLAIVE | {"chat": "USER: Hello"}, "no assistant message"),
        (R1 | {"reasoning": ""}, "reasoning is blank"),
        ({"question": "a", "answer": "b"}, "neither 'steps' .* instruction, output.*r3lite.collect"),
    ],
)
def test_what_is_wrong_names_the_place(row, message):
    with pytest.raises(InvalidRecord, match=message) as caught:
        turns_of(row)
    assert isinstance(caught.value, R3LiteError) and "x.jsonl, line 1: " in str(caught.value)
