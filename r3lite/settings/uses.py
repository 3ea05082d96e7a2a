"""Which settings work only together with certain others. One that was passed but has no effect is an error.

A setting in no row always works, or another check knows when: those that an algorithm reads it names itself (`own`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from r3lite.core.config import Section, kinds_of
from r3lite.settings.commands import CollectSettings
from r3lite.settings.data import NewQuestionSettings
from r3lite.settings.judge import JudgeSettings
from r3lite.settings.model import LoraSettings, MemorySettings, ModelSettings
from r3lite.settings.protocol import ProtocolSettings
from r3lite.settings.retrieval import SERVICES, ProcedureSettings, RetrievalSettings, collection_server
from r3lite.settings.rollout import LengthSettings, SamplingSettings, TruncationSettings, is_greedy
from r3lite.settings.training import GuardSettings


class Chosen(dict):
    """The settings of a command by name, also as attributes; None for those that it lacks. `command` is its name."""

    __getattr__ = dict.get


@dataclass(frozen=True)
class Use:
    """Settings, by name with blanks between, that have an effect only if `works`; `purpose`: what they need.

    `harmful`: otherwise they would have an effect that is wrong, so that they may not stand at the top of a file for
    all commands either.
    """

    names: str
    purpose: str
    works: Callable[[Chosen], object]
    harmful: bool = False


def of(*sections: type[Section], but: str = "") -> str:
    """The names of all settings of sections, but for some."""
    return " ".join(name for section in sections for name in kinds_of(section) if name not in but.split())


def formats(s: Chosen) -> set[str]:
    """Those in use: --format, or those of the sources that have steps."""
    sources = s.sources or [{}]
    return {entry.get("format", s.format) for entry in sources if entry.get("type", "qa") == "qa"}


def of_format(*names: str) -> Callable[[Chosen], bool]:
    """Whether one of these formats is in use, or one of the user's own, which its file decides on."""
    return lambda s: any(name in names or str(name).endswith(".toml") for name in formats(s))


def searches_by_graph(s: Chosen) -> bool:
    """Whether searches are the nodes of a graph, which may name a kind of source."""
    return "dag" in formats(s) or ("tags" in formats(s) and bool(s.search_graph))


def asks(s: Chosen) -> bool:
    """Whether the model may write queries."""
    return bool(formats(s) - {"solution"}) and s.baseline in (None, "none")


def retrieves(s: Chosen) -> object:
    """Whether documents are given."""
    return formats(s) - {"solution"} and s.baseline not in ("closed-book", "no-retrieval") and s.retriever != "none"


def searches(s: Chosen) -> object:
    """Whether they are found by a search."""
    return retrieves(s) and s.retriever != "golden"


def has_passages(s: Chosen) -> bool:
    """Whether passages are searched that are here, and not on a server or the web."""
    return "://" not in (s.retriever or "") and s.retriever not in SERVICES


def on_the_web(s: Chosen) -> bool:
    places = [entry.partition("=")[2].strip() for entry in s.source_index or ()]
    return any(place in SERVICES for place in (s.retriever, *places))


def encodes(s: Chosen) -> bool:
    """Whether --encoder has something to encode: passages and queries, or descriptions of procedures."""
    if s.command == "index":
        return True
    described = s.procedures_by == "both" and (s.match if s.command == "procedures" else s.procedures)
    own = s.retriever in ("semantic", "hybrid", *SERVICES) or collection_server(s.retriever or "") or s.source_index
    return bool(described or (own and searches(s)))


def has_vectors(s: Chosen) -> bool:
    """Whether a network makes them."""
    return encodes(s) and s.encoder != "hashing"


def in_steps(s: Chosen) -> bool:
    """Whether gold trajectories are collected, and not conversations of a baseline."""
    return s.source == "gold" and s.baseline == "none"


