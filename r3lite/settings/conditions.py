"""What settings of several sections together say about a run, as conditions of `NeedsOthers`.

A condition takes `s`, all settings of a command. A setting that the command lacks is None.
"""

from collections.abc import Callable

from r3lite.core.inherited import VECTOR_RETRIEVERS
from r3lite.core.needs import CommandSettings
from r3lite.settings.addresses import SERVICES, collection_server, is_server


def formats(s: CommandSettings) -> set[str]:
    """Returns the formats in use: --format, or those of the sources that have steps."""
    sources = s.sources or [{}]  # without --sources: one source that sets no format, so that --format holds
    return {source.get("format", s.format) for source in sources if source.get("type", "qa") == "qa"}


def uses_format(*names: str) -> Callable[[CommandSettings], bool]:
    """Returns the condition that one of these formats is in use, or a format of the user's own.

    The user's own format is a TOML file, which is not read here. It may be like any of these formats.
    """
    return lambda s: any(name in names or str(name).endswith(".toml") for name in formats(s))


def searches_by_graph(s: CommandSettings) -> bool:
    """Tells whether searches are the nodes of a graph. A node may name a kind of source."""
    return "dag" in formats(s) or ("tags" in formats(s) and bool(s.search_graph))


def has_steps(s: CommandSettings) -> bool:
    """Tells whether answers are written in steps, and not at once, as for some baselines."""
    return s.baseline not in ("rag", "closed-book", "gold")


def has_searching_format(s: CommandSettings) -> bool:
    """Tells whether a format in use has searches: every one but solution."""
    return bool(formats(s) - {"solution"})


def has_queries(s: CommandSettings) -> bool:
    """Tells whether the model may write queries. With a baseline it writes none: the question itself is the query."""
    return has_searching_format(s) and s.baseline in (None, "none")


def has_documents(s: CommandSettings) -> bool:
    """Tells whether the model gets documents."""
    if not has_searching_format(s):
        return False
    return s.baseline not in ("closed-book", "no-retrieval") and s.retriever != "none"


def has_search(s: CommandSettings) -> bool:
    """Tells whether documents are searched for. With `golden` they are not: it takes them from the question."""
    return has_documents(s) and s.retriever != "golden"


def reads_paragraphs(s: CommandSettings) -> bool:
    """Tells whether documents are the paragraphs that come with the questions."""
    retriever = s.retriever or ""
    if not has_documents(s) or is_server(retriever):
        return False
    has_corpus = s.corpus or s.index
    return retriever == "golden" or not has_corpus


def chooses_procedure(s: CommandSettings) -> bool:
    """Tells whether a procedure is chosen for a question."""
    if s.command == "procedures":
        return bool(s.match)
    return bool(s.procedures)


def describes_procedures(s: CommandSettings) -> bool:
    """Tells whether a procedure is also chosen by descriptions, which are then encoded."""
    return s.procedures_by == "both" and chooses_procedure(s)


def encodes(s: CommandSettings) -> bool:
    """Tells whether --encoder has something to encode: passages and queries, or descriptions of procedures.

    Web services find pages by words; their passages are ranked by vectors.
    """
    if s.command == "index" or describes_procedures(s):
        return True
    retriever = s.retriever or ""
    uses_vectors = retriever in (*VECTOR_RETRIEVERS, *SERVICES) or collection_server(retriever) or s.source_index
    return bool(uses_vectors) and has_search(s)


def encodes_with_model(s: CommandSettings) -> bool:
    """Tells whether --encoder is a model, and not the hashing of words, and has something to encode."""
    return encodes(s) and s.encoder != "hashing"


def makes_gold_trajectories(s: CommandSettings) -> bool:
    """Tells whether `collect` makes trajectories from gold decompositions."""
    return s.source in ("gold", "documents") and s.baseline == "none"


def follows_sub_questions(s: CommandSettings) -> bool:
    """Tells whether gold trajectories follow the decompositions; see datasets/demonstrations.py."""
    if not makes_gold_trajectories(s):
        return False
    return s.demonstrations == "sub-questions" or s.format in ("dag", "solution")


def loads_model(s: CommandSettings) -> bool:
    """Tells whether `collect` loads a model."""
    return s.source == "self" or bool(s.teacher_logprobs)


def trains(s: CommandSettings) -> bool:
    return s.command in ("sft", "ppo")


def tunes_adapter(s: CommandSettings) -> bool:
    """Tells whether no weights are trained but an adapter's: --no-lora is not set."""
    return not s.no_lora


def can_capture(s: CommandSettings) -> bool:
    """Tells whether training passes can be captured as CUDA graphs."""
    return not (s.no_lora or s.lora_dropout or s.stream_layers or s.offload == "on")


def judges(s: CommandSettings) -> bool:
    """Tells whether a judge is asked, or a teacher in its place."""
    if s.command == "collect":
        return s.source == "teacher"
    return s.judge != "none"


def writes_file(s: CommandSettings) -> bool:
    """Tells whether there is something to write where --output says."""
    if s.command in ("ask", "serve", "procedures", "check_format"):
        return False
    if s.command == "retrieve":
        return not (s.query or s.serve)
    return s.command != "collect" or not s.teacher_logprobs
