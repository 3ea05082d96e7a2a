"""A plan of searches, and then its nodes: `--format dag`.

The first turn of the model is a plan (plan.py). Its nodes are searched level by level, those of a level in one batch.
The documents are given to the model, which writes the answer of each node in a short turn; those are filled into the
queries of the next level. After the last level the same turn has the final answer:

    A: Ann Dahl
    B: Oslo
    The final answer: Oslo

In a step, `analysis` is the plan or the answers of the nodes, as written; the searches follow from them.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from r3lite.core.episode import Search, Step
from r3lite.protocols import plan
from r3lite.protocols.base import LAYOUT_FAULTS, Protocol, asked_before, named, one_line
from r3lite.protocols.plan import InvalidPlan, Limits, Node, Plan
from r3lite.protocols.r3 import Headings, render_each
from r3lite.protocols.templates import filled, opening_prompt, prompt_file, read_template
from r3lite.settings import ProtocolSettings

FAULTS = {
    **plan.FAULTS,
    "text_outside_answers": "has text other than the requested answers",
    "repeated_answer": "answers twice",
    "blank_answer": "has an empty answer",
    "missing_answer": "does not answer a node that others depend on",
    "early_answer": "gives the final answer before all nodes were searched",
    "no_final_answer": "does not give the final answer after the last node",
    **LAYOUT_FAULTS,
}
ANSWER = Headings().answer
DOCUMENTS = "The retrieval documents of"
LINE = re.compile(r"[ \t]*([A-Za-z]\w{0,15})[ \t]*:[ \t]*(.*?)[ \t]*")


@dataclass(frozen=True)
class Dag(Protocol):
    """Reading and rendering of plans and of the answers of their nodes.

    `parse(render(step, k), earlier) == step` for every well-formed step.
    """

    init_prompt: str
    step_prompt: str  # gives documents; has {documents} and may have {request}, what is to be written next
    limits: Limits = Limits()
    system: str | None = None

    faults = FAULTS
    stop_strings = (DOCUMENTS,)  # a model that writes them would invent them
    user_turns = True
    plans = names_sources = True
    answer_heading = ANSWER

    @staticmethod
    def load(settings: ProtocolSettings) -> "Dag":
        """With the prompt files that the settings name; a relative path is looked up here, then among the shipped."""
        limits = Limits(settings.most_nodes, settings.most_node_words)
        values = limits.placeholders()
        init = read_template(prompt_file(settings, "init_prompt"), "question", (*values, "A"))
        step = read_template(prompt_file(settings, "step_prompt"), "documents", ("request",))
        return Dag(opening_prompt(filled(init, values), settings), step, limits, settings.system_prompt)

    def render(self, step: Step, number: int) -> str:
        return "\n".join(filter(None, (step.analysis, step.answer and f"{ANSWER} {step.answer}")))

    def observation(self, question: str, steps: Sequence[Step]) -> str:
        """The documents of each node of a level, then the queries whose answers are to be written next."""
        levels, searches = self._plan(steps).levels, steps[-1].searches
        nodes = levels[len(steps) - 1]
        documents = render_each([f"{DOCUMENTS} {node.name}:" for node in nodes], searches)
        asked = {f"{node.name}:": one_line(s.query) for node, s in zip(nodes, searches, strict=True)}
        if len(levels) == len(steps):
            asked[ANSWER] = question
        lines = f"the line{'s' * (len(asked) > 1)} {' and '.join(asked)}"
        request = "\n".join([*map(" ".join, asked.items()), "", f"Write {lines} with answers of a few words."])
        return filled(self.step_prompt, {"documents": documents, "request": request})

    def read_answer(self, text: str, earlier: Sequence[Step]) -> Step:
        return _with_final(Step(), [text])

    def finishing(self, text: str, earlier: Sequence[Step]) -> str | None:
        return super().finishing(text, earlier) if earlier else None

    def step_request(self, number: int) -> str:
        return "Write the plan now, and nothing else." if number == 1 else "Write that now, and nothing else."

    def first_search(self, question: str) -> Step:
        """A plan of one node. Braces would be references, and a query of braces alone would be none."""
        only = Node("A", re.sub(r"[{}]", "", question).strip() or "?")
        return Step(Plan((only,)).text(), (Search(question, source=only.source),))

    def example(self) -> list[Step]:
        first, second = Node("A", "one short question"), Node("B", "another one, which uses the answer {A}")
        said = "the answer of A in a few words"
        return [
            Step(Plan((first, second), (("A", "B"),)).text(), plan.searches([first])),
            Step(f"A: {said}", plan.searches([second], {"A": said})),
            Step("B: the answer of B in a few words", answer="the answer in a few words"),
        ]

    def parse(self, text: str, earlier: Sequence[Step]) -> Step:
        """Reads a plan, or the answers of the nodes that were searched last; faults are named in the step.

        A plan that is not valid has no searches, so the episode ends with it. Answers are used in spite of faults as
        long as the queries of the next level can be filled.
        """
        text = text.strip()
        if earlier:
            return self._answers(text, earlier)
        try:
            return Step(text, plan.searches(plan.read(text, self.limits).levels[0]))
        except InvalidPlan as error:
            return Step(text, faults=(str(error),))

    def _answers(self, text: str, earlier: Sequence[Step]) -> Step:
        """The step of a turn that answers nodes: it searches the next level or, if there is none, has the answer."""
        levels, done = self._plan(earlier).levels, len(earlier)
        body, *final = re.split(rf"^[ \t]*{ANSWER}", text, flags=re.MULTILINE)
        answers, faults = _read_answers(body, levels[done - 1])
        step = Step(body.strip(), faults=tuple(faults))
        if final:
            return _with_final(replace(step, faults=(*faults, *named(early_answer=done < len(levels)))), final)
        if done == len(levels):
            return replace(step, faults=(*faults, "no_final_answer"))
        faults += named(missing_answer=len(answers) < len(levels[done - 1]))
        for level, before in zip(levels, earlier[1:]):
            answers |= _read_answers(before.analysis, level)[0]
        needed = {name for node in levels[done] for name in node.references}
        if needed <= answers.keys():
            searches = plan.searches(levels[done], answers)
            faults += named(repeated_query=any(asked_before(search.query, earlier) for search in searches))
            step = replace(step, searches=searches)
        return replace(step, faults=tuple(dict.fromkeys(faults)))

    def _plan(self, steps: Sequence[Step]) -> Plan:
        """The plan that an episode's first step wrote; one that was given may be of any size."""
        return plan.read(steps[0].analysis, Limits(sys.maxsize, sys.maxsize))


def _read_answers(text: str, nodes: Sequence[Node]) -> tuple[dict[str, str], list[str]]:
    """The answers of nodes, by their names, and the faults of the lines that they are written in."""
    asked, answers, faults = {node.name for node in nodes}, {}, []
    for line in filter(str.strip, text.splitlines()):
        name, answer = match.groups() if (match := LINE.fullmatch(line)) else (None, "")
        wrong = named(text_outside_answers=name not in asked, repeated_answer=name in answers, blank_answer=not answer)
        faults += wrong[:1]
        if not wrong:
            answers[name] = answer
    return answers, list(dict.fromkeys(faults))


def _with_final(step: Step, final: Sequence[str]) -> Step:
    """The step with its final answer: one, on a line. `final` are the texts after its heading."""
    line, _, rest = final[0].strip(" \t").partition("\n")
    twice = len(final) > 1  # it is not clear which of the two is meant
    found = named(text_outside_answers=rest.strip(), repeated_answer=twice, blank_answer=not (twice or line.strip()))
    answer = None if twice else line.strip() or None
    return replace(step, answer=answer, faults=tuple(dict.fromkeys((*step.faults, *found))))
