"""Sections that only one command has."""

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from r3lite.core.config import (
    ANY,
    Basic,
    Bounds,
    Count,
    Fraction,
    InputPath,
    OfRun,
    Required,
    Section,
    Tokens,
    Trait,
    UsageError,
    Whole,
)
from r3lite.core.needs import Needs, NeedsOthers
from r3lite.settings.common import budget_bytes
from r3lite.settings.conditions import can_capture, follows_sub_questions, makes_gold_trajectories, tunes_adapter
from r3lite.settings.data import DATA_FILE
from r3lite.settings.model import ADAPTER
from r3lite.settings.protocol import Format
from r3lite.settings.retrieval import EncoderSettings
from r3lite.settings.rl import Algorithm, Top

Few = Annotated[int, Bounds(low=1, high=100)]


class PrepareSettings(Section):
    """Splits."""

    held_out: Annotated[str | None, DATA_FILE] = None
    """source of --dev-size and --test-size; default: the validation split of a known data set, else --data"""
    train_size: Count | None = None
    """training questions, sampled with --seed; none: all"""
    rl_size: Count | None = None
    """further training questions, in rl.jsonl: for RL of an adapter that has learned from train.jsonl and knows its
    answers; none: no such file"""
    dev_size: Count = 300
    """questions for validation during training, as for --eval-data"""
    test_size: Count = 500
    """test questions, for one evaluation at the end"""


class SftSettings(Section):
    """Supervised fine-tuning."""

    needs: ClassVar = (
        NeedsOthers(
            "gradient_accumulation",
            "a run without --no-lora; --batch-size is the rows of a step",
            tunes_adapter,
            harmful=True,  # with --no-lora each pass of a step changes the weights
        ),
        Needs("validation_rows", "--validation-fraction", lambda s: s.validation_fraction),
        Needs(
            "validate_every",
            "--validation-fraction and --validation-rows",
            lambda s: s.validation_fraction and s.validation_rows,
        ),
        NeedsOthers(
            "cuda_graphs",
            "a run without --no-lora, --lora-dropout, --stream-layers and --offload on",
            can_capture,
            harmful=True,  # these passes cannot be captured
        ),
    )

    batch_size: Basic[Annotated[int, Bounds(low=1, high=4096)]] = 2
    """maximum rows per backward pass, packed end to end"""
    gradient_accumulation: Basic[Annotated[int, Bounds(low=1, high=4096)]] = 8
    """batches of --batch-size rows per optimizer step"""
    max_length: Basic[Tokens] = 2048
    """maximum tokens of a row. The documents of longer rows are shortened; rows that are still too long are left out"""
    max_document_tokens: Tokens = 160
    """maximum tokens in a document; longer documents are cut"""
    validation_fraction: Annotated[float, Bounds(low=0, high=0.5)] = 0.05
    """share of the rows held out for the validation loss; rows of one question stay together"""
    validation_rows: Whole = 64
    """maximum rows held out; 0: none"""
    validate_every: Count = 50
    """steps between validations; there is also one at the end"""
    cuda_graphs: bool = False
    """run passes of up to 4,096 tokens as CUDA graphs: the host launches each at once. Takes more memory; not yet
    tested on a GPU"""


