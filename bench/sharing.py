"""What episodes of a question save by sharing what they have in common: prefilled tokens, decoded rows, time.

    python -m bench.sharing --adapter runs/quickstart/sft     # a round of GRPO on the sample world: 4 questions x 8

`prompts_alone` are the tokens that would be prefilled if only the prompt were shared. `own_rows` is the same round with
a row of the KV cache for each episode: prefixes are copied, but tokens that are sampled alike are decoded once for each
episode. Times are of the processor, of sampling without what fetches documents; both take turns on the same questions.
"""

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch

from bench import options, records
from r3lite.assembly.answering import build_engine
from r3lite.core.files import shipped
from r3lite.core.invocation import resolve
from r3lite.datasets.qa import read_questions
from r3lite.devices.precision import Precision
from r3lite.evaluate import EvaluateConfig
from r3lite.models.kv_cache import Prefill
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.rollout.decoder import Decoder
from r3lite.rollout.engine import Engine
from r3lite.rollout.sampling import Sampler
from r3lite.rollout.scheduler import Scheduler
from r3lite.rollout.sequence import Sequence

SHARING = records.Bench(
    "sharing",
    "What episodes of a question share",
    keys=("model", "questions", "episodes"),
    figures=("prefilled", "prompts_alone", "prefilled_share", "decoded_share", "time_ratio"),
)


@dataclass
class Counted(Engine):
    """An engine that counts what its model runs, and the processor's seconds of that."""

    prefilled: int = 0  # tokens
    decoded: int = 0  # rows of all passes that decode
    seconds: float = 0.0

    def _prefill(self, scheduler: Scheduler) -> None:
        start = time.process_time()
        passes: list[Prefill] = []
        handle = self.model.register_forward_pre_hook(lambda module, inputs: passes.append(inputs[1]))
        super()._prefill(scheduler)
        handle.remove()
        self.prefilled += sum(context.tokens.shape[1] for context in passes)
        self.seconds += time.process_time() - start

    def _decode(self, scheduler: Scheduler, decoder: Decoder) -> list[Sequence]:
        self.decoded += scheduler.running_count
        start = time.process_time()
        sampled = super()._decode(scheduler, decoder)
        self.seconds += time.process_time() - start
        return sampled


def prompts_alone(sequences: list[Sequence], group: int) -> int:
    """Returns the tokens that are prefilled if the episodes of a group share their prompt and nothing else."""
    count = 0
    for place, sequence in enumerate(sequences):
        prompt = sequence.action_mask.index(True)
        observations = sequence.action_mask[prompt:].count(False)
        count += observations
        if place % group == 0:
            count += prompt - 1
    return count


def measure(engine: Counted, flags: argparse.Namespace) -> dict:
    """Runs the pairs, after one that is not counted."""
    questions = read_questions(shipped("data", "world", "train.jsonl"), flags.questions)
    retrieve = build_retriever(Setup(engine_config(flags).retrieval, questions))
    asked = [question for question in questions for _ in range(flags.group)]
    engine.grant.memory = replace(engine.grant.memory, rollout_batch_size=len(asked))
    shared_seconds = []
    ratios = []
    for pair in range(flags.pairs + 1):
        seeds = [f"{pair}/{i}" for i in range(len(asked))]
        shared = replace(engine, prefilled=0, decoded=0, seconds=0.0)
        sequences = shared.run(asked, seeds, retrieve)
        own_rows = replace(engine, prefilled=0, decoded=0, seconds=0.0)
        with mock.patch.object(Scheduler, "_equal_row", lambda scheduler, sequence: []):
            alone = own_rows.run(asked, seeds, retrieve)
        if pair:
            shared_seconds.append(shared.seconds)
            ratios.append(shared.seconds / own_rows.seconds)
    expected = prompts_alone(sequences, flags.group)
    equal = sum(one.tokens == other.tokens for one, other in zip(sequences, alone, strict=True))
    return {
        "model": flags.model,
        "questions": flags.questions,
        "episodes": len(asked),
        "equal_episodes": equal,
        "prefilled": shared.prefilled,
        "prompts_alone": expected,
        "prefilled_share": round(shared.prefilled / expected, 3),
        "decoded": shared.decoded,
        "decoded_own_rows": own_rows.decoded,
        "decoded_share": round(shared.decoded / own_rows.decoded, 3),
        "seconds": round(statistics.median(shared_seconds), 2),
        "time_ratio": round(statistics.median(ratios), 3),
        "time_ratios": " ".join(f"{ratio:.3f}" for ratio in ratios),
    }


def engine_config(flags: argparse.Namespace) -> EvaluateConfig:
    """Returns the settings of an engine that answers from the sample world."""
    arguments = ["--preset", "tiny", "--model", flags.model, "--adapter", flags.adapter, "--dtype", "fp32"]
    arguments += ["--device", "cpu", "--corpus", str(shipped("data", "world", "corpus.jsonl"))]
    return resolve("evaluate", EvaluateConfig(), arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--adapter", default="none")
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--group", type=int, default=8, help="episodes of each question")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--note", default="", help="what else the machine did, and whose adapter it is")
    parser.add_argument("--results", type=Path, default=options.RESULTS)
    flags = parser.parse_args()
    built = build_engine(engine_config(flags), flags.questions * flags.group)
    engine = Counted(**vars(built))
    engine.sampler = Sampler(flags.temperature)
    record = measure(engine, flags)
    print(records.table([record]), flush=True)
    note = f"{flags.pairs} pairs; processor time. {flags.note}".strip()
    precision = Precision(torch.float32, torch.device("cpu"))
    run = {"section": "rounds of GRPO", **records.provenance(precision), "note": note, "records": [record]}
    records.keep(flags.results, "cpu", SHARING, run)


if __name__ == "__main__":
    main()
