"""A plain chat, without steps and search: the question is a user turn as it stands, and the model's turn is the answer.

No format of --format, as it has no steps. `serve` speaks it in its mode chat.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from r3lite.episode import Step
from r3lite.protocols.base import LAYOUT_FAULTS, Protocol

FAULTS = {"blank_answer": "answers nothing", **LAYOUT_FAULTS}


@dataclass(frozen=True)
class Chat(Protocol):
    """Any turn is an answer, even one that looks like a step."""

    system: str | None = None

    faults = FAULTS
    stop_strings = ()
    user_turns = True
    searches = False
    answer_request = ""

    def quoted(self, text: str) -> str:
        return text  # nothing in it could be taken for markup, and its lines are its own

    def opening(self, question: str) -> str:
        return question

    def parse(self, text: str, earlier: Sequence[Step]) -> Step:
        answer = text.strip() or None
        return Step(answer=answer, faults=() if answer else ("blank_answer",))

    def render(self, step: Step, number: int) -> str:
        return step.answer or ""

    def observation(self, steps: Sequence[Step]) -> str:
        raise AssertionError("a chat does not search")

    def forced_prefix(self, number: int) -> str:
        return ""

    def step_request(self, number: int) -> str:
        return ""

    def first_turn(self, reply: str) -> str:
        return reply