class CollectSettings(Section):
    """Trajectories."""

    needs: ClassVar = (
        NeedsOthers("", "a run without --teacher-logprobs", lambda s: not s.teacher_logprobs),
        Needs("baseline", "--source gold", lambda s: s.source == "gold"),
        NeedsOthers(
            "demonstrations",
            "--source gold or documents without --baseline, and a --format other than dag and solution",
            lambda s: makes_gold_trajectories(s) and s.format not in ("dag", "solution"),
        ),
        NeedsOthers("insert_gold hurried_share", "--demonstrations sub-questions", follows_sub_questions),
        NeedsOthers(
            "without_search",
            "--source teacher, or --demonstrations sub-questions",
            lambda s: s.source == "teacher" or follows_sub_questions(s),
        ),
        Needs("attempts", "--source teacher", lambda s: s.source == "teacher"),
        Needs("min_f1", "--source teacher or self", lambda s: s.source in ("teacher", "self")),
        Needs("num_generations keep", "--source self", lambda s: s.source == "self"),
        Needs("test_share", "--source documents", lambda s: s.source == "documents"),
    )

    source: Basic[Literal["gold", "documents", "teacher", "self"]] = "gold"
    """where trajectories come from. gold: from the data set's decompositions or supporting facts, up to --max-hops
    hops; documents: the same, of questions that are made from --index or --corpus and written beside --output; teacher:
    sampled from --judge-model; self: sampled from --model with --adapter. The last two reject wrong and malformed
    trajectories, and continue an earlier run with the same settings and --output"""
    baseline: Basic[Literal["none", "rag"]] = "none"
    """rag: conversations that teach plain RAG, instead of trajectories. They have the prompt of `evaluate --baseline
    rag` (so pass its --top-k and limits) and the gold answer as the reply; --model is the one to train (--source
    gold)"""
    demonstrations: Literal["evidence", "sub-questions"] = "evidence"
    """for --source gold; evidence: search the question itself first, then names that are missing, and write down the
    facts found; sub-questions: search the sub-questions of the decomposition (dag always does)"""
    insert_gold: bool = False
    """add the gold paragraph if a sub-question does not find it; otherwise the question is dropped (sub-questions)"""
    hurried_share: Fraction = 0.0
    """share of trajectories that answer one hop too early, like a hasty teacher; for experiments (sub-questions)"""
    attempts: Few = 4
    """maximum tries per question; after the first, the teacher is asked to try another way"""
    without_search: Literal["keep", "drop"] = "keep"
    """whether to keep trajectories without a search; with drop, the teacher is asked again"""
    min_f1: Fraction = 0.8
    """F1 from which an answer counts as correct, besides an exact match"""
    num_generations: Basic[Annotated[int, Bounds(low=1, high=1024)]] = 8
    """episodes sampled per question"""
    keep: Basic[Annotated[int, Bounds(low=1, high=1024)]] = 2
    """maximum trajectories kept per question: the shortest with different queries"""
    test_share: Fraction = 0.2
    """share of the documents whose questions are only for testing, in a file of their own (documents)"""


class TeacherCacheSettings(Section):
    """A teacher's log-probabilities."""

    needs: ClassVar = (
        Needs("teacher_top", "--teacher, or --teacher-logprobs in collect", lambda s: s.teacher_logprobs),
    )

    teacher_logprobs: str | None = None
    """folder to write for `ppo --algorithm dgpo`: the token distributions of --model, with --adapter, along the
    trajectories in --data. Trajectories that are too long get shorter documents or are left out"""
    teacher_top: Top = 32
    """number of most likely tokens kept of each distribution"""


# What reports call the values of --baseline.
BASELINES = {
    "rag": "plain RAG", "closed-book": "closed book", "gold": "gold paragraphs", "no-retrieval": "no retrieval",
    "single-retrieval": "single retrieval",
}  # fmt: skip


def with_baseline(name: str, settings: dict) -> str:
    """Returns the name of an evaluation with these settings, with its --baseline in brackets, if it has one."""
    baseline = BASELINES.get(str(settings.get("baseline")))
    return f"{name} ({baseline})" if baseline else name


