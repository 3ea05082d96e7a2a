"""Prints the page docs/scaling.md: predicted speed and cost of SFT and of GRPO rounds on 1 to 64 cards.

    python -m bench.clusters > docs/scaling.md

Nothing is run. The times of one rank are those of `r3lite/memory/duration.py`; how long ranks wait for each other is
simulated with the lengths of real episodes (bench/results/episode-lengths.json). A test fails if the page differs from
what this prints.
"""

import functools
import json
import math
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
RANKS = (1, 2, 8, 64)  # numbers of cards; each card has one rank
CARDS_A_MACHINE = 8
ROWS = 64  # of an SFT step, on all cards together
TOKENS = 1024  # of an SFT row
QUESTIONS = 64  # of a round
GENERATIONS = 8  # episodes of each question
MINI_BATCH = 128  # episodes of an optimizer step
ROUNDS = 20  # that are simulated
CACHE_FILL = 0.75  # mean length of a running episode, as a share of the mean length of a finished one; assumed
SECONDS_AN_HOUR = 3600
RESERVED_GIB = 2  # of a card's memory, which its --vram-budget leaves out
# The parts of a round that can limit it, with their names in the table.
LIMITS = {"sample": "rollouts", "update": "updates", "all_reduce": "all-reduce", "retrieve": "retrieval"}


@dataclass(frozen=True)
class Rented:
    """A card that can be rented: its price, and the bandwidth at which ranks exchange gradients."""

    name: str
    dollars: float  # per hour
    inside: float  # bytes per second between two cards of a machine, one way
    between: float  # bytes per second between two machines, one way


# Prices: RunPod's in March 2026 (https://deploybase.ai/articles/rtx-4090-vs-h100). Links are assumed: NVLink at half of
# its 900 GB/s, PCIe 4.0 x16 at 25 GB/s; between machines 100 Gbit/s.
RENTED = (
    Rented("RTX 4090", dollars=0.34, inside=25e9, between=12.5e9),
    Rented("H100 80GB HBM3", dollars=2.69, inside=450e9, between=12.5e9),
)
LATENCY = 50e-6  # seconds that a message takes besides the transfer of its bytes; assumed

LOAD = """\
Measured with {clients} clients for {minutes:g} minutes and a restart in the middle, on {threads} CPU cores:
{requests_per_second:g} queries per second with all-MiniLM-L6-v2, p50 {p50_ms:.0f} ms, p99 {p99_ms:.0f} ms.
`serve` with the tiny model (chat, 32 tokens): {chats[requests_per_second]:g} answers per second,
p50 {chats[p50_ms]:.0f} ms, p99 {chats[p99_ms]:.0f} ms.
Clients repeat failed requests: all {sent:,} and {chats[sent]:,} were answered. Memory grew by at most {growth:.1%}."""


@functools.cache
def loads() -> dict[str, dict]:
    """Returns the newest run of bench/stress/load.py for each server, with its minutes.

    `growth` is the largest growth of memory of all servers, as a share.
    """
    runs = json.loads((RESULTS / "load.json").read_text(encoding="utf-8"))["runs"]
    newest = {run["server"]: run | {"minutes": run["seconds"] / 60} for run in runs}
    assert all(run["sent"] == run["answered"] and not run["wrong"] for run in newest.values()), "something was lost"
    growth = max(share for run in newest.values() for share in run["memory_growth"])
    return {name: run | {"growth": growth} for name, run in newest.items()}


def queries_a_second() -> float:
    """Returns the measured queries per second of one retrieval server."""
    return loads()["retrieve"]["requests_per_second"]


@functools.cache
def lengths() -> list[list[tuple[int, int, int]]]:
    """Returns (tokens, sampled tokens, turns) of each measured episode, grouped by question."""
    measured = json.loads((RESULTS / "episode-lengths.json").read_text(encoding="utf-8"))
    return [[tuple(episode) for episode in group] for group in measured["groups"]]


