"""R3 steps, the protocol of R3-RAG: numbered steps with headings, documents in user turns.

In R3-RAG (arXiv 2505.23794) the model writes numbered steps:

    Step 1:
    The problem analysis: what is known and what is missing
    The retrieval query: what to look up            (or)   The final answer: the answer

An episode is a chat: the question is the first user turn, each step is an assistant turn, and the documents of its
query, under `The retrieval documents:`, are the next user turn. Only assistant turns are parsed, so that the example
in the prompt is never read as a step.

Two options: a step may have several queries, numbered under `The retrieval queries:`, one per line; and an answer may
have to be checked against the documents before it is given, under `The verification:`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from r3lite.core.episode import Document, Search, Step
from r3lite.protocols.base import STEP_FAULTS, Protocol, asked_before, named, one_line
from r3lite.protocols.templates import check_placeholders, filled, opening_prompt, prompt_file, read_prompt
from r3lite.settings import ProtocolSettings

FAULTS = {
    "no_step_heading": "does not open with `Step k:`",
    "wrong_step_number": "opens with the wrong number",
    "no_analysis": "has no problem analysis, or a blank one",
    "repeated_heading": "writes a heading twice",
    "query_and_queries": "has both a query and a list of queries",
    "unnumbered_query": "does not number its queries from 1, one a line",
    "too_many_queries": "asks more queries than are allowed at once",
    "no_verification": "answers without a verification before it, or with a blank one",
    "idle_verification": "verifies, but does not answer",
    "text_after_query": "goes on after the query",
    "text_after_answer": "goes on after the answer",
    "wrote_documents": "writes retrieval documents itself",
    **STEP_FAULTS,
}


@dataclass(frozen=True)
class Headings:
    """The headings of the parts of a step."""

    step: str = "Step"  # followed by its number and a colon
    analysis: str = "The problem analysis:"
    query: str = "The retrieval query:"
    queries: str = "The retrieval queries:"
    documents: str = "The retrieval documents:"
    verification: str = "The verification:"
    answer: str = "The final answer:"


NUMBERED = re.compile(r"[ \t]*(\d+)\.(.*)")
# The text for {queries_note} and {verification_note} of the opening prompt, if the options are on.
QUERIES_NOTE = """Up to {most} questions that do not wait for each other's answers can be asked at once, as in:
{h.queries}
1. Marta Lindqvist
2. Silent Harbour

