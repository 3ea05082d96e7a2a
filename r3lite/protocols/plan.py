"""Plans of searches, which are graphs of queries in text: their grammar, their faults, and the order of their queries.

    Nodes:
    A: Who directed Brenn? (General)
    B: Where was {A} born? (General)
    Edges: A -> B

After R-Search (arXiv 2506.08352). There the edges only order the queries; here the answer of a node can also be filled
into the queries that refer to the node. Knows no steps, no documents and no model.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from r3lite.core.episode import Search
from r3lite.settings.retrieval import SOURCES

NODES = "Nodes:"
EDGES = "Edges:"
# The sources by the names that a plan may have for them, in lower case; a plan may use any letter case.
SOURCE_NAMES = {"academy": "Academic"} | {source.lower(): source for source in SOURCES}
NO_EDGES = "none"  # written after `Edges:` if there are none

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
    """A plan that cannot be run; the text of the exception is a name from FAULTS."""


def refuse_if(**faults: bool) -> None:
    """Raises InvalidPlan for the first of the faults, in the order of the arguments, whose value is true."""
    for name, has_fault in faults.items():
        if has_fault:
            raise InvalidPlan(name)


@dataclass(frozen=True)
class Node:
    """One search of a plan."""

    name: str
    query: str  # in it `{A}` stands for the answer of node A
    kind: str = SOURCES[0]  # the kind of source

    @property
    def references(self) -> list[str]:
        """The names of the nodes whose answers are filled into the query."""
        return REFERENCE.findall(self.query)

    def filled(self, answers: Mapping[str, str]) -> str:
        """Returns the query with the answers of other nodes filled in; `answers` are by the nodes' names.

        Braces in an answer are no reference.
        """
        return REFERENCE.sub(lambda reference: answers[reference[1]], self.query)


def searches_of(nodes: Iterable[Node], answers: Mapping[str, str] = MappingProxyType({})) -> tuple[Search, ...]:
    """Returns the searches of nodes, with the answers of other nodes filled in."""
    return tuple(Search(node.filled(answers), kind=node.kind) for node in nodes)


@dataclass(frozen=True)
class Limits:
    """The limits of a plan."""

    nodes: int = 6
    words: int = 30  # of a query

    def placeholders(self) -> dict[str, str]:
        """Returns the values of the placeholders of an opening prompt that asks for plans."""
        return {"sources": ", ".join(SOURCES), "most_nodes": str(self.nodes), "most_words": str(self.words)}


@dataclass(frozen=True)
class SearchPlan:
    """A valid plan: named nodes, and edges, each from a node to a node that is searched after it."""

    nodes: tuple[Node, ...]
    edges: tuple[tuple[str, str], ...] = ()

    @property
    def levels(self) -> list[list[Node]]:
        """The nodes in topological order (Kahn, 1962): a level has those whose predecessors are in earlier levels."""
        remaining = list(self.nodes)
        levels = []
        while remaining:
            names = {node.name for node in remaining}
            blocked = {end for start, end in self.edges if start in names}
            ready = [node for node in remaining if node.name not in blocked]
            refuse_if(cycle=not ready)  # each remaining node waits for another one
            levels.append(ready)
            remaining = [node for node in remaining if node not in ready]
        return levels

    def text(self) -> str:
        """Returns the plan as `read` reads it."""
        nodes = [f"{node.name}: {node.query} ({node.kind})" for node in self.nodes]
        edges = " ; ".join(f"{start} -> {end}" for start, end in self.edges)
        return "\n".join([NODES, *nodes, f"{EDGES} {edges or NO_EDGES}"])


def read(text: str, limits: Limits) -> SearchPlan:
    """Returns the plan that a text states; raises InvalidPlan for the first fault."""
    preamble, nodes_heading, body = text.partition(NODES)
    nodes_text, edges_heading, edges_text = body.partition(f"\n{EDGES}")
    lines = [line.strip() for line in nodes_text.splitlines() if line.strip()]
    refuse_if(
        no_nodes=not (nodes_heading and lines),
        text_outside_plan=bool(preamble.strip()),
        no_edges=not edges_heading,
    )
    nodes = tuple(_node(line, limits) for line in lines)
    names = {node.name for node in nodes}
    # Queries are compared by their words and references.
    queries = {" ".join(re.findall(r"[\w{}]+", node.query.casefold())) for node in nodes}
    refuse_if(
        too_many_nodes=len(nodes) > limits.nodes,
        repeated_node=len(names) < len(nodes),
        repeated_query=len(queries) < len(nodes),
    )
    plan = SearchPlan(nodes, _edges(edges_text, names))
    _check_references(plan)
    return plan


def _node(line: str, limits: Limits) -> Node:
    """Returns the node of a line; raises InvalidPlan."""
    match = NODE.fullmatch(line)
    refuse_if(malformed_node=not match)
    name, query, source_name = match.groups()
    source = SOURCE_NAMES.get(source_name.strip().lower())
    refuse_if(
        blank_query=not query,
        long_query=len(query.split()) > limits.words,
        unknown_source=not source,
    )
    return Node(name, query, source)


def _edges(text: str, names: set[str]) -> tuple[tuple[str, str], ...]:
    """Returns the edges in a text, separated by `;` or line breaks, as pairs (start, end); raises InvalidPlan.

    `names` are those of the nodes.
    """
    parts = [part.strip() for part in re.split(r"[;\n]", text) if part.strip()]
    if [part.lower() for part in parts] == [NO_EDGES]:
        return ()
    edges: list[tuple[str, str]] = []
    for part in parts:
        match = EDGE.fullmatch(part)
        refuse_if(malformed_edge=not match)
        start, end = match.groups()
        refuse_if(
            unknown_node=start not in names or end not in names,
            self_loop=start == end,
            repeated_edge=(start, end) in edges,
        )
        edges.append((start, end))
    return tuple(edges)


def _check_references(plan: SearchPlan) -> None:
    """Raises InvalidPlan at a cycle, or at a node that uses the answer of a node from which no edges lead to it."""
    ancestors: dict[str, set[str]] = {}
    for level in plan.levels:
        for node in level:
            parents = {start for start, end in plan.edges if end == node.name}
            ancestors[node.name] = parents.union(*(ancestors[name] for name in parents))
    for node in plan.nodes:
        for name in node.references:
            refuse_if(
                unknown_node=name not in ancestors,
                reference_without_edge=name not in ancestors[node.name],
            )