class EvaluateSettings(Section):
    """Evaluation."""

    implied: ClassVar = {
        "baseline": {
            "rag": {"max_hops": 1},
            "closed-book": {"retriever": "none", "max_hops": 1},
            "gold": {"retriever": "golden", "max_hops": 1},
            "no-retrieval": {"retriever": "none"},
        }
    }

    baseline: Basic[Literal["none", "rag", "closed-book", "gold", "no-retrieval", "single-retrieval"]] = "none"
    """another way to answer, to compare with. none: the model decides; rag: a plain chat instead of --format, with the
    documents of one retrieval for the question, and a short answer; closed-book: without documents; gold: with the gold
    paragraphs; no-retrieval: --format, but an immediate answer; single-retrieval: --format, but an answer after one
    retrieval for the question"""
    bert_score: str | None = None
    """also compute BERTScore with this encoder: folder or hub id of a BERT"""
    compare: Basic[tuple[str, str] | None] = None
    """compare two evaluation folders or prediction files of the same questions. Or two lists A1,A2,... B1,B2,... of
    several sets of questions and seeds, pair by pair; needs neither a model nor --data"""

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Returns the pairs of evaluations in --compare.

        Raises UsageError if the two lists differ in length, or if a pair is there twice.
        """
        first, second = map(_names_in, self.compare or ("", ""))
        if len(first) != len(second):
            problem = f"--compare has lists of {len(first)} and {len(second)} evaluations"
            example = "they are compared pair by pair: A1,A2 B1,B2 compares A1 with B1 and A2 with B2"
            raise UsageError(f"{problem}; {example}", code="compare-lists-differ")
        pairs = list(zip(first, second))
        for pair in pairs:
            if pairs.count(pair) > 1:
                raise UsageError(
                    f"--compare has the pair {pair[0]} and {pair[1]} more than once", code="compare-pair-twice"
                )
        return pairs

    def check(self) -> None:
        if self.compare and not self.pairs:
            raise UsageError(
                "--compare has no evaluation: pass two folders, or two lists of folders", code="compare-empty"
            )


def _names_in(text: str) -> list[str]:
    """Returns the names in a comma-separated list, without blank ones."""
    return [name.strip() for name in text.split(",") if name.strip()]


class TuningSettings(Section):
    """Prompt optimization."""

    improve: Basic[Literal["init_prompt", "step_prompt"]] = "init_prompt"
    """prompt to improve. It starts from the file passed for it (--init-prompt, --step-prompt) or the format's own"""
    eval_data: Basic[
        Annotated[
            str | None,
            DATA_FILE,
            Required("pass a question file to score prompts on, with other questions than --data"),
        ]
    ] = None
    """question file, or name,subset,split, on which prompts are scored"""
    eval_questions: Count = 100
    """maximum questions of --eval-data per score, sampled with --seed"""
    metric: Literal["f1", "em"] = "f1"
    """score that ranks the prompts"""
    rounds: Basic[Few] = 3
    """rounds of critiques, edits and scores"""
    beam: Few = 4
    """number of best prompts so far that a round continues from"""
    branch: Few = 4
    """new prompts per round from each of them"""
    sampled_questions: Count = 32
    """maximum questions of --data, sampled anew in each round, to find failures of each prompt of the beam"""
    shown_failures: Few = 4
    """failed episodes (a wrong answer or none) shown in one critique"""


class AnswerSettings(Section):
    """Answers."""

    steps: Basic[Literal["auto", "on", "off"]] = "auto"
    """whether to answer in steps of --format. off: by plain RAG, that is one search for the question and a short answer
    in an ordinary chat, as `evaluate --baseline rag` does; auto: in steps if r3lite has trained the model or its
    adapter"""


class AskSettings(Section):
    """Ask."""

    question: Basic[Annotated[str | None, Trait.BARE]] = None
    """question, in quotes. Without it, questions are read from a prompt until an empty line or Ctrl-D"""
    json: Basic[bool] = False
    """print one line of JSON per question. It has question, final_answer, reasoning_trace, search_queries, documents"""


class ReportSettings(Section):
    """Report."""

    needs: ClassVar = (
        Needs(
            "model",
            "a file of trajectories or questions",
            lambda s: any(not Path(run).is_dir() for run in s.runs or ()),
        ),
        Needs("watch", "a run folder", lambda s: any(not Path(run).is_file() for run in s.runs or ())),
    )

    runs: Annotated[tuple[str, ...] | None, Trait.BARE, Required("pass one or more run folders")] = None
    """run folders, evaluation folders, folders that contain some, and files of trajectories or questions"""
    model: str | None = None
    """count tokens with this model's tokenizer (folder, hub id or tiny) in data files; default: count words"""
    png: str | None = None
    """also write each chart as a PNG file into this folder (extra plots)"""
    watch: bool = False
    """rewrite the page until the runs are complete; a browser that shows it reloads"""