def all_reduce(size: float, ranks: int, rented: Rented) -> float:
    """Returns the seconds of a ring all-reduce (arXiv 1802.05799) of `size` bytes.

    Each of n ranks sends 2 (n - 1) messages of 1 / n of the bytes.
    """
    if ranks == 1:
        return 0.0
    link = rented.inside if ranks <= CARDS_A_MACHINE else rented.between
    return 2 * (ranks - 1) * (size / ranks / link + LATENCY)


def plan_of(size: str, speeds: Speeds, run_flags: list[str]) -> Plan:
    """Returns the plan of `python -m r3lite.plan` for one card. It is that of every rank."""
    assert speeds.memory
    budget = ["--vram-budget", f"{speeds.memory // GIB - RESERVED_GIB}GiB"]
    rank_plan = planned(["--card", speeds.name, "--model", MODELS[size], *budget, *run_flags])
    assert rank_plan, f"{size} does not fit"
    return rank_plan


def seconds(rank_plan: Plan, cost: duration.Cost) -> float:
    """Returns the seconds of a cost on the card of a plan."""
    return cost.seconds(rank_plan.workload.speeds, rank_plan.workload.dtype)


# SFT


def sft(rank_plan: Plan, ranks: int, rented: Rented) -> float:
    """Returns the seconds of an SFT step of ROWS rows, which the ranks share."""
    work = replace(rank_plan.workload, step_rows=math.ceil(ROWS / ranks), mean_tokens=TOKENS, row_tokens=TOKENS)
    return seconds(rank_plan, duration.update(work, rank_plan.memory)) + all_reduce(adapter_bytes(work), ranks, rented)


# A round of GRPO


@dataclass(frozen=True)
class Timed:
    """The times of a round in seconds."""

    sample: float  # rollouts, until the slowest rank has finished
    update: float  # scoring, and the optimizer steps, each until the slowest rank has finished
    all_reduce: float  # exchange of gradients
    retrieve: float  # answering all queries of the round
    waited: float  # share of the time of all ranks in which they wait for the slowest one

    @property
    def round(self) -> float:
        """The seconds of the round. Queries are answered during the rollouts, so the longer of both times counts."""
        return max(self.sample, self.retrieve) + self.update + self.all_reduce

    @property
    def limit(self) -> str:
        """The name of the part that takes the longest."""
        parts = {name: getattr(self, name) for name in LIMITS}
        return LIMITS[max(parts, key=parts.get)]


def draw(rng: random.Random) -> list[list[tuple[int, int, int]]]:
    """Returns the episodes of a simulated round, by question: each question draws episodes of one measured question."""
    return [rng.choices(rng.choice(lengths()), k=GENERATIONS) for _ in range(QUESTIONS)]


def loads_of(rows: list[int], ranks: int) -> list[int]:
    """Returns the tokens that each rank gets if rows of these lengths are shared out as in training."""
    return [sum(rows[i] for i in share) for share in shares(rows, ranks)]


