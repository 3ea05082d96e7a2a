"""Plans of searches: a graph of queries, written as text. Its grammar, what can be wrong with it, and its order.

    Nodes:
    A: Who directed Brenn? (General)
    B: Where was {A} born? (General)
    Edges: A -> B

After R-Search (arXiv 2506.08352), whose edges order the queries only; here the answer of a node is filled into the
queries that name it. Knows no steps, no documents and no model.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from r3lite.core.episode import Search
from r3lite.settings.retrieval import SOURCES

NODES, EDGES = "Nodes:", "Edges:"
ALSO = {"academy": "Academic"}  # other names of sources; all are read in any letter case
NONE = "none"  # the edges of a plan that has none

# Why a plan is not valid; worded to follow `step k`.
FAULTS = {
    "no_nodes": "has no `Nodes:` with a node under it",
    "no_edges": "has no `Edges:` after its nodes",
    "text_outside_plan": "has text before its nodes",
    "malformed_node": "has a node not written as `A: query (Source)`",
    "blank_query": "has an empty query",
    "unknown_source": "has a node whose source is none of General, News and Academic",
    "repeated_node": "has two nodes with the same name",
    "too_many_nodes": "has too many nodes",
    "long_query": "has a node whose query has too many words",
    "repeated_query": "repeats an earlier query",
    "malformed_edge": "has an edge not written as `A -> B`",
    "unknown_node": "has an edge or a reference to an unknown node",
    "repeated_edge": "has an edge twice",
    "self_loop": "has an edge from a node to itself",
    "cycle": "has edges that form a cycle",
    "reference_without_edge": "uses the answer of a node from which no edges lead to it",
}
NODE = re.compile(r"([A-Za-z]\w{0,15})[ \t]*:[ \t]*(.*?)[ \t]*\(([^()]*)\)[ \t]*")
EDGE = re.compile(r"([A-Za-z]\w{0,15})[ \t]*->[ \t]*([A-Za-z]\w{0,15})")
REFERENCE = re.compile(r"\{(\w+)\}")


class InvalidPlan(ValueError):
    """A plan that cannot be run; its text is a name from FAULTS."""


def refuse(**faults: bool) -> None:
    """Raises InvalidPlan for the first of the faults that is there."""
    for name in filter(faults.get, faults):
        raise InvalidPlan(name)


@dataclass(frozen=True)
class Node:
    """One search of a plan: a query, in which `{A}` stands for the answer of node A, and its kind of source."""

    name: str
    query: str
    source: str = SOURCES[0]

    @property
    def references(self) -> list[str]:
        """The names of the nodes whose answers its query takes."""
        return REFERENCE.findall(self.query)

    def filled(self, answers: Mapping[str, str]) -> str:
        """The query with the answers of other nodes, by their names. In one pass: an answer is no reference."""
        return REFERENCE.sub(lambda reference: answers[reference[1]], self.query)


def searches(nodes: Iterable[Node], answers: Mapping[str, str] = MappingProxyType({})) -> tuple[Search, ...]:
    """The searches of nodes, with the answers of others filled in."""
    return tuple(Search(node.filled(answers), source=node.source) for node in nodes)


@dataclass(frozen=True)
class Limits:
    """How large a plan may be: nodes, and words of a query."""

    nodes: int = 6
    words: int = 30

    def placeholders(self) -> dict[str, str]:
        """What stands for the placeholders of an opening prompt that asks for plans."""
        return {"sources": ", ".join(SOURCES), "most_nodes": str(self.nodes), "most_words": str(self.words)}


@dataclass(frozen=True)
class Plan:
    """A valid plan: named nodes, and edges from a node to one that follows it."""

    nodes: tuple[Node, ...]
    edges: tuple[tuple[str, str], ...] = ()

    @property
    def levels(self) -> list[list[Node]]:
        """The nodes in topological order (Kahn, 1962): a level has those whose predecessors are in earlier levels."""
        left, levels = list(self.nodes), []
        while left:
            waiting = {node.name for node in left}
            ready = [n for n in left if not any(to == n.name and start in waiting for start, to in self.edges)]
            refuse(cycle=not ready)
            levels.append(ready)
            left = [node for node in left if node not in ready]
        return levels

    def text(self) -> str:
        """As `read` reads it."""
        nodes = [f"{node.name}: {node.query} ({node.source})" for node in self.nodes]
        edges = " ; ".join(f"{start} -> {to}" for start, to in self.edges) or NONE
        return "\n".join([NODES, *nodes, f"{EDGES} {edges}"])


def read(text: str, limits: Limits) -> Plan:
    """The plan that a text is; raises InvalidPlan at the first thing that is wrong with it."""
    before, found, rest = text.partition(NODES)
    written, _, edges = rest.partition(f"\n{EDGES}")
    lines = [line.strip() for line in written.splitlines() if line.strip()]
    refuse(no_nodes=not (found and lines), text_outside_plan=bool(before.strip()), no_edges=f"\n{EDGES}" not in rest)
    nodes = tuple(_node(line, limits) for line in lines)
    names, asked = {n.name for n in nodes}, {" ".join(re.findall(r"[\w{}]+", n.query.casefold())) for n in nodes}
    count = len(nodes)
    refuse(too_many_nodes=count > limits.nodes, repeated_node=len(names) < count, repeated_query=len(asked) < count)
    plan = Plan(nodes, _edges(edges, names))
    _check_references(plan)
    return plan


def _node(line: str, limits: Limits) -> Node:
    match = NODE.fullmatch(line)
    refuse(malformed_node=not match)
    name, query, source = match.groups()
    known = (ALSO | {source.lower(): source for source in SOURCES}).get(source.strip().lower())
    refuse(blank_query=not query, long_query=len(query.split()) > limits.words, unknown_source=not known)
    return Node(name, query, known)


def _edges(text: str, names: set[str]) -> tuple[tuple[str, str], ...]:
    """The edges that stand under their heading, separated by `;` or line breaks."""
    parts = [part.strip() for part in re.split(r"[;\n]", text) if part.strip()]
    if [part.lower() for part in parts] == [NONE]:
        return ()
    edges: list[tuple[str, str]] = []
    for part in parts:
        match = EDGE.fullmatch(part)
        refuse(malformed_edge=not match)
        start, to = match.groups()
        refuse(unknown_node=not {start, to} <= names, self_loop=start == to, repeated_edge=(start, to) in edges)
        edges.append((start, to))
    return tuple(edges)


def _check_references(plan: Plan) -> None:
    """Raises InvalidPlan at a cycle, or at a node that uses the answer of one that does not come before it."""
    before: dict[str, set[str]] = {}
    for level in plan.levels:
        for node in level:
            direct = {start for start, to in plan.edges if to == node.name}
            before[node.name] = direct.union(*(before[name] for name in direct))
    for node in plan.nodes:
        for name in node.references:
            refuse(unknown_node=name not in before, reference_without_edge=name not in before[node.name])
