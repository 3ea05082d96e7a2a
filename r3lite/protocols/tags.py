"""Steps in tags, inside one assistant turn: `--format tags` (Search-R1 and its relatives) and `--format solution`.

With `tags` (arXiv 2503.09516) the model writes

    <think> what is known and what is missing </think><search> what to look up </search>

and is stopped there. The documents follow as `<information>...</information>`, and the model goes on in the same
assistant turn until `<answer> the answer </answer>`. With `solution` it writes one step that does not search:

    <start_working_out> the working-out <end_working_out><SOLUTION> the answer </SOLUTION>

With --search-graph, the text in <search> is a plan (plan.py), as in R-Search (arXiv 2506.08352). Its edges decide only
in which order the queries are listed: no query waits for the documents of another one. In a step, `analysis` is the
thought, followed by the plan as written.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from r3lite.core.episode import Search, Step
from r3lite.core.errors import R3LiteError
from r3lite.protocols import markup, plan
from r3lite.protocols.base import NO_MORE, STEP_FAULTS, Protocol, asked_before, faults_if
from r3lite.protocols.markup import Block, Markup, Tag
from r3lite.protocols.plan import InvalidPlan, Limits, Node, SearchPlan
from r3lite.protocols.templates import filled, opening_prompt, prompt_file, read_template, refuse_step_prompt
from r3lite.settings import ProtocolSettings

FAULTS = {
    **markup.FAULTS,
    "repeated_tag": "has two blocks of one kind",
    "no_think": "has no thinking before its query or answer, or a blank one",
    "late_think": "thinks after its query or answer",
    "wrote_documents": "writes retrieved documents itself",
    **STEP_FAULTS,
}
GRAPH_FAULTS = {**plan.FAULTS, "unfilled_reference": "uses another node's answer, though all are searched at once"}
# Faults that lenient reading does not count, as they leave no doubt about the query or the answer.
FORGIVEN = {*markup.FAULTS, "no_think", "late_think"}
THINK = Tag("<think>", "</think>")
SEARCH = Tag("<search>", "</search>")
INFORMATION = Tag("<information>", "</information>")
ANSWER = Tag("<answer>", "</answer>")
WORKING_OUT = Tag("<start_working_out>", "<end_working_out>")
SOLUTION = Tag("<SOLUTION>", "</SOLUTION>")
TAG_NAME = re.compile(r"</?[A-Za-z][A-Za-z0-9_-]*>")


@dataclass(frozen=True)
class Tags(Protocol):
    """Reading and rendering of steps in tags.

    `parse(render(step, k), earlier)` equals `step` without its documents, for every well-formed step without a
    verification that meets a condition on its searches. With `graph`: if it has any, its analysis ends with their plan.
    Without `graph`: it has at most one, which names no kind.

    Without `search` and `information` a step can only answer. Lenient reading takes tags in any letter case; the next
    tag or the end of the turn also closes a block, and the faults in FORGIVEN do not count.
    """

    init_prompt: str
    think: Tag = THINK
    answer: Tag = ANSWER
    search: Tag | None = SEARCH
    information: Tag | None = INFORMATION  # around documents
    lenient: bool = False
    system: str | None = None
    graph: Limits | None = None  # the limits of the plan in <search>; None: there is a query instead of a plan

    faults = GRAPH_FAULTS | FAULTS
    user_turns = False

    @property
    def can_search(self) -> bool:
        return self.search is not None

    @property
    def searches_by_graph(self) -> bool:
        return self.graph is not None

    @property
    def thinks(self) -> bool:
        return self.think == THINK

    @cached_property
    def markup(self) -> Markup:
        tags = (self.think, self.search, self.information, self.answer)
        return Markup(tuple(filter(None, tags)), self.lenient)

    @cached_property
    def stop_strings(self) -> tuple[str, ...]:
        """The closing ends that stop a turn; for lenient reading in each of the usual letter cases."""
        ends = [tag.closing for tag in (self.search, self.answer) if tag]
        if not self.lenient:
            return tuple(dict.fromkeys(ends))
        stops = []
        for end in ends:
            stops += [end, end.lower(), end.title(), end.upper()]
        return tuple(dict.fromkeys(stops))

    @property
    def answer_request(self) -> str:
        if not self.can_search:
            return ""
        return self._spliced(NO_MORE)

    @property
    def answer_heading(self) -> str:
        return self.answer.opening

    def quoted(self, text: str) -> str:
        return self.markup.quoted(text)

    def render(self, step: Step, number: int) -> str:
        assert self.search or not step.searches, "a protocol without search renders no query"
        if step.answer is not None:
            return self.think.around(step.analysis) + self.answer.around(step.answer)
        if not self.graph:
            return self.think.around(step.analysis) + self.search.around(step.queries[0])
        thought, plan_text = _split_plan(step.analysis)
        if not plan_text:
            plan_text = _plan_of(step).text()
        return self.think.around(thought) + self.search.around(plan_text)

    def observation(self, question: str, steps: Sequence[Step]) -> str:
        """Returns numbered passages, one a line, as Search-R1 gives them; with a graph, each query above its own."""
        lines = []
        number = 0
        for search in steps[-1].searches:
            if self.graph:
                lines.append(self.quoted(search.query))
            for document in search.documents:
                number += 1
                title = self.quoted(document.title)
                lines.append(f"Doc {number}(Title: {title}) {self.quoted(document.text)}")
            if not search.documents:
                lines.append("(nothing was found)")
        return self._spliced("\n".join(lines))

    def read_answer(self, text: str, earlier: Sequence[Step]) -> Step:
        return self.parse(self.think.around("-") + self.answer.opening + text, earlier)

    def heading_after_cut_off(self, text: str, earlier: Sequence[Step]) -> str | None:
        heading = super().heading_after_cut_off(text, earlier)
        if not heading:
            return heading
        missing_ends = ""
        for tag in (self.think, self.search):
            if tag and self.markup.is_open(tag, text):
                missing_ends += tag.closing
        return missing_ends + heading

    def step_request(self, number: int) -> str:
        endings = " or ".join(tag.opening for tag in (self.search, self.answer) if tag)
        return f"Go on now: write {self.think.opening}, then {endings}, and nothing else."

    def first_turn(self, reply: str) -> str:
        ends = [reply.index(stop) + len(stop) for stop in self.stop_strings if stop in reply]
        return reply[: min(ends, default=len(reply))]

    def begins_answer(self, text: str) -> bool:
        return self.markup.opens(self.answer, text)

    def parse(self, text: str, earlier: Sequence[Step]) -> Step:
        """Reads a turn; its faults are named in the step.

        A step with faults nevertheless has the query of its one closed search block, or the answer of its one closed
        answer block, so that an episode can continue and be rewarded for what is right in it. With two search
        blocks it has no query, with two answer blocks no answer, and with both kinds of blocks neither.
        """
        blocks, faults = self.markup.read(text)
        thoughts = [block for block in blocks if block.tag == self.think]
        queries = [block for block in blocks if block.tag == self.search]
        answers = [block for block in blocks if block.tag == self.answer]
        thought = ""
        if thoughts:
            thought = thoughts[0].text
        faults += faults_if(
            repeated_tag=max(len(thoughts), len(queries), len(answers)) > 1,
            wrote_documents=self.information in self.markup.tags_in(text),
            no_think=not thought,
            late_think=thought and self._first_tag(blocks) != self.think,
        )
        query = self._usable_text(queries, "query", faults)
        answer = self._usable_text(answers, "answer", faults)
        faults += faults_if(query_and_answer=queries and answers, no_query_or_answer=not (queries or answers))
        if queries and answers:
            query = None
            answer = None
        searches: tuple[Search, ...] = ()
        if query:
            searches = self._read_searches(query, faults)
        faults += faults_if(repeated_query=any(asked_before(search.query, earlier) for search in searches))
        analysis = thought
        if searches and self.graph:
            # With the plan as the model wrote it, so that `_split_plan` can find the plan again.
            analysis = f"{thought}\n{query}".strip()
        faults = list(dict.fromkeys(faults))
        if self.lenient:
            faults = [fault for fault in faults if fault not in FORGIVEN]
        return Step(analysis, searches=searches, answer=answer, faults=tuple(faults))

    def _first_tag(self, blocks: list[Block]) -> Tag:
        """Returns the tag of the first block that is not a block of documents."""
        return next(block.tag for block in blocks if block.tag != self.information)

    def _read_searches(self, text: str, faults: list[str]) -> tuple[Search, ...]:
        """Returns the searches of a search block: one for its query or, with `graph`, one for each node of its plan.

        If the plan is not valid, there are none, and its fault is appended to `faults`.
        """
        if not self.graph:
            return (Search(text),)
        try:
            nodes = [node for level in plan.read(text, self.graph).levels for node in level]
            plan.refuse_if(unfilled_reference=any(node.references for node in nodes))
            return plan.searches_of(nodes)
        except InvalidPlan as error:
            faults.append(str(error))  # the name of a fault
            return ()

    def _usable_text(self, blocks: list[Block], part: str, faults: list[str]) -> str | None:
        """Returns the text of the block of a kind; None if it is blank or not closed, or if there are none or several.

        Lenient reading also takes a block that is not closed. `part` is the kind of the blocks: "query" or "answer". If
        one of them is blank, a fault is appended to `faults`.
        """
        if any(not block.text for block in blocks):
            faults.append(f"blank_{part}")
        if len(blocks) != 1:
            return None
        block = blocks[0]
        if block.closed or self.lenient:
            return block.text or None
        return None

    def _spliced(self, text: str) -> str:
        """Returns text that is inserted into the model's turn, in the tag around documents."""
        assert self.information, "a protocol without search is given nothing"
        return f"\n\n{self.information.opening}{text}{self.information.closing}\n\n"