class RetrieveSettings(Section):
    """Retrieve."""

    needs: ClassVar = (
        Needs("host port", "--serve", lambda s: s.serve),
        Needs("query gap_report", "a run without --serve", lambda s: not s.serve),
        Needs("gap_report", "--data, without --query", lambda s: not s.query),
    )

    query: Basic[str | None] = None
    """only print the documents found by this query, with scores. With --corpus or --index, --data is not needed"""
    gap_report: Basic[str | None] = None
    """JSON file to write: the gold paragraphs missing from the corpus, and the best recall possible without them"""
    serve: Basic[bool] = False
    """answer queries over HTTP until Ctrl-C or SIGTERM. Other machines pass --retriever http://HOST:PORT/retrieve"""
    host: Basic[str] = "127.0.0.1"
    """address to listen on with --serve. Any address but a loopback address needs a token in R3LITE_TOKEN, which
    clients send from R3LITE_RETRIEVER_TOKEN"""
    port: Basic[Annotated[int, Bounds(low=0, high=65535)]] = 8000
    """port to listen on with --serve; 0: any free port"""


class CheckFormatSettings(Section):
    """Format check."""

    needs: ClassVar = (Needs("step", "--turn", lambda s: s.turn),)

    turn: Basic[Annotated[str | None, InputPath(remedy="Pass a text file.")]] = None
    """text file with one turn of the model, to parse; default: write and parse a sample episode"""
    step: Basic[Annotated[int, Bounds(low=1, high=3)]] = 1
    """number of the step that --turn is. The steps before it are the sample's"""


class ExportSettings(Section):
    """Export."""

    implied: ClassVar = {
        "adapter": {ANY: {"worked_example": False}},
        "average": {ANY: {"form": "adapter", "weights": "fp32", "worked_example": False}},
    }
    needs: ClassVar = (
        Needs("questions", "--prompts above 0", lambda s: s.prompts),
        Needs(
            "max_shard_size",
            "--form folder, and --weights other than nf4",
            lambda s: s.form == "folder" and s.weights != "nf4",
        ),
        Needs("push_as yes", "--push", lambda s: s.push),
    )

    model: Basic[OfRun[str]] = "Qwen/Qwen2.5-0.5B-Instruct"
    """base model: folder, GGUF file, hub id, or tiny"""
    adapter: Basic[Annotated[str | None, ADAPTER]] = None
    """LoRA adapter to merge into the base: a run folder or its adapter/; without it, the base is exported"""
    average: Basic[Annotated[tuple[str, ...] | None, ADAPTER]] = None
    """instead of --adapter: comma-separated run folders. The exact mean of their adapters, such as those of several
    seeds, is exported as one adapter, whose rank is the sum of theirs. Sets --form adapter --weights fp32"""
    form: Basic[Literal["folder", "gguf", "adapter", "gguf-adapter"]] = "folder"
    """folder: for transformers and vLLM; gguf: for llama.cpp and Ollama (extra gguf); adapter: the adapter alone, for
    PEFT; gguf-adapter: the adapter alone, for --lora of llama.cpp (extra gguf)"""
    weights: Basic[Literal["fp32", "bf16", "fp16", "q8_0", "nf4"]] = "bf16"
    """type of the weights. q8_0 only in a GGUF file, nf4 only in a folder, which only r3lite can load"""
    max_shard_size: str = "5GB"
    """maximum size of a weight file in a folder, such as 5GB or 900MiB; larger models are split (not nf4)"""
    questions: Annotated[str | None, DATA_FILE] = None
    """question file for the comparison of the result with the original; default: the sample world's"""
    prompts: Whole = 200
    """prompts in that comparison, each of which takes two forward passes; 0: no comparison"""
    evaluation: Annotated[str | None, InputPath("folder", "Pass the --output of an evaluation.")] = None
    """evaluation folder whose scores are added to the model card"""
    license: str | None = None
    """license of the result, for the model card; the base model's license applies as well"""

    push: Basic[str | None] = None
    """repository on the Hugging Face hub, OWNER/NAME, to upload --output to, with the token in HF_TOKEN; if --output
    was exported before, it is uploaded as it is"""
    push_as: Literal["private", "pull-request"] = "private"
    """private: a private repository, created if needed; pull-request: a pull request to an existing repository"""
    yes: Basic[bool] = False
    """upload; without it, --push only prints what would be uploaded"""

    @property
    def adapters(self) -> tuple[str, ...]:
        """Returns the adapters of --average, or that of --adapter; none if the base is exported."""
        if self.average is not None:
            return self.average
        if self.adapter is not None:
            return (self.adapter,)
        return ()

    def check(self) -> None:
        if self.average is not None and self.adapter is not None:
            raise UsageError("--adapter and --average are both given: pass one", code="adapter-and-average")
        if self.average is not None and len(self.average) < 2:
            raise UsageError(
                "--average has one adapter only: pass two or more, separated by commas", code="average-of-one"
            )
        if not self.adapters and self.form.endswith("adapter"):
            raise UsageError(
                f"--adapter is missing: --form {self.form} exports an adapter; pass a run folder",
                code="adapter-missing",
            )
        if self.form != "gguf" and self.weights == "q8_0":
            raise UsageError(
                "--weights q8_0 needs --form gguf; others take fp32, bf16 or fp16, folder also nf4",
                code="weights-q8-form",
            )
        if self.form != "folder" and self.weights == "nf4":
            raise UsageError(
                "--weights nf4 needs --form folder; others take fp32, bf16 or fp16, gguf also q8_0",
                code="weights-nf4-form",
            )
        if self.push is not None and not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", self.push):
            raise UsageError(
                f"--push {self.push} is not a repository name; write it as OWNER/NAME", code="repository-name"
            )
        budget_bytes(self.max_shard_size, "--max-shard-size")


