"""The random stream of an episode: each appended token was sampled with the next uniform number of the stream."""

import random
from collections import deque


class Uniforms:
    """A stream of uniform numbers in [0, 1), whose next numbers can be read before they are removed."""

    def __init__(self, seed: str | int):
        self.source = random.Random(seed)
        self.buffer: deque[float] = deque()  # the next numbers of the stream, already drawn from `source`

    def advance(self) -> None:
        """Removes the next number from the stream, after the token that was sampled with it has been appended."""
        if self.buffer:
            self.buffer.popleft()
        else:
            self.source.random()

    def peek(self, count: int) -> float:
        """Returns the number that will be next after `count` calls of `advance`, and leaves it in the stream."""
        while len(self.buffer) <= count:
            self.buffer.append(self.source.random())
        return self.buffer[count]
