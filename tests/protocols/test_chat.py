"""A plain chat: its tokens are those of the conversation, and whatever the model says is the answer."""

import pytest

from r3lite.core.episode import Question, Step
from r3lite.core.records import Record, Source
from r3lite.datasets.conversations import from_r1
from r3lite.protocols.chat import Chat, ThinkingChat
from r3lite.protocols.layout import Layout
from r3lite.protocols.r3 import R3
from r3lite.protocols.transcript import Transcript
from r3lite.settings import LengthSettings

EARLIER = ({"role": "user", "content": "first\n\nquestion"}, {"role": "assistant", "content": "its <|im_end|> answer"})


@pytest.mark.parametrize("system_prompt", [None, "be kind"])
@pytest.mark.parametrize("system", [(), ({"role": "system", "content": "be brief"},)])
def test_an_episode_opens_with_the_conversation_so_far(tokenizer, system_prompt, system):
    layout = Layout(tokenizer, Chat(system_prompt), LengthSettings())
    transcript = Transcript(Question("q", "one\ntwo", (), earlier=system + EARLIER))
    layout.open(transcript)
    system_messages = [{"role": "system", "content": system_prompt}] if system_prompt and not system else [*system]
    expected, _ = tokenizer.chat([*system_messages, *EARLIER, {"role": "user", "content": "one\ntwo"}])
    assert transcript.tokens == expected + tokenizer.assistant_turn()[len(tokenizer.encode("\n")) :]
    assert not any(transcript.action_mask)


def test_without_a_conversation_the_prompt_of_steps_is_what_it_was(tokenizer):
    layout = Layout(tokenizer, R3("Q: {question}", "D: {documents}", "think"), LengthSettings())
    turns = [{"role": "system", "content": "think"}, {"role": "user", "content": "Q: who?"}]
    assert layout.prompt("who?") == tokenizer.chat(turns)[0] + tokenizer.assistant_turn()[len(tokenizer.encode("\n")) :]


@pytest.mark.parametrize("text", ["Rome", "Step 1:\nThe retrieval query: x", "a\n\nb"])
def test_any_turn_is_an_answer(text):
    assert Chat().parse(f" {text}\n", []) == Step(answer=text)
    assert Chat().parse(Chat().render(Step(answer=text), 1), []) == Step(answer=text)


def test_a_blank_turn_is_none():
    assert Chat().parse(" \n", []) == Step(faults=("blank_answer",))


@pytest.mark.parametrize(
    ("text", "thought", "answer", "faults"),
    [
        ("<think>\nTwo and two.\n</think>\n\n4", "Two and two.", "4", ()),
        ("<think>a</think>b\n\nc", "a", "b\n\nc", ()),
        ("<think></think>4", "", "4", ("no_thought",)),
        ("Two.</think>4", "Two.", "4", ("no_thought",)),
        ("Well. <think>Two.</think>4", "Well. <think>Two.", "4", ("no_thought", "repeated_thought")),
        ("<think>a</think>4 <think>b</think>5", "a</think>4 <think>b", "5", ("repeated_thought",)),
        ("<think>Two.</think> ", "Two.", None, ("blank_answer",)),
        ("<think>The final answer: 4", "The final answer: 4", None, ("no_thought", "blank_answer")),
        ("4", "4", None, ("no_thought", "blank_answer")),
    ],
)
def test_what_follows_a_thought_is_the_answer(text, thought, answer, faults):
    assert ThinkingChat().parse(f" {text}\n", []) == Step(thought, answer=answer, faults=faults)
    assert set(faults) <= ThinkingChat.faults.keys()


def test_a_thought_is_rendered_as_the_rows_of_sft_have_it():
    step = Step("Two and two.", answer="4")
    text = ThinkingChat().render(step, 1)
    assert ThinkingChat().parse(text, []) == step
    row = Record({"question": "2 + 2?", "reasoning": step.analysis, "answer": step.answer}, Source("a test"))
    assert from_r1(row)[-1]["content"] == text
