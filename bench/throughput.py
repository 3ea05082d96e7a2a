"""Speed of decoding, prefill, SFT and whole GRPO and PPO steps, beside transformers + peft and TRL on the same work.

    python -m bench.throughput --models DIR                      # everything that is installed
    python -m bench.throughput --only decode sft --repeats 5

Contestants of one contest run in turn, in one process, `--repeats` times each after a warm-up; the table has medians
and spreads. Weights, shapes and prompts are the same; a LoRA adapter (r=8, all projections) is on everywhere. Beside
decoding stands its floor: the bare matrix products of the same weights for the same number of rows.
"""

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import peers
from bench.memory import HUB, RESULTS

PROMPT, NEW = 128, 64  # tokens of a decoding contest
BATCHES = (1, 8, 32)
ROWS = (512, 1024)  # tokens of a row of an SFT contest
RL_PROMPT, RL_NEW, RL_EPISODES = 216, 128, 8
OURS, FLOOR = "r3lite", "floor"


@dataclass
class Contest:
    """The same work by several contestants; each is a function that does it once, and may time itself."""

    name: str
    tokens: int  # that the work makes or learns from
    contestants: dict[str, Callable[[], float | None]]
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def run(self, repeats: int, device: str) -> None:
        """Warms up, then takes turns."""
        for i in range(repeats + 1):
            for name, work in self.contestants.items():
                start = time.perf_counter()
                told = work()
                if device == "cuda":
                    torch.cuda.synchronize()
                if i:
                    self.seconds.setdefault(name, []).append(told or time.perf_counter() - start)

    def results(self) -> list[dict]:
        """One record a contestant: tokens per second, the spread of its times, and its speed as a multiple."""
        medians = {name: statistics.median(times) for name, times in self.seconds.items()}
        return [
            {
                "contest": self.name,
                "contestant": name,
                "tokens_per_second": round(self.tokens / medians[name], 1),
                "seconds": round(medians[name], 3),
                "spread": round((max(times) - min(times)) / medians[name], 3),
                "r3lite_is_faster_by": round(medians[name] / medians[OURS], 2),
            }
            for name, times in self.seconds.items()
        ]


class Ours:
    """r3lite's model with an adapter that is on."""

    def __init__(self, folder: str, device: str):
        from r3lite.models import lora, weights
        from r3lite.models.tokenizer import Tokenizer

        self.device = torch.device(device)
        where = weights.resolve_folder(folder)
        self.tokenizer = Tokenizer.load(where)
        self.model = weights.load_qwen2(where, torch.bfloat16, self.device)
        lora.add_adapter(self.model, "policy", 8, 16)
        lora.set_adapter(self.model, "policy")

    def decode(self, batch: int, new: int) -> Callable[[], None]:
        """Sampling of so many tokens after PROMPT others, with the engine of the rollouts."""
        from r3lite.episode import Question
        from r3lite.formats import Prompts
        from r3lite.rollout.engine import Engine
        from r3lite.rollout.fetcher import Fetcher
        from r3lite.rollout.sequence import Sequence
        from r3lite.settings import LengthSettings

        lengths = LengthSettings(max_new_tokens=new, max_length=PROMPT + new + 1)
        engine = Engine(self.model, self.tokenizer, Prompts("{question}", "{documents}"), lengths)
        engine.rollout_batch_size = batch

        @torch.no_grad()
        def work() -> None:
            self.model.eval()
            sequences = []
            for ids in prompts(batch):
                sequences.append(Sequence(Question("q", "q", ()), random.Random(0)))
                sequences[-1].observe(ids)
            with torch.autocast(self.device.type, torch.bfloat16), Fetcher(lambda pairs: []) as fetcher:
                engine.run_sequences(sequences, fetcher, lambda: None)

        return work

    def sft(self, tokens: int, budget: str) -> Callable[[], None]:
        """One optimizer step on one row, with the memory settings that the planner chooses for the budget."""
        from r3lite.models import activation_checkpointing, lora
        from r3lite.models.logprobs import token_loss
        from r3lite.settings import LoraSettings, MemorySettings, ModelSettings, SftSettings
        from r3lite.training import optim, workloads

        config = self.model.config
        workload = workloads.sft_workload(
            ModelSettings(model="qwen/qwen2.5-0.5b", device=self.device.type, dtype="bf16"),
            SftSettings(max_length=tokens, batch_size=1),
            LoraSettings(),
        )
        assert workload.model.hidden_size == config.hidden_size, "the contest is of the 0.5B model"
        memory = workloads.make_plan(workload, MemorySettings(vram_budget=budget, quantize="none")).memory
        parameters = lora.adapter_parameters(self.model, "policy")
        optimizer = optim.adamw([optim.Group(parameters, 1e-4)], 0.0)
        ids = torch.tensor(prompts(1, tokens), device=self.device)  # [1, T]

        def mean_loss(rows: slice, logprobs: Tensor, _: None) -> Tensor:
            return -logprobs.sum() / (tokens - 1)

        def work() -> None:
            activation_checkpointing.enable(self.model, **memory.on_model)
            self.model.train()
            with torch.autocast(self.device.type, torch.bfloat16):
                hidden = self.model(ids)[0, :-1]  # [T-1, C]
                head = self.model.head_weight[: self.tokenizer.size]
                loss = token_loss(hidden, head, ids[0, 1:], mean_loss, chunk=memory.loss_chunk)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return work

    def floor(self, batch: int, steps: int) -> Callable[[], None]:
        """The matrix products of so many decoding steps, and nothing else."""
        weights = [m.weight for m in self.model.modules() if isinstance(m, torch.nn.Linear)]
        weights.append(self.model.head_weight[: self.tokenizer.size])
        inputs = {w.shape[1]: torch.randn(batch, w.shape[1], device=self.device, dtype=w.dtype) for w in weights}

        @torch.no_grad()
        def work() -> None:
            for _ in range(steps):
                for weight in weights:
                    F.linear(inputs[weight.shape[1]], weight)

        return work


