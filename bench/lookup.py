"""Sampling one episode at a time, beside transformers' `generate` with prompt lookup: seconds of the processor.

    python -m bench.lookup --model DIR --adapter RUN --replay trajectories.jsonl

Both write exactly the turns of the trajectories (see bench.drafts), greedily and in fp32, and keep their cache from
turn to turn. Seconds are of whole episodes, with the prefill of prompts and documents, without what fetches these.
transformers runs with the adapter merged, without lookup and with each setting of LOOKUPS; the best one counts.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from bench import drafts, options, peers, records
from r3lite.core.inherited import adapter_folder
from r3lite.devices.precision import Precision
from r3lite.rollout.sampling import Sampler

LOOKUPS = [(3, 2), (5, 2), (8, 2), (8, 3)]  # drafted tokens, and the most tokens whose last occurrence is looked up
LOOKUP = records.Bench(
    "lookup",
    "Sampling beside transformers' prompt lookup",
    keys=("model", "adapter"),
    figures=("tokens_per_second", "theirs", "ratio", "theirs_plain", "ratio_plain"),
)


def seconds_of(work: Callable[[], None]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(engine: drafts.Timed, replayed: drafts.Replayed, theirs: peers.Turns, pairs: int) -> dict:
    """Runs all ways by turns, `pairs` times after one time that is not counted."""
    engine.replayed = replayed.transcripts
    engine.grant.memory = replace(engine.grant.memory, rollout_batch_size=1)
    transcripts = [replayed.transcripts[question.id] for question in replayed.questions]

    def ours() -> None:
        one = replace(engine, sampler=Sampler(0.0))
        for question, transcript in zip(replayed.questions, transcripts, strict=True):
            [sequence] = one.run([question], ["0"], replayed.retrieve)
            assert sequence.tokens == transcript.tokens, "another episode was written"

    def peer(setting: tuple[int, int] | None) -> Callable[[], None]:
        def work() -> None:
            for transcript in transcripts:
                theirs.write(transcript, setting)

        return work

    ways = {None: peer(None)} | {setting: peer(setting) for setting in LOOKUPS}
    seconds: dict = {"ours": [], **{way: [] for way in ways}}
    for pair in range(pairs + 1):
        for way, work in [("ours", ours), *ways.items()]:
            spent = seconds_of(work)
            if pair:
                seconds[way].append(spent)
    best = min(LOOKUPS, key=lambda setting: statistics.median(seconds[setting]))
    tokens = sum(sum(transcript.action_mask) for transcript in transcripts)

    def ratios(way: tuple[int, int] | None) -> list[float]:
        return [slow / fast for slow, fast in zip(seconds[way], seconds["ours"], strict=True)]

    return {
        "episodes": len(transcripts),
        "written_tokens": tokens,
        "tokens_per_second": round(tokens / statistics.median(seconds["ours"]), 1),
        "theirs": round(tokens / statistics.median(seconds[best]), 1),
        "best_setting": f"{best[0]} tokens, at most {best[1]} looked up",
        "ratio": round(statistics.median(ratios(best)), 2),
        "ratios": " ".join(f"{ratio:.2f}" for ratio in ratios(best)),
        "theirs_plain": round(tokens / statistics.median(seconds[None]), 1),
        "ratio_plain": round(statistics.median(ratios(None)), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    drafts.add_engine_flags(parser)
    parser.add_argument("--replay", required=True, help="trajectories whose turns are written")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--note", default="", help="what else the machine did, and whose adapter it is")
    parser.add_argument("--results", type=Path, default=options.RESULTS)
    flags = parser.parse_args()
    precision = Precision(torch.float32, torch.device("cpu"))
    engine, config = drafts.timed_engine(flags, rows=1)
    replayed = drafts.replay(flags.replay, engine.layout, flags.questions)
    adapter = None if flags.adapter == "none" else str(adapter_folder(flags.adapter))
    record = {"model": config.model.model, "adapter": flags.adapter}
    record |= measure(engine, replayed, peers.Turns(config.model.model, adapter, precision), flags.pairs)
    print(records.table([record]), flush=True)
    run = {"section": "episodes one by one", **records.provenance(precision), "records": [record]}
    run |= {"note": f"{flags.pairs} pairs; processor time. {flags.note}".strip()}
    records.keep(flags.results, "cpu", LOOKUP, run)


if __name__ == "__main__":
    main()
