"""A question without r3lite's steps: an ordinary chat prompt, with documents or without, and a short answer.

It belongs to the baselines of `evaluate`, and is no format of --format: nothing is trained on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from r3lite.core.episode import Step
from r3lite.protocols.base import one_line
from r3lite.protocols.chat import Chat
from r3lite.protocols.r3 import render_documents
from r3lite.settings import ProtocolSettings

SYSTEM = "You answer questions."
WITH_DOCUMENTS = f"{SYSTEM} Use the documents."
REQUEST = "Question: {question}\nAnswer with a short phrase or a name only, no explanation."


@dataclass(frozen=True)
class PlainAnswer(Chat):
    """If it `can_search`, the documents before the question are found by a search for the question itself.

    The answer is the first line of the reply that is not blank, even if a limit cut the reply off. So every reply that
    is not blank is whole (`is_whole`).
    """

    can_search: bool = False

    init_prompt = REQUEST
    quoted = staticmethod(one_line)

    @staticmethod
    def load(settings: ProtocolSettings, with_documents: bool) -> "PlainAnswer":
        """Returns the protocol with the system message of the settings, if they have one."""
        system = SYSTEM
        if with_documents:
            system = WITH_DOCUMENTS
        return PlainAnswer(settings.system_prompt or system, can_search=with_documents)

    def first_search(self, question: str) -> Step:
        return Step.asking("", question)

    def observation(self, question: str, steps: Sequence[Step]) -> str:
        """Returns the whole user turn: documents, one a line, then the question."""
        return f"{render_documents(steps[-1].documents)}\n\n{self.question_message(question)}"

    def parse(self, text: str, earlier: Sequence[Step]) -> Step:
        first_line = next(filter(str.strip, text.splitlines()), "")
        return super().parse(first_line, earlier)

    def is_whole(self, text: str) -> bool:
        return bool(text.strip())
