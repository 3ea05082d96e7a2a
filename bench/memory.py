"""Peak memory of SFT, PPO and GRPO, beside the planner's figure and beside other trainers.

    python -m bench.memory                              # every case; JSON and a table under bench/results
    python -m bench.memory --only 0.5B --algorithms sft # some of them
    python -m bench.memory --row                        # one case of your card, as a table row to send us

Each case is the real command in a process of its own: two steps on full-length rows, or a round of rollouts that run
to their limit, with two optimizer steps. On the CPU the peak is that of live tensor bytes, on CUDA that of PyTorch's
allocator. Peers (transformers + peft, and TRL where it is installed) do one step of the same shape.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
HUB = {"0.5B": "Qwen/Qwen2.5-0.5B-Instruct", "1.5B": "Qwen/Qwen2.5-1.5B-Instruct", "3B": "Qwen/Qwen2.5-3B-Instruct"}
PROMPT = 256  # tokens of a question with its instructions, in RL


@dataclass(frozen=True)
class Case:
    size: str
    algorithm: str  # sft, ppo, grpo, or a peer: peft, trl
    tokens: int  # of a row; in RL sampled after a prompt of 256
    quantize: str = "none"
    budget: str = "4GiB"


CASES = [
    *(Case("0.5B", "sft", tokens, budget=b) for tokens, b in (
        (512, "1250MiB"), (1024, "1300MiB"), (2048, "1400MiB"), (4096, "1650MiB"),
        (512, "4GiB"), (1024, "4GiB"), (2048, "4GiB"), (8192, "4GiB"),
    )),
    *(Case("0.5B", "sft", tokens, "nf4", "1GiB") for tokens in (512, 2048)),
    *(Case("0.5B", "sft", 1024, "nf4", budget) for budget in ("700MiB", "4GiB")),
    *(Case("1.5B", "sft", tokens, budget="4GiB") for tokens in (512, 1024)),
    *(Case("1.5B", "sft", tokens, "nf4", b) for tokens, b in ((512, "1700MiB"), (2048, "1900MiB"), (1024, "4GiB"))),
    Case("3B", "sft", 512, budget="7GiB"),
    *(Case("3B", "sft", tokens, "nf4", b) for tokens, b in ((512, "2700MiB"), (2048, "3050MiB"))),
    *(Case("0.5B", algorithm, 512, budget="1350MiB") for algorithm in ("ppo", "grpo")),
    *(Case("0.5B", algorithm, 64, budget=b) for algorithm, b in (("ppo", "1200MiB"), ("grpo", "4GiB"))),
    Case("0.5B", "grpo", 64, "nf4", "800MiB"),
    Case("1.5B", "grpo", 512, "nf4", "4GiB"),
    Case("1.5B", "ppo", 64, "nf4", "4GiB"),
    Case("3B", "grpo", 64, "nf4", "4GiB"),
]  # fmt: skip
PEERS = [*(Case("0.5B", "peft", tokens) for tokens in (1024, 2048)), Case("0.5B", "trl", 64)]


def full_rows(folder: str, tokens: int, path: Path) -> None:
    """Conversations of exactly so many tokens, nearly all of them the assistant's."""
    from r3lite.protocols.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(Path(folder))

    def messages(words: int) -> list[dict]:
        return [{"role": "user", "content": "q"}, {"role": "assistant", "content": " a" * words}]

    given = len(tokenizer.chat(messages(100))[0]) - 100
    row = {"messages": messages(tokens - given)}
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(4)), encoding="utf-8")


def full_question(folder: str, where: Path, tokens: int) -> list[str]:
    """The flags of RL on one question whose prompt takes so many tokens."""
    from r3lite.protocols.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(Path(folder))
    words = " a" * (tokens - len(tokenizer.open_chat(" b", None)))
    data, prompt = where / "data.jsonl", where / "prompt.txt"
    data.write_text(json.dumps({"id": "1", "question": "b", "answer": "x"}) + "\n", encoding="utf-8")
    prompt.write_text(words + " {question}", encoding="utf-8")
    return ["--data", str(data), "--init-prompt", str(prompt), "--retriever", "none", "--max-hops", "1"]


def arguments(case: Case, folder: str, where: Path, device: str) -> list[str]:
    """The flags of the command that a case runs."""
    flags = ["--model", folder, "--device", device, "--batch-size", "1", "--output"]
    flags += [str(where / "run"), "--vram-budget", case.budget, "--quantize", case.quantize, "--nf4-cache", "none"]
    flags += ["--dtype", "bf16" if device == "cpu" else "auto"]
    if case.algorithm == "sft":
        full_rows(folder, case.tokens, where / "data.jsonl")
        flags += ["--data", str(where / "data.jsonl"), "--max-length", str(case.tokens)]
        return [*flags, "--max-steps", "2", "--gradient-accumulation", "1", "--validation-rows", "0"]
    flags += [*full_question(folder, where, PROMPT), "--algorithm", case.algorithm, "--num-generations", "8"]
    flags += ["--max-steps", "1", "--mini-batch-size", "4"]  # in the second step the optimizer's moments are there
    return [*flags, "--max-new-tokens", str(case.tokens), "--max-length", str(PROMPT + case.tokens)]


