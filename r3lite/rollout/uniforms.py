"""The random stream of an episode: one uniform number for each token that it keeps."""

import random
from collections import deque


class Uniforms(random.Random):
    """The random stream of an episode, whose next numbers can be seen before they are drawn."""

    def __init__(self, seed: str | int):
        self.seen: deque[float] = deque()
        super().__init__(seed)

    def random(self) -> float:
        return self.seen.popleft() if self.seen else super().random()

    def ahead(self, count: int) -> float:
        """Returns the number that `random` will return after so many others."""
        while len(self.seen) <= count:
            self.seen.append(super().random())
        return self.seen[count]
