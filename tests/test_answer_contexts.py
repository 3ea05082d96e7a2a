"""Contexts from demonstrations: which demonstration of a question becomes one, and what is refused."""

from dataclasses import replace

import pytest

from r3lite.assembly.answer_contexts import contexts_of
from r3lite.assembly.answer_round import is_context
from r3lite.core.episode import ANSWERED
from r3lite.core.errors import R3LiteError
from r3lite.datasets.rl_questions import read_rl_questions
from r3lite.protocols.layout import Layout
from r3lite.protocols.registry import build_protocol
from r3lite.settings import LengthSettings, ProtocolSettings
from tests.datasets.test_rl_questions import config_of, demonstration, row

TEXT = "Where is Rome?"


@pytest.fixture
def layout(tokenizer):
    lengths = LengthSettings(max_new_tokens=20, max_length=8000)
    return Layout(tokenizer, build_protocol(ProtocolSettings()), lengths)


def longer(query: str) -> dict:
    long = demonstration(TEXT, "Tiber")
    long["steps"][0]["query"] = query
    return long


def test_a_demonstration_without_its_last_turn_is_a_context(tmp_path, layout):
    config = config_of(tmp_path, [row(TEXT, "Tiber")], [demonstration(TEXT, "Tiber")])
    questions, demonstrations = read_rl_questions(config)
    (context,) = contexts_of(questions, demonstrations, {"": layout}).values()
    assert (context.question, context.finish) == (questions[0], ANSWERED)
    assert is_context(context)
    text = layout.tokenizer.decode(context.tokens[: context.turn_start])
    assert "Rome lies on the Tiber." in text
    assert layout.tokenizer.decode(context.turn).startswith("Step 2:\nThe problem analysis: It is there.")


def test_a_question_gets_the_first_demonstration_that_leaves_room_for_a_turn(tmp_path, layout, capsys):
    config = config_of(tmp_path, [row(TEXT, "Tiber")], [longer("x" * 50), longer("y"), longer("z")])
    questions, demonstrations = read_rl_questions(config)
    (context,) = contexts_of(questions, demonstrations, {"": layout}).values()
    assert context.steps[0].queries == ("x" * 50,)
    room = context.turn_start - 49  # what the second demonstration takes
    for max_length, fits in ((room + 20, True), (room + 19, False)):
        shorter = Layout(layout.tokenizer, layout.protocol, replace(layout.lengths, max_length=max_length))
        if fits:
            (context,) = contexts_of(questions, demonstrations, {"": shorter}).values()
            assert context.steps[0].queries == ("y",)
        else:
            with pytest.raises(R3LiteError, match="no demonstration in --contexts leaves room for a turn"):
                contexts_of(questions, demonstrations, {"": shorter})
            assert "left out 1 of 1 questions" in capsys.readouterr().err
