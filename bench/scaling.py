"""How cost grows: the same work at three sizes, and the exponent of the power law through them.

1 means that twice as much costs twice as much, 2 that it costs four times as much, 0 that it costs the same.
"""

import math
import statistics
import time
from collections.abc import Callable

import numpy as np

from bench.contest import Contest
from bench.contests import RL_PROMPT, Ours, rl_round
from r3lite.devices.precision import Precision

GROUPS = (2, 4, 8)  # episodes of a GRPO round
NEW = 32  # tokens sampled in a round, and after a context
CONTEXTS = (128, 512, 2048)  # tokens of a prompt
ROWS = (256, 512, 1024)  # tokens of a row of SFT
CORPORA = (1_000, 10_000, 100_000)  # passages
DIMENSION = 384  # of vectors, as all-MiniLM-L6-v2's
QUERIES, SEARCHES = 8, 20  # as many at once as a round's episodes ask; and how often, for one search is soon done


class Growth(Contest):
    """The contestants are sizes of the same work."""

    def results(self) -> list[dict]:
        sizes = [int(name) for name in self.seconds]
        medians = [statistics.median(times) for times in self.seconds.values()]
        spreads = [(max(times) - min(times)) / m for times, m in zip(self.seconds.values(), medians)]
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
    """The slope of the least-squares line through (log size, log cost)."""
    x, y = ([math.log(value) for value in values] for values in (sizes, costs))
    return statistics.linear_regression(x, y).slope


def growths(folder: str, precision: Precision) -> list[Callable[[], Growth]]:
    """What is to be run, each made when it is its turn."""

    def grow(name: str, sizes: tuple[int, ...], work: Callable[[int], Callable[[], object]]) -> Growth:
        return Growth(name, 0, {str(size): work(size) for size in sizes})

    def groups() -> Growth:
        play = rl_round(folder, precision, "grpo", max(GROUPS), RL_PROMPT, NEW)
        name = f"a GRPO round of {RL_PROMPT} + {NEW} tokens, by episodes"
        return grow(name, GROUPS, lambda count: lambda: play(count))

    def prefill() -> Growth:
        ours = Ours(folder, precision)
        return grow("prefill and one token, by prompt tokens", CONTEXTS, lambda n: ours.decode(1, 1, n))

    def decode() -> Growth:
        ours = Ours(folder, precision)
        return grow(f"prefill and {NEW} tokens, by prompt tokens", CONTEXTS, lambda n: ours.decode(1, NEW, n))

    def sft() -> Growth:
        ours = Ours(folder, precision)
        return grow("an SFT step on one row, by tokens", ROWS, lambda n: ours.sft(n, "4GiB"))

    def retrieval() -> Growth:
        return grow("a retrieval query without its encoding, by passages", CORPORA, search)

    return [groups, prefill, decode, sft, retrieval]


class RandomEncoder:
    """Unit vectors drawn at random: what a search costs does not depend on what texts say."""

    dimension, settings = DIMENSION, {}

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        vectors = self.generator.standard_normal((len(queries), DIMENSION), dtype=np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def encode_passages(self, documents: list, advance: Callable[[int], object]) -> np.ndarray:
        return self.encode_queries(documents)


def search(passages: int) -> Callable[[], float]:
    """Finds documents for QUERIES queries at a time in an index of so many passages: seconds a query."""
    from r3lite.core.episode import Document, Question
    from r3lite.retrieval.index import build_index
    from r3lite.retrieval.search import RankingRetriever

    documents = [Document(str(i), "", "") for i in range(passages)]
    retrieve = RankingRetriever(build_index(RandomEncoder(), documents), top_k=5, own_paragraphs=lambda questions: None)
    pairs = [(Question(str(i), "q", ()), f"query {i}") for i in range(QUERIES)]

    def work() -> float:
        start = time.perf_counter()
        for _ in range(SEARCHES):
            retrieve(pairs)
        return (time.perf_counter() - start) / (SEARCHES * QUERIES)

    return work
