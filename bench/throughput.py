"""Compares r3lite's speed of decoding, prefill, SFT and GRPO with transformers + peft and TRL; also times PPO steps.

    python -m bench.throughput --models DIR                      # everything that is installed
    python -m bench.throughput --only decode sft --repeats 5
    python -m bench.throughput --only decode sft --model gemma-3-270m
    python -m bench.throughput --only scaling                    # how cost grows; r3lite alone
    python -m bench.throughput --only encoder --corpus FILE      # vectors of a corpus's first passages, in fp32

The contestants of a contest run in turn in one process: a warm-up, and then `--repeats` times each. The table has
medians and spreads. All contestants have the same weights, shapes, prompts, precision and numbers of sampled tokens.
All have a LoRA adapter (r=8, all projections). In one row of decoding it is merged into the weights; everywhere else it
is computed beside them.

SFT has a memory budget of 4 GiB. The peers train with and without activation checkpointing, each with the loss of
transformers and with that of TRL's SFTTrainer. r3lite is compared with the fastest peer whose peak memory is within the
budget.

Two further rows show limits. The floor of decoding is the time of its matrix products alone, with the same weights and
the same number of rows. `of floor` is the share of the floor's speed that a contestant reaches. The peak of SFT is the
time of large matrix products with as many operations as the step needs (see limits.training_flops). `of peak` is the
share of the peak's speed that a contestant reaches.
"""

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch

from bench import contests, counted, options, peers, records
from bench.contest import FLOOR, GRAPH, OURS, PEAK, Contest
from bench.contests import PROMPT, RL_EPISODES, RL_NEW, RL_PROMPT, Ours
from bench.full_length import full_prompts
from bench.scaling import growths
from r3lite.core.files import shipped
from r3lite.devices.precision import Precision

DEFAULT_MODEL = "0.5B"
NEW = 64  # tokens that are decoded for each prompt
BATCHES = (1, 8, 32)  # prompts
ROWS = (512, 1024)  # tokens of the row of an SFT contest
SFT_BUDGET_GIB = 4
MIB_PER_GIB = 1024
KINDS = ("decode", "prefill", "sft", "grpo", "ppo", "encoder", "scaling")
# Names of contestants.
PEFT = "transformers + peft"
MERGED = "transformers, adapter merged"
TRL_SFT = "transformers + peft, TRL's loss"
SPEED = records.Bench(
    name="throughput",
    title="Speed",
    keys=("contest", "corpus", "mean_tokens", "contestant", "cost_of"),
    figures=("tokens_per_second", "seconds", "r3lite_is_faster_by", "of_floor", "of_peak", "peak_mib", "exponent"),
)


def has_trl() -> bool:
    """Returns whether TRL is installed, and prints a message if it is not."""
    is_installed = find_spec("trl") is not None
    if not is_installed:
        print("TRL is not installed: it does not take part")
    return is_installed


def captured_sft(folder: str, precision: Precision, tokens: int) -> Callable[[], object]:
    """Returns a function that takes a step of r3lite's SFT as a CUDA graph."""
    flags = f"--vram-budget {SFT_BUDGET_GIB}GiB --cuda-graphs"
    trainer = counted.trainer(folder, precision, tokens=tokens, flags=flags)
    torch.cuda.set_per_process_memory_fraction(1.0)  # the trainer has set its budget; others need more
    return partial(next, map(trainer.step, itertools.count(1)))


