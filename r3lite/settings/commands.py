"""Sections that only one command has."""

import re
from typing import Annotated, ClassVar, Literal

from r3lite.core.config import ANY, Bounds, Count, Fraction, Required, Section, Tokens, Trait, UsageError, Whole
from r3lite.settings.common import budget_bytes
from r3lite.settings.protocol import Format
from r3lite.settings.retrieval import EncoderSettings
from r3lite.settings.rl import Algorithm, Top

Few = Annotated[int, Bounds(low=1, high=100)]


class PrepareSettings(Section):
    """Preparing."""

    held_out: str | None = None
    """source of --dev-size and --test-size; by default the validation split of a known data set, else --data itself"""
    train_size: Count | None = None
    """questions to train on, drawn by --seed; none: all that there are"""
    dev_size: Count = 300
    """questions to choose by while training, as for --eval-data"""
    test_size: Count = 500
    """test questions, for one evaluation at the end"""


class SftSettings(Section):
    """Supervised fine-tuning."""

    batch_size: Annotated[int, Bounds(low=1, high=4096)] = 2
    """most rows of one backward pass, laid end to end"""
    gradient_accumulation: Annotated[int, Bounds(low=1, high=4096)] = 8
    """rows of one optimizer step, in units of --batch-size"""
    max_length: Tokens = 2048
    """most tokens of a row; longer ones get shorter documents, or are left out if that is not enough"""
    max_document_tokens: Tokens = 160
    """most tokens of one document; longer ones are cut"""
    validation_fraction: Annotated[float, Bounds(low=0, high=0.5)] = 0.05
    """share of the questions held out for the validation loss; at most half, as the rest is trained on"""
    validation_rows: Whole = 64
    """most rows held out; 0: none"""
    validate_every: Count = 50
    """steps between validation losses; one more at the end"""


class CollectSettings(Section):
    """Collecting."""

    source: Literal["gold", "teacher", "self"] = "gold"
    """gold: from the data set's decompositions or supporting facts, of at most --max-hops hops; teacher: sampled from
    --judge-model; self: sampled from --model with --adapter. Of the last two, wrong and malformed ones are rejected,
    and the same settings with the same --output go on where an earlier run stopped"""
    demonstrations: Literal["evidence", "sub-questions"] = "evidence"
    """of gold; evidence: the question itself is searched first, then names that are missing, and analyses write down
    the facts found; sub-questions: the queries are those of the decompositions (dag does so in any case)"""
    insert_gold: bool = False
    """a gold paragraph that a sub-question misses joins its documents; else the question is dropped (sub-questions)"""
    hurried_share: Fraction = 0.0
    """share of gold trajectories that answer one hop early, like a hasty teacher; for experiments (sub-questions)"""
    attempts: Few = 4
    """tries of the teacher at a question; each after the first is asked for another way"""
    without_search: Literal["keep", "drop"] = "keep"
    """trajectories that answer without a search; a teacher that does so is asked again"""
    min_f1: Fraction = 0.8
    """an answer of a teacher or of the model itself is right when it is an exact match or has this F1"""
    num_generations: Annotated[int, Bounds(low=1, high=1024)] = 8
    """episodes that the model itself samples per question"""
    keep: Annotated[int, Bounds(low=1, high=1024)] = 2
    """most of them that are kept of a question, the shortest, no two with the same queries"""


class TeacherCacheSettings(Section):
    """Log-probabilities of a teacher."""

    teacher_logprobs: str | None = None
    """folder to write, for `ppo --algorithm dgpo`: the distributions of --model, with --adapter, along the trajectories
    of --data; too long ones get shorter documents or are left out; the same command goes on where it stopped"""
    teacher_top: Top = 32
    """how many of the likeliest tokens of a distribution are kept"""


# What a reader calls the values of --baseline.
BASELINES = {
    "rag": "plain RAG", "closed-book": "closed book", "gold": "gold paragraphs", "no-retrieval": "no retrieval",
    "single-retrieval": "single retrieval",
}  # fmt: skip


