"""Fetches documents on a thread of its own while other episodes go on.

When queries are sent and when documents are taken is counted in the engine's iterations, never by the clock: which
episodes are decoded together, and so the last bit of every number, is the same in every run.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from r3lite.core.episode import Document, Failure, Retrieve, retrieve_all
from r3lite.core.spans import Spans
from r3lite.rollout.sequence import Sequence

GATHER = 8  # iterations for which queries are gathered, so that few are encoded together
PATIENCE = 16  # iterations after which documents are taken, waiting for them if need be

Fetched = tuple[Sequence, list[list[Document]]]  # a sequence and the documents of each query that it waited for


class Fetcher:
    """The queries of sequences that wait for documents, all of a sequence's at the same time."""

    def __init__(self, retrieve: Retrieve, spans: Spans | None = None):
        self.retrieve, self.spans = retrieve, spans
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="retrieve")
        self.iteration = 0
        self.asking: list[Sequence] = []
        self.asked_at = 0  # iteration of the first of them
        self.sent: deque[tuple[int, Future]] = deque()  # with the iteration at which the result is taken

    def close(self) -> None:
        """Waits for the queries that are under way, and sends no other."""
        self.worker.shutdown(cancel_futures=True)

    def fetch(self, sequences: list[Sequence]) -> list[Fetched]:
        """Each sequence with the documents of each of its pending queries, by one call of each retriever.

        A query that failed has none, and its sequence says why.
        """
        asked = [(s.question, search) for s in sequences for search in s.pending]
        start = self.spans.now() if self.spans else 0
        of_query = iter(retrieve_all(self.retrieve, asked))
        if self.spans:
            self.spans.add("retrieve", "retriever", start, queries=len(asked))
        fetched = []
        for sequence in sequences:
            outcomes = [next(of_query) for _ in sequence.pending]
            for failed in (outcome for outcome in outcomes if isinstance(outcome, Failure)):
                sequence.failure = failed.reason
            fetched.append((sequence, [[] if isinstance(o, Failure) else o for o in outcomes]))
        return fetched

    def ask(self, sequence: Sequence) -> None:
        """Takes the pending queries of a sequence, to be sent with others."""
        if not self.asking:
            self.asked_at = self.iteration
        self.asking.append(sequence)

    def send(self, idle: bool) -> None:
        """At the end of an iteration: sends what was gathered, at once if no sequence is at work."""
        if self.asking and (idle or self.iteration - self.asked_at >= GATHER):
            self.sent.append((self.iteration + PATIENCE, self.worker.submit(self.fetch, self.asking)))
            self.asking = []
        self.iteration += 1

    @property
    def is_waiting(self) -> bool:
        """Whether the next documents have been asked for and are not there yet."""
        return bool(self.sent) and not self.sent[0][1].done()

    def collect(self, idle: bool) -> list[Fetched]:
        """At the start of an iteration: the documents that are due, or the next ones if no sequence is at work."""
        fetched: list[Fetched] = []
        while self.sent and (self.sent[0][0] <= self.iteration or (idle and not fetched)):
            fetched += self.sent.popleft()[1].result()
        return fetched