class Simulation:
    """Simulates rounds of `ppo` under torchrun, for one model on one kind of card."""

    def __init__(self, rank_plan: Plan, rented: Rented):
        self.plan = rank_plan
        self.rented = rented
        episodes = [episode for group in lengths() for episode in group]
        self.mean_length = statistics.fmean(tokens for tokens, _, _ in episodes)
        work = replace(
            rank_plan.workload, episodes=MINI_BATCH, step_rows=MINI_BATCH, mean_tokens=self.mean_length, steps=None
        )
        tokens = MINI_BATCH * self.mean_length
        self.update_per_token = seconds(rank_plan, duration.update(work, rank_plan.memory)) / tokens
        self.score_per_token = seconds(rank_plan, duration.score(work, rank_plan.memory)) / tokens
        self.step_seconds: dict[int, float] = {}  # of a decoding step, by its number of rows

    def step(self, rows: int) -> float:
        """Returns the seconds of one decoding step of `rows` rows, with caches of CACHE_FILL of the mean length."""
        if rows not in self.step_seconds:
            length = CACHE_FILL * self.mean_length
            cost = duration.decode(self.plan.workload, self.plan.memory, rows=rows, slots=length)
            self.step_seconds[rows] = seconds(self.plan, cost)
        return self.step_seconds[rows]

    def sampling(self, episodes: list[tuple[int, int, int]]) -> float:
        """Returns the seconds of a rank's rollouts.

        They are the prefill of prompts and documents, and the decoding steps until the last episode has ended. The
        longest episodes start first; whenever one ends, the shortest of those that wait starts.
        """
        memory = self.plan.memory
        prefill_tokens = sum(tokens - sampled for tokens, sampled, _ in episodes)
        passes = max(1, math.ceil(prefill_tokens / memory.micro_batch_tokens))
        # In the mean over its tokens, half of an episode is in the cache.
        prefill = duration.forward(
            self.plan.workload, memory, passes=passes, tokens=prefill_tokens, keys=self.mean_length / 2
        )
        rows = min(memory.rollout_batch_size, len(episodes))
        total = seconds(self.plan, prefill)
        lengths_left = sorted((sampled for _, sampled, _ in episodes), reverse=True)
        running = lengths_left[:rows]  # tokens that each running episode still samples
        waiting = lengths_left[rows:]
        while running:
            steps = min(running)  # until the next episode ends
            total += steps * self.step(len(running))
            running = [tokens - steps for tokens in running if tokens > steps]
            while waiting and len(running) < rows:
                running.append(waiting.pop())
        return total

    def timed(self, ranks: int) -> Timed:
        """Returns the mean times over ROUNDS simulated rounds on `ranks` ranks."""
        rng = random.Random(0)
        rounds = []
        for _ in range(ROUNDS):
            groups = draw(rng)
            share = QUESTIONS // ranks
            by_rank = [
                [episode for group in groups[rank * share : (rank + 1) * share] for episode in group]
                for rank in range(ranks)
            ]
            sampling = [self.sampling(episodes) for episodes in by_rank]
            row_lengths = [tokens for group in groups for tokens, _, _ in group]
            rng.shuffle(row_lengths)
            batches = [row_lengths[i : i + MINI_BATCH] for i in range(0, len(row_lengths), MINI_BATCH)]
            scoring = [tokens * self.score_per_token for tokens in loads_of(row_lengths, ranks)]
            updates = [[tokens * self.update_per_token for tokens in loads_of(batch, ranks)] for batch in batches]
            # Seconds of each rank in each phase. The ranks wait for each other at the end of a phase.
            training = [scoring, *updates]
            phases = [sampling, *training]
            longest = sum(map(max, phases))
            exchange = len(batches) * all_reduce(adapter_bytes(self.plan.workload), ranks, self.rented)
            queries = sum(turns - 1 for group in groups for _, _, turns in group)
            rounds.append(
                Timed(
                    sample=max(sampling),
                    update=sum(map(max, training)),
                    all_reduce=exchange,
                    retrieve=queries / queries_a_second(),
                    waited=1 - sum(map(statistics.fmean, phases)) / longest,
                )
            )
        fields = Timed.__dataclass_fields__
        return Timed(*(statistics.fmean(getattr(r, name) for r in rounds) for name in fields))


def rows_of(rented: Rented) -> list[dict]:
    """Returns the rows of a card's table: one for each model and number of cards."""
    speeds = card(rented.name)
    rows = []
    assert speeds
    for size in MODELS:
        learning = ["--algorithm", "grpo", "--adapter", "runs/sft", "--batch-size", str(QUESTIONS * GENERATIONS)]
        learning += ["--num-generations", str(GENERATIONS), "--mini-batch-size", str(MINI_BATCH)]
        supervised = plan_of(size, speeds, ["--max-length", str(TOKENS)])
        simulation = Simulation(plan_of(size, speeds, learning), rented)
        for ranks in RANKS:
            step = sft(supervised, ranks, rented)
            timed = simulation.timed(ranks)
            price = rented.dollars * ranks / SECONDS_AN_HOUR
            rows.append(
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
    return rows


def page() -> str:
    """Returns the text of docs/scaling.md."""
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
