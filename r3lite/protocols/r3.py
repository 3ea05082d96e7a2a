"""R3, the protocol of R3-RAG: numbered steps with headings, and documents in user turns.

In R3-RAG (arXiv 2505.23794) the model writes numbered steps:

    Step 1:
    The problem analysis: what is known and what is missing
    The retrieval query: what to look up            (or)   The final answer: the answer

An episode is a chat. The question is the first user turn, and each step is an assistant turn. The documents of the
step's query, under `The retrieval documents:`, are the next user turn. Only assistant turns are parsed, so that the
example in the prompt is never read as a step.

There are two options. With `most_queries` > 1 a step may have several queries, numbered under `The retrieval queries:`,
one per line. With `verifies` a step checks its answer against the documents under `The verification:`, above the
answer.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from r3lite.core.episode import Document, Search, Step
from r3lite.protocols.base import STEP_FAULTS, Protocol, asked_before, faults_if, one_line
from r3lite.protocols.templates import check_placeholders, filled, opening_prompt, prompt_file, read_prompt
from r3lite.settings import ProtocolSettings

# What is wrong with a step, worded to follow `step k`, as in "step 2 writes a heading twice".
FAULTS = {
    "no_step_heading": "does not open with `Step k:`",
    "wrong_step_number": "opens with the wrong number",
    "no_analysis": "has no problem analysis, has a blank one, or has text before its first heading",
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


# A numbered query, such as "1. Marta Lindqvist". A decimal number, as in "1.5 km", does not number its line.
NUMBERED_LINE = re.compile(r"[ \t]*(\d+)\.(?!\d)(.*)")
# If an option is on, its note takes the place of {queries_note} or {verification_note} in the opening prompt. In the
# notes, `h` stands for the `Headings`.
QUERIES_NOTE = """Up to {limit} questions that do not wait for each other's answers can be asked at once, as in:
{h.queries}
1. Marta Lindqvist
2. Silent Harbour