def measure(case: Case, root: str | None, device: str) -> dict:
    """Runs one case in this process: peak and planned MiB, and seconds."""
    import torch

    from bench.live_tensors import MIB, LiveTensors

    folder = str(Path(root) / case.size) if root else HUB[case.size]
    counter, start = LiveTensors(), time.perf_counter()
    planned = None
    with tempfile.TemporaryDirectory() as where:
        if case.algorithm in ("sft", "ppo", "grpo"):
            from r3lite import policy, ppo, sft

            plans, announce = [], policy.announce
            policy.announce = lambda plan: (plans.append(plan), announce(plan))
            flags = arguments(case, folder, Path(where), device)
            main = sft.main if case.algorithm == "sft" else ppo.main

            def work() -> None:
                assert main(flags) == 0, "the command failed"

        else:
            from bench import peers

            plans = []

            def work() -> None:
                if case.algorithm == "trl":
                    peers.grpo_trainer(folder, PROMPT, case.tokens, 8, device, steps=2).train()
                    return
                step = peers.sft(folder, case.tokens, device)
                step()
                step()  # now the optimizer's moments are there

        if device == "cpu":
            with counter:
                work()
            peak = {"peak_mib": round(counter.peak_mib, 1)}
        else:
            work()
            peak = {"peak_mib": round(torch.cuda.max_memory_allocated() / MIB, 1),
                    "reserved_mib": round(torch.cuda.max_memory_reserved() / MIB, 1)}  # fmt: skip
        if plans:
            # The planner counts the context, which PyTorch's allocator does not see.
            phases = plans[0].report()["phases"].values()
            planned = round(max(sum(v for k, v in parts.items() if k != "context") for parts in phases), 1)
    return {**asdict(case), **peak, "planned_mib": planned, "seconds": round(time.perf_counter() - start, 1)}


def in_its_own_process(case: Case, options: argparse.Namespace) -> dict:
    command = [sys.executable, "-m", "bench.memory", "--device", options.device, "--one", json.dumps(asdict(case))]
    command += ["--models", options.models] if options.models else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {**asdict(case), "error": (done.stderr.strip().splitlines() or ["?"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def row(found: dict) -> str:
    """One line of the table."""
    if "error" in found:
        found = {**found, "peak_mib": None, "seconds": None}
    peak, planned = found["peak_mib"], found.get("planned_mib")
    off = f"{100 * (planned - peak) / peak:+.1f} %" if peak and planned else ""
    show = lambda x: "" if x is None else f"{x:,.0f}"  # noqa: E731
    cells = [found["size"], found["algorithm"], found["tokens"], found["quantize"], found["budget"]]
    cells += [show(peak), show(planned), off, show(found.get("reserved_mib")), show(found["seconds"])]
    return "| " + " | ".join(map(str, cells)) + " |" + (f" {found['error']}" if "error" in found else "")


HEAD = """| model | what | tokens | base | budget | peak MiB | planned | off | reserved | seconds |
|---|---|---|---|---|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="folder with 0.5B, 1.5B and 3B; by default the hub's Qwen2.5-*-Instruct")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--only", nargs="*", help="model sizes")
    parser.add_argument("--algorithms", nargs="*", help="sft, ppo, grpo, peft, trl")
    parser.add_argument("--row", action="store_true", help="one case only, as a table row to send us")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()

    import torch

    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.one:
        print(json.dumps(measure(Case(**json.loads(options.one)), options.models, options.device)))
        return
    machine = torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()} CPU"
    label = f"{machine}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    cases = [c for c in CASES + PEERS if options.only is None or c.size in options.only]
    cases = [c for c in cases if options.algorithms is None or c.algorithm in options.algorithms]
    if options.row:
        cases = [Case("0.5B", "sft", 1024)]
    print(f"{label}\n\n{HEAD}")
    for case in cases:
        found = in_its_own_process(case, options)
        print(row(found), flush=True)
        if not options.row:
            keep(found, RESULTS / f"memory-{options.device}", label)


def keep(found: dict, stem: Path, label: str) -> None:
    """Adds a case to the results of this machine, in the place of an earlier one of the same shape."""
    path = stem.with_suffix(".json")
    before = json.loads(path.read_text()) if path.exists() else {}
    cases = before["cases"] if before.get("machine") == label else []
    key = lambda x: Case(**{k: x[k] for k in ("size", "algorithm", "tokens", "quantize", "budget")})  # noqa: E731
    cases = [x for x in cases if key(x) != key(found)] + [found]
    order = {case: i for i, case in enumerate(CASES + PEERS)}
    cases.sort(key=lambda x: order.get(key(x), len(order)))
    stem.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"machine": label, "cases": cases}, indent=1) + "\n")
    lines = [f"# Peak memory\n\n{label}\n", HEAD, *map(row, cases)]
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
