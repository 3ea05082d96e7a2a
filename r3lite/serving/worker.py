"""The thread that answers, and the jobs that it and the server's event loop share.

The event loop submits jobs and awaits their events; the thread answers all jobs at the same time. If a client stops
waiting, its job is stopped at the next token.
"""

import asyncio
import queue
import sys
import threading
import traceback
from typing import Any

from r3lite.serving.asks import Answering, Ask, ServedAnswer


class Job:
    """An ask that is answered. Made and awaited on the event loop."""

    def __init__(self, ask: Ask):
        self.ask = ask
        self.prepared: Any = None
        self.stopped = False  # set on the event loop, read on the thread
        self._loop = asyncio.get_running_loop()
        # The progress, then the answer. None instead of the answer: an error in the server, which is in its log.
        self.events: asyncio.Queue[dict[str, Any] | ServedAnswer | None] = asyncio.Queue()

    def put(self, event: dict[str, Any] | ServedAnswer | None) -> None:
        """Adds an event; may be called on any thread."""
        if not self.stopped:
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)


class AnsweringThread:
    """Answers jobs on a thread of its own, and begins them in the order in which they are submitted."""

    def __init__(self, answering: Answering):
        self.answering = answering
        self._incoming: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}  # by the id() of `prepared`
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._incoming.put(job)

    def close(self) -> None:
        """Drops what is not finished and ends the thread."""
        self._incoming.put(None)
        self._thread.join()

    def _run(self) -> None:
        while self._join_incoming():
            for job in self._jobs.values():
                if job.stopped:
                    self.answering.leave(job.prepared)
            try:
                finished = self.answering.iterate()
            except Exception:  # whatever it is, the next jobs are to be answered
                traceback.print_exc(file=sys.stderr)
                for job in self._jobs.values():
                    job.put(None)
                self._jobs.clear()
                self.answering.restart()
                continue
            for prepared, answer in finished:
                self._jobs.pop(id(prepared)).put(answer)
        self.answering.close()

    def _join_incoming(self) -> bool:
        """Begins the jobs that were submitted; if none is under way, waits for one.

        Returns False if the thread must end.
        """
        while not self._jobs or not self._incoming.empty():
            job = self._incoming.get()
            if job is None:
                return False
            if not job.stopped:
                self._jobs[id(job.prepared)] = job
                self.answering.join(job.prepared)
        return True
