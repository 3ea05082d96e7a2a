"""Steps in tags, inside one assistant turn: `--format tags` (Search-R1 and its relatives) and `--format solution`.

With `tags` (arXiv 2503.09516) the model writes

    <think> what is known and what is missing </think><search> what to look up </search>

and is stopped there; the documents follow as `<information>...</information>`, and it goes on in the same turn until
`<answer> the answer </answer>`. With `solution` it writes one step that does not search:

    <start_working_out> the working-out <end_working_out><SOLUTION> the answer </SOLUTION>

With --search-graph, what stands in <search> is a plan (plan.py), as in R-Search (arXiv 2506.08352). Its edges only
order the queries: all are searched at once. In a step, `analysis` is the thought, then the plan as written.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from r3lite.core.episode import Search, Step
from r3lite.core.errors import R3LiteError
from r3lite.protocols import markup, plan
from r3lite.protocols.base import NO_MORE, STEP_FAULTS, Protocol, asked_before, named
from r3lite.protocols.markup import Block, Markup, Tag
from r3lite.protocols.plan import InvalidPlan, Limits, Node, Plan
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
# Lenient reading counts none of these: they leave no doubt about the query or the answer.
FORGIVEN = {*markup.FAULTS, "no_think", "late_think"}
TAGS = ("think", "search", "information", "answer")
THINK, SEARCH, INFORMATION, ANSWER = (Tag(f"<{name}>", f"</{name}>") for name in TAGS)
WORKING_OUT, SOLUTION = Tag("<start_working_out>", "<end_working_out>"), Tag("<SOLUTION>", "</SOLUTION>")


@dataclass(frozen=True)
class Tags(Protocol):
    """Reading and rendering of steps in tags. `parse(render(step, k), earlier) == step` for every well-formed step.

    Without `search` and `information` a step can only answer. `lenient` reading takes tags in any letter case, and a
    block as ended by the next tag or by the end of the turn; it does not count as faults what it forgives. With the
    limits of a `graph` a search is a plan.
    """

    init_prompt: str
    think: Tag = THINK
    answer: Tag = ANSWER
    search: Tag | None = SEARCH
    information: Tag | None = INFORMATION
    lenient: bool = False
    system: str | None = None
    graph: Limits | None = None

    faults = GRAPH_FAULTS | FAULTS
    user_turns = False

    @property
    def searches(self) -> bool:
        return self.search is not None

    @property
    def names_sources(self) -> bool:
        return self.graph is not None

    @property
    def thinks(self) -> bool:
        return self.think == THINK

    @cached_property
    def markup(self) -> Markup:
        return Markup(tuple(filter(None, (self.think, self.search, self.information, self.answer))), self.lenient)

    @cached_property
    def stop_strings(self) -> tuple[str, ...]:
        """The closing tags that end a turn; for lenient reading in each of the usual letter cases."""
        ends = [tag.closing for tag in (self.search, self.answer) if tag]
        if self.lenient:
            ends = [case for end in ends for case in (end, end.lower(), end.title(), end.upper())]
        return tuple(dict.fromkeys(ends))

    @property
    def answer_request(self) -> str:
        return self._spliced(NO_MORE) if self.searches else ""

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
        thought, nodes, rest = step.analysis.rpartition(f"\n{plan.NODES}")
        if not nodes:
            thought, rest = step.analysis, _plan_of(step).text()
        return self.think.around(thought) + self.search.around(nodes.lstrip() + rest)

    def observation(self, question: str, steps: Sequence[Step]) -> str:
        """Numbered passages, one a line, as Search-R1 gives them; those of a graph after their queries."""
        lines, numbers = [], itertools.count(1)
        for search in steps[-1].searches:
            lines += [self.quoted(search.query)] * bool(self.graph)
            for d in search.documents:
                lines.append(f"Doc {next(numbers)}(Title: {self.quoted(d.title)}) {self.quoted(d.text)}")
            lines += ["(nothing was found)"] * (not search.documents)
        return self._spliced("\n".join(lines))

    def read_answer(self, text: str, earlier: Sequence[Step]) -> Step:
        return self.parse(self.think.around("-") + self.answer.opening + text, earlier)

    def finishing(self, text: str, earlier: Sequence[Step]) -> str | None:
        tags = [tag for tag in (self.think, self.search) if tag]
        opened = [tag.closing for tag in tags if text.count(tag.opening) > text.count(tag.closing)]
        given = super().finishing(text, earlier)
        return given and "".join(opened) + given

    def step_request(self, number: int) -> str:
        last = " or ".join(tag.opening for tag in (self.search, self.answer) if tag)
        return f"Go on now: write {self.think.opening}, then {last}, and nothing else."

    def first_turn(self, reply: str) -> str:
        ends = [reply.index(stop) + len(stop) for stop in self.stop_strings if stop in reply]
        return reply[: min(ends, default=len(reply))]

    def parse(self, text: str, earlier: Sequence[Step]) -> Step:
        """Reads a turn; what is wrong with it is named in `faults`.

        A step with one whole search block, or else one whole answer block, carries it in spite of its faults, so that
        an episode can go on and be rewarded for what is right in it. With both, or two of a kind, neither is usable.
        """
        blocks, faults = self.markup.read(text)
        kinds = (self.think, self.search, self.answer)
        thoughts, asking, answers = ([block for block in blocks if block.tag == kind] for kind in kinds)
        thought = thoughts[0].text if thoughts else ""
        faults += named(
            repeated_tag=max(map(len, (thoughts, asking, answers))) > 1,
            wrote_documents=self.information in self.markup.tags_in(text),
            no_think=not thought,
            late_think=thought and next(b.tag for b in blocks if b.tag != self.information) != self.think,
        )
        query, answer = self._only(asking, "query", faults), self._only(answers, "answer", faults)
        faults += named(query_and_answer=asking and answers, no_query_or_answer=not (asking or answers))
        if asking and answers:
            query = answer = None
        searches = self._searches(query, faults) if query else ()
        faults += named(repeated_query=any(asked_before(search.query, earlier) for search in searches))
        if searches and self.graph:
            thought = f"{thought}\n{query}".strip()
        counted = [f for f in dict.fromkeys(faults) if not (self.lenient and f in FORGIVEN)]
        return Step(thought, searches, answer, tuple(counted))

    def _searches(self, text: str, faults: list[str]) -> tuple[Search, ...]:
        """The searches of a search block: its query, or those of its graph, none if that is not valid. Adds to
        `faults`."""
        if not self.graph:
            return (Search(text),)
        try:
            nodes = [node for level in plan.read(text, self.graph).levels for node in level]
            plan.refuse(unfilled_reference=any(node.references for node in nodes))
            return plan.searches(nodes)
        except InvalidPlan as error:
            faults.append(str(error))
            return ()

    def _only(self, blocks: list[Block], what: str, faults: list[str]) -> str | None:
        """The query or answer of a step: the text of its only block. Adds to `faults`."""
        faults += named(**{f"blank_{what}": any(not block.text for block in blocks)})
        usable = len(blocks) == 1 and (blocks[0].closed or self.lenient)
        return blocks[0].text or None if usable else None

    def _spliced(self, text: str) -> str:
        assert self.information, "a protocol without search is given nothing"
        return f"\n\n{self.information.opening}{text}{self.information.closing}\n\n"


def _plan_of(step: Step) -> Plan:
    """A plan of the searches of a step without one, such as a step that was written for another format."""
    nodes = (Node(chr(ord("A") + i), s.query, s.source or Node.source) for i, s in enumerate(step.searches))
    return Plan(tuple(nodes))


def load_tags(settings: ProtocolSettings) -> Tags:
    """Think, search, answer; the tags around documents and the opening prompt are those of the settings."""
    ends = settings.information_open, settings.information_close
    own = Markup((THINK, SEARCH, ANSWER), any_case=True)
    for flag, end in zip(("--information-open", "--information-close"), ends):
        if not re.fullmatch(r"</?[A-Za-z][A-Za-z0-9_-]*>", end) or own.tags_in(end):
            raise R3LiteError(f"{flag} is {end!r}", "Pass a tag such as <context>, other than think, search, answer.")
    if ends[0] != INFORMATION.opening and ends[1] == INFORMATION.closing:
        cause = f"--information-open is {ends[0]}, but --information-close is {ends[1]}"
        raise R3LiteError(cause, "Pass both, such as <context> and </context>.")
    values = {"information_open": ends[0], "information_close": ends[1]}
    graph = Limits(settings.most_nodes, settings.most_node_words) if settings.search_graph else None
    values |= graph.placeholders() if graph else {}
    prompt = filled(_init_prompt(settings, tuple(values)), values)
    return Tags(prompt, information=Tag(*ends), graph=graph, **_reading(settings))


def load_solution(settings: ProtocolSettings) -> Tags:
    """Working-out and solution; no search."""
    return Tags(_init_prompt(settings), WORKING_OUT, SOLUTION, search=None, information=None, **_reading(settings))


def _reading(settings: ProtocolSettings) -> dict:
    return {"lenient": settings.tags == "lenient", "system": settings.system_prompt}


def _init_prompt(settings: ProtocolSettings, optional: tuple[str, ...] = ()) -> str:
    refuse_step_prompt(settings)
    return opening_prompt(read_template(prompt_file(settings, "init_prompt"), "question", optional), settings)