def by_sub_questions(s: Chosen) -> bool:
    """Whether gold trajectories follow the decompositions; see datasets/demonstrations.py."""
    return in_steps(s) and (s.demonstrations == "sub-questions" or s.format in ("dag", "solution"))


def lays_out(s: Chosen) -> bool:
    """Whether `collect` needs the tokenizer of --model, to cut documents as an episode has them."""
    return has_model(s) or s.baseline != "none"


def has_model(s: Chosen) -> bool:
    """Whether `collect` loads a model."""
    return s.command != "collect" or s.source == "self" or bool(s.teacher_logprobs)


def judges(s: Chosen) -> bool:
    """Whether a judge, or a teacher in its place, is asked."""
    return s.source == "teacher" if s.command == "collect" else s.judge != "none"


def writes(s: Chosen) -> bool:
    """Whether there is something to write where --output says."""
    prints = s.command in ("ask", "serve", "procedures", "check_format") or (s.command == "retrieve" and s.query)
    return not (prints or (s.command == "retrieve" and s.serve) or (s.command == "collect" and s.teacher_logprobs))


def trains(s: Chosen) -> bool:
    return s.command in ("sft", "ppo")


ANSWERING = (
    NewQuestionSettings, RetrievalSettings, ProcedureSettings, ProtocolSettings, ModelSettings, MemorySettings,
    LengthSettings, SamplingSettings, TruncationSettings, JudgeSettings,
)  # fmt: skip