"""
VERIFICATION_NOTE = "{h.verification} [2] Marta Lindqvist shows the town, [1] Ljungby shows the river.\n"


@dataclass(frozen=True)
class R3(Protocol):
    """Parses and renders R3 steps.

    Parsing undoes rendering: with k = len(earlier) + 1, `parse(render(step, k), earlier)` equals `step` without its
    documents. This holds for a well-formed step with at most `most_queries` queries and, unless `verifies` is on,
    without a verification.
    """

    init_prompt: str
    # The user turn with documents. It has {documents}; it may have {question} and {step}, the number of the next step.
    step_prompt: str
    system: str | None = None
    most_queries: int = 1  # how many queries a step may have
    verifies: bool = False  # whether an answer needs a verification
    headings: Headings = Headings()

    faults = FAULTS
    user_turns = True  # documents are user turns of the chat, see Protocol

    @staticmethod
    def load(settings: ProtocolSettings) -> "R3":
        """Returns R3 with the prompt files that the settings name.

        A relative path is looked up in the current folder, then in the package.
        """
        init_prompt = read_prompt(prompt_file(settings, "init_prompt"))
        step_prompt = read_prompt(prompt_file(settings, "step_prompt"))
        return R3.from_prompts(settings, init_prompt, step_prompt)

    @staticmethod
    def from_prompts(
        settings: ProtocolSettings,
        init_prompt: str,
        step_prompt: str,
        headings: Headings = Headings(),
    ) -> "R3":
        """Returns R3 with these prompts; raises R3LiteError if their placeholders are wrong."""
        notes = {"queries_note": "", "verification_note": ""}
        if settings.queries_per_step > 1:
            notes["queries_note"] = QUERIES_NOTE.format(limit=settings.queries_per_step, h=headings)
        if settings.verification:
            notes["verification_note"] = VERIFICATION_NOTE.format(h=headings)
        check_placeholders("the opening prompt", init_prompt, placeholder="question", optional=tuple(notes))
        check_placeholders(
            "the prompt with documents", step_prompt, placeholder="documents", optional=("question", "step")
        )
        return R3(
            # `opening_prompt` removes the worked example if the settings want none.
            init_prompt=opening_prompt(filled(init_prompt, notes), settings),
            step_prompt=step_prompt,
            system=settings.system_prompt,
            most_queries=settings.queries_per_step,
            verifies=settings.verification,
            headings=headings,
        )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The heading of documents: behind it the model would invent documents for its query, so it ends a turn.

        It stays in the text of the turn, where `parse` finds the fault. The stop token ends a turn without this fault.
        """
        return (self.headings.documents,)

    @cached_property
    def heading_pattern(self) -> re.Pattern:
        """Matches any heading of a part of a step, at the beginning of a line.

        Headings of options that are off are plain text.
        """
        headings = [self.headings.analysis, self.headings.query, self.headings.documents, self.headings.answer]
        if self.most_queries > 1:
            headings.append(self.headings.queries)
        if self.verifies:
            headings.append(self.headings.verification)
        any_heading = "|".join(map(re.escape, headings))
        return re.compile(rf"^[ \t]*({any_heading})", re.MULTILINE)

    def render(self, step: Step, number: int) -> str:
        parts = [f"{self.headings.step} {number}:", f"{self.headings.analysis} {step.analysis}"]
        if len(step.searches) > 1:
            parts.append(self.headings.queries)
            parts += [f"{i}. {query}" for i, query in enumerate(step.queries, 1)]
        elif step.searches:
            parts.append(f"{self.headings.query} {step.queries[0]}")
        if step.verification:
            parts.append(f"{self.headings.verification} {step.verification}")
        if step.answer is not None:
            parts.append(f"{self.headings.answer} {step.answer}")
        return "\n".join(parts)

    def observation(self, question: str, steps: Sequence[Step]) -> str:
        searches = steps[-1].searches
        if len(searches) == 1:
            documents = render_documents(searches[0].documents)
        else:  # the documents of each query stand below the query
            numbered_queries = [f"{i}. {search.query}" for i, search in enumerate(searches, 1)]
            documents = render_each(numbered_queries, searches)
        values = {"documents": documents, "question": question, "step": str(len(steps) + 1)}
        return filled(self.step_prompt, values)

    @property
    def answer_heading(self) -> str:
        return self.headings.answer

    def begins_answer(self, text: str) -> bool:
        # A heading counts at the beginning of a line, and directly after `Step k:` on the same line. Elsewhere the
        # words of a heading are plain text.
        _, body = self._step_number_and_body(text)
        return any(match[1] == self.answer_heading for match in self.heading_pattern.finditer(body))

    def answer_prefix(self, number: int) -> str:
        return f"{self.headings.step} {number}:\n{self.headings.answer}"

    def read_answer(self, text: str, earlier: Sequence[Step]) -> Step:
        # The model wrote only `text`, behind the heading of the answer, but `parse` reads whole steps. So the parts up
        # to this heading are rendered here, with "-" as their content, and `parse` finds faults only in the answer.
        verification = "-" if self.verifies else ""
        step_before_text = self.render(Step("-", answer="", verification=verification), len(earlier) + 1)
        return self.parse(step_before_text + text, earlier)

    def step_request(self, number: int) -> str:
        return f"Write {self.headings.step} {number} now, and nothing else."

    def _step_number_and_body(self, text: str) -> tuple[int | None, str]:
        """Returns the number k of the heading `Step k:` that begins a turn, and the text behind the heading.

        Returns None and the whole text if the turn does not begin with such a heading.
        """
        heading = re.match(rf"\s*{re.escape(self.headings.step)}[ \t]+(\d{{1,9}})[ \t]*:[ \t]*\n?", text)
        if heading is None:
            return None, text
        return int(heading[1]), text[heading.end() :]

    def parse(self, text: str, earlier: Sequence[Step]) -> Step:
        """Reads a turn strictly; the step's `faults` name everything that is wrong with the turn.

        A step can have faults and still a query or an answer, so that the episode can go on and be rewarded for what is
        right in it:
        - With both a query and an answer, or with two answers, the step gets no query and no answer: it is not clear
          which one is meant.
        - With two queries it gets the first one, because a search does not end the episode.
        - With a query and a list of queries it gets no query.
        """
        step_number, body = self._step_number_and_body(text)
        # The pattern has a group, so `split` returns the text before the first heading (the preamble), then each
        # heading and the text below it.
        preamble, *headings_and_texts = self.heading_pattern.split(body)
        written_headings = headings_and_texts[::2]
        texts = headings_and_texts[1::2]
        sections: dict[str, str] = {}  # by heading, in the order of the turn; of a repeated heading, the first section
        for heading, section in zip(written_headings, texts):
            sections.setdefault(heading, section.strip())
        analysis = sections.get(self.headings.analysis, "")
        # Text between `Step k:` and the first heading is the fault "no_analysis", even if an analysis with its heading
        # follows. A turn without `Step k:` has the fault "no_step_heading" instead, whatever its first words are.
        has_text_before_headings = step_number is not None and preamble.strip()
        faults = faults_if(
            no_step_heading=step_number is None,
            wrong_step_number=step_number not in (None, len(earlier) + 1),
            repeated_heading=len(sections) < len(written_headings),
            wrote_documents=self.headings.documents in sections,
            no_analysis=has_text_before_headings or not analysis,
        )
        queries = self._parse_queries(sections, faults)
        answer = _parse_answer(sections.get(self.headings.answer), faults)
        self._check_verification(sections, faults)
        has_query = self.headings.query in sections or self.headings.queries in sections
        has_answer = self.headings.answer in sections
        faults += faults_if(
            query_and_answer=has_query and has_answer,
            no_query_or_answer=not has_query and not has_answer,
        )
        has_two_answers = written_headings.count(self.headings.answer) > 1
        if (has_query and has_answer) or has_two_answers:
            queries = []
            answer = None
        faults += faults_if(repeated_query=_repeats_query(queries, earlier))
        return Step(
            analysis=analysis,
            searches=tuple(map(Search, queries)),
            answer=answer,
            faults=tuple(dict.fromkeys(faults)),  # each fault once
            verification=sections.get(self.headings.verification, ""),
        )

    def _check_verification(self, sections: dict[str, str], faults: list[str]) -> None:
        """Appends a fault if an answer has no verification above it, or if there is a verification but no answer.

        `sections` are in the order of the turn.
        """
        has_answer = self.headings.answer in sections
        has_verification = self.headings.verification in sections
        is_after_answer = False
        if has_answer and has_verification:
            in_order = list(sections)
            is_after_answer = in_order.index(self.headings.verification) > in_order.index(self.headings.answer)
        is_blank = not sections.get(self.headings.verification)  # or there is none
        faults += faults_if(
            no_verification=self.verifies and has_answer and (is_blank or is_after_answer),
            idle_verification=has_verification and not has_answer,
        )

    def _parse_queries(self, sections: dict[str, str], faults: list[str]) -> list[str]:
        """Returns the usable queries of a step, and appends what is wrong with its queries to `faults`."""
        query = _parse_query(sections.get(self.headings.query), faults)
        has_list = self.headings.queries in sections
        if has_list and self.headings.query in sections:
            faults.append("query_and_queries")
            return []
        if has_list:
            return self._parse_query_list(sections[self.headings.queries], faults)
        if query:
            return [query]
        return []

    def _parse_query_list(self, section: str, faults: list[str]) -> list[str]:
        """Returns the usable queries of a numbered list, one a line, and appends what is wrong with it to `faults`.

        Usable are those that are not blank, up to `most_queries`, even if they are wrongly numbered.
        """
        numbers: list[str | None] = []  # None: the line has no number
        queries = []
        for line in section.split("\n"):
            if not line.strip():
                continue
            match = NUMBERED_LINE.fullmatch(line)
            if match:
                numbers.append(match[1])
                queries.append(match[2].strip())
            else:
                numbers.append(None)
                queries.append(line.strip())
        expected_numbers = [str(number) for number in range(1, len(queries) + 1)]
        faults += faults_if(
            unnumbered_query=numbers != expected_numbers,
            blank_query=not queries or not all(queries),
            too_many_queries=len(queries) > self.most_queries,
        )
        usable = [query for query in queries if query]
        return usable[: self.most_queries]


