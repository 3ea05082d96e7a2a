"""The random stream of an episode: one uniform number for each token that it keeps."""

import random
from collections import deque


class Uniforms:
    """A stream of uniform numbers in [0, 1), whose next ones can be seen before they are drawn."""

    def __init__(self, seed: str | int):
        self.source = random.Random(seed)
        self.seen: deque[float] = deque()

    def random(self) -> float:
        """Draws the next number."""
        return self.seen.popleft() if self.seen else self.source.random()

    def ahead(self, count: int) -> float:
        """Returns the number that `random` will return after so many others."""
        while len(self.seen) <= count:
            self.seen.append(self.source.random())
        return self.seen[count]
