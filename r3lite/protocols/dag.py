"""Steps that are a plan of searches, then the answers of its nodes: `--format dag`.

The first turn of the model is a plan (plan.py). Its nodes are searched level by level, those of a level in one batch.
After each level the model gets the documents, and writes the answers of the level's nodes in a short turn; the answers
are filled into the queries of the next level. After the last level this turn also has the final answer:

    A: Ann Dahl
    B: Oslo
    The final answer: Oslo

In a step, `analysis` is the plan or the answers of the nodes, as written; the searches follow from plan and answers.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from r3lite.core.episode import Search, Step
from r3lite.protocols import plan
from r3lite.protocols.base import LAYOUT_FAULTS, Protocol, asked_before, faults_if, one_line
from r3lite.protocols.plan import InvalidPlan, Limits, Node, SearchPlan
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
ANSWER_LINE = re.compile(rf"^[ \t]*{ANSWER}", re.MULTILINE)
DOCUMENTS = "The retrieval documents of"
NODE_ANSWER = re.compile(r"[ \t]*([A-Za-z]\w{0,15})[ \t]*:[ \t]*(.*?)[ \t]*")


@dataclass(frozen=True)
class Dag(Protocol):
    """Reading and rendering of plans and of the answers of their nodes.

    `parse(render(step, k), earlier)` equals `step` without its documents, for every well-formed step.
    """

    init_prompt: str
    step_prompt: str  # has {documents} and may have {request}, which says what to write next
    limits: Limits = Limits()
    system: str | None = None

    faults = FAULTS
    stop_strings = (DOCUMENTS,)  # a model that writes this heading would invent the documents
    user_turns = True
    plans = True
    searches_by_graph = True
    answer_heading = ANSWER

    @staticmethod
    def load(settings: ProtocolSettings) -> "Dag":
        """Returns the protocol with the prompt files that the settings name.

        A relative path is looked up in the current folder, then in the package.
        """
        limits = Limits(settings.most_nodes, settings.most_node_words)
        values = limits.placeholders()
        init = read_template(prompt_file(settings, "init_prompt"), placeholder="question", optional=(*values, "A"))
        step = read_template(prompt_file(settings, "step_prompt"), placeholder="documents", optional=("request",))
        return Dag(
            init_prompt=opening_prompt(filled(init, values), settings),
            step_prompt=step,
            limits=limits,
            system=settings.system_prompt,
        )

    def render(self, step: Step, number: int) -> str:
        lines = []
        if step.analysis:
            lines.append(step.analysis)
        if step.answer:
            lines.append(f"{ANSWER} {step.answer}")
        return "\n".join(lines)

    def observation(self, question: str, steps: Sequence[Step]) -> str:
        """Returns the documents of each node of a level, then the queries whose answers are to be written next."""
        levels = self._plan(steps).levels
        searches = steps[-1].searches
        nodes = levels[len(steps) - 1]
        documents = render_each([f"{DOCUMENTS} {node.name}:" for node in nodes], searches)
        queries = {}  # by the beginning of the line that is to answer it
        for node, search in zip(nodes, searches, strict=True):
            queries[f"{node.name}:"] = one_line(search.query)
        if len(levels) == len(steps):
            queries[ANSWER] = question
        noun = "line"
        if len(queries) > 1:
            noun = "lines"
        request = [f"{beginning} {query}" for beginning, query in queries.items()]
        request.append("")
        request.append(f"Write the {noun} {' and '.join(queries)} with answers of a few words.")
        return filled(self.step_prompt, {"documents": documents, "request": "\n".join(request)})

    def read_answer(self, text: str, earlier: Sequence[Step]) -> Step:
        return _with_final(Step(), [text])

    def begins_answer(self, text: str) -> bool:
        return ANSWER_LINE.search(text) is not None

    def heading_after_cut_off(self, text: str, earlier: Sequence[Step]) -> str | None:
        if not earlier:
            return None
        return super().heading_after_cut_off(text, earlier)

    def step_request(self, number: int) -> str:
        if number == 1:
            return "Write the plan now, and nothing else."
        return "Write that now, and nothing else."

    def first_search(self, question: str) -> Step:
        """Returns the step of a plan of one node: the question without braces, which would be references to nodes."""
        node = Node("A", re.sub(r"[{}]", "", question).strip() or "?")
        return Step(SearchPlan((node,)).text(), (Search(question, kind=node.kind),))

    def example(self) -> list[Step]:
        node_a = Node("A", "one short question")
        node_b = Node("B", "another one, which uses the answer {A}")
        answer_a = "the answer of A in a few words"
        both = SearchPlan((node_a, node_b), edges=(("A", "B"),))
        return [
            Step(both.text(), searches=plan.searches_of([node_a])),
            Step(f"A: {answer_a}", searches=plan.searches_of([node_b], {"A": answer_a})),
            Step("B: the answer of B in a few words", answer="the answer in a few words"),
        ]

    def parse(self, text: str, earlier: Sequence[Step]) -> Step:
        """Reads a plan if there is no earlier step, else the answers of the nodes that were searched last.

        The faults are named in the step. The step of an invalid plan has no searches, so the episode ends with it.
        Answers with faults are used nevertheless if all queries of the next level can be filled.
        """
        text = text.strip()
        if earlier:
            return self._answers(text, earlier)
        try:
            first_level = plan.read(text, self.limits).levels[0]
        except InvalidPlan as error:
            return Step(text, faults=(str(error),))
        return Step(text, plan.searches_of(first_level))

    def _answers(self, text: str, earlier: Sequence[Step]) -> Step:
        """Returns the step of a turn that answers nodes.

        The step searches the next level or, if there is none, has the final answer.
        """
        levels = self._plan(earlier).levels
        searched_levels = len(earlier)
        last_level = levels[searched_levels - 1]
        body, *final_texts = ANSWER_LINE.split(text)
        answers, faults = _read_answers(body, last_level)
        step = Step(body.strip(), faults=tuple(faults))
        if final_texts:
            faults += faults_if(early_answer=searched_levels < len(levels))
            return _with_final(replace(step, faults=tuple(faults)), final_texts)
        if searched_levels == len(levels):
            return replace(step, faults=(*faults, "no_final_answer"))
        faults += faults_if(missing_answer=len(answers) < len(last_level))
        for level, earlier_step in zip(levels, earlier[1:]):  # step 1 is the plan, step 2 answers level 1, ...
            earlier_answers, _ = _read_answers(earlier_step.analysis, level)
            answers |= earlier_answers
        next_level = levels[searched_levels]
        needed = {name for node in next_level for name in node.references}
        if needed <= answers.keys():
            searches = plan.searches_of(next_level, answers)
            faults += faults_if(repeated_query=any(asked_before(search.query, earlier) for search in searches))
            step = replace(step, searches=searches)
        return replace(step, faults=tuple(dict.fromkeys(faults)))

    def _plan(self, steps: Sequence[Step]) -> SearchPlan:
        """Returns the plan of an episode's first step, of any size: a demonstration may exceed the model's limits."""
        return plan.read(steps[0].analysis, Limits(nodes=sys.maxsize, words=sys.maxsize))


def _read_answers(text: str, nodes: Sequence[Node]) -> tuple[dict[str, str], list[str]]:
    """Returns the answers of nodes, by the nodes' names, and the faults of the text."""
    names = {node.name for node in nodes}
    answers: dict[str, str] = {}
    faults: list[str] = []
    for line in text.splitlines():
        if not line.strip():
            continue
        name = None
        answer = ""
        match = NODE_ANSWER.fullmatch(line)
        if match:
            name, answer = match.groups()
        if name not in names:
            faults.append("text_outside_answers")
        elif name in answers:
            faults.append("repeated_answer")
        elif not answer:
            faults.append("blank_answer")
        else:
            answers[name] = answer
    return answers, list(dict.fromkeys(faults))


def _with_final(step: Step, final_texts: Sequence[str]) -> Step:
    """Returns the step with its final answer, which is one line; without an answer if there are several or it is blank.

    `final_texts` has the text after each heading of a final answer in the turn.
    """
    line, _, more_lines = final_texts[0].strip(" \t").partition("\n")
    is_repeated = len(final_texts) > 1
    faults = faults_if(
        text_outside_answers=more_lines.strip(),
        repeated_answer=is_repeated,
        blank_answer=not is_repeated and not line.strip(),
    )
    answer = None
    if not is_repeated:
        answer = line.strip() or None
    all_faults = dict.fromkeys((*step.faults, *faults))
    return replace(step, answer=answer, faults=tuple(all_faults))
