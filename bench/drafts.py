"""What drafts from the context bring: tokens a second of decoding and tokens a pass, with them and without, in pairs.

    python -m bench.drafts --adapter runs/quickstart/sft                # the tiny model answers the sample world
    python -m bench.drafts --model DIR --replay trajectories.jsonl      # a model whose turns are those of a file

Replayed turns are forced upon a model, which computes what it would in sampling them: so the acceptance is that of a
model which writes exactly these turns, greedily. Times are of the processor, of decoding alone (`Engine._decode`), so
that what else the machine does counts little; both engines take turns on the same questions. Each pair gives a ratio.
"""

import argparse
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from bench import options, records
from r3lite.assembly.answering import build_engine
from r3lite.core.episode import Document, Question, Retrieve
from r3lite.core.files import shipped
from r3lite.core.invocation import resolve
from r3lite.datasets.qa import read_questions
from r3lite.datasets.trajectories import Trajectory, read_rows
from r3lite.devices.precision import Precision
from r3lite.evaluate import EvaluateConfig
from r3lite.protocols.layout import Layout
from r3lite.protocols.transcript import Transcript
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.rollout.decoder import Decoder
from r3lite.rollout.engine import Engine
from r3lite.rollout.sampling import Sampler
from r3lite.rollout.sampling_batches import SamplingBatch
from r3lite.rollout.scheduler import Scheduler
from r3lite.rollout.sequence import Sequence

DRAFTS = records.Bench(
    "drafts",
    "Drafts from the context",
    keys=("model", "turns", "temperature", "batch"),
    figures=("tokens_per_second", "with_drafts", "ratio", "tokens_a_pass"),
)


@dataclass
class Timed(Engine):
    """An engine that counts the processor's seconds of decoding, its passes row by row, and the tokens they gave."""

    replayed: dict[str, Transcript] = field(default_factory=dict)  # by the question's id: what is to be written
    seconds: float = 0.0
    row_passes: int = 0
    tokens: int = 0

    def _decode(self, scheduler: Scheduler, decoder: Decoder) -> list[Sequence]:
        rows = scheduler.running
        before = sum(len(row.tokens) for row in rows)
        start = time.process_time()
        sampled = super()._decode(scheduler, decoder)
        self.seconds += time.process_time() - start
        self.row_passes += len(rows)
        self.tokens += sum(len(row.tokens) for row in rows) - before
        return sampled

    def _sample(self, logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
        tokens, logprobs = super()._sample(logits, batch)
        if self.replayed:
            forced = []
            for sequence, depth in zip(batch.sequences, batch.depths, strict=True):
                written = self.replayed[sequence.question.id].tokens
                forced.append(written[min(len(sequence.tokens) + depth, len(written) - 1)])
            tokens = torch.tensor(forced)
        return tokens, logprobs


@dataclass(frozen=True)
class Replayed:
    """Questions, the transcripts that their episodes shall have by the questions' ids, and what gives the documents."""

    questions: list[Question]
    transcripts: dict[str, Transcript]
    retrieve: Retrieve


def replay(path: str, layout: Layout, count: int) -> Replayed:
    """Returns what the first trajectories of a file write."""
    questions = []
    transcripts = {}
    documents: dict[tuple[str, str], list[Document]] = {}
    for number, row in enumerate(read_rows(path, layout.protocol)[:count]):
        assert isinstance(row, Trajectory)
        question = Question(f"{number}", row.question, row.answers)
        questions.append(question)
        transcripts[question.id] = layout.lay_out(question, row.steps, layout.lengths.max_document_tokens)
        for step in row.steps:
            for search in step.searches:
                documents[question.id, search.query] = list(search.documents)

    def retrieve(pairs: list[tuple[Question, str]]) -> list[list[Document]]:
        return [documents[question.id, query] for question, query in pairs]

    return Replayed(questions, transcripts, retrieve)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--adapter", default="none")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--draft-tokens", type=int, default=7)
    parser.add_argument("--document-tokens", type=int, default=160)


