"""A protocol double that searches inside its assistant turn: it shows that the layout of R3 is not the only one."""

import re

from r3lite.episode import Step
from r3lite.protocols.base import LAYOUT_FAULTS, Protocol

PART = re.compile(r"<(think|search|answer)>(.*?)</\1>", re.DOTALL)


class Tagged(Protocol):
    """Steps in tags. A search ends the turn at its closing tag; documents follow inside the same assistant turn."""

    faults = LAYOUT_FAULTS | {"untagged": "has neither a search nor an answer"}
    stop_strings = ("</search>",)
    user_turns = False
    system = None
    answer_request = "<information>no more</information>"

    def opening(self, question):
        return f"Think, search and answer in tags: {question}"

    def parse(self, text, earlier):
        found = dict(PART.findall(text))
        query, answer = found.get("search"), found.get("answer")
        return Step(found.get("think", ""), query, (), answer, () if query or answer else ("untagged",))

    def render(self, step, number):
        last = f"<search>{step.query}</search>" if step.answer is None else f"<answer>{step.answer}</answer>"
        return f"<think>{step.analysis}</think>{last}"

    def observation(self, documents, number):
        return "<information>" + " ".join(d.text for d in documents) + "</information>"

    def forced_prefix(self, number):
        return "<answer>"

    def step_request(self, number):
        return "Go on."

    def first_turn(self, reply):
        head, stop, _ = reply.partition("</search>")
        return head + stop
