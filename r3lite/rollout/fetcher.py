"""Fetches documents on a thread of its own while other episodes go on.

When queries are sent and when documents are taken is counted in the engine's steps, never by the clock: which episodes
are decoded together, and so the last bit of every number, is the same in every run.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from r3lite.episode import Document, Question
from r3lite.rollout.sequence import Sequence

Retrieve = Callable[[list[tuple[Question, str]]], list[list[Document]]]
GATHER = 8  # steps for which queries are gathered, so that few are encoded together
PATIENCE = 16  # steps after which documents are taken, waiting for them if need be


class Fetcher:
    """Queries on their way, of sequences whose last step asks one."""

    def __init__(self, retrieve: Retrieve):
        self.retrieve = retrieve
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="retrieve")
        self.step = 0
        self.asking: list[Sequence] = []
        self.asked_at = 0  # step of the first of them
        self.sent: deque[tuple[int, list[Sequence], Future]] = deque()  # with the step when they are taken

    def __enter__(self) -> "Fetcher":
        return self

    def __exit__(self, *exception) -> None:
        self.worker.shutdown(cancel_futures=True)

    def ask(self, sequence: Sequence) -> None:
        if not self.asking:
            self.asked_at = self.step
        self.asking.append(sequence)

    def send(self, idle: bool) -> None:
        """At the end of a step: sends what was gathered, at once when nobody is at work."""
        if self.asking and (idle or self.step - self.asked_at >= GATHER):
            pairs = [(s.question, s.steps[-1].query) for s in self.asking]
            self.sent.append((self.step + PATIENCE, self.asking, self.worker.submit(self.retrieve, pairs)))
            self.asking = []
        self.step += 1

    def collect(self, idle: bool) -> list[tuple[Sequence, list[Document]]]:
        """At the start of a step: the documents that are due; the next ones in any case when nobody is at work."""
        found: list[tuple[Sequence, list[Document]]] = []
        while self.sent and (self.sent[0][0] <= self.step or (idle and not found)):
            _, sequences, future = self.sent.popleft()
            found += zip(sequences, future.result(), strict=True)
        return found
