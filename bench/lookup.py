"""Times sampling one episode at a time, by r3lite and by transformers' `generate` with prompt lookup.

    python -m bench.lookup --model DIR --adapter RUN --replay trajectories.jsonl

Both write exactly the turns of the trajectories (see bench.drafts), greedily. Both use one KV cache for all
turns of an episode. Times are processor seconds of whole episodes, including the prefill of prompts and documents,
excluding retrieval. transformers runs with the adapter merged: without lookup, and with each setting of LOOKUPS, of
which the fastest counts.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from bench import drafts, episodes, options, peers, records
from r3lite.core.inherited import adapter_folder
from r3lite.rollout.sampling import Sampler

# Settings of transformers' prompt lookup: the number of drafted tokens, and the largest number of tokens whose last
# occurrence is looked up.
LOOKUPS = [(3, 2), (5, 2), (8, 2), (8, 3)]
OURS = "ours"
LOOKUP = records.Bench(
    "lookup",
    "Sampling beside transformers' prompt lookup",
    keys=("model", "adapter"),
    figures=("tokens_per_second", "theirs", "ratio", "theirs_plain", "ratio_plain"),
)


def seconds_of(work: Callable[[], None]) -> float:
    """Returns the processor seconds of the work."""
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(engine: drafts.Timed, replayed: drafts.Replayed, theirs: peers.Turns, pairs: int) -> dict:
    """Times r3lite, transformers without lookup and transformers with each setting of LOOKUPS, by turns.

    Each is timed `pairs` times, after one time that is not counted. Returns a record of the results.
    """
    engine.replayed = replayed.transcripts
    engine.grant.memory = replace(engine.grant.memory, rollout_batch_size=1)
    transcripts = [replayed.transcripts[question.id] for question in replayed.questions]

    def ours() -> None:
        greedy_engine = replace(engine, sampler=Sampler(0.0))
        for question, transcript in zip(replayed.questions, transcripts, strict=True):
            [sequence] = greedy_engine.run([question], ["0"], replayed.retrieve)
            assert sequence.tokens == transcript.tokens, "another episode was written"

    def peer(setting: tuple[int, int] | None) -> Callable[[], None]:
        """Returns the work of transformers with a setting of LOOKUPS; None: without lookup."""

        def work() -> None:
            for transcript in transcripts:
                theirs.write(transcript, setting)

        return work

    # The contestants: OURS, and the settings of transformers; None is without lookup.
    works = {OURS: ours, None: peer(None)} | {setting: peer(setting) for setting in LOOKUPS}
    seconds: dict = {contestant: [] for contestant in works}
    for pair in range(pairs + 1):
        for contestant, work in works.items():
            duration = seconds_of(work)
            if pair > 0:  # the first time warms up
                seconds[contestant].append(duration)
    best = min(LOOKUPS, key=lambda setting: statistics.median(seconds[setting]))
    tokens = sum(sum(transcript.action_mask) for transcript in transcripts)

    def ratios(setting: tuple[int, int] | None) -> list[float]:
        """Returns the time of transformers as a multiple of r3lite's, for each pair."""
        return [theirs / ours for theirs, ours in zip(seconds[setting], seconds[OURS], strict=True)]

    return {
        "episodes": len(transcripts),
        "written_tokens": tokens,
        "tokens_per_second": round(tokens / statistics.median(seconds[OURS]), 1),
        "theirs": round(tokens / statistics.median(seconds[best]), 1),
        "best_setting": f"{best[0]} tokens, at most {best[1]} looked up",
        "ratio": round(statistics.median(ratios(best)), 2),
        "ratios": " ".join(f"{ratio:.2f}" for ratio in ratios(best)),
        "theirs_plain": round(tokens / statistics.median(seconds[None]), 1),
        "ratio_plain": round(statistics.median(ratios(None)), 2),
    }


def main(argv: list[str] | None = None) -> None:
    parser = episodes.parser(__doc__)
    parser.add_argument("--replay", required=True, help="trajectories whose turns are written")
    parser.add_argument("--questions", type=int, default=8)
    flags, config = episodes.parse(parser, "test.jsonl", argv)
    precision = options.precision(config.model)
    engine = drafts.timed_engine(config, rows=1)
    replayed = drafts.replay(flags.replay, engine.layout, flags.questions)
    adapter = None if config.model.adapter is None else str(adapter_folder(config.model.adapter))
    record = {"model": flags.model_name, "adapter": config.model.adapter or "none"}
    theirs = peers.Turns(config.model.model, adapter, precision)
    record |= measure(engine, replayed, theirs=theirs, pairs=flags.pairs)
    print(records.table([record]), flush=True)
    run = {"section": "episodes one by one", **records.provenance(precision), "records": [record]}
    run |= {"note": f"{flags.pairs} pairs; processor time. {flags.note}".strip()}
    records.keep(flags.results, "cpu", LOOKUP, run)


if __name__ == "__main__":
    main()