def _repeats_query(queries: Sequence[str], earlier: Sequence[Step]) -> bool:
    """Returns whether a query of a step repeats a query of an earlier step, or a query before it in the same step."""
    for i, query in enumerate(queries):
        step_before_query = Step(searches=tuple(map(Search, queries[:i])))
        if asked_before(query, [*earlier, step_before_query]):
            return True
    return False


def _parse_query(section: str | None, faults: list[str]) -> str | None:
    """Returns the first line of a section as the query; None if there is no section or its first line is blank.

    Appends what is wrong with the query to `faults`.
    """
    if section is None:
        return None
    query, more_lines = _first_line(section)
    faults += faults_if(text_after_query=more_lines, blank_query=not query)
    return query or None


def _parse_answer(section: str | None, faults: list[str]) -> str | None:
    """Returns the first line of a section as the answer; None if there is no section or its first line is blank.

    Appends what is wrong with the answer to `faults`.
    """
    if section is None:
        return None
    answer, more_lines = _first_line(section)
    faults += faults_if(text_after_answer=more_lines, blank_answer=not answer)
    return answer or None


def _first_line(section: str) -> tuple[str, str]:
    """Returns the first line of a section and the text below it, both without blanks around them."""
    line, _, more_lines = section.partition("\n")
    return line.strip(), more_lines.strip()


def render_each(headings: Sequence[str], searches: Sequence[Search]) -> str:
    """Returns the documents of each search under its heading, numbered consecutively over all searches."""
    parts = []
    first_number = 1
    for heading, search in zip(headings, searches, strict=True):
        parts.append(f"{heading}\n{render_documents(search.documents, first_number)}")
        first_number += len(search.documents)
    return "\n".join(parts)


def render_documents(documents: Sequence[Document], first_number: int = 1) -> str:
    """Returns the documents, one a line, numbered from `first_number` on."""
    if not documents:
        return "(nothing was found)"
    lines = [f"[{i}] {one_line(d.title)}: {one_line(d.text)}" for i, d in enumerate(documents, first_number)]
    return "\n".join(lines)
