"""The random stream of an episode: one uniform number for each token that it keeps."""

import random
from collections import deque


class Uniforms:
    """A stream of uniform numbers in [0, 1). The next numbers can be looked at before they are drawn."""

    def __init__(self, seed: str | int):
        self.source = random.Random(seed)
        self.seen: deque[float] = deque()

    def drop(self) -> None:
        """Takes the next number out of the stream, because the token that was sampled with this number is kept."""
        if self.seen:
            self.seen.popleft()
        else:
            self.source.random()

    def ahead(self, count: int) -> float:
        """Returns the number that will be next once `count` numbers are dropped, and leaves it in the stream."""
        while len(self.seen) <= count:
            self.seen.append(self.source.random())
        return self.seen[count]
