"""Settings of the step format and the prompts."""

from typing import Annotated, ClassVar, Literal, get_args

from r3lite.core.config import Basic, Bounds, InputPath, OfRun, Section
from r3lite.core.errors import UsageError, nearest
from r3lite.core.needs import NeedsOthers
from r3lite.settings.conditions import formats, has_steps, searches_by_graph, uses_format

Format = Literal["r3", "tags", "solution", "dag"]
FORMATS = get_args(Format)
PROMPT = InputPath(remedy="Pass a text file, such as a changed copy of one in prompts/.")


class ProtocolSettings(Section):
    """Step format and prompts."""

    needs: ClassVar = (
        NeedsOthers("", "a --baseline with steps", has_steps, but="system_prompt"),
        NeedsOthers("queries_per_step verification", "--format r3", uses_format("r3")),
        NeedsOthers("step_prompt", "a --format with documents in a user turn: r3 or dag", uses_format("r3", "dag")),
        NeedsOthers("tags", "--format tags or solution", uses_format("tags", "solution")),
        NeedsOthers(
            "information_open information_close search_graph",
            "--format tags",
            lambda s: "tags" in formats(s),
        ),
        NeedsOthers("most_nodes most_node_words", "--format dag, or --search-graph", searches_by_graph),
    )

    format: Basic[OfRun[str]] = "r3"
    """step format: r3, tags, solution, dag, or FILE.toml. r3: numbered steps of analysis and query or answer
    (arXiv 2505.23794); tags: think, search and answer in tags, in one assistant turn (arXiv 2503.09516); solution:
    reasoning and solution in tags, without search; dag: a plan of searches as a graph, then its nodes (after arXiv
    2506.08352). Your own format: docs/formats.md"""
    init_prompt: OfRun[Annotated[str | None, PROMPT]] = None
    """prompt file that starts an episode; must contain {question} [prompts/init_prompt.txt for r3,
    prompts/tags/graph/init_prompt.txt for --search-graph, else prompts/FORMAT/init_prompt.txt]"""
    step_prompt: OfRun[Annotated[str | None, PROMPT]] = None
    """prompt file for the documents of a query, with {documents} [prompts/step_prompt.txt, or
    prompts/dag/step_prompt.txt] (r3, dag)"""
    worked_example: OfRun[bool] = True
    """show the prompt's worked example, for models not trained on the format; off in sft and with an adapter"""
    queries_per_step: OfRun[Annotated[int, Bounds(low=1, high=16)]] = 1
    """maximum queries in a step, listed under `The retrieval queries:` (r3)"""
    verification: OfRun[bool] = False
    """require `The verification:`, with the evidence, before the answer (r3)"""
    most_nodes: OfRun[Annotated[int, Bounds(low=1, high=50)]] = 6
    """maximum nodes in a plan (dag, and tags with --search-graph)"""
    most_node_words: OfRun[Annotated[int, Bounds(low=1, high=1000)]] = 30
    """maximum words in the query of a node (dag, and tags with --search-graph)"""
    search_graph: OfRun[bool] = False
    """a search is a graph of queries, written as Nodes and Edges as in dag; all are searched at once (tags)"""
    tags: OfRun[Literal["strict", "lenient"]] = "strict"
    """lenient: accept a clear query or answer in spite of upper-case tags, missing closing tags, missing thinking, or
    text outside tags, without counting a fault (tags, solution)"""
    information_open: OfRun[str] = "<information>"
    """tag before the documents of a query (tags)"""
    information_close: OfRun[str] = "</information>"
    """tag after the documents of a query (tags)"""
    system_prompt: OfRun[str | None] = None
    """system message; default: that of the model's chat template"""

    @property
    def is_own(self) -> bool:
        """Tells whether the format is a user's file."""
        return self.format.endswith(".toml")

    def check(self) -> None:
        if not self.is_own and self.format not in FORMATS:
            remedy = f"choose from {', '.join(FORMATS)}, or pass a .toml file"
            raise UsageError(
                f"--format is {self.format!r}{nearest(self.format, FORMATS)}; {remedy}", code="unknown-format"
            )
