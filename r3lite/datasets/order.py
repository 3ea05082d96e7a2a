"""The rows or questions of each step, as functions of the seed and the step's number: a resumed run needs no position
in the data."""

import functools
import math
import random
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from r3lite.core.answer_match import question_key
from r3lite.core.episode import Question
from r3lite.datasets.trajectories import ExamplesBySource


@dataclass(frozen=True)
class Passes:
    """Passes over `count` rows, each in a new order, which is seeded by `stream` and the number of the pass."""

    count: int
    stream: str

    def rows(self, start: int, stop: int) -> list[int]:
        """Returns the rows of draws `start` to `stop` - 1; draw 0 is the first of the first pass."""
        rows = []
        for draw in range(start, stop):
            number_of_pass, place = divmod(draw, self.count)
            order = _shuffled(self.count, f"{self.stream}{number_of_pass}")
            rows.append(order[place])
        return rows

    def shuffled(self, stream: str) -> Sequence[int]:
        """Returns all rows in a random order, seeded by the argument `stream` alone."""
        return _shuffled(self.count, stream)


class Mixture:
    """Draws rows: each draw picks a source at random by the weights, and takes the next row of a pass over it.

    Each pass over a source has a new order. Draws depend on the seed, the sizes and the weights only, so that a resumed
    run, which begins with a later draw, gets the same rows.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: str):
        """`sizes` has the number of rows of each source. Rows are numbered source by source.

        Weights need not add up to 1.
        """
        assert min(sizes) > 0 and len(sizes) == len(weights)
        self.sizes = sizes
        self.weights = weights
        self.seed = seed
        self.starts = list(accumulate(sizes, initial=0))
        self._source_stream = random.Random(f"{seed}/sources")
        self._draws = [0] * len(sizes)  # draws of each source so far
        self._passes: list[list[int]] = [[]] * len(sizes)  # the rows of each source in the order of its current pass
        self._rows = array("q")  # the rows of the draws so far

    def rows(self, start: int, stop: int) -> list[int]:
        """Returns the rows of draws `start` to `stop` - 1."""
        while len(self._rows) < stop:
            (source,) = self._source_stream.choices(range(len(self.sizes)), self.weights)
            number_of_pass, place = divmod(self._draws[source], self.sizes[source])
            if place == 0:
                self._passes[source] = self._new_pass(source, number_of_pass)
            self._draws[source] += 1
            self._rows.append(self._passes[source][place])
        return self._rows[start:stop].tolist()

    def _new_pass(self, source: int, number: int) -> list[int]:
        """Returns the rows of a source in the order of its pass 0, 1, ..."""
        rows = list(range(self.starts[source], self.starts[source + 1]))
        random.Random(f"{self.seed}/source {source}/{number}").shuffle(rows)
        return rows

    def shuffled(self, stream: str) -> list[int]:
        """Returns all rows in the order of a weighted draw without replacement, seeded by `stream`.

        The weight w of a row is its source's weight divided by the source's size. Each row gets the key log(u) / w with
        a random u; the rows are sorted by their keys, the largest first (Efraimidis and Spirakis 2006, doi
        10.1016/j.ipl.2005.11.003).
        """
        generator = random.Random(stream)
        keys = []
        for size, weight in zip(self.sizes, self.weights, strict=True):
            for _ in range(size):
                u = 1 - generator.random()  # above 0
                keys.append(math.log(u) * size / weight)
        return sorted(range(len(keys)), key=keys.__getitem__, reverse=True)


def rows_of_step(
    step: int,
    count: int,
    per_step: int,
    seed: int,
    row_limit: int | None,
    mixture: Mixture | None = None,
) -> list[int]:
    """Returns the indices of the rows of a step (1, 2, ...), drawn in passes over all `count` rows or from a mixture.

    `row_limit` is the number of draws of the whole run, after which a step has no more rows; None: there is no limit.
    """
    start = (step - 1) * per_step
    stop = step * per_step
    if row_limit is not None:
        stop = min(stop, row_limit)
    draws = mixture or Passes(count, f"{seed}/sft/")
    return draws.rows(start, stop)


@dataclass(frozen=True)
class QuestionOrder:
    """Draws the questions of each round, repeats each one `generations` times, and seeds each episode."""

    questions: Sequence[Question]
    generations: int
    seed: int
    mixture: Mixture | None = None

    @property
    def _draws(self) -> Passes | Mixture:
        return self.mixture or Passes(len(self.questions), f"{self.seed}/epoch ")

    def of_round(self, number: int, size: int) -> tuple[list[Question], list[str]]:
        """Returns the questions and the seeds of the episodes of a round (1, 2, ...), which has `size` draws.

        Each drawn question is repeated `generations` times, every time with another seed.
        """
        start = (number - 1) * size
        stop = number * size
        questions = []
        for row in self._draws.rows(start, stop):
            questions += [self.questions[row]] * self.generations
        seeds = []
        for i in range(start, stop):
            seeds += [f"{self.seed}/{i}/{k}" for k in range(self.generations)]
        return questions, seeds

    def of_refill(
        self,
        number: int,
        attempt: int,
        size: int,
        used: set[str],
    ) -> tuple[list[Question], list[str]]:
        """Returns the questions and the seeds of `size` groups that replace groups of round `number`.

        `attempt` (1, 2, ...) counts the replacements in the round. Questions whose ids are not in `used` come first.
        The result depends only on the seed, the round, the attempt and `used`.
        """
        stream = f"{self.seed}/refill {number}/{attempt}"
        shuffled = self._draws.shuffled(stream)
        unused_first = sorted(shuffled, key=lambda row: self.questions[row].id in used)  # sorting is stable
        questions = []
        seeds = []
        for i in range(size):
            row = unused_first[i % len(unused_first)]  # with fewer questions than `size`, they repeat
            questions += [self.questions[row]] * self.generations
            seeds += [f"{stream}/{i}/{k}" for k in range(self.generations)]
        return questions, seeds


def hold_out(
    rows: ExamplesBySource, fraction: float, limit: int, seed: int
) -> tuple[ExamplesBySource, ExamplesBySource]:
    """Returns rows to train on and rows held out, both by source.

    At most `fraction` of all rows are held out, and at most `limit` rows. Rows of one question stay together whatever
    their source (see `ids_by_question`), so that the answer of a held-out question is never trained on. At least one
    question is trained on.
    """
    counts = Counter(row.id for of_source in rows.values() for row in of_source)  # the number of rows of each id
    ids = sorted(counts)
    random.Random(f"{seed}/sft/validation").shuffle(ids)
    available = min(int(fraction * counts.total()), limit)
    held_out: set[str] = set()
    same_question = ids_by_question(rows)
    for id in ids:
        group = same_question[id]
        size = sum(counts[member] for member in group)
        if id not in held_out and size <= available and len(held_out) + len(group) < len(ids):
            held_out |= group
            available -= size
    to_train: ExamplesBySource = {}
    to_validate: ExamplesBySource = {}
    for name, of_source in rows.items():
        to_train[name] = [row for row in of_source if row.id not in held_out]
        to_validate[name] = [row for row in of_source if row.id in held_out]
    return to_train, to_validate


def ids_by_question(rows: ExamplesBySource) -> dict[str, set[str]]:
    """Returns, for each id, the ids of all rows of its question. All ids of a question have the same set object.

    Two rows are of one question if they have the same id or ask the same, directly or through other rows.
    """
    groups: dict[str, set[str]] = {}
    first_ids: dict[str, str] = {}  # by the key of a question: the id of the first row that asks it
    for row in chain.from_iterable(rows.values()):
        group = groups.setdefault(row.id, {row.id})
        key = question_key(row.question)
        if not key:
            continue
        first_id = first_ids.setdefault(key, row.id)
        group_of_key = groups[first_id]
        if group_of_key is group:
            continue
        smaller, larger = sorted((group, group_of_key), key=len)
        larger |= smaller
        for id in smaller:
            groups[id] = larger
    return groups


@functools.lru_cache(maxsize=2)
def _shuffled(count: int, seed: str) -> tuple[int, ...]:
    """Returns the numbers from 0 to `count` - 1, shuffled. The two latest orders are cached for the next steps."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return tuple(order)
