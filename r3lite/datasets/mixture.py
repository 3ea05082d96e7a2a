"""Which row each draw of a run takes if the rows are of several sources: by weight, from random streams of their own.

Knows no rows, only how many each source has.
"""

import math
import random
from array import array
from collections.abc import Sequence
from itertools import accumulate


class Mixture:
    """Draw 0, 1, ... takes a source at random by the weights, and of that the next row of a pass over it.

    Each pass over a source is shuffled anew. All of it follows from the seed, the sizes and the weights: a run that is
    resumed asks for a later draw first and finds the row that it would have found.
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
            self._rows.append(self._draw())
        return self._rows[start:stop].tolist()

    def _draw(self) -> int:
        (source,) = self._choices.choices(range(len(self.sizes)), self.weights)
        count, place = divmod(self._taken[source], self.sizes[source])
        if place == 0:
            self._passes[source] = list(range(self.starts[source], self.starts[source + 1]))
            random.Random(f"{self.seed}/source {source}/{count}").shuffle(self._passes[source])
        self._taken[source] += 1
        return self._passes[source][place]

    def shuffled(self, stream: str) -> list[int]:
        """All rows in a random order in which a source's rows come early by its weight.

        Drawn one by one without replacement, a row with its source's weight over its size (Efraimidis and Spirakis
        2006, doi 10.1016/j.ipl.2005.11.003).
        """
        draw = random.Random(stream)
        weighed = zip(self.sizes, self.weights, strict=True)
        keys = [math.log(1 - draw.random()) * size / weight for size, weight in weighed for _ in range(size)]
        return sorted(range(len(keys)), key=keys.__getitem__, reverse=True)
