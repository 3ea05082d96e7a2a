"""Plain chats, without steps and search: the user turn is the unchanged question, the model's turn is the answer.

In a `ThinkingChat` the model's turn has a thought before the answer. --format does not offer these protocols, because
they have no steps. `serve` uses `Chat` in its mode `chat`; [[sources]] of conversations use both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from r3lite.core.episode import Step
from r3lite.protocols.base import LAYOUT_FAULTS, Protocol, faults_if

FAULTS = {"blank_answer": "has an empty answer", **LAYOUT_FAULTS}
THOUGHT_FAULTS = {
    "no_thought": "does not begin with a thought between <think> and </think>",
    "repeated_thought": "has a <think> or </think> beside those of its thought",
    **FAULTS,
}


@dataclass(frozen=True)
class Chat(Protocol):
    """Takes every turn for an answer, even a turn that looks like a step."""

    system: str | None = None

    init_prompt = "{question}"
    faults = FAULTS
    stop_strings = ()
    user_turns = True
    can_search = False
    # A chat has no forced answers, so it needs no request for them and no heading.
    answer_request = ""
    answer_heading = ""

    def quoted(self, text: str) -> str:
        return text  # unchanged, with its line breaks: a chat has no markup that a text could imitate

    def parse(self, text: str, earlier: Sequence[Step]) -> Step:
        answer = text.strip()
        if not answer:
            return Step(answer=None, faults=("blank_answer",))
        return Step(answer=answer)

    def render(self, step: Step, number: int) -> str:
        return step.answer or ""


@dataclass(frozen=True)
class ThinkingChat(Chat):
    """A chat whose turn is a thought between <think> and </think>, then the answer (DeepSeek-R1, arXiv 2501.12948).

    A turn without </think> has no answer, because the answer cannot be told from the thought.
    """

    faults = THOUGHT_FAULTS
    thinks = True

    def parse(self, text: str, earlier: Sequence[Step]) -> Step:
        thought = text.strip()
        answer = ""
        is_closed = "</think>" in text
        if is_closed:
            thought, _, answer = (part.strip() for part in text.rpartition("</think>"))
        is_opened = thought.startswith("<think>")
        thought = thought.removeprefix("<think>").strip()
        faults = faults_if(
            no_thought=not (is_opened and thought and is_closed),
            repeated_thought="think>" in f"{thought}\n{answer}",
            blank_answer=not answer,
        )
        return Step(thought, answer=answer or None, faults=tuple(faults))

    def render(self, step: Step, number: int) -> str:
        return f"<think>\n{step.analysis}\n</think>\n\n{step.answer or ''}"
