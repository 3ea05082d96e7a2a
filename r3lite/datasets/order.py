"""The rows or questions of each step, as functions of the seed and the step's number: a resumed run needs no position
in the data."""

import functools
import math
import random
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from r3lite.core.answer_match import question_key
from r3lite.core.episode import Question
from r3lite.datasets.trajectories import Rows


@dataclass(frozen=True)
class Passes:
    """Passes over `count` rows, each in a new order, which is seeded by `stream` and the number of the pass."""

    count: int
    stream: str

    def rows(self, start: int, stop: int) -> list[int]:
        """The rows of draws `start` to `stop` - 1; draw 0 is the first of the first pass."""
        draws = (divmod(draw, self.count) for draw in range(start, stop))
        return [_shuffled(self.count, f"{self.stream}{number}")[place] for number, place in draws]

    def shuffled(self, stream: str) -> Sequence[int]:
        """All rows in a random order."""
        return _shuffled(self.count, stream)


class Mixture:
    """Each draw takes a source at random by the weights, and the next row of a pass over that source.

    Each pass over a source has a new order. Draws depend on the seed, the sizes and the weights only, so that a resumed
    run, which begins with a later draw, gets the same rows.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: str):
        """The rows of all sources are numbered one after the other; weights need not add up to 1."""
        assert min(sizes) > 0 and len(sizes) == len(weights)
        self.sizes, self.weights, self.seed = sizes, weights, seed
        self.starts = list(accumulate(sizes, initial=0))
        self._choices = random.Random(f"{seed}/sources")
        self._taken = [0] * len(sizes)  # draws of each source so far
        self._passes: list[list[int]] = [[]] * len(sizes)  # the order of the pass that each is in
        self._rows = array("q")  # of the draws so far

    def rows(self, start: int, stop: int) -> list[int]:
        """The rows of draws `start` to `stop` - 1."""
        while len(self._rows) < stop:
            (source,) = self._choices.choices(range(len(self.sizes)), self.weights)
            count, place = divmod(self._taken[source], self.sizes[source])
            if place == 0:
                self._passes[source] = list(range(self.starts[source], self.starts[source + 1]))
                random.Random(f"{self.seed}/source {source}/{count}").shuffle(self._passes[source])
            self._taken[source] += 1
            self._rows.append(self._passes[source][place])
        return self._rows[start:stop].tolist()

    def shuffled(self, stream: str) -> list[int]:
        """All rows in a random order: drawn one by one without replacement, each row with its source's weight divided
        by the source's size (Efraimidis and Spirakis 2006, doi 10.1016/j.ipl.2005.11.003)."""
        draw = random.Random(stream)
        weighed = zip(self.sizes, self.weights, strict=True)
        keys = [math.log(1 - draw.random()) * size / weight for size, weight in weighed for _ in range(size)]
        return sorted(range(len(keys)), key=keys.__getitem__, reverse=True)


def rows_of_step(
    step: int, count: int, per_step: int, seed: int, last: int | None, mixture: Mixture | None = None
) -> list[int]:
    """Indices of the rows of step 1, 2, ...: of passes over all `count` rows up to draw `last`, or of a mixture."""
    stop = step * per_step if last is None else min(step * per_step, last)
    return (mixture or Passes(count, f"{seed}/sft/")).rows((step - 1) * per_step, stop)


@dataclass(frozen=True)
class QuestionOrder:
    """Draws the questions of each round, each `generations` times, and names the random stream of each episode."""

    questions: Sequence[Question]
    generations: int
    seed: int
    mixture: Mixture | None = None

    @property
    def _draws(self) -> Passes | Mixture:
        return self.mixture or Passes(len(self.questions), f"{self.seed}/epoch ")

    def of_round(self, number: int, size: int) -> tuple[list[Question], list[str]]:
        """The questions and seeds of round 1, 2, ..., with `size` different draws."""
        start, stop = (number - 1) * size, number * size
        drawn = [self.questions[row] for row in self._draws.rows(start, stop) for _ in range(self.generations)]
        return drawn, [f"{self.seed}/{i}/{k}" for i in range(start, stop) for k in range(self.generations)]

    def of_refill(self, number: int, attempt: int, size: int, used: set[str]) -> tuple[list[Question], list[str]]:
        """The questions and seeds of attempt 1, 2, ... to replace groups of a round: questions whose ids are not in
        `used`, if there are enough. They depend on the seed, the round and the attempt only."""
        stream = f"{self.seed}/refill {number}/{attempt}"
        order = sorted(self._draws.shuffled(stream), key=lambda i: self.questions[i].id in used)  # stable: unused first
        drawn = [self.questions[order[i % len(order)]] for i in range(size) for _ in range(self.generations)]
        return drawn, [f"{stream}/{i}/{k}" for i in range(size) for k in range(self.generations)]


def hold_out(rows: Rows, fraction: float, most: int, seed: int) -> tuple[Rows, Rows]:
    """Rows to train on, and rows held out: at most `fraction` of them and at most `most`; each by their sources.

    Rows of one question stay together, whatever their source, since a held-out question's answer must not be known:
    rows with the same id, and rows that ask the same. At least one question is trained on.
    """
    of_id = Counter(row.id for some in rows.values() for row in some)
    ids = sorted(of_id)
    random.Random(f"{seed}/sft/validation").shuffle(ids)
    room, held_out, same = min(int(fraction * of_id.total()), most), set(), ids_by_question(rows)
    for id in ids:
        size = sum(of_id[other] for other in same[id])
        if id not in held_out and size <= room and len(held_out) + len(same[id]) < len(ids):
            held_out |= same[id]
            room -= size
    trained = {name: [row for row in some if row.id not in held_out] for name, some in rows.items()}
    return trained, {name: [row for row in some if row.id in held_out] for name, some in rows.items()}


def ids_by_question(rows: Rows) -> dict[str, set[str]]:
    """By each id, the ids of all rows of the same question.

    Rows that ask the same are one question, and so are rows with one id; through a third, two that have neither in
    common are, too.
    """
    same: dict[str, set[str]] = {}
    first: dict[str, str] = {}  # by the key of a question
    for row in (row for some in rows.values() for row in some):
        own = same.setdefault(row.id, {row.id})
        key = question_key(row.question)
        other = same[first.setdefault(key, row.id)] if key else own
        if other is own:
            continue
        fewer, more = sorted((own, other), key=len)
        more |= fewer
        for id in fewer:
            same[id] = more
    return same


@functools.lru_cache(maxsize=2)
def _shuffled(count: int, seed: str) -> tuple[int, ...]:
    """The numbers below `count`, shuffled. The last two orders are cached, because each step needs them."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return tuple(order)
