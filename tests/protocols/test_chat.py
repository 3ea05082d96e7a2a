"""A plain chat: its tokens are those of the conversation, and whatever the model says is the answer."""

import pytest

from r3lite.episode import Question, Step
from r3lite.protocols.chat import Chat
from r3lite.protocols.r3 import R3
from r3lite.protocols.transcript import Layout, Transcript
from r3lite.settings import LengthSettings

EARLIER = ({"role": "user", "content": "first\n\nquestion"}, {"role": "assistant", "content": "its <|im_end|> answer"})


@pytest.mark.parametrize("own", [None, "be kind"])
@pytest.mark.parametrize("system", [(), ({"role": "system", "content": "be brief"},)])
def test_an_episode_opens_with_the_conversation_so_far(tokenizer, own, system):
    layout = Layout(tokenizer, Chat(own), LengthSettings())
    transcript = Transcript(Question("q", "one\ntwo", (), earlier=system + EARLIER))
    layout.open(transcript)
    given = [{"role": "system", "content": own}] if own and not system else [*system]
    expected, _ = tokenizer.chat([*given, *EARLIER, {"role": "user", "content": "one\ntwo"}])
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