def with_baseline(name: str, settings: dict) -> str:
    """The name of an evaluation with these settings, followed by that of its baseline, if it is one's."""
    known = BASELINES.get(str(settings.get("baseline")))
    return f"{name} ({known})" if known else name


class EvaluateSettings(Section):
    """Evaluation."""

    implied: ClassVar = {
        "baseline": {
            "rag": {"max_hops": 1},
            "closed-book": {"retriever": "none", "max_hops": 1},
            "gold": {"retriever": "golden", "max_hops": 1},
        }
    }

    baseline: Literal["none", "rag", "closed-book", "gold", "no-retrieval", "single-retrieval"] = "none"
    """none: the model decides; rag: a plain chat in place of --format, with the documents of one retrieval for the
    question, and a short answer; closed-book: the same without documents; gold: with the gold paragraphs; no-retrieval:
    in --format, the answer is forced at once; single-retrieval: after one retrieval for the question"""
    bert_score: str | None = None
    """also score answers by BERTScore with this encoder: the folder or hub id of a BERT"""
    compare: tuple[str, str] | None = None
    """two evaluation folders or prediction files of the same questions to compare; needs no model and no --data"""


class TuningSettings(Section):
    """Prompt optimisation."""

    improve: Literal["init_prompt", "step_prompt"] = "init_prompt"
    """the prompt that is improved, from the file that is named for it or, without one, the format's own"""
    eval_data: Annotated[
        str | None, Required("questions that the prompts are scored on, other than those of --data")
    ] = None
    """question file, or name,subset,split, on which every prompt is scored"""
    eval_questions: Count = 100
    """most questions of --eval-data that a prompt is scored on, drawn with --seed"""
    metric: Literal["f1", "em"] = "f1"
    """score by which prompts are chosen"""
    rounds: Few = 3
    """rounds of critiques, edits and scores"""
    beam: Few = 4
    """best prompts of all so far, which a round goes on from"""
    branch: Few = 4
    """new prompts that a round makes of each of them"""
    sampled_questions: Count = 32
    """most questions of --data, drawn anew in each round, that each prompt of the beam is tried on to be criticized"""
    shown_failures: Few = 4
    """episodes with a wrong answer, or without one, that one critique is about"""


class AskSettings(Section):
    """Ask."""

    question: Annotated[str | None, Trait.BARE] = None
    """what is asked, in quotes; without it there is a prompt, and an empty line or Ctrl-D ends"""
    json: bool = False
    """print only one line of JSON a question: question, final_answer, reasoning_trace, search_queries and documents"""


class ReportSettings(Section):
    """Report."""

    runs: Annotated[tuple[str, ...] | None, Trait.BARE, Required("the folder of a run, or several")] = None
    """folders of runs and evaluations, folders that hold some, and files of trajectories or questions"""
    model: str | None = None
    """count tokens of this model (folder, hub id or tiny) in files of trajectories or questions; without it, words"""
    png: str | None = None
    """also write each chart as a PNG file into this folder (extra plots)"""
    watch: bool = False
    """write the page again and again until the runs are complete; a browser that shows it follows"""


class RetrieveSettings(Section):
    """Retrieve."""

    query: str | None = None
    """print what this one query brings, with scores, and measure nothing; needs no --data beside --corpus or --index"""
    gap_report: str | None = None
    """JSON file to write: the gold paragraphs that the corpus lacks, and the best recall that they leave possible"""
    serve: bool = False
    """answer queries over HTTP, until Ctrl-C or SIGTERM: other machines pass --retriever http://HOST:PORT/retrieve"""
    host: str = "127.0.0.1"
    """address to listen on with --serve; 0.0.0.0 is all of this machine's, and anyone who reaches it can query"""
    port: Annotated[int, Bounds(low=0, high=65535)] = 8000
    """port to listen on with --serve; 0: any that is free"""


