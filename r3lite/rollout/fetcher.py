"""Fetches documents on a thread of its own while other sequences run.

Queries are sent, and documents are taken, after fixed numbers of the engine's iterations and never by the clock. So
the same sequences are decoded together in every run, and results are equal to the last bit. The server is an exception:
it skips an adapter whose sequences all wait, until their documents have come, and so depends on the clock (lanes.py).
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from r3lite.core.episode import Document, Failure, Retrieve, retrieve_all
from r3lite.core.spans import NO_SPANS, Spans
from r3lite.rollout.sequence import Sequence

GATHER = 8  # iterations for which queries are queued, so that they are encoded together
PATIENCE = 16  # iterations from sending queries to taking their documents; if they have not come, the engine waits

Fetched = tuple[Sequence, list[list[Document]]]  # a sequence, and the documents of each of its pending queries


class Fetcher:
    """Collects the pending queries of sequences, and retrieves their documents in batches."""

    def __init__(self, retrieve: Retrieve, spans: Spans = NO_SPANS):
        self.retrieve = retrieve
        self.spans = spans
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="retrieve")
        self.iteration = 0
        self.queued: list[Sequence] = []
        self.queued_since = 0  # iteration at which the first of `queued` was queued
        # Batches of queries that were sent, oldest first: the iteration at which a batch's documents are due, and a
        # future of list[Fetched].
        self.in_flight: deque[tuple[int, Future]] = deque()

    def close(self) -> None:
        """Waits for the batch that is being retrieved, and drops the batches sent after it."""
        self.worker.shutdown(cancel_futures=True)

    def fetch(self, sequences: list[Sequence]) -> list[Fetched]:
        """Returns each sequence with the documents of each of its pending queries. Calls each retriever at most once.

        A query that fails gets no documents, and the reason is written to its sequence's `failure`.
        """
        queries = [(s.question, search) for s in sequences for search in s.pending]
        start = self.spans.now()
        outcomes = retrieve_all(self.retrieve, queries)
        self.spans.add("retrieve", "retriever", start, queries=len(queries))
        fetched = []
        first = 0  # index of the sequence's first query among all queries
        for sequence in sequences:
            stop = first + len(sequence.pending)
            documents: list[list[Document]] = []  # a list for each query of the sequence
            for outcome in outcomes[first:stop]:
                if isinstance(outcome, Failure):
                    sequence.failure = outcome.reason  # if several queries fail, the last reason stays
                    documents.append([])
                else:
                    documents.append(outcome)
            fetched.append((sequence, documents))
            first = stop
        return fetched

    def queue(self, sequence: Sequence) -> None:
        """Queues the pending queries of a sequence; `end_iteration` sends them together with others."""
        if not self.queued:
            self.queued_since = self.iteration
        self.queued.append(sequence)

    def end_iteration(self, idle: bool) -> None:
        """Counts the iteration, and sends the queued queries if the first of them has waited for GATHER iterations.

        `idle` means that no sequence is running; then the queued queries are sent at once.
        """
        if self.queued and (idle or self.iteration - self.queued_since >= GATHER):
            future = self.worker.submit(self.fetch, self.queued)
            self.in_flight.append((self.iteration + PATIENCE, future))
            self.queued = []
        self.iteration += 1

    @property
    def is_waiting(self) -> bool:
        """True if the oldest batch that was sent is still being retrieved."""
        if not self.in_flight:
            return False
        _, future = self.in_flight[0]
        return not future.done()

    def collect(self, idle: bool) -> list[Fetched]:
        """Returns the documents that are due at the beginning of an iteration; waits for them if they have not come.

        `idle` means that no sequence is running; then at least the oldest batch is returned, even before it is due.
        """
        fetched: list[Fetched] = []
        while self.in_flight:
            due, future = self.in_flight[0]
            is_due = due <= self.iteration
            is_needed = idle and not fetched
            if not (is_due or is_needed):
                break
            self.in_flight.popleft()
            fetched += future.result()
        return fetched
