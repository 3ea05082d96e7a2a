"""Measures how costs grow: times the same work at three sizes, and fits a power law, cost ~ size ^ exponent.

Exponent 1 means that twice the size costs twice as much, 2 that it costs four times as much, 0 that it costs the same.
"""

import math
import statistics
import time
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from bench.contest import Contest
from bench.contests import RL_PROMPT, Ours, rl_round
from r3lite.devices.precision import Precision

GROUPS = (2, 4, 8)  # episodes of a GRPO round
NEW = 32  # tokens sampled in each episode of a round, and after a context
CONTEXTS = (128, 512, 2048)  # tokens of a prompt
ROWS = (256, 512, 1024)  # tokens of a row of SFT
SFT_BUDGET = "4GiB"
CORPORA = (1_000, 10_000, 100_000)  # passages
DIMENSION = 384  # of vectors, as all-MiniLM-L6-v2's
QUERIES = 8  # in one search: as many as the episodes of a round ask at a time
SEARCHES = 20  # searches that are timed together, because one takes too little time


class Growth(Contest):
    """A contest whose contestants are sizes of the same work. Their names are the sizes."""

    def results(self) -> list[dict]:
        """Returns one record, with the median seconds of each size and the exponent."""
        sizes = [int(name) for name in self.seconds]
        medians = [statistics.median(times) for times in self.seconds.values()]
        spreads = []
        for times, median in zip(self.seconds.values(), medians, strict=True):
            spreads.append((max(times) - min(times)) / median)
        return [
            {
                "cost_of": self.name,
                "sizes": sizes,
                "seconds": [float(f"{seconds:.3g}") for seconds in medians],
                "exponent": round(exponent(sizes, medians), 2),
                "largest_spread": round(max(spreads), 3),
            }
        ]


def exponent(sizes: list[float], costs: list[float]) -> float:
    """Returns the slope of the least-squares line through the points (log size, log cost)."""
    log_sizes = [math.log(size) for size in sizes]
    log_costs = [math.log(cost) for cost in costs]
    return statistics.linear_regression(log_sizes, log_costs).slope


def growths(folder: str, precision: Precision) -> list[Callable[[], Growth]]:
    """Returns a function for each growth, which builds it.

    A growth is built only when it is due, so that the models of the others take no memory meanwhile.
    """

    def growth(name: str, sizes: tuple[int, ...], work: Callable[[int], Callable[[], object]]) -> Growth:
        """Returns a growth of `work(size)`, which returns a function that does the work of that size once."""
        # Speeds in tokens a second are not shown, so the number of tokens is 0.
        return Growth(name, 0, {str(size): work(size) for size in sizes})

    def groups() -> Growth:
        run_round = rl_round(
            folder=folder,
            precision=precision,
            algorithm="grpo",
            episodes=max(GROUPS),
            prompt=RL_PROMPT,
            new=NEW,
        )
        name = f"a GRPO round of {RL_PROMPT} + {NEW} tokens, by episodes"
        return growth(name, GROUPS, lambda count: lambda: run_round(count))

    def prefill() -> Growth:
        ours = Ours(folder, precision)
        return growth("prefill and one token, by prompt tokens", CONTEXTS, lambda tokens: ours.decode(1, 1, tokens))

    def decode() -> Growth:
        ours = Ours(folder, precision)
        return growth(
            f"prefill and {NEW} tokens, by prompt tokens", CONTEXTS, lambda tokens: ours.decode(1, NEW, tokens)
        )

    def sft() -> Growth:
        ours = Ours(folder, precision)
        return growth("an SFT step on one row, by tokens", ROWS, lambda tokens: ours.sft(tokens, SFT_BUDGET))

    def retrieval() -> Growth:
        return growth("a retrieval query without its encoding, by passages", CORPORA, search)

    return [groups, prefill, decode, sft, retrieval]


class RandomEncoder:
    """Encodes every text as a random unit vector: the time of a search does not depend on the texts."""

    dimension = DIMENSION
    settings: ClassVar[dict] = {}

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        vectors = self.generator.standard_normal((len(queries), DIMENSION), dtype=np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def encode_passages(self, documents: list, advance: Callable[[int], object]) -> np.ndarray:
        return self.encode_queries(documents)


def search(passages: int) -> Callable[[], float]:
    """Returns a function that searches an index of `passages` passages, and returns the mean seconds of a query.

    Each search has QUERIES queries.
    """
    from r3lite.core.episode import Document, Question
    from r3lite.retrieval.index import build_index
    from r3lite.retrieval.search import RankingRetriever

    documents = [Document(str(number), "", "") for number in range(passages)]
    retrieve = RankingRetriever(
        build_index(RandomEncoder(), documents), top_k=5, findable_places=lambda questions: None
    )
    pairs = [(Question(str(number), "q", ()), f"query {number}") for number in range(QUERIES)]

    def work() -> float:
        start = time.perf_counter()
        for _ in range(SEARCHES):
            retrieve(pairs)
        return (time.perf_counter() - start) / (SEARCHES * QUERIES)

    return work
