"""Fetches documents on a thread of its own while other sequences run.

Queries are sent and documents are taken after fixed numbers of the engine's iterations, never by the clock. So the
same sequences are decoded together in every run, and results are equal to the last bit. The server is different: it
goes on with other requests until documents have come (lanes.py).
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from r3lite.core.episode import Document, Failure, Retrieve, retrieve_all
from r3lite.core.spans import NO_SPANS, Spans
from r3lite.rollout.sequence import Sequence

GATHER = 8  # iterations for which queries are gathered, to be encoded together
PATIENCE = 16  # iterations after which documents are taken, and waited for if they have not come

Fetched = tuple[Sequence, list[list[Document]]]  # a sequence, and the documents of each of its pending queries


class Fetcher:
    """Collects the pending queries of sequences, and retrieves their documents in batches."""

    def __init__(self, retrieve: Retrieve, spans: Spans = NO_SPANS):
        self.retrieve = retrieve
        self.spans = spans
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="retrieve")
        self.iteration = 0
        self.queued: list[Sequence] = []
        self.queued_since = 0  # iteration at which the first of them was queued
        # Batches of queries that are being retrieved, oldest first: the iteration by which a batch is due, its result.
        self.in_flight: deque[tuple[int, Future]] = deque()

    def close(self) -> None:
        """Waits for the batch that is being retrieved, and drops those behind it."""
        self.worker.shutdown(cancel_futures=True)

    def fetch(self, sequences: list[Sequence]) -> list[Fetched]:
        """Returns each sequence with the documents of each of its pending queries, by one call of each retriever.

        A query that fails gets no documents, and the reason becomes its sequence's `failure`.
        """
        queries = [(s.question, search) for s in sequences for search in s.pending]
        start = self.spans.now()
        outcomes = retrieve_all(self.retrieve, queries)
        self.spans.add("retrieve", "retriever", start, queries=len(queries))
        fetched = []
        first = 0  # index of the sequence's first query
        for sequence in sequences:
            stop = first + len(sequence.pending)
            documents: list[list[Document]] = []  # of each query
            for outcome in outcomes[first:stop]:
                if isinstance(outcome, Failure):
                    sequence.failure = outcome.reason  # if several fail, that of the last one
                    documents.append([])
                else:
                    documents.append(outcome)
            fetched.append((sequence, documents))
            first = stop
        return fetched

    def ask(self, sequence: Sequence) -> None:
        """Queues the pending queries of a sequence, to be sent with others."""
        if not self.queued:
            self.queued_since = self.iteration
        self.queued.append(sequence)

    def send(self, idle: bool) -> None:
        """Ends an iteration: sends the queued queries if the first of them has waited for GATHER iterations.

        If `idle`, no sequence is running, and they are sent at once.
        """
        if self.queued and (idle or self.iteration - self.queued_since >= GATHER):
            result = self.worker.submit(self.fetch, self.queued)
            self.in_flight.append((self.iteration + PATIENCE, result))
            self.queued = []
        self.iteration += 1

    @property
    def is_waiting(self) -> bool:
        """True if the next batch of documents has been sent for and has not come yet."""
        if not self.in_flight:
            return False
        _, result = self.in_flight[0]
        return not result.done()

    def collect(self, idle: bool) -> list[Fetched]:
        """Begins an iteration: returns the documents that are due, and waits for them.

        If `idle`, no sequence is running, and the next documents are returned though they are not due.
        """
        fetched: list[Fetched] = []
        while self.in_flight:
            due, result = self.in_flight[0]
            is_due = due <= self.iteration
            is_needed = idle and not fetched
            if not (is_due or is_needed):
                break
            self.in_flight.popleft()
            fetched += result.result()
        return fetched
