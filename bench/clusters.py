"""What several cards are predicted to do, as the page docs/scaling.md: tokens a second, seconds and dollars of SFT and
of GRPO rounds on 1 to 64 cards, and what limits each.

    python -m bench.clusters > docs/scaling.md

Nothing is run. The times of one rank are those of `r3lite/memory/duration.py`; how long ranks wait for each other is
simulated with the lengths of real episodes (bench/results/episode-lengths.json). A test holds the page to what this
prints.
"""

import functools
import json
import random
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from bench import records
from bench.cards import planned
from bench.options import RESULTS
from r3lite.devices.cards import GIB, Speeds, card
from r3lite.devices.ranks import shares
from r3lite.memory import duration
from r3lite.memory.parameters import adapter_bytes
from r3lite.memory.plan import Plan

MODELS = {
    "0.5B": "Qwen/Qwen2.5-0.5B-Instruct",
    "7B": "mistralai/Mistral-7B-Instruct-v0.3",
}
RANKS, OF_A_MACHINE = (1, 2, 8, 64), 8
ROWS, TOKENS = 64, 1024  # of an SFT step, on all cards together
QUESTIONS, GENERATIONS, MINI_BATCH = 64, 8, 128  # of a round
ROUNDS = 20  # simulated
LIMITS = {"sample": "rollouts", "update": "updates", "all_reduce": "all-reduce", "retrieve": "retrieval"}


@dataclass(frozen=True)
class Rented:
    """A card that can be rented: its price, and how fast ranks exchange gradients."""

    name: str
    dollars: float  # an hour
    inside: float  # bytes a second between two cards of a machine, one way
    between: float  # between two machines


# Prices: RunPod's in March 2026 (https://deploybase.ai/articles/rtx-4090-vs-h100). Links are assumed: NVLink at half of
# its 900 GB/s, PCIe 4.0 x16 at 25 GB/s; between machines 100 Gbit/s.
RENTED = (Rented("RTX 4090", 0.34, 25e9, 12.5e9), Rented("H100 80GB HBM3", 2.69, 450e9, 12.5e9))
LATENCY = 50e-6  # seconds of a message, assumed


LOAD = """\
Measured with {clients} clients for {minutes:g} minutes and a restart in the middle, on {threads} CPU cores:
{requests_per_second:g} queries per second with all-MiniLM-L6-v2, p50 {p50_ms:.0f} ms, p99 {p99_ms:.0f} ms.
`serve` with the tiny model (chat, 32 tokens): {chats[requests_per_second]:g} answers per second,
p50 {chats[p50_ms]:.0f} ms, p99 {chats[p99_ms]:.0f} ms.
Clients repeat failed requests: all {sent:,} and {chats[sent]:,} were answered. Memory grew by at most {growth:.1%}."""


@functools.cache
def loads() -> dict[str, dict]:
    """The newest run of bench/stress/load.py for each server."""
    runs = json.loads((RESULTS / "load.json").read_text(encoding="utf-8"))["runs"]
    found = {run["server"]: run | {"minutes": run["seconds"] / 60} for run in runs}
    assert all(run["sent"] == run["answered"] and not run["wrong"] for run in found.values()), "something was lost"
    growth = max(share for run in found.values() for share in run["memory_growth"])
    return {name: run | {"growth": growth} for name, run in found.items()}


def queries_a_second() -> float:
    """Of one retrieval server, as measured."""
    return loads()["retrieve"]["requests_per_second"]


@functools.cache
def lengths() -> list[list[tuple[int, int, int]]]:
    """(tokens, sampled tokens, turns) of the episodes of each question that was measured."""
    found = json.loads((RESULTS / "episode-lengths.json").read_text(encoding="utf-8"))
    return [[tuple(episode) for episode in group] for group in found["groups"]]


def all_reduce(size: float, ranks: int, rented: Rented) -> float:
    """Seconds of a ring all-reduce (arXiv 1802.05799) of `size` bytes, of which each rank sends 2 (n - 1) / n."""
    if ranks == 1:
        return 0.0
    link = rented.inside if ranks <= OF_A_MACHINE else rented.between
    return 2 * (ranks - 1) * (size / ranks / link + LATENCY)


def plan_of(size: str, known: Speeds, more: list[str]) -> Plan:
    """The plan of `python -m r3lite.plan` on one card, which all ranks have."""
    assert known.memory
    budget = ["--vram-budget", f"{known.memory // GIB - 2}GiB"]
    found = planned(["--card", known.name, "--model", MODELS[size], *budget, *more])
    assert found, f"{size} does not fit"
    return found


def seconds(found: Plan, cost: duration.Cost) -> float:
    return cost.seconds(found.workload.speeds, found.workload.dtype)


# SFT