class ProcedureFileSettings(EncoderSettings):
    """Procedures and encoder."""

    needs: ClassVar = (
        Needs("encoder encoder_style encoder_dtype", "--match", lambda s: s.match),
        *EncoderSettings.needs,
    )

    add: Annotated[str | None, InputPath(remedy="Pass a JSON file of procedures.")] = None
    """JSON file with one procedure or a list of them, to add to the file --procedures"""
    match: str | None = None
    """show how well each procedure matches this question, and which one would be inserted before it"""


class PlanSettings(Section):
    """Plan."""

    algorithm: Basic[Literal["sft", Algorithm]] = "sft"
    """kind of run: sft takes the flags of sft, all others those of ppo"""


class CardSettings(Section):
    """Card."""

    # --card implies CUDA, because the device of a preset, such as the CPU of `tiny`, is for a run on this machine.
    implied: ClassVar = {"card": {ANY: {"device": "cuda"}}}
    needs: ClassVar = (NeedsOthers("card", "--device cuda", lambda s: s.device in ("auto", "cuda")),)

    card: Basic[str | None] = None
    """plan for another card, such as "RTX 3050". An unknown name lists the known ones"""


class DoctorSettings(Section):
    """Doctor."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """device to check; auto: cuda if available, else mps, else cpu"""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """precision to check; auto: bf16 where that is fast, else fp16 (on a CPU fp32)"""
    clear_cache: bool = False
    """instead of the checks, delete what r3lite has cached in ~/.cache/r3lite: NF4 weights, web results and the like"""


class QuickstartSettings(Section):
    """Quickstart."""

    algorithm: Algorithm = "reinforce++-baseline"
    """algorithm of the second training stage; the default did best over three seeds (docs/algorithms.md)"""
    format: Format = "r3"
    """step format to train (docs/formats.md); solution does not retrieve"""
    quick: bool = False
    """only a few steps and questions: shows that everything runs, but the model learns almost nothing"""
