"""Speed of decoding, prefill, SFT and whole GRPO and PPO steps, beside transformers + peft and TRL on the same work.

    python -m bench.throughput --models DIR                      # everything that is installed
    python -m bench.throughput --only decode sft --repeats 5
    python -m bench.throughput --only scaling                    # how cost grows; r3lite alone
    python -m bench.throughput --only encoder --corpus FILE      # vectors of a corpus's first passages, in fp32

Contestants of one contest run in turn, in one process, `--repeats` times each after a warm-up; the table has medians
and spreads. Weights, shapes, prompts, precision and numbers of sampled tokens are the same; a LoRA adapter (r=8, all
projections) is on everywhere, but for the row of decoding whose adapter is merged. SFT has a budget of 4 GiB: the peers
train with activation checkpointing and without, by the loss of transformers and by that of TRL's SFTTrainer, and the
fastest whose peak is within it is the one compared. Beside decoding stands its floor: the bare matrix products of the
same weights for the same number of rows; `of floor` is the share of its speed that a contestant reaches. Beside SFT
stands the device's peak: as many operations as are of use in the step (see limits.training_flops), in large matrix
products; `of peak` is the share of their speed.
"""

import argparse
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch

from bench import contests, options, peers, records
from bench.contest import FLOOR, OURS, PEAK, Contest
from bench.contests import PROMPT, RL_EPISODES, RL_NEW, RL_PROMPT, Ours
from bench.full_length import full_prompts
from bench.scaling import growths
from r3lite.core.files import shipped
from r3lite.devices.precision import Precision

NEW = 64  # tokens of a decoding contest
BATCHES = (1, 8, 32)
ROWS = (512, 1024)  # tokens of a row of an SFT contest
GIB = 4  # budget of SFT
KINDS = ("decode", "prefill", "sft", "grpo", "ppo", "encoder", "scaling")
PEFT, MERGED = "transformers + peft", "transformers, adapter merged"
TRL_SFT = "transformers + peft, TRL's loss"
SPEED = records.Bench(
    "throughput",
    "Speed",
    keys=("contest", "corpus", "mean_tokens", "contestant", "cost_of"),
    figures=("tokens_per_second", "seconds", "r3lite_is_faster_by", "of_floor", "of_peak", "peak_mib", "exponent"),
)


def has_trl() -> bool:
    """Whether TRL is installed; says so if it is not."""
    found = find_spec("trl") is not None
    if not found:
        print("TRL is not installed: it does not take part")
    return found


def planned(kind: str, flags: argparse.Namespace, precision: Precision) -> list[Callable[[], Contest]]:
    """What is to be run, each made when it is its turn, so that one contest's models do not stand beside another's."""
    device, folder = precision.device.type, options.folder(flags, "0.5B")

    def decode(batch: int) -> Contest:
        ours, prompts = Ours(folder, precision), full_prompts(batch, PROMPT)
        work = {
            OURS: ours.decode(batch, NEW),
            PEFT: peers.generate(folder, prompts, NEW, precision),
            MERGED: peers.generate(folder, prompts, NEW, precision, merged=True),
            FLOOR: ours.floor(batch, NEW),
        }
        return Contest(f"decode, batch {batch}", batch * NEW, work)

    def prefill(batch: int) -> Contest:
        ours = Ours(folder, precision)
        theirs = peers.generate(folder, full_prompts(batch, PROMPT), 1, precision)
        return Contest(f"prefill, batch {batch}", batch * PROMPT, {OURS: ours.decode(batch, 1), PEFT: theirs})

    def sft(tokens: int) -> Contest:
        ours = Ours(folder, precision)
        work = {OURS: ours.sft(tokens, f"{GIB}GiB")}
        for peer, fused in ((PEFT, False), (TRL_SFT, True)):
            if fused and not has_trl():
                continue
            recomputing, keeping = peers.sft(folder, tokens, precision, fused)
            work |= {f"{peer}, with checkpointing": recomputing, f"{peer}, without checkpointing": keeping}
        return Contest(f"SFT, {tokens} tokens", tokens, work | {PEAK: ours.peak(tokens)}, budget=GIB * 1024)

    def grpo() -> Contest:
        work = {OURS: contests.rl_round(folder, precision, "grpo", RL_EPISODES, RL_PROMPT, RL_NEW)}
        if has_trl():
            work["TRL"] = peers.grpo(folder, RL_PROMPT, RL_NEW, RL_EPISODES, precision)
        return Contest(f"GRPO step, 8 x ({RL_PROMPT} + {RL_NEW})", RL_EPISODES * RL_NEW, work)

    def ppo() -> Contest:
        half = RL_NEW // 2
        work = {OURS: contests.rl_round(folder, precision, "ppo", RL_EPISODES, RL_PROMPT, half, searches=1)}
        return Contest(f"PPO step, 8 x ({RL_PROMPT} + {half} + documents + {half})", RL_EPISODES * RL_NEW, work)

    return {
        "decode": [partial(decode, batch) for batch in BATCHES],
        "prefill": [partial(prefill, batch) for batch in BATCHES],
        "sft": [partial(sft, tokens) for tokens in ROWS],
        "grpo": [grpo],
        "ppo": [ppo],
        "encoder": [partial(contests.encoding, flags.encoder, flags.corpus, device)],
        "scaling": growths(folder, precision),
    }[kind]


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("--encoder", default="sentence-transformers/all-MiniLM-L6-v2", help="folder or hub id")
    parser.add_argument("--corpus", default=str(shipped("data", "world", "corpus.jsonl")), help="of the encoder")
    parser.add_argument("--only", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--repeats", type=int, default=5)
    flags = parser.parse_args()
    precision = options.precision(flags)
    device = precision.device.type
    for kind in flags.only:
        used = Precision(torch.float32, precision.device) if kind == "encoder" else precision
        found: list[dict] = []
        run = {"section": kind, **records.provenance(used), "note": f"{flags.repeats} repeats.", "records": found}
        print(f"\n## {kind}\n\n{records.conditions(run)}\n", flush=True)
        for make in planned(kind, flags, used):
            contest = make()
            contest.run(flags.repeats, device)
            new = contest.results()
            print(records.table(new), flush=True)
            found += new
            records.keep(flags.results, device, SPEED, run)


if __name__ == "__main__":
    main()
