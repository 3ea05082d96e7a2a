"""Whether each setting that the user has set has an effect. One that has none is an error.

What a setting needs within its own section stands there (`Section.needs`). What it needs of other sections is here. A
setting in neither always works, or another check knows when: those that an algorithm reads it names itself (`own`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3lite.core.config import Origin, Section, flag, flat, kinds_of, sections
from r3lite.core.errors import UsageError
from r3lite.settings.commands import CollectSettings
from r3lite.settings.data import DataSettings
from r3lite.settings.judge import JudgeSettings
from r3lite.settings.model import MemorySettings, ModelSettings
from r3lite.settings.protocol import ProtocolSettings
from r3lite.settings.retrieval import SERVICES, ProcedureSettings, RetrievalSettings, collection_server
from r3lite.settings.rollout import LengthSettings, SamplingSettings, TruncationSettings, is_greedy


class CommandSettings(dict):
    """Holds all settings of a command by name, also as attributes; None for those that it lacks.

    `command` is its name.
    """

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


@dataclass(frozen=True)
class Use:
    """Says that settings, by name with blanks between, have an effect only if `works`; `purpose`: what they need.

    `harmful`: otherwise they would have an effect that is wrong, so that they may not stand at the top of a file for
    all commands either.
    """

    names: str
    purpose: str
    works: Callable[[CommandSettings], object]
    harmful: bool = False


def names_of(*sections: type[Section], but: str = "") -> str:
    """Returns the names of all settings of sections, but for some, with blanks between."""
    return " ".join(name for section in sections for name in kinds_of(section) if name not in but.split())


def formats(s: CommandSettings) -> set[str]:
    """Returns the formats in use: --format, or those of the sources that have steps."""
    sources = s.sources or [{}]
    return {source.get("format", s.format) for source in sources if source.get("type", "qa") == "qa"}


def uses_format(*names: str) -> Callable[[CommandSettings], bool]:
    """Returns a test for one of these formats, or for a user's own, which its file decides on."""
    return lambda s: any(name in names or str(name).endswith(".toml") for name in formats(s))


def searches_by_graph(s: CommandSettings) -> bool:
    """Tells whether searches are the nodes of a graph, which may name a kind of source."""
    return "dag" in formats(s) or ("tags" in formats(s) and bool(s.search_graph))


def has_queries(s: CommandSettings) -> bool:
    """Tells whether the model may write queries."""
    return bool(formats(s) - {"solution"}) and s.baseline in (None, "none")


def retrieves(s: CommandSettings) -> object:
    """Tells whether documents are given."""
    return formats(s) - {"solution"} and s.baseline not in ("closed-book", "no-retrieval") and s.retriever != "none"


def searches(s: CommandSettings) -> object:
    """Tells whether documents are found by a search."""
    return retrieves(s) and s.retriever != "golden"


def reads_paragraphs(s: CommandSettings) -> object:
    """Tells whether documents are the paragraphs that come with the questions."""
    if not retrieves(s) or "://" in (s.retriever or "") or s.retriever in SERVICES:
        return False
    return s.retriever == "golden" or not (s.corpus or s.index)


def chooses_procedure(s: CommandSettings) -> object:
    """Tells whether there are procedures and a question for which one is chosen."""
    return s.match if s.command == "procedures" else s.procedures


def describes_procedures(s: CommandSettings) -> object:
    """Tells whether procedures are chosen by their descriptions, too."""
    return s.procedures_by == "both" and chooses_procedure(s)


def encodes(s: CommandSettings) -> bool:
    """Tells whether --encoder has something to encode: passages and queries, or descriptions of procedures."""
    if s.command == "index" or describes_procedures(s):
        return True
    retriever = s.retriever or ""
    has_vectors = retriever in ("semantic", "hybrid", *SERVICES) or collection_server(retriever) or s.source_index
    return bool(has_vectors and searches(s))


def has_network(s: CommandSettings) -> bool:
    """Tells whether a network makes the vectors."""
    return encodes(s) and s.encoder != "hashing"


def writes_steps(s: CommandSettings) -> bool:
    """Tells whether gold trajectories are collected, and not conversations of a baseline."""
    return s.source == "gold" and s.baseline == "none"


def follows_sub_questions(s: CommandSettings) -> bool:
    """Tells whether gold trajectories follow the decompositions; see datasets/demonstrations.py."""
    return writes_steps(s) and (s.demonstrations == "sub-questions" or s.format in ("dag", "solution"))


def loads_model(s: CommandSettings) -> bool:
    """Tells whether `collect` loads a model."""
    return s.source == "self" or bool(s.teacher_logprobs)


