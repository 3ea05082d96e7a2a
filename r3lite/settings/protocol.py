"""Settings of the step format and the prompts."""

from typing import Annotated, Literal, get_args

from r3lite.core.config import Bounds, Section
from r3lite.core.errors import UsageError, nearest

Format = Literal["r3", "tags", "solution", "dag"]
FORMATS = get_args(Format)


class ProtocolSettings(Section):
    """Step format and prompts."""

    format: str = "r3"
    """r3: numbered steps of analysis and query or answer (arXiv 2505.23794); tags: think, search and answer in tags,
    in one assistant turn (arXiv 2503.09516); solution: working-out and solution in tags, without search; dag: a plan of
    searches as a graph, then its nodes (after arXiv 2506.08352); or a file of your own, FILE.toml (docs/formats.md)"""
    init_prompt: str | None = None
    """file that opens an episode, with {question} [as shipped prompts/init_prompt.txt for r3,
    prompts/tags/graph/init_prompt.txt for --search-graph, else prompts/FORMAT/init_prompt.txt]"""
    step_prompt: str | None = None
    """file that gives the documents of a query, with {documents} [as shipped prompts/step_prompt.txt, or
    prompts/dag/step_prompt.txt] (r3, dag)"""
    worked_example: bool = True
    """show the opening prompt's worked example, which untrained models need; off in sft and with an adapter"""
    queries_per_step: Annotated[int, Bounds(low=1, high=16)] = 1
    """most queries that a step may ask at once, under `The retrieval queries:` (r3)"""
    verification: bool = False
    """an answer must be preceded by `The verification:`, with the evidence for it (r3)"""
    most_nodes: Annotated[int, Bounds(low=1, high=50)] = 6
    """most nodes of a plan (dag, and tags with --search-graph)"""
    most_node_words: Annotated[int, Bounds(low=1, high=1000)] = 30
    """most words of the query of a node (dag, and tags with --search-graph)"""
    search_graph: bool = False
    """a search is a graph of queries, Nodes and Edges as in dag, which are searched at once (tags)"""
    tags: Literal["strict", "lenient"] = "strict"
    """lenient: a query or answer that is clear counts in spite of tags in other letter case, missing closing tags,
    missing thinking or text outside tags, and these are no faults (tags, solution)"""
    information_open: str = "<information>"
    """tag before the documents of a query (tags)"""
    information_close: str = "</information>"
    """tag after them (tags)"""
    system_prompt: str | None = None
    """system message; default: the one of the model's chat markup"""

    @property
    def is_own(self) -> bool:
        """Whether the format is a user's file."""
        return self.format.endswith(".toml")

    def check(self) -> None:
        if not self.is_own and self.format not in FORMATS:
            known = f"choose from {', '.join(FORMATS)}, or name a file that ends in .toml"
            raise UsageError(f"--format is {self.format!r}{nearest(self.format, FORMATS)}; {known}")
