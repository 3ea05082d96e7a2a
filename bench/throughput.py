"""Speed of decoding, prefill, SFT and whole GRPO and PPO steps, beside transformers + peft and TRL on the same work.

    python -m bench.throughput --models DIR                      # everything that is installed
    python -m bench.throughput --only decode sft --repeats 5
    python -m bench.throughput --only scaling                    # how cost grows; r3lite alone
    python -m bench.throughput --only encoder --corpus FILE      # vectors of a corpus's first passages

Contestants of one contest run in turn, in one process, `--repeats` times each after a warm-up; the table has medians
and spreads. Weights, shapes and prompts are the same; a LoRA adapter (r=8, all projections) is on everywhere. Beside
decoding stands its floor: the bare matrix products of the same weights for the same number of rows; `of floor` is the
share of its speed that a contestant reaches. Beside SFT stands the device's peak: as many operations as are of use in
the step (see limits.training_flops), in large matrix products in bf16; `of peak` is the share of their speed.
"""

import argparse
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from bench import contests, peers, records
from bench.contests import FLOOR, OURS, PEAK, PROMPT, RL_EPISODES, RL_NEW, RL_PROMPT, Contest, Ours
from bench.memory import HUB, RESULTS
from bench.scaling import growths
from r3lite.config import shipped

NEW = 64  # tokens of a decoding contest
BATCHES = (1, 8, 32)
ROWS = (512, 1024)  # tokens of a row of an SFT contest
KINDS = ("decode", "prefill", "sft", "grpo", "ppo", "encoder", "scaling")


def planned(kind: str, options: argparse.Namespace) -> list[Callable[[], Contest]]:
    """What is to be run, each made when it is its turn, so that one contest's models do not stand beside another's."""
    device, folder = options.device, str(Path(options.models) / "0.5B") if options.models else HUB["0.5B"]

    def decode(batch: int) -> Contest:
        ours = Ours(folder, device)
        return Contest(
            f"decode, batch {batch}",
            batch * NEW,
            {
                OURS: ours.decode(batch, NEW),
                "transformers + peft": peers.generate(folder, contests.prompts(batch), NEW, device),
                FLOOR: ours.floor(batch, NEW),
            },
        )

    def prefill(batch: int) -> Contest:
        ours = Ours(folder, device)
        theirs = peers.generate(folder, contests.prompts(batch), 1, device)
        return Contest(
            f"prefill, batch {batch}", batch * PROMPT, {OURS: ours.decode(batch, 1), "transformers + peft": theirs}
        )

    def sft(tokens: int) -> Contest:
        ours = Ours(folder, device)
        theirs = peers.sft(folder, tokens, device)
        work = {OURS: ours.sft(tokens, "4GiB"), "transformers + peft": theirs, PEAK: ours.peak(tokens)}
        return Contest(f"SFT, {tokens} tokens", tokens, work)

    def grpo() -> Contest:
        work = {OURS: contests.rl_round(folder, device, "grpo", RL_EPISODES, RL_PROMPT, RL_NEW)}
        if find_spec("trl"):
            work["TRL"] = peers.grpo(folder, RL_PROMPT, RL_NEW, RL_EPISODES, device)
        else:
            print("TRL is not installed: r3lite alone")
        return Contest(f"GRPO step, 8 x ({RL_PROMPT} + {RL_NEW})", RL_EPISODES * RL_NEW, work)

    def ppo() -> Contest:
        half = RL_NEW // 2
        work = {OURS: contests.rl_round(folder, device, "ppo", RL_EPISODES, RL_PROMPT, half, searches=1)}
        return Contest(f"PPO step, 8 x ({RL_PROMPT} + {half} + documents + {half})", RL_EPISODES * RL_NEW, work)

    return {
        "decode": [partial(decode, batch) for batch in BATCHES],
        "prefill": [partial(prefill, batch) for batch in BATCHES],
        "sft": [partial(sft, tokens) for tokens in ROWS],
        "grpo": [grpo],
        "ppo": [ppo],
        "encoder": [partial(contests.encoding, options.encoder, options.corpus, device)],
        "scaling": growths(folder, device),
    }[kind]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="folder with 0.5B; by default the hub's Qwen2.5-0.5B-Instruct")
    parser.add_argument("--encoder", default="sentence-transformers/all-MiniLM-L6-v2", help="folder or hub id")
    parser.add_argument("--corpus", default=str(shipped("data", "world", "corpus.jsonl")), help="of the encoder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    label = records.machine(options.device)
    print(label)
    for kind in options.only:
        found: list[dict] = []
        for make in planned(kind, options):
            contest = make()
            contest.run(options.repeats, options.device)
            new = contest.results()
            columns = records.columns_of(new)
            if not found:
                print(f"\n## {kind}\n\n{records.head(columns)}")
            print("\n".join(records.row(record, columns) for record in new), flush=True)
            found += new
            stem = RESULTS / f"throughput-{options.device}"
            records.keep(stem, "Speed", label, kind, f"{options.repeats} repeats.", found)


if __name__ == "__main__":
    main()
