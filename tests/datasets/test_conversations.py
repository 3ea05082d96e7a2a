"""Conversations in the layouts of published data sets: rows as these have them, and what is wrong with others."""

import json

import pytest

from r3lite.core.errors import R3LiteError
from r3lite.core.records import InvalidRecord, Record, Source
from r3lite.datasets.conversations import LAYOUTS
from r3lite.datasets.trajectories import Conversation, read_rows, row_from_json
from r3lite.protocols.registry import build_protocol
from r3lite.settings import ProtocolSettings

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


def said(row):
    made = row_from_json(Record(row, Source("x.jsonl, line 1")), FORMAT, "x-1")
    assert isinstance(made, Conversation) and made.id == "x-1"
    return [(m["role"], m["content"]) for m in made.messages]


def test_messages():
    assert said(MESSAGES) == [("system", "Be brief."), ("user", "Where is Oslo?"), ("assistant", "In Norway.")]


def test_sharegpt():
    assert said(SHAREGPT) == [
        ("user", "Name a fjord."),
        ("assistant", "Sognefjord"),
        ("user", "Another?"),
        ("assistant", "Hardangerfjord"),
    ]
    opened = {"conversations": [{"from": "system", "value": "Be kind."}, *SHAREGPT["conversations"]]}
    assert said(opened)[0] == ("system", "Be kind.")


def test_alpaca():
    assert said(ALPACA) == [("user", "Name the odd one out.\n\nOslo, Bergen, Rome"), ("assistant", "Rome")]
    assert said(ALPACA | {"input": ""})[0] == ("user", "Name the odd one out.")
    assert said(EVOL) == [("user", "Add 1 and 2 in Python."), ("assistant", "print(1 + 2)")]


def test_prompt_and_completion():
    assert said(PROMPT) == [("user", "The sky is"), ("assistant", "blue.")]


def test_glaive():
    assert said(GLAIVE) == [
        ("system", 'You may use this function:\n{\n    "name": "rate"\n}'),
        ("user", "How many kroner is a dollar?"),
        ("assistant", '<functioncall> {"name": "rate", "arguments": \'{"of": "USD"}\'}'),
        ("user", 'FUNCTION RESPONSE: {"rate": 10.5}'),
        ("assistant", "About 10.5.\nUSER is not meant here: nor is this."),
    ]
    assert said(GLAIVE | {"system": " "})[0] == ("user", "How many kroner is a dollar?")


def test_r1():
    expected = [("user", "What is 2 + 2?"), ("assistant", "<think>\nTwo and two\nmake four.\n</think>\n\n4")]
    assert said(R1) == expected
    assert said(R1 | {"reasoning": "<think>\nTwo and two\nmake four.\n</think>"}) == expected  # some sets keep the tags


def test_every_layout_is_read_from_one_file(tmp_path):
    rows = [MESSAGES, SHAREGPT, GLAIVE, ALPACA, PROMPT, R1]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert [row.id for row in read_rows(tmp_path / "mixed.jsonl", FORMAT)] == [f"mixed-{i}" for i in range(1, 7)]
    assert len(rows) == len(LAYOUTS)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (MESSAGES | ALPACA, "it has the keys of messages and of instruction, output: which is meant"),
        (MESSAGES | {"steps": []}, "it has the keys of messages and of steps: which is meant"),
        (
            SHAREGPT | {"conversations": [{"from": "bot", "value": "x"}]},
            r"conversations\[0\].from is 'bot', not one of",
        ),
        (SHAREGPT | {"conversations": [{"from": "human", "value": "x"}]}, "no assistant message"),
        (SHAREGPT | {"conversations": [{"from": "gpt", "value": " "}]}, "message 1 is an empty one of the assistant's"),
        (ALPACA | {"output": " "}, "output is blank"),
        (ALPACA | {"input": 3}, "input is 3, not text"),
        (PROMPT | {"prompt": [{"role": "user", "content": "x"}]}, "prompt is .* not text"),
        (GLAIVE | {"chat": "Hello"}, "chat does not open with USER:"),
        (GLAIVE | {"chat": "USER: Hello"}, "no assistant message"),
        (R1 | {"reasoning": ""}, "reasoning is blank"),
        ({"question": "a", "answer": "b"}, "neither 'steps' .* instruction, output.*r3lite.collect"),
    ],
)
def test_what_is_wrong_names_the_place(row, message):
    with pytest.raises(InvalidRecord, match=message) as caught:
        said(row)
    assert isinstance(caught.value, R3LiteError) and "x.jsonl, line 1: " in str(caught.value)