def timed_engine(flags: argparse.Namespace, rows: int) -> tuple[Timed, EvaluateConfig]:
    """Returns an engine that samples at most `rows` episodes at once, in fp32 on the CPU, and its settings."""
    arguments = ["--preset", flags.preset, "--model", flags.model, "--adapter", flags.adapter, "--dtype", "fp32"]
    arguments += ["--device", "cpu", "--corpus", str(shipped("data", "world", "corpus.jsonl"))]
    arguments += ["--max-document-tokens", str(flags.document_tokens), "--draft-tokens", str(flags.draft_tokens)]
    config = resolve("evaluate", EvaluateConfig(), arguments)
    return Timed(**vars(build_engine(config, rows))), config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_flags(parser)
    parser.add_argument("--replay", help="trajectories whose turns are written")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--temperatures", nargs="*", type=float, default=[0.0, 1.0])
    parser.add_argument(
        "--questions", type=int, default=32, help="at a time at most; as many as rows if these are less"
    )
    parser.add_argument("--group", type=int, default=1, help="episodes of each question")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--note", default="", help="what else the machine did, and whose adapter it is")
    parser.add_argument("--results", type=Path, default=options.RESULTS)
    flags = parser.parse_args()
    engine, config = timed_engine(flags, flags.questions)
    if flags.replay:
        replayed = replay(flags.replay, engine.layout, flags.questions)
        questions, retrieve = replayed.questions, replayed.retrieve
        engine.replayed = replayed.transcripts
    else:
        questions = read_questions(shipped("data", "world", "test.jsonl"), flags.questions)
        retrieve = build_retriever(Setup(config.retrieval, questions))
    found: list[dict] = []
    precision = Precision(torch.float32, torch.device("cpu"))
    run = {"section": "replayed" if flags.replay else "sampled", **records.provenance(precision)}
    run |= {"note": f"{flags.pairs} pairs; processor time. {flags.note}".strip(), "records": found}
    for batch in flags.batches:
        for temperature in flags.temperatures:
            found.append(measure(engine, questions, retrieve, batch=batch, temperature=temperature, flags=flags))
            print(records.table(found[-1:]), flush=True)
            records.keep(flags.results, "cpu", DRAFTS, run)


def measure(
    engine: Timed,
    questions: list[Question],
    retrieve: Retrieve,
    batch: int,
    temperature: float,
    flags: argparse.Namespace,
) -> dict:
    """Runs the pairs of one batch size and temperature, after a run of each that is not counted."""
    count = min(len(questions), max(batch, 4))
    asked = [question for question in questions[:count] for _ in range(flags.group)]
    seeds = [f"{i}" for i in range(len(asked))]
    memory = replace(engine.grant.memory, rollout_batch_size=batch)
    engine.grant.memory = memory
    speeds: dict[int, list[float]] = {0: [], flags.draft_tokens: []}
    tokens_a_pass = 0.0
    texts = {}
    for pair in range(flags.pairs + 1):
        for limit in speeds:
            one = replace(
                engine,
                sampler=Sampler(temperature),
                draft_tokens=limit,
                seconds=0.0,
                row_passes=0,
                tokens=0,
            )
            sequences = one.run(asked, seeds, retrieve)
            texts[limit] = [sequence.tokens for sequence in sequences]
            if pair:
                speeds[limit].append(one.tokens / one.seconds)
            if limit:
                tokens_a_pass = one.tokens / one.row_passes
    plain, drafted = speeds.values()
    equal = sum(a == b for a, b in zip(*texts.values(), strict=True))
    ratios = [new / old for old, new in zip(plain, drafted, strict=True)]
    return {
        "model": flags.model,
        "turns": "replayed" if flags.replay else "sampled",
        "temperature": temperature,
        "batch": batch,
        "episodes": len(asked),
        "equal_episodes": equal,
        "tokens_per_second": round(statistics.median(plain), 1),
        "with_drafts": round(statistics.median(drafted), 1),
        "ratio": round(statistics.median(ratios), 2),
        "ratios": " ".join(f"{ratio:.2f}" for ratio in ratios),
        "tokens_a_pass": round(tokens_a_pass, 2),
    }


if __name__ == "__main__":
    main()
