"""Several sources: what becomes of the rows of each type, and errors that say which source is wrong."""

import json

import pytest

from r3lite.core.config import UsageError
from r3lite.core.episode import ANSWERED, Episode, Step
from r3lite.core.errors import R3LiteError
from r3lite.core.invocation import with_values
from r3lite.datasets.conversations import Conversation
from r3lite.datasets.sources import (
    build_mixture,
    encode_rows_of,
    entries_of,
    protocols_of,
    read_questions_of,
    read_rows_of,
)
from r3lite.datasets.summary import table
from r3lite.protocols.chat import Chat, ThinkingChat
from r3lite.rewards.tasks import combined
from r3lite.settings import DataSettings, NewQuestionSettings, ProtocolSettings, SftConfig, SourceSettings
from r3lite.settings.data import SourceEntry
from tests.errors import raises

GLAIVE = {
    "system": 'SYSTEM: You may call: {"name": "rate", "parameters": {}}',
    "chat": "USER: Hello\n\n\nASSISTANT: How can I help? <|endoftext|>\n\n\nUSER: Dollars to euros?\n\n\n"
    'ASSISTANT: <functioncall> {"name": "rate", "arguments": "{}"} <|endoftext|>\n\n\n'
    'FUNCTION RESPONSE: {"rate": 0.9}\n\n\nASSISTANT: It is 0.9. <|endoftext|>',
}
ROWS = {
    "qa": {"id": 1, "question": "Who  wrote it?", "answer": "Ann Dahl", "task": "bridge"},
    "chat": {"id": 1, "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]},
    "coding": {"instruction": "Write it.\n    def f", "output": "def f():\n    pass"},
    "function_calling": GLAIVE,
    "r1": {"question": "2 + 2?", "reasoning": "Two and two.", "answer": "4"},
}


def thinks(content: str) -> dict:
    return {"id": 1, "messages": [{"role": "user", "content": "2?"}, {"role": "assistant", "content": content}]}


STEPS = {"question": "Who?", "steps": [{"analysis": "I know.", "answer": "Ann"}]}


@pytest.fixture
def sources(tmp_path):
    """Settings of sources, whose rows it writes into files: name -> (rows, further keys)."""

    def make(**sources_by_name) -> SourceSettings:
        entries = []
        for name, (rows, keys) in sources_by_name.items():
            path = tmp_path / f"{name}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            entries.append({"file": str(path)} | keys)
        return with_values(SftConfig(), {"sources": entries}).mixture

    return make


def questions(mixture: SourceSettings, **settings):
    return read_questions_of(NewQuestionSettings(**settings), mixture)


def test_questions_of_each_type(sources):
    """Ids repeat from file to file: each is its source's own."""
    types = ("qa", "chat", "coding", "function_calling")
    qa, chat, coding, calling = questions(sources(**{kind: ([ROWS[kind]], {"type": kind}) for kind in types}))
    assert [q.source for q in (qa, chat, coding, calling)] == list(types)
    assert (qa.id, qa.text, qa.answers, qa.type) == ("qa/1", "Who wrote it?", ("Ann Dahl",), "bridge")
    assert (chat.id, chat.text, chat.answers, chat.type) == ("chat/1", "Hi", ("Hello.",), "chat")
    assert (coding.text, coding.answers) == ("Write it.\n    def f", ("def f():\n    pass",))  # lines stay
    assert calling.text == "Dollars to euros?" and calling.answers[0].startswith("<functioncall>")
    assert [m["role"] for m in calling.earlier] == ["system", "user", "assistant"]  # nothing after the call


def test_a_trace_asks_for_what_follows_its_thought(sources):
    """Reasoning is neither given nor gold. Such sources were refused in RL."""
    rows = {"plain": ROWS["r1"], "talk": thinks("<think>\nTwo.\n</think>\n\n2")}
    mixture = sources(**{name: ([row], {"type": "r1"}) for name, row in rows.items()})
    assert [(q.text, q.answers, q.type, q.earlier) for q in questions(mixture)] == [
        ("2 + 2?", ("4",), "r1", ()), ("2?", ("2",), "r1", ()),
    ]  # fmt: skip
    assert protocols_of(ProtocolSettings(system_prompt="Think."), mixture)["talk"] == ThinkingChat("Think.")


def test_traces_with_a_gold_answer_of_their_own_ask_for_that(sources):
    s1 = {"question": "2 + 2?", "thinking_trajectories": ["Two."], "attempt": "It is 4.", "solution": "4"}
    openr1 = {"problem": "2 + 2?", "generations": ["<think>\nTwo.\n</think>\n\nIt is 4."], "answer": "4"}
    mixture = sources(s1=([s1], {"type": "r1"}), openr1=([openr1], {"type": "r1"}))
    assert [(q.text, q.answers, q.type) for q in questions(mixture)] == [("2 + 2?", ("4",), "r1")] * 2
    trained = read_rows_of(DataSettings(), mixture, protocols_of(ProtocolSettings(), mixture))
    assert [rows[0].messages[1]["content"] for rows in trained.values()] == ["<think>\nTwo.\n</think>\n\nIt is 4."] * 2


def test_a_reply_of_weight_0_is_not_asked_for(sources):
    dialogue = [("user", "Hi"), ("assistant", "Hello."), ("user", "And?"), ("assistant", "No.")]
    row = {"messages": [{"role": role, "content": content} for role, content in dialogue]}
    row["messages"][3]["weight"] = 0
    (question,) = questions(sources(mine=([row], {"type": "chat"})))
    assert (question.text, question.answers) == ("Hi", ("Hello.",))


def test_the_type_of_a_source_reaches_the_reward_combined(sources):
    """The tools of Glaive's rows are declared in the system message, which the reward did not read."""
    types = ("chat", "coding", "function_calling")
    source_questions = questions(sources(**{kind: ([ROWS[kind]], {"type": kind}) for kind in types}))

    def paid(answer: str) -> list[float]:
        return [combined(Episode(question, [Step(answer=answer)], ANSWERED)) for question in source_questions]

    assert paid('<functioncall> {"name": "rate", "arguments": "{}"}') == [0.0, -0.3, 0.7]
    assert paid("Hello.")[0] == 1.0
    assert paid('{"name": "other", "arguments": "{}"}')[2] == 0.5  # no tool of that name


def test_questions_and_answers_as_they_stand_and_the_limit_of_each(sources):
    rows = [{"question": f"Line\n{i}", "answer": ["a", "b"]} for i in range(3)]
    limited = questions(sources(one=(rows, {"type": "chat"}), two=([ROWS["qa"]] * 1, {})), limit=2)
    assert [(q.id, q.source) for q in limited] == [("one/one-1", "one"), ("one/one-2", "one"), ("two/1", "two")]
    assert limited[0].text == "Line\n0" and limited[0].answers == ("a", "b")


def test_each_source_has_its_format_and_prompts_are_of_the_one_that_format_names(tmp_path, sources):
    (tmp_path / "own.txt").write_text("Mine: {question}", encoding="utf-8")
    settings = ProtocolSettings(init_prompt=str(tmp_path / "own.txt"), system_prompt="Be brief.")
    keys_by_name = {"a": {}, "b": {"format": "tags"}, "c": {"type": "chat"}, "d": {"type": "qa", "format": "solution"}}
    protocols = protocols_of(settings, sources(**{name: ([], keys) for name, keys in keys_by_name.items()}))
    assert protocols["a"] is protocols[""] and protocols["a"].question_message("x") == "Mine: x"
    tags_message = protocols["b"].question_message("x")
    assert protocols["b"].can_search and "<search>" in tags_message and "Mine" not in tags_message
    assert (
        protocols["c"] == Chat("Be brief.") and not protocols["d"].can_search and protocols["d"].system == "Be brief."
    )


def test_rows_of_sft_are_of_the_type_of_their_source(sources):
    mixture = sources(qa=([STEPS], {"type": "qa"}), r1=([ROWS["r1"]], {"type": "r1"}), any=([STEPS, ROWS["chat"]], {}))
    rows_by_source = read_rows_of(DataSettings(), mixture, protocols_of(ProtocolSettings(), mixture))
    assert [len(rows) for rows in rows_by_source.values()] == [1, 1, 2]
    assert isinstance(rows_by_source["r1"][0], Conversation) and rows_by_source["qa"][0].steps[0].answer == "Ann"


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("qa", ROWS["chat"], "line 1: a conversation, but the type of the source is qa"),
        ("chat", STEPS, "line 1: a trajectory, but the type of the source is chat"),
        ("r1", ROWS["chat"], "line 1: no assistant message with a thought that ends with </think>"),
        ("coding", {"instruction": "x"}, "line 1: has neither 'steps'"),
    ],
)
def test_a_row_of_another_type_is_refused_with_its_source(sources, kind, row, message):
    mixture = sources(mine=([row], {"type": kind}))
    with pytest.raises(R3LiteError) as error:
        read_rows_of(DataSettings(), mixture, protocols_of(ProtocolSettings(), mixture))
    assert error.value.cause.startswith("the source mine: ") and message in error.value.cause


