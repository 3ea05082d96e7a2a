"""R3 steps, the protocol of R3-RAG: numbered steps with headings, documents in user turns.

R3-RAG (arXiv 2505.23794) writes an episode as numbered steps. The model writes

    Step 1:
    The problem analysis: what is known and what is missing
    The retrieval query: what to look up            (or)   The final answer: the answer

and the documents of its query are given to it under `The retrieval documents:`. An episode is a chat: the question is
the first user turn, each step is an assistant turn, the documents of each query are the next user turn. Parsing sees
one assistant turn at a time, so the example in the prompt is never read as a step.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from r3lite.episode import Document, Step
from r3lite.protocols.base import LAYOUT_FAULTS, Protocol, one_line, same_query
from r3lite.protocols.templates import read_template
from r3lite.settings import ProtocolSettings

FAULTS = {
    "no_step_heading": "does not open with `Step k:`",
    "wrong_step_number": "opens with the wrong number",
    "no_analysis": "has no problem analysis, or a blank one",
    "no_query_or_answer": "has neither a query nor an answer",
    "query_and_answer": "has both a query and an answer",
    "blank_query": "asks for nothing",
    "blank_answer": "answers nothing",
    "repeated_query": "asks again what an earlier step asked",
    "repeated_heading": "writes a heading twice",
    "text_after_query": "goes on after the query",
    "text_after_answer": "goes on after the answer",
    "wrote_documents": "writes retrieval documents itself",
    **LAYOUT_FAULTS,
}
STEP = re.compile(r"\s*Step[ \t]+(\d+)[ \t]*:[ \t]*\n?")
ANALYSIS, QUERY, DOCUMENTS, ANSWER = (
    "The problem analysis:",
    "The retrieval query:",
    "The retrieval documents:",
    "The final answer:",
)
HEADING = re.compile(rf"^[ \t]*({'|'.join(map(re.escape, (ANALYSIS, QUERY, DOCUMENTS, ANSWER)))})", re.MULTILINE)


@dataclass(frozen=True)
class R3(Protocol):
    """Parsing and rendering of R3 steps. `parse(render(step, k), earlier) == step` for every well-formed step."""

    init_prompt: str  # opens an episode; has {question}
    step_prompt: str  # answers a query; has {documents} and may have {step}, the number of the step to be written next
    system: str | None = None

    faults = FAULTS
    # A model that goes on past its query would invent the documents; its turn is over when it starts to.
    stop_strings = (DOCUMENTS,)
    user_turns = True
    answer_request = "No further retrieval is possible. Give the final answer."

    @staticmethod
    def load(settings: ProtocolSettings) -> "R3":
        """With the prompt files that the settings name; a relative path is looked up here, then among the shipped."""
        init = read_template(settings.init_prompt or "prompts/init_prompt.txt", "question")
        step = read_template(settings.step_prompt or "prompts/step_prompt.txt", "documents", ("step",))
        return R3(init, step, settings.system_prompt)

    def opening(self, question: str) -> str:
        return self.init_prompt.replace("{question}", question)

    def render(self, step: Step, number: int) -> str:
        last = f"{QUERY} {step.query}" if step.answer is None else f"{ANSWER} {step.answer}"
        return f"Step {number}:\n{ANALYSIS} {step.analysis}\n{last}"

    def observation(self, documents: Sequence[Document], number: int) -> str:
        filled = {"documents": render_documents(documents), "step": str(number)}
        # One pass, so that a document that has a placeholder in it stays as it is.
        return re.sub(r"\{(documents|step)\}", lambda m: filled[m[1]], self.step_prompt)

    def forced_prefix(self, number: int) -> str:
        return f"Step {number}:\n{ANALYSIS} No further retrieval is possible.\n{ANSWER}"

    def step_request(self, number: int) -> str:
        return f"Write Step {number} now, and nothing else."

    def first_turn(self, reply: str) -> str:
        return reply.partition(DOCUMENTS)[0]

    def parse(self, text: str, earlier: Sequence[Step]) -> Step:
        """Reads a turn strictly; whatever is wrong with it is named in `faults`.

        A step with a usable query, or else a usable answer, carries it in spite of its faults, so that an episode
        can go on and be rewarded for what is right in it. With both at once, or two answers, neither is usable.
        """
        faults = []
        opening = STEP.match(text)
        if opening is None:
            faults.append("no_step_heading")
        elif int(opening[1]) != len(earlier) + 1:
            faults.append("wrong_step_number")
        body = text[opening.end() :] if opening else text
        marks = list(HEADING.finditer(body))
        if opening and marks and body[: marks[0].start()].strip():
            faults.append("no_analysis")  # text that stands under no heading
        sections: dict[str, str] = {}
        for mark, following in zip(marks, [*marks[1:], None]):
            if mark[1] in sections:
                faults.append("repeated_heading")
                continue
            sections[mark[1]] = body[mark.end() : following.start() if following else len(body)].strip()
        if DOCUMENTS in sections:
            faults.append("wrote_documents")
        if not sections.get(ANALYSIS):
            faults.append("no_analysis")
        query = _line(sections.get(QUERY), "query", faults)
        answer = _line(sections.get(ANSWER), "answer", faults)
        if QUERY in sections and ANSWER in sections:
            faults.append("query_and_answer")
            query = answer = None
        elif sum(mark[1] == ANSWER for mark in marks) > 1:
            answer = None  # it is not clear which of the two is meant
        elif QUERY not in sections and ANSWER not in sections:
            faults.append("no_query_or_answer")
        if query and any(same_query(query, s.query) for s in earlier if s.query is not None):
            faults.append("repeated_query")
        return Step(sections.get(ANALYSIS, ""), query, (), answer, tuple(dict.fromkeys(faults)))


def _line(section: str | None, what: str, faults: list[str]) -> str | None:
    """The query or answer in a section: its only line, or None if there is none. Adds to `faults`."""
    if section is None:
        return None
    line, _, rest = section.partition("\n")
    if rest.strip():
        faults.append(f"text_after_{what}")
    if not line.strip():
        faults.append(f"blank_{what}")
    return line.strip() or None


def render_documents(documents: Sequence[Document]) -> str:
    """Numbered passages, one a line."""
    if not documents:
        return "(nothing was found)"
    return "\n".join(f"[{i}] {one_line(d.title)}: {one_line(d.text)}" for i, d in enumerate(documents, 1))
