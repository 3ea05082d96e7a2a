"""Compares decoding with and without drafts from the context: tokens per second, and tokens per pass.

    python -m bench.drafts --adapter runs/quickstart/sft                # the tiny model answers the sample world
    python -m bench.drafts --preset hotpotqa --model DIR --adapter runs/sft --data dev.json     # real questions
    python -m bench.drafts --model DIR --replay trajectories.jsonl      # a model whose turns are those of a file

With --replay the model computes its logits as usual, but the tokens of the file replace those that it would sample. So
drafts are accepted as often as with a model that writes exactly these turns greedily. Times are processor seconds of
decoding alone (`Engine._decode`), so that other programs count little. Runs with and without drafts alternate on the
same questions; each pair of runs gives a ratio. Of episodes with equal tokens the largest difference between
log-probabilities is shown.
"""

import argparse
import statistics
import time
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bench import episodes, options, records
from r3lite.assembly.answering import build_engine
from r3lite.core.episode import Document, Question, Retrieve
from r3lite.datasets.trajectories import Trajectory, read_rows
from r3lite.evaluate import EvaluateConfig
from r3lite.protocols.layout import Layout
from r3lite.protocols.transcript import Transcript
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
MIN_QUESTIONS = 4  # of a measurement, even if the batch is smaller


@dataclass
class Timed(Engine):
    """An engine that measures its decoding, and that can be forced to write the turns of transcripts."""

    replayed: dict[str, Transcript] = field(default_factory=dict)  # by question id; empty: the model samples freely
    seconds: float = 0.0  # processor time of decoding
    row_passes: int = 0  # passes, each counted once for every row in it
    tokens: int = 0  # that decoding added to the rows

    def _decode(self, scheduler: Scheduler, decoder: Decoder) -> list[Sequence]:
        rows = scheduler.running
        tokens_before = sum(len(row.tokens) for row in rows)
        start = time.process_time()
        sampled = super()._decode(scheduler, decoder)
        self.seconds += time.process_time() - start
        self.row_passes += len(rows)
        self.tokens += sum(len(row.tokens) for row in rows) - tokens_before
        return sampled

    def _sample(self, logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
        tokens, logprobs = super()._sample(logits, batch)
        if self.replayed:
            forced = []
            for sequence, depth in zip(batch.sequences, batch.depths, strict=True):
                transcript = self.replayed[sequence.question.id].tokens
                position = len(sequence.tokens) + depth  # a draft is checked at several depths
                forced.append(transcript[min(position, len(transcript) - 1)])
            tokens = torch.tensor(forced)
        return tokens, logprobs


@dataclass(frozen=True)
class Replayed:
    """Questions, the transcripts that their episodes must write, and a retriever of the documents in these.

    `transcripts` has each transcript by its question's id.
    """

    questions: list[Question]
    transcripts: dict[str, Transcript]
    retrieve: Retrieve


def replay(path: str, layout: Layout, count: int) -> Replayed:
    """Returns the questions, transcripts and documents of the first `count` trajectories of a file."""
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


def timed_engine(config: EvaluateConfig, rows: int) -> Timed:
    """Returns an engine that samples at most `rows` episodes at once."""
    return Timed(**vars(build_engine(config, rows)))


def main(argv: list[str] | None = None) -> None:
    parser = episodes.parser(__doc__)
    parser.add_argument("--replay", help="trajectories whose turns are written")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--temperatures", nargs="*", type=float, default=[0.0, 1.0])
    parser.add_argument(
        "--questions", type=int, default=32, help="at a time at most; as many as rows if these are less"
    )
    parser.add_argument("--group", type=int, default=1, help="episodes of each question")
    flags, config = episodes.parse(parser, "test.jsonl", argv)
    if config.sampling.draft_tokens == 0:
        parser.error("--draft-tokens 0 leaves nothing to compare")
    engine = timed_engine(config, flags.questions)
    if flags.replay:
        replayed = replay(flags.replay, engine.layout, flags.questions)
        questions = replayed.questions
        retrieve = replayed.retrieve
        engine.replayed = replayed.transcripts
    else:
        questions, retrieve = episodes.questions_and_retriever(config, flags.questions)
    results: list[dict] = []
    conditions = records.provenance(options.precision(config.model))
    run = {"section": "replayed" if flags.replay else "sampled", **conditions}
    run |= {"note": f"{flags.pairs} pairs; processor time. {flags.note}".strip(), "records": results}
    for batch in flags.batches:
        for temperature in flags.temperatures:
            results.append(measure(engine, questions, retrieve, batch=batch, temperature=temperature, flags=flags))
            print(records.table(results[-1:]), flush=True)
            records.keep(flags.results, "cpu", DRAFTS, run)


def measure(
    engine: Timed,
    questions: list[Question],
    retrieve: Retrieve,
    batch: int,
    temperature: float,
    flags: argparse.Namespace,
) -> dict:
    """Measures one batch size and temperature: `--pairs` pairs of a run without drafts and one with them.

    One more pair is run first and not counted. Returns a record of the results.
    """
    count = min(len(questions), max(batch, MIN_QUESTIONS))
    repeated = [question for question in questions[:count] for _ in range(flags.group)]
    seeds = [f"{i}" for i in range(len(repeated))]
    memory = replace(engine.grant.memory, rollout_batch_size=batch)
    engine.grant.memory = memory
    # Tokens per second of each run, by the largest number of drafted tokens; 0 is without drafts.
    speeds: dict[int, list[float]] = {0: [], engine.draft_tokens: []}
    tokens_a_pass = 0.0
    runs: dict[int, list[Sequence]] = {}  # the episodes of the last run, by the same number
    for pair in range(flags.pairs + 1):
        for limit in speeds:
            run_engine = replace(
                engine,
                sampler=Sampler(temperature),
                draft_tokens=limit,
                seconds=0.0,
                row_passes=0,
                tokens=0,
            )
            runs[limit] = run_engine.run(repeated, seeds, retrieve)
            if pair > 0:  # the first pair warms up
                speeds[limit].append(run_engine.tokens / run_engine.seconds)
            if limit > 0:
                tokens_a_pass = run_engine.tokens / run_engine.row_passes
    plain, drafted = speeds.values()
    equal_episodes, logprob_difference = compare(*runs.values())
    ratios = [with_drafts / without for without, with_drafts in zip(plain, drafted, strict=True)]
    return {
        "model": flags.model_name,
        "turns": "replayed" if flags.replay else "sampled",
        "temperature": temperature,
        "batch": batch,
        "episodes": len(repeated),
        "equal_episodes": equal_episodes,
        "logprob_difference": float(f"{logprob_difference:.1e}"),
        "tokens_per_second": round(statistics.median(plain), 1),
        "with_drafts": round(statistics.median(drafted), 1),
        "ratio": round(statistics.median(ratios), 2),
        "ratios": " ".join(f"{ratio:.2f}" for ratio in ratios),
        "tokens_a_pass": round(tokens_a_pass, 2),
    }


def compare(episodes_without: list[Sequence], episodes_with: list[Sequence]) -> tuple[int, float]:
    """Returns how many episodes have equal tokens without and with drafts.

    Also returns the largest difference between log-probabilities of a token in these episodes.
    """
    equal_episodes = 0
    differences = [0.0]
    for one, other in zip(episodes_without, episodes_with, strict=True):
        if one.tokens == other.tokens:
            equal_episodes += 1
            differences += [abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)]
    return equal_episodes, max(differences)


if __name__ == "__main__":
    main()