USES = (
    # What a command has to do decides first.
    Use("output", "commands that write a file", writes),
    Use(f"{of(*ANSWERING, but='model dtype device')} baseline bert_score", "a run without --compare",
        lambda s: not s.compare),
    Use(of(CollectSettings, RetrievalSettings) + " max_hops exclude", "a run without --teacher-logprobs",
        lambda s: s.command != "collect" or not s.teacher_logprobs),
    Use("baseline", "--source gold", lambda s: s.command != "collect" or s.source == "gold"),
    Use("demonstrations", "--source gold without --baseline, and a --format other than dag and solution",
        lambda s: in_steps(s) and s.format not in ("dag", "solution")),
    Use("insert_gold hurried_share", "--demonstrations sub-questions", by_sub_questions),
    Use("without_search", "--source teacher, or --demonstrations sub-questions",
        lambda s: s.source == "teacher" or by_sub_questions(s)),
    Use("attempts", "--source teacher", lambda s: s.source == "teacher"),
    Use("min_f1", "--source teacher or self", lambda s: s.source != "gold"),
    Use("num_generations keep", "--source self", lambda s: s.command != "collect" or s.source == "self"),
    # --model, --dtype, --device and --seed may be the same in all commands.
    Use(of(ModelSettings, MemorySettings, SamplingSettings, TruncationSettings, but="model dtype device thinking")
        + " end_at_idle_query", "--source self or --teacher-logprobs", has_model),
    Use("thinking max_new_tokens max_length", "--source self, --teacher-logprobs or --baseline", lays_out),
    Use("epochs", "a run without --max-steps", lambda s: s.max_steps is None),
    # Retrieval. --encoder and --top-k may stay while retrievers and baselines are compared.
    Use("retriever", "a --format and a --baseline that retrieve documents",
        lambda s: s.retriever == "none" or (retrieves(s) and s.baseline != "gold")),
    Use(of(RetrievalSettings, but="retriever top_k noise_rate encoder encoder_style encoder_dtype"),
        "a --retriever other than golden and none, and a --format and a --baseline that search", searches),
    Use("context corpus index filter", "a --retriever that searches local passages", has_passages),
    Use("corpus index filter source_index", "--context corpus",
        lambda s: s.context != "question"),
    Use("noise_rate", "the paragraphs of the questions, without --corpus, --index, a server or the web",
        lambda s: retrieves(s) and has_passages(s) and (s.retriever == "golden" or not (s.corpus or s.index))),
    Use("fusion", "--retriever hybrid", lambda s: s.retriever == "hybrid"),
    Use("lexical_weight", "--retriever hybrid --fusion weighted",
        lambda s: s.retriever == "hybrid" and s.fusion == "weighted"),
    Use("web_results web_rpm web_cache web_replay", "web search: exa or duckduckgo", on_the_web),
    Use("query_cache encoder_style", "a retriever that uses an --encoder other than hashing", has_vectors),
    Use("query_cache_mib", "--query-cache", lambda s: s.query_cache),
    Use("source_index", "--format dag or --search-graph", searches_by_graph),
    Use("encoder_dtype", "a retriever that uses an --encoder other than hashing, or a local --rerank",
        lambda s: has_vectors(s) or (s.rerank and "://" not in s.rerank)),
    Use("procedures_by", "--procedures", lambda s: s.match if s.command == "procedures" else s.procedures),
    Use("procedures_floor", "--procedures with --procedures-by both",
        lambda s: s.procedures_by == "both" and (s.match if s.command == "procedures" else s.procedures)),
    Use("host port", "--serve", lambda s: s.command != "retrieve" or s.serve),
    Use("limit", "--data", lambda s: s.command != "retrieve" or s.data),
    Use("query gap_report", "a run without --serve", lambda s: not s.serve),
    Use("gap_report", "--data, without --query", lambda s: not s.query),
    # Indexes
    Use("batch_size", "an --encoder other than hashing", lambda s: s.command != "index" or has_vectors(s)),
    Use("index_type memory_budget", "a new index in a folder, without --add and --delete",
        lambda s: not (s.add or s.delete or collection_server(s.output or ""))),
    Use("skip_bad_rows", "a JSONL file: --corpus or --add", lambda s: s.command != "index" or s.corpus or s.add),
    Use("chunk_tokens chunk_overlap max_file_mib", "--documents, or a folder in --add; JSONL passages are not split",
        lambda s: s.documents or (s.add and Path(s.add).is_dir())),
    # Episodes
    Use(of(ProtocolSettings, ProcedureSettings, but="system_prompt"), "a --baseline with steps",
        lambda s: s.baseline not in ("rag", "closed-book", "gold")),
    Use("queries_per_step verification", "--format r3", of_format("r3")),
    Use("step_prompt", "a --format with documents in a user turn: r3 or dag", of_format("r3", "dag")),
    Use("tags", "--format tags or solution", of_format("tags", "solution")),
    Use("information_open information_close search_graph", "--format tags", lambda s: "tags" in formats(s)),
    Use("most_nodes most_node_words", "--format dag, or --search-graph", searches_by_graph),
    Use("max_hops end_at_idle_query", "a --format and a --baseline in which the model writes queries", asks),
    Use("max_document_tokens", "retrieved documents", lambda s: s.command == "sft" or retrieves(s)),
    Use("rollout_batch_size", "a command that samples several episodes at a time", lambda s: s.command != "ask"),
    Use("max_staleness rollout_timeout", "--rollout-server", lambda s: s.rollout_server),
    Use("top_k_sampling top_p", "a --temperature above 0",
        lambda s: s.command == "serve" or not is_greedy(s.temperature or 0)),
    # Rewards and judges
    Use("least_searches", "a --format that searches", asks, harmful=True),  # no answer would be rewarded
    Use("search_bonus idle_query_penalty process_judge", "a --format that searches", asks),
    Use("process_recall expand_limit", "a --format that searches and a --retriever other than none", retrieves),
    Use("gamma_correct gamma_incorrect gamma_fail", "--process-recall or --process-judge",
        lambda s: s.process_recall or s.process_judge),
    Use("curriculum_rounds curriculum_switch", "a reward with a first_weight in --rewards",
        lambda s: any("first_weight" in entry for entry in s.rewards or ())),
    Use("judge", "--source teacher", lambda s: s.command != "collect" or s.source == "teacher"),
    Use(of(JudgeSettings, but="judge"), "--judge, or --source teacher in collect", judges),
    Use("judge_quantize judge_max_length", "--judge local", lambda s: s.judge == "local"),
    Use("judge_base_url judge_rpm judge_concurrency judge_timeout judge_retries judge_thinking judge_max_cost "
        "judge_input_price judge_output_price", "--judge gemini or openai", lambda s: s.judge != "local"),
    # Training
    Use("recompute_layers offload", "sft or ppo", trains),
    Use("loss_chunk", "sft, ppo or --teacher-logprobs", lambda s: trains(s) or s.teacher_logprobs),
    Use("nf4_cache", "--quantize auto or nf4", lambda s: s.quantize != "none"),
    Use(of(LoraSettings, but="no_lora") + " lora_plus_ratio nf4_cache compile stream_layers",
        "a run without --no-lora",
        lambda s: not s.no_lora),
    Use("quantize", "a run without --no-lora", lambda s: not s.no_lora or s.quantize == "none"),
    # With --no-lora each pass of a step changes the weights.
    Use("gradient_accumulation", "a run without --no-lora; --batch-size is the rows of a step",
        lambda s: not s.no_lora, harmful=True),
    Use("micro_batch_tokens", "a run without --no-lora, in which all rows of a step are one pass",
        lambda s: not s.no_lora, harmful=True),
    Use("recompute_layers", "a run without --no-lora, which recomputes all layers", lambda s: not s.no_lora),
    Use("lora_dropout", "sft; ppo must train the policy that it sampled from", lambda s: s.command == "sft",
        harmful=True),
    Use("validation_rows", "--validation-fraction", lambda s: s.validation_fraction),
    Use("validate_every", "--validation-fraction and --validation-rows",
        lambda s: s.validation_fraction and s.validation_rows),
    Use("kl_estimator kl_target guard_kl_factor", "--kl-beta above 0", lambda s: s.kl_beta),
    Use("guard_kl", "--kl-beta above 0, or --kl-budget", lambda s: s.kl_beta or s.kl_budget),
    Use("overlong_cache", "--overlong-penalty", lambda s: s.overlong_penalty),
    Use("teacher_adapter teacher_quantize", "--teacher", lambda s: s.teacher),
    Use("teacher_top", "--teacher, or --teacher-logprobs in collect",
        lambda s: s.teacher_logprobs if s.command == "collect" else s.teacher),
    Use("eval_every eval_questions eval_seed", "--eval-data", lambda s: s.command != "ppo" or s.eval_data),
    Use("guard_validations guard_f1_drop", "--eval-data", lambda s: s.eval_data),
    Use("guard_rollbacks guard_rate_factor guard_kl_factor", "--guard roll-back with --eval-data",
        lambda s: s.guard == "roll-back" and s.eval_data),
    Use(of(GuardSettings, but="guard"), "--guard roll-back or warn", lambda s: s.guard != "off"),
    Use("track_project track_name", "--track wandb", lambda s: s.track == "wandb"),
    # Others
    Use("memory_modes conversations memory_kib", "--memory-turns above 0", lambda s: s.memory_turns),
    Use("retrieving_modes search_adapter", "a --format and a --retriever that search", searches),
    Use("model", "a file of trajectories or questions",
        lambda s: s.command != "report" or any(not Path(run).is_dir() for run in s.runs or ())),
    Use("watch", "a run folder", lambda s: any(not Path(run).is_file() for run in s.runs or ())),
    Use("encoder encoder_style encoder_dtype", "--match", lambda s: s.command != "procedures" or s.match),
    Use("card", "--device cuda", lambda s: s.device in ("auto", "cuda")),
    Use("step", "--turn", lambda s: s.turn),
    Use("questions", "--prompts above 0", lambda s: s.prompts),
    Use("max_shard_size", "--form folder, and --weights other than nf4",
        lambda s: s.form == "folder" and s.weights != "nf4"),
    Use("push_as yes", "--push", lambda s: s.push),
)  # fmt: skip