def _split_plan(analysis: str) -> tuple[str, str]:
    """Returns the thought and the plan that `Tags.parse` has joined to an analysis; the plan is "" if there is none."""
    # The line break that is put before the analysis finds a plan at its very beginning, if there is no thought.
    thought, nodes_heading, nodes = f"\n{analysis}".rpartition(f"\n{plan.NODES}")
    if not nodes_heading:
        return analysis, ""
    return thought.removeprefix("\n"), plan.NODES + nodes


def _plan_of(step: Step) -> SearchPlan:
    """Returns a plan of the searches of a step without one, such as a step that was written for another format."""
    nodes = []
    for i, search in enumerate(step.searches):
        name = chr(ord("A") + i)
        kind = search.kind or Node.kind  # Node.kind is the default, for a search that names no kind of source
        nodes.append(Node(name, query=search.query, kind=kind))
    return SearchPlan(tuple(nodes))


def load_tags(settings: ProtocolSettings) -> Tags:
    """Returns the protocol with the tags think, search and answer; the settings name the tag around documents."""
    information = Tag(settings.information_open, settings.information_close)
    _check_information(information)
    values = {"information_open": information.opening, "information_close": information.closing}
    graph = None
    if settings.search_graph:
        graph = Limits(settings.most_nodes, settings.most_node_words)
        values |= graph.placeholders()
    prompt = filled(_init_prompt(settings, tuple(values)), values)
    return Tags(
        prompt,
        information=information,
        lenient=settings.tags == "lenient",
        system=settings.system_prompt,
        graph=graph,
    )