def contest_builders(kind: str, flags: argparse.Namespace, precision: Precision) -> list[Callable[[], Contest]]:
    """Returns a function for each contest of a kind (see KINDS), which builds the contest.

    A contest is built only when it is due, so that the models of two contests are not in memory at the same time.
    """
    device = precision.device.type
    folder = options.folder(flags, flags.model)

    def decode(batch: int) -> Contest:
        ours = Ours(folder, precision)
        prompts = full_prompts(batch, PROMPT)
        work = {
            OURS: ours.decode(batch, NEW),
            PEFT: peers.generate(folder, prompts=prompts, new=NEW, precision=precision),
            MERGED: peers.generate(folder, prompts=prompts, new=NEW, precision=precision, merged=True),
            FLOOR: ours.floor(batch, NEW),
        }
        return Contest(f"decode, batch {batch}", batch * NEW, work)

    def prefill(batch: int) -> Contest:
        ours = Ours(folder, precision)
        theirs = peers.generate(folder, prompts=full_prompts(batch, PROMPT), new=1, precision=precision)
        return Contest(f"prefill, batch {batch}", batch * PROMPT, {OURS: ours.decode(batch, 1), PEFT: theirs})

    def sft(tokens: int) -> Contest:
        ours = Ours(folder, precision)
        work = {OURS: ours.sft(tokens, f"{SFT_BUDGET_GIB}GiB")}
        if precision.device.type == "cuda":
            work[GRAPH] = captured_sft(folder, precision, tokens)
        for peer, is_trl in ((PEFT, False), (TRL_SFT, True)):
            if is_trl and not has_trl():
                continue
            with_checkpointing, without_checkpointing = peers.sft(
                folder, tokens=tokens, precision=precision, fused=is_trl
            )
            work[f"{peer}, with checkpointing"] = with_checkpointing
            work[f"{peer}, without checkpointing"] = without_checkpointing
        work[PEAK] = ours.peak(tokens)
        return Contest(
            name=f"SFT, {tokens} tokens", tokens=tokens, contestants=work, budget=SFT_BUDGET_GIB * MIB_PER_GIB
        )

    def grpo() -> Contest:
        grpo_round = contests.rl_round(
            folder=folder,
            precision=precision,
            algorithm="grpo",
            episodes=RL_EPISODES,
            prompt=RL_PROMPT,
            new=RL_NEW,
        )
        work = {OURS: grpo_round}
        if has_trl():
            work["TRL"] = peers.grpo(folder, prompt=RL_PROMPT, new=RL_NEW, episodes=RL_EPISODES, precision=precision)
        return Contest(f"GRPO step, 8 x ({RL_PROMPT} + {RL_NEW})", RL_EPISODES * RL_NEW, work)

    def ppo() -> Contest:
        turn = RL_NEW // 2  # tokens of each of the two turns, before and after the search
        ppo_round = contests.rl_round(
            folder=folder,
            precision=precision,
            algorithm="ppo",
            episodes=RL_EPISODES,
            prompt=RL_PROMPT,
            new=turn,
            searches=1,
        )
        name = f"PPO step, 8 x ({RL_PROMPT} + {turn} + documents + {turn})"
        return Contest(name, RL_EPISODES * RL_NEW, {OURS: ppo_round})

    return {
        "decode": [partial(decode, batch) for batch in BATCHES],
        "prefill": [partial(prefill, batch) for batch in BATCHES],
        "sft": [partial(sft, tokens) for tokens in ROWS],
        "grpo": [grpo],
        "ppo": [ppo],
        "encoder": [partial(contests.encoding, folder=flags.encoder, corpus=flags.corpus, device=device)],
        "scaling": growths(folder, precision),
    }[kind]


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("--encoder", default="sentence-transformers/all-MiniLM-L6-v2", help="folder or hub id")
    parser.add_argument("--corpus", default=str(shipped("data", "world", "corpus.jsonl")), help="of the encoder")
    parser.add_argument("--only", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--model", default=DEFAULT_MODEL, choices=options.HUB, help="also in the names of the sections")
    parser.add_argument("--repeats", type=int, default=5)
    flags = parser.parse_args()
    precision = options.precision(flags)
    device = precision.device.type
    for kind in flags.only:
        kind_precision = Precision(torch.float32, precision.device) if kind == "encoder" else precision
        kind_records: list[dict] = []
        run = {
            "section": kind if flags.model == DEFAULT_MODEL else f"{kind}, {flags.model}",
            **records.provenance(kind_precision),
            "note": f"{flags.repeats} repeats.",
            "records": kind_records,
        }
        print(f"\n## {kind}\n\n{records.conditions(run)}\n", flush=True)
        for build_contest in contest_builders(kind, flags, kind_precision):
            contest = build_contest()
            contest.run(flags.repeats, device)
            results = contest.results()
            print(records.table(results), flush=True)
            kind_records += results
            records.keep(folder=flags.results, device=device, bench=SPEED, run=run)


if __name__ == "__main__":
    main()
