"""A plain chat, without steps and search: the question is a user turn as it stands, and the model's turn is the answer,
perhaps after a thought.

It is no value of --format, because it has no steps. `serve` uses it in its mode `chat`.
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
    """Any turn is an answer, even one that looks like a step."""

    system: str | None = None

    init_prompt = "{question}"
    faults = FAULTS
    stop_strings = ()
    user_turns = True
    can_search = False
    # No answer is requested, and after a turn that was cut off none is forced.
    answer_request = ""
    answer_heading = ""

    def quoted(self, text: str) -> str:
        return text  # a chat has no markup that a text could imitate, so the text keeps its lines

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

    Without </think> there is no answer: it cannot be separated from the thought.
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