"""
VERIFICATION_NOTE = "{h.verification} [2] Marta Lindqvist shows the town, [1] Ljungby shows the river.\n"


@dataclass(frozen=True)
class R3(Protocol):
    """Parses and renders R3 steps. `parse(render(step, k), earlier) == step` for every well-formed step."""

    init_prompt: str
    step_prompt: str  # the user turn with {documents}, perhaps with {question} and {step}, the number of the next step
    system: str | None = None
    most_queries: int = 1  # of a step
    verifies: bool = False
    names: Headings = Headings()

    faults = FAULTS
    user_turns = True

    @staticmethod
    def load(settings: ProtocolSettings) -> "R3":
        """R3 with the prompt files that the settings name: a relative path is looked up here, then in the package."""
        init, step = (read_prompt(prompt_file(settings, which)) for which in ("init_prompt", "step_prompt"))
        return R3.made(settings, init, step)

    @staticmethod
    def made(settings: ProtocolSettings, init: str, step: str, headings: Headings = Headings()) -> "R3":
        """R3 with these prompts; R3LiteError if their placeholders are wrong."""
        most, verifies = settings.queries_per_step, settings.verification
        notes = {
            "queries_note": QUERIES_NOTE.format(most=most, h=headings) if most > 1 else "",
            "verification_note": VERIFICATION_NOTE.format(h=headings) if verifies else "",
        }
        check_placeholders("the opening prompt", init, "question", tuple(notes))
        check_placeholders("the prompt with documents", step, "documents", ("question", "step"))
        return R3(opening_prompt(filled(init, notes), settings), step, settings.system_prompt, most, verifies, headings)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """A turn ends when the model begins to invent the documents of its query."""
        return (self.names.documents,)

    @cached_property
    def heading(self) -> re.Pattern:
        """Matches the headings of a step at the beginning of a line; those of options that are off are plain text."""
        optional = [self.names.queries] * (self.most_queries > 1) + [self.names.verification] * self.verifies
        known = (self.names.analysis, self.names.query, self.names.documents, self.names.answer, *optional)
        return re.compile(rf"^[ \t]*({'|'.join(map(re.escape, known))})", re.MULTILINE)

    def render(self, step: Step, number: int) -> str:
        parts = [f"{self.names.step} {number}:", f"{self.names.analysis} {step.analysis}"]
        if len(step.searches) > 1:
            parts += [self.names.queries, *(f"{i}. {query}" for i, query in enumerate(step.queries, 1))]
        elif step.searches:
            parts.append(f"{self.names.query} {step.queries[0]}")
        if step.verification:
            parts.append(f"{self.names.verification} {step.verification}")
        if step.answer is not None:
            parts.append(f"{self.names.answer} {step.answer}")
        return "\n".join(parts)

    def observation(self, question: str, steps: Sequence[Step]) -> str:
        searches, number = steps[-1].searches, str(len(steps) + 1)
        if len(searches) == 1:
            documents = render_documents(searches[0].documents)
        else:  # under their queries
            documents = render_each([f"{i}. {search.query}" for i, search in enumerate(searches, 1)], searches)
        return filled(self.step_prompt, {"documents": documents, "question": question, "step": number})

    @property
    def answer_heading(self) -> str:
        return self.names.answer

    def answer_opening(self, number: int) -> str:
        return f"{self.names.step} {number}:\n{self.names.answer}"

    def read_answer(self, text: str, earlier: Sequence[Step]) -> Step:
        written = Step("-", answer="", verification="-" * self.verifies)
        return self.parse(self.render(written, len(earlier) + 1).rstrip() + text, earlier)

    def step_request(self, number: int) -> str:
        return f"Write {self.names.step} {number} now, and nothing else."

    def parse(self, text: str, earlier: Sequence[Step]) -> Step:
        """Reads a turn strictly; `faults` names everything that is wrong with it.

        A usable query, or else a usable answer, is kept in spite of faults, so that the episode can go on and be
        rewarded for what is right in it. With both a query and an answer, or with two answers, none is usable.
        """
        opening = re.match(rf"\s*{re.escape(self.names.step)}[ \t]+(\d{{1,9}})[ \t]*:[ \t]*\n?", text)
        before, *parts = self.heading.split(text[opening.end() :] if opening else text)
        headings, sections = parts[::2], {}
        for heading, section in zip(headings, parts[1::2]):
            sections.setdefault(heading, section.strip())
        stray = opening and headings and before.strip()  # text before the first heading
        faults = named(
            no_step_heading=opening is None,
            wrong_step_number=opening and int(opening[1]) != len(earlier) + 1,
            repeated_heading=len(sections) < len(headings),
            wrote_documents=self.names.documents in sections,
            no_analysis=stray or not sections.get(self.names.analysis),
        )
        queries = self._queries(sections, faults)
        answer = _line(sections.get(self.names.answer), "answer", faults)
        asks, answers = self.names.query in sections or self.names.queries in sections, self.names.answer in sections
        verification, order = sections.get(self.names.verification, ""), list(sections)
        verifies = self.names.verification in sections
        late = answers and verifies and order.index(self.names.verification) > order.index(self.names.answer)
        unverified = self.verifies and answers and (late or not verification)
        faults += named(no_verification=unverified, idle_verification=verifies and not answers)
        faults += named(query_and_answer=asks and answers, no_query_or_answer=not (asks or answers))
        if (asks and answers) or headings.count(self.names.answer) > 1:
            queries, answer = [], None  # it is not clear which one is meant
        searches = tuple(map(Search, queries))
        again = (asked_before(query, [*earlier, Step(searches=searches[:i])]) for i, query in enumerate(queries))
        faults += named(repeated_query=any(again))
        return Step(sections.get(self.names.analysis, ""), searches, answer, tuple(dict.fromkeys(faults)), verification)

    def _queries(self, sections: dict[str, str], faults: list[str]) -> list[str]:
        """The usable queries of a step; appends to `faults`."""
        query = _line(sections.get(self.names.query), "query", faults)
        if self.names.queries not in sections or self.names.query in sections:
            faults += named(query_and_queries=self.names.queries in sections)
            return [query] if query and self.names.queries not in sections else []
        lines = [line for line in sections[self.names.queries].splitlines() if line.strip()]
        numbered = [NUMBERED.fullmatch(line) for line in lines]
        queries = [(found[2] if found else line).strip() for found, line in zip(numbered, lines)]
        faults += named(
            unnumbered_query=[found and found[1] for found in numbered] != [str(i + 1) for i in range(len(lines))],
            blank_query=not queries or not all(queries),
            too_many_queries=len(queries) > self.most_queries,
        )
        return list(filter(None, queries))[: self.most_queries]


def _line(section: str | None, what: str, faults: list[str]) -> str | None:
    """The query or answer in a section, which is its first line; None if there is none. Appends to `faults`."""
    if section is None:
        return None
    line, _, rest = section.partition("\n")
    faults += named(**{f"text_after_{what}": rest.strip(), f"blank_{what}": not line.strip()})
    return line.strip() or None


def render_each(headings: Sequence[str], searches: Sequence[Search]) -> str:
    """The documents of each search under its heading, numbered consecutively over all searches."""
    parts, first = [], 1
    for heading, search in zip(headings, searches, strict=True):
        parts.append(f"{heading}\n{render_documents(search.documents, first)}")
        first += len(search.documents)
    return "\n".join(parts)


def render_documents(documents: Sequence[Document], first: int = 1) -> str:
    """Numbered passages, one per line, from number `first` on."""
    if not documents:
        return "(nothing was found)"
    return "\n".join(f"[{i}] {one_line(d.title)}: {one_line(d.text)}" for i, d in enumerate(documents, first))