@pytest.mark.parametrize(
    ("kind", "rows", "message"),
    [
        ("qa", [{"question": "x"}], "the source mine: "),
        ("r1", [ROWS["chat"]], "line 1: the reply to learn has no answer after </think>"),
        ("r1", [thinks("Two.</think> ")], "line 1: the reply to learn has no answer after </think>"),
        ("chat", [{"text": "x"}], "line 1: has neither 'question' and 'answer' nor the keys of a conversation"),
        ("chat", [ROWS["chat"] | ROWS["coding"]], "the keys fit more than one layout"),
        ("chat", [{"messages": [{"role": "assistant", "content": "x"}]}], "does not follow a user message"),
        ("chat", [ROWS["chat"] | {"tools": [{"name": "rate"}]}], "line 1: has tools, which only sft supports"),
        ("chat", [ROWS["chat"]] * 2, "the source mine: duplicate id '1'"),
        ("chat", [], "is empty: it has no row"),
        ("function_calling", [ROWS["chat"]], "line 1: no message of the assistant calls a function"),
    ],
)
def test_questions_that_cannot_be_asked_are_refused_with_their_source(sources, kind, rows, message):
    with pytest.raises((R3LiteError, UsageError)) as error:
        questions(sources(mine=(rows, {"type": kind})))
    assert "source mine" in str(error.value) and message in str(error.value)


def test_a_file_that_is_not_there_is_told_with_its_source():
    mixture = SourceSettings((SourceEntry("nowhere.jsonl=2"),))
    with raises(R3LiteError, "bad-source", "the source nowhere: "):
        questions(mixture)


def test_a_source_that_is_held_out_whole_is_told():
    """It was told that no row fits into --max-length."""
    with raises(R3LiteError, "source-all-held-out", "the source b "):
        encode_rows_of({"a": [Conversation("1", ())], "b": []}, {})


def test_without_sources_there_is_no_mixture():
    assert build_mixture(SourceSettings(), [], "0") is None


def test_data_beside_sources_are_refused():
    with raises(UsageError, "data-and-sources"):
        entries_of(DataSettings("x.jsonl"), SourceSettings((SourceEntry("a.jsonl"),)))


def test_the_table_normalizes_weights():
    mixture = with_values(SftConfig(), {"sources": "a.jsonl=0.3,b.jsonl=0.3,c.jsonl=0.3"}).mixture
    assert table(mixture, ProtocolSettings(), {"a": 1, "b": 2, "c": 3}).count(" 33.3% ") == 3
    assert table(SourceSettings(), ProtocolSettings(), {}) == ""