def trains(s: CommandSettings) -> bool:
    return s.command in ("sft", "ppo")


def writes_file(s: CommandSettings) -> object:
    """Tells whether there is something to write where --output says."""
    if s.command in ("ask", "serve", "procedures", "check_format"):
        return False
    if s.command == "retrieve":
        return not (s.query or s.serve)
    return s.command != "collect" or not s.teacher_logprobs


def judges(s: CommandSettings) -> bool:
    """Tells whether a judge, or a teacher in its place, is asked."""
    return s.source == "teacher" if s.command == "collect" else s.judge != "none"


def tunes_adapter(s: CommandSettings) -> bool:
    return not s.no_lora


# Of a command that has the settings of others. What it has to do decides first.
USES_OF_COMMAND = {
    "evaluate": (
        Use(
            names_of(
                DataSettings,
                RetrievalSettings,
                ProcedureSettings,
                ProtocolSettings,
                ModelSettings,
                MemorySettings,
                LengthSettings,
                SamplingSettings,
                TruncationSettings,
                JudgeSettings,
                but="model dtype device",
            )
            + " baseline bert_score",
            "a run without --compare",
            lambda s: not s.compare,
        ),
    ),
    "collect": (
        Use(
            names_of(CollectSettings, RetrievalSettings) + " max_hops exclude",
            "a run without --teacher-logprobs",
            lambda s: not s.teacher_logprobs,
        ),
        Use(
            "demonstrations",
            "--source gold without --baseline, and a --format other than dag and solution",
            lambda s: writes_steps(s) and s.format not in ("dag", "solution"),
        ),
        Use("insert_gold hurried_share", "--demonstrations sub-questions", follows_sub_questions),
        Use(
            "without_search",
            "--source teacher, or --demonstrations sub-questions",
            lambda s: s.source == "teacher" or follows_sub_questions(s),
        ),
        # --model, --dtype, --device and --seed may be the same in all commands.
        Use(
            names_of(
                ModelSettings, MemorySettings, SamplingSettings, TruncationSettings, but="model dtype device thinking"
            )
            + " end_at_idle_query",
            "--source self or --teacher-logprobs",
            loads_model,
        ),
        # Or documents are cut with its tokenizer, as an episode has them.
        Use(
            "thinking max_new_tokens max_length",
            "--source self, --teacher-logprobs or --baseline",
            lambda s: loads_model(s) or s.baseline != "none",
        ),
        Use("judge", "--source teacher", lambda s: s.source == "teacher"),
    ),
    "ask": (Use("rollout_batch_size", "a command that samples several episodes at a time", lambda s: False),),
    "retrieve": (Use("limit", "--data", lambda s: s.data),),
    "procedures": (Use("encoder encoder_style encoder_dtype", "--match", lambda s: s.match),),
    "index": (
        Use(
            "index_type memory_budget",
            "a new index in a folder, without --add and --delete",
            lambda s: not (s.add or s.delete or collection_server(s.output or "")),
        ),
        Use(
            "chunk_tokens chunk_overlap max_file_mib",
            "--documents, or a folder in --add; JSONL passages are not split",
            lambda s: s.documents or (s.add and Path(s.add).is_dir()),
        ),
    ),
}