def prompts(batch: int, tokens: int = PROMPT) -> list[list[int]]:
    """Random ordinary tokens, every row its own, the same for every contestant."""
    stream = random.Random(0)
    return [[stream.randrange(1000, 100_000) for _ in range(tokens)] for _ in range(batch)]


def rl_step(folder: str, device: str, algorithm: str) -> Callable[[], float]:
    """Two rounds of the real command on one question; returns the seconds of the second one."""
    from bench.memory import full_question
    from r3lite import ppo

    def work() -> float:
        with tempfile.TemporaryDirectory() as where:
            run = Path(where) / "run"
            flags = f"--model {folder} --output {run} --algorithm {algorithm} --save-every 0 --max-steps 2"
            flags += f" --device {device} --dtype bf16 --batch-size 1 --num-generations {RL_EPISODES} --quantize none"
            flags += f" --mini-batch-size {RL_EPISODES} --micro-batch-size {RL_EPISODES}"
            flags += f" --max-new-tokens {RL_NEW} --max-length {RL_PROMPT + RL_NEW}"
            question = full_question(folder, Path(where), RL_PROMPT)
            assert ppo.main([*flags.split(), *question]) == 0, "the command failed"
            return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step_time"]

    return work


def contests(options: argparse.Namespace, folder: str, device: str) -> list[Callable[[], Contest]]:
    """What is to be run, each made when it is its turn, so that one contest's models do not stand beside another's."""

    def decode(batch: int) -> Contest:
        ours = Ours(folder, device)
        return Contest(
            f"decode, batch {batch}",
            batch * NEW,
            {
                OURS: ours.decode(batch, NEW),
                "transformers + peft": peers.generate(folder, prompts(batch), NEW, device),
                FLOOR: ours.floor(batch, NEW),
            },
        )

    def prefill(batch: int) -> Contest:
        ours = Ours(folder, device)
        theirs = peers.generate(folder, prompts(batch), 1, device)
        return Contest(
            f"prefill, batch {batch}", batch * PROMPT, {OURS: ours.decode(batch, 1), "transformers + peft": theirs}
        )

    def sft(tokens: int) -> Contest:
        work = {
            OURS: Ours(folder, device).sft(tokens, "4GiB"),
            "transformers + peft": peers.sft(folder, tokens, device),
        }
        return Contest(f"SFT, {tokens} tokens", tokens, work)

    def rl(algorithm: str) -> Contest:
        work = {OURS: rl_step(folder, device, algorithm)}
        if algorithm == "grpo":
            work["TRL"] = peers.grpo(folder, RL_PROMPT, RL_NEW, RL_EPISODES, device)
        return Contest(f"{algorithm.upper()} step, 8 x ({RL_PROMPT} + {RL_NEW})", RL_EPISODES * RL_NEW, work)

    made: list[Callable[[], Contest]] = []
    if "decode" in options.only:
        made += [lambda b=b: decode(b) for b in BATCHES]
    if "prefill" in options.only:
        made += [lambda b=b: prefill(b) for b in BATCHES]
    if "sft" in options.only:
        made += [lambda t=t: sft(t) for t in ROWS]
    for algorithm in ("grpo", "ppo"):
        if algorithm in options.only:
            made.append(lambda a=algorithm: rl(a))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="folder with 0.5B; by default the hub's Qwen2.5-0.5B-Instruct")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    kinds = ["decode", "prefill", "sft", "grpo", "ppo"]
    parser.add_argument("--only", nargs="*", default=kinds, choices=kinds)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    folder = str(Path(options.models) / "0.5B") if options.models else HUB["0.5B"]
    machine = torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()} CPU"
    label = f"{machine}, {torch.get_num_threads()} threads, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    head = "| contest | contestant | tokens/s | seconds | spread | r3lite is faster by |\n|---|---|---|---|---|---|"
    print(f"{label}\n\n{head}")
    found = []
    for make in contests(options, folder, options.device):
        contest = make()
        contest.run(options.repeats, options.device)
        for record in contest.results():
            found.append(record)
            print("| " + " | ".join(map(str, record.values())) + " |", flush=True)
        RESULTS.mkdir(exist_ok=True)
        lines = ["| " + " | ".join(map(str, record.values())) + " |" for record in found]
        (RESULTS / f"throughput-{options.device}.md").write_text(
            "\n".join([f"# Speed\n\n{label}\n", head, *lines]) + "\n"
        )
        result = json.dumps({"machine": label, "repeats": options.repeats, "results": found}, indent=1)
        (RESULTS / f"throughput-{options.device}.json").write_text(result + "\n")


if __name__ == "__main__":
    main()