def sft(found: Plan, ranks: int, rented: Rented) -> float:
    """Seconds of a step of ROWS rows."""
    work = replace(found.workload, step_rows=-(-ROWS // ranks), mean_tokens=TOKENS, row_tokens=TOKENS)
    return seconds(found, duration.update(work, found.memory)) + all_reduce(adapter_bytes(work), ranks, rented)


# A round of GRPO


@dataclass(frozen=True)
class Timed:
    """Means over simulated rounds, in seconds; `waited` is the share of all ranks' time."""

    sample: float
    update: float
    all_reduce: float
    retrieve: float
    waited: float

    @property
    def round(self) -> float:
        """Queries are answered while other episodes go on: they take the longer of both times."""
        return max(self.sample, self.retrieve) + self.update + self.all_reduce

    @property
    def limit(self) -> str:
        parts = {name: getattr(self, name) for name in LIMITS}
        return LIMITS[max(parts, key=parts.get)]


def draw(rng: random.Random) -> list[list[tuple[int, int, int]]]:
    """The episodes of a round, by question."""
    return [rng.choices(rng.choice(lengths()), k=GENERATIONS) for _ in range(QUESTIONS)]


def loads_of(rows: list[int], ranks: int) -> list[int]:
    """Tokens of each rank, as rows are given to ranks in training."""
    return [sum(rows[i] for i in share) for share in shares(rows, ranks)]


class Simulation:
    """Rounds of one model on one kind of card, in which all ranks do what `ppo` does under torchrun."""

    def __init__(self, found: Plan, rented: Rented):
        self.found, self.rented = found, rented
        w = found.workload
        every = [episode for group in lengths() for episode in group]
        self.mean = statistics.fmean(tokens for tokens, _, _ in every)
        work = replace(w, episodes=MINI_BATCH, step_rows=MINI_BATCH, mean_tokens=self.mean, steps=None)
        self.a_token = seconds(found, duration.update(work, found.memory)) / (MINI_BATCH * self.mean)
        self.a_score = seconds(found, duration.score(work, found.memory)) / (MINI_BATCH * self.mean)
        self.steps: dict[int, float] = {}

    def step(self, rows: int) -> float:
        """Seconds of one more token in each of `rows` rows, whose caches are three quarters full in the mean."""
        if rows not in self.steps:
            cost = duration.decode(self.found.workload, self.found.memory, rows, 0.75 * self.mean)
            self.steps[rows] = seconds(self.found, cost)
        return self.steps[rows]

    def sampling(self, episodes: list[tuple[int, int, int]]) -> float:
        """Seconds of a rank's rollouts: prefill of what is given, and decoding until its last episode has ended."""
        w, memory = self.found.workload, self.found.memory
        given = sum(tokens - sampled for tokens, sampled, _ in episodes)
        passes = max(1, -(-given // memory.micro_batch_tokens))
        reading = duration.forward(w, memory, passes, given, self.mean / 2)
        rows, total = min(memory.rollout_batch_size, len(episodes)), seconds(self.found, reading)
        waiting = sorted((sampled for _, sampled, _ in episodes), reverse=True)
        running, waiting = waiting[:rows], waiting[rows:]
        while running:
            run = min(running)
            total += run * self.step(len(running))
            running = [left - run for left in running if left > run]
            while waiting and len(running) < rows:
                running.append(waiting.pop())
        return total

    def timed(self, ranks: int) -> Timed:
        rng, rounds = random.Random(0), []
        for _ in range(ROUNDS):
            groups = draw(rng)
            each = QUESTIONS // ranks
            own = [[e for group in groups[r * each : (r + 1) * each] for e in group] for r in range(ranks)]
            sampled = [self.sampling(episodes) for episodes in own]
            every = [tokens for group in groups for tokens, _, _ in group]
            rng.shuffle(every)
            batches = [every[i : i + MINI_BATCH] for i in range(0, len(every), MINI_BATCH)]
            tokens = [loads_of(every, ranks), *(loads_of(batch, ranks) for batch in batches)]
            busy = [[n * self.a_score for n in tokens[0]], *([n * self.a_token for n in t] for t in tokens[1:])]
            parts = [sampled, *busy]
            longest = sum(map(max, parts))
            reduced = len(batches) * all_reduce(adapter_bytes(self.found.workload), ranks, self.rented)
            queries = sum(turns - 1 for group in groups for _, _, turns in group)
            rounds.append(
                Timed(
                    sample=max(sampled),
                    update=sum(map(max, busy)),
                    all_reduce=reduced,
                    retrieve=queries / queries_a_second(),
                    waited=1 - sum(map(statistics.fmean, parts)) / longest,
                )
            )
        fields = Timed.__dataclass_fields__
        return Timed(*(statistics.fmean(getattr(r, name) for r in rounds) for name in fields))


def rows_of(rented: Rented) -> list[dict]:
    known, found = card(rented.name), []
    assert known
    for size in MODELS:
        learning = ["--algorithm", "grpo", "--adapter", "runs/sft", "--batch-size", str(QUESTIONS * GENERATIONS)]
        learning += ["--num-generations", str(GENERATIONS), "--mini-batch-size", str(MINI_BATCH)]
        supervised = plan_of(size, known, ["--max-length", str(TOKENS)])
        simulation = Simulation(plan_of(size, known, learning), rented)
        for ranks in RANKS:
            step = sft(supervised, ranks, rented)
            timed = simulation.timed(ranks)
            price = rented.dollars * ranks / 3600
            found.append(
                {
                    "model": size,
                    "GPUs": ranks,
                    "SFT, tokens/s": f"{ROWS * TOKENS / step:,.0f}",
                    "$ per million": f"{price * step / (ROWS * TOKENS) * 1e6:.3f}",
                    "a round, s": f"{timed.round:.1f}",
                    "$ per 100 rounds": f"{price * timed.round * 100:.2f}",
                    "waiting": f"{timed.waited:.0%}",
                    "limit": timed.limit,
                }
            )
    return found


def page() -> str:
    text = (Path(__file__).parent / "scaling_page.md").read_text(encoding="utf-8")
    tables = [f"### {rented.name}, ${rented.dollars} an hour\n\n{records.table(rows_of(rented))}" for rented in RENTED]
    served = loads()
    return text.format(
        rows=ROWS, tokens=TOKENS, questions=QUESTIONS, generations=GENERATIONS, mini_batch=MINI_BATCH, rounds=ROUNDS,
        queries=queries_a_second(), load=LOAD.format(**served["retrieve"], chats=served["serve"]),
        tables="\n\n".join(tables),
    )  # fmt: skip


if __name__ == "__main__":
    print(page(), end="")