class CheckFormatSettings(Section):
    """Check of a format."""

    turn: str | None = None
    """text file with one turn of the model, to be read; without it a sample episode is written and read"""
    step: Annotated[int, Bounds(low=1, high=3)] = 1
    """which step --turn is; those before it are the sample's"""


class ExportSettings(Section):
    """Export."""

    implied: ClassVar = {"adapter": {ANY: {"worked_example": False}}}

    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    """the base: folder, GGUF file, hub id, or tiny"""
    adapter: str | None = None
    """LoRA adapter that is merged into the base: a run folder or its adapter/; without it, the base alone is written"""
    form: Literal["folder", "gguf", "adapter", "gguf-adapter"] = "folder"
    """folder: as transformers and vLLM read it; gguf: as llama.cpp and Ollama read it (extra gguf); adapter: the
    adapter alone, as PEFT reads it; gguf-adapter: the same for llama.cpp's --lora (extra gguf)"""
    weights: Literal["fp32", "bf16", "fp16", "q8_0", "nf4"] = "bf16"
    """numbers of the weights; q8_0 in a gguf file only, nf4 in a folder for r3lite only"""
    max_shard_size: str = "5GB"
    """most of one file of a folder, such as 5GB or 900MiB; beyond it there are several and an index (not in nf4)"""
    questions: str | None = None
    """question file whose prompts are compared before and after; default: the sample world's test questions"""
    prompts: Whole = 200
    """prompts of the comparison, which takes two passes over each; 0: none"""
    evaluation: str | None = None
    """folder of an evaluation, whose scores go into the model card"""
    license: str | None = None
    """licence of the result for the model card; the base's holds, too"""

    push: str | None = None
    """repository of the Hugging Face hub, OWNER/NAME, that --output is uploaded to, with the token in HF_TOKEN; a
    folder that was exported before is uploaded as it is"""
    push_as: Literal["private", "pull-request"] = "private"
    """private: a private repository, made if there is none; pull-request: one to a repository that is there"""
    yes: bool = False
    """upload; without it, --push prints what would be uploaded"""

    def check(self) -> None:
        if self.adapter is None and self.form.endswith("adapter"):
            raise UsageError(f"--adapter is missing: --form {self.form} writes it alone; name a run folder")
        if self.form != "gguf" and self.weights == "q8_0":
            raise UsageError("--weights q8_0 is for --form gguf; others have fp32, bf16, fp16, and a folder nf4")
        if self.form != "folder" and self.weights == "nf4":
            raise UsageError("--weights nf4 is for --form folder; others have fp32, bf16, fp16, and gguf q8_0")
        if self.push is not None and not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", self.push):
            raise UsageError(f"--push {self.push} is not the name of a repository: write it as OWNER/NAME")
        budget_bytes(self.max_shard_size, "--max-shard-size")


class ProcedureFileSettings(EncoderSettings):
    """The file of procedures."""

    add: str | None = None
    """JSON file of further procedures, a list or a single one, that are written into --procedures"""
    match: str | None = None
    """show how well each procedure fits this question by --encoder, and which one would stand before it"""


class PlanSettings(Section):
    """Plan."""

    algorithm: Literal["sft", Algorithm] = "sft"
    """the run that is planned: sft takes the flags of sft, all others those of ppo"""


class CardSettings(Section):
    """Card."""

    card: str | None = None
    """plan for a card that is elsewhere: a name such as "RTX 3050 Laptop"; a wrong one tells which are known"""


class DoctorSettings(Section):
    """Doctor."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """what is examined; auto: cuda if there is one, else mps, else cpu"""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """precision of the runs that it is examined for; auto: bf16 if the device has it, else fp16 (on a CPU fp32)"""


class QuickstartSettings(Section):
    """Quickstart."""

    algorithm: Algorithm = "reinforce++-baseline"
    """algorithm of the second training stage; by default the best one over three seeds (docs/algorithms.md)"""
    format: Format = "r3"
    """what the model learns to write (docs/formats.md); solution does without retrieval"""
    quick: bool = False
    """a few steps and questions only: shows that everything runs, teaches next to nothing"""