def _check_information(information: Tag) -> None:
    """Raises R3LiteError unless the ends of the tag around documents are tags that the format does not have.

    Also raises it if only the opening end was changed: its closing end was then probably forgotten. It is no error to
    change the closing end alone, to a tag such as <end>.
    """
    format_tags = Markup((THINK, SEARCH, ANSWER), any_case=True)
    ends = {"--information-open": information.opening, "--information-close": information.closing}
    for flag, end in ends.items():
        if not TAG_NAME.fullmatch(end) or format_tags.tags_in(end):
            raise R3LiteError(
                f"{flag} is {end!r}",
                "Pass a tag such as <context>, other than think, search, answer.",
                code="tag-invalid",
            )
    if information.opening != INFORMATION.opening and information.closing == INFORMATION.closing:
        cause = f"--information-open is {information.opening}, but --information-close is {information.closing}"
        raise R3LiteError(cause, "Pass both, such as <context> and </context>.", code="tags-differ")


def load_solution(settings: ProtocolSettings) -> Tags:
    """Returns the protocol with the tags working-out and solution, which does not search."""
    return Tags(
        _init_prompt(settings),
        think=WORKING_OUT,
        answer=SOLUTION,
        search=None,
        information=None,
        lenient=settings.tags == "lenient",
        system=settings.system_prompt,
    )


def _init_prompt(settings: ProtocolSettings, optional: tuple[str, ...] = ()) -> str:
    refuse_step_prompt(settings)
    template = read_template(prompt_file(settings, "init_prompt"), placeholder="question", optional=optional)
    return opening_prompt(template, settings)