USES = (
    Use("output", "commands that write a file", writes_file),
    # Retrieval. --encoder and --top-k may stay while retrievers and baselines are compared.
    Use(
        "retriever",
        "a --format and a --baseline that retrieve documents",
        lambda s: s.retriever == "none" or (retrieves(s) and s.baseline != "gold"),
    ),
    Use(
        names_of(RetrievalSettings, but="retriever top_k noise_rate encoder encoder_style encoder_dtype"),
        "a --retriever other than golden and none, and a --format and a --baseline that search",
        searches,
    ),
    Use(
        "noise_rate",
        "the paragraphs of the questions, without --corpus, --index, a server or the web",
        reads_paragraphs,
    ),
    Use("query_cache encoder_style", "a retriever that uses an --encoder other than hashing", has_network),
    Use(
        "encoder_dtype",
        "a retriever that uses an --encoder other than hashing, or a local --rerank",
        lambda s: has_network(s) or (s.rerank and "://" not in s.rerank),
    ),
    Use("source_index", "--format dag or --search-graph", searches_by_graph),
    Use("procedures_by", "--procedures", chooses_procedure),
    Use("procedures_floor", "--procedures with --procedures-by both", describes_procedures),
    Use("retrieving_modes search_adapter", "a --format and a --retriever that search", searches),
    # Episodes
    Use(
        names_of(ProtocolSettings, ProcedureSettings, but="system_prompt"),
        "a --baseline with steps",
        lambda s: s.baseline not in ("rag", "closed-book", "gold"),
    ),
    Use("queries_per_step verification", "--format r3", uses_format("r3")),
    Use("step_prompt", "a --format with documents in a user turn: r3 or dag", uses_format("r3", "dag")),
    Use("tags", "--format tags or solution", uses_format("tags", "solution")),
    Use("information_open information_close search_graph", "--format tags", lambda s: "tags" in formats(s)),
    Use("most_nodes most_node_words", "--format dag, or --search-graph", searches_by_graph),
    Use(
        "max_hops end_at_idle_query",
        "a --format and a --baseline in which the model writes queries",
        has_queries,
    ),
    Use("max_document_tokens", "retrieved documents", lambda s: s.command == "sft" or retrieves(s)),
    Use(
        "top_k_sampling top_p",
        "a --temperature above 0",
        lambda s: s.command == "serve" or not is_greedy(s.temperature or 0),
    ),
    # Rewards and judges. With --least-searches no answer would be rewarded.
    Use("least_searches", "a --format that searches", has_queries, harmful=True),
    Use("search_bonus idle_query_penalty process_judge", "a --format that searches", has_queries),
    Use("process_recall expand_limit", "a --format that searches and a --retriever other than none", retrieves),
    Use(names_of(JudgeSettings, but="judge"), "--judge, or --source teacher in collect", judges),
    # Training
    Use("recompute_layers offload", "sft or ppo", trains),
    Use("loss_chunk", "sft, ppo or --teacher-logprobs", lambda s: trains(s) or s.teacher_logprobs),
    Use("lora_plus_ratio nf4_cache compile stream_layers", "a run without --no-lora", tunes_adapter),
    Use("quantize", "a run without --no-lora", lambda s: tunes_adapter(s) or s.quantize == "none"),
    # With --no-lora each pass of a step changes the weights.
    Use(
        "gradient_accumulation",
        "a run without --no-lora; --batch-size is the rows of a step",
        tunes_adapter,
        harmful=True,
    ),
    Use(
        "micro_batch_tokens",
        "a run without --no-lora, in which all rows of a step are one pass",
        tunes_adapter,
        harmful=True,
    ),
    Use("recompute_layers", "a run without --no-lora, which recomputes all layers", tunes_adapter),
    Use(
        "lora_dropout",
        "sft; ppo must train the policy that it sampled from",
        lambda s: s.command == "sft",
        harmful=True,
    ),
    Use("guard_kl_factor", "--kl-beta above 0", lambda s: s.kl_beta),
    Use("guard_kl", "--kl-beta above 0, or --kl-budget", lambda s: s.kl_beta or s.kl_budget),
    Use("guard_validations guard_f1_drop", "--eval-data", lambda s: s.eval_data),
    Use(
        "guard_rollbacks guard_rate_factor guard_kl_factor",
        "--guard roll-back with --eval-data",
        lambda s: s.guard == "roll-back" and s.eval_data,
    ),
    Use("card", "--device cuda", lambda s: s.device in ("auto", "cuda")),
)


def check_used(command: str, config: Any) -> None:
    """Raises UsageError for a setting that the user has set and that would, beside the others, do nothing.

    Keys at the top of a TOML file are for all commands: those that this one has no use for are not asked of it, unless
    they would do harm. Nor are those of a run that is gone on with.
    """
    values = CommandSettings(flat(config), command=command)
    for section in sections(config).values():
        for name in vars(section):
            origin = config.set_by_user.get(name)
            if origin is None or values[name] is None:
                continue
            for purpose, harmful in _unmet(name, section, values):
                if origin is Origin.TABLE and values.resume:
                    continue
                if origin is Origin.SHARED and not harmful:
                    continue
                hint = ""
                if origin is Origin.SHARED:
                    hint = f" (in {values.config} it may stand in the table of another command)"
                cause = f"{flag(name)} is {values[name]}, but has no effect here: it needs {purpose}{hint}"
                raise UsageError(cause, code="setting-unused")


def _unmet(name: str, section: Section, values: CommandSettings) -> Iterator[tuple[str, bool]]:
    """Yields what a setting needs and does not have, and whether it would do harm without it."""
    for use in (*USES_OF_COMMAND.get(values.command, ()), *USES):
        if name in use.names.split() and not use.works(values):
            yield use.purpose, use.harmful
    for needs in section.needs:
        if needs.concerns(name) and not needs.met(section):
            yield needs.purpose, False
