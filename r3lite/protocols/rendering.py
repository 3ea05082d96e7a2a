"""Renders chat templates in a process of its own, which has a limit on time and on memory (render_process.py).

A chat template comes from a download, and nothing bounds what it computes: a loop in a loop, or `"a" * 10 ** 10`. One
process serves all templates of a command. It is started at the first request, which takes about a tenth of a second,
and again after a template had to be ended. Where the platform has no limit on a process's memory (Windows, macOS), the
limit on time is the only one.
"""

import atexit
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

SECONDS = 20.0  # for a request; a usual template takes milliseconds
START_SECONDS = 120.0  # for the first reply of a new process, which may have to read Python from a slow disk
MEMORY = 2**30  # bytes of the process
MAX_CHARACTERS = 50_000_000  # of a rendered text
PROGRAM = Path(__file__).with_name("render_process.py")


class RenderError(Exception):
    """A template that cannot be read or rendered; its text says why."""


class LimitExceeded(Exception):
    """A template that needs more time or memory than it may have; the text of the error says which."""


class Renderer:
    """The process, and the requests to it. Threads wait for one another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._replies: queue.SimpleQueue[str] = queue.SimpleQueue()  # "" at the end of the process
        # The id of the Python process that started the renderer. A fork of that process has another id, and must start
        # a renderer of its own.
        self._owner = 0
        atexit.register(self._stop)

    def render(self, source: str, variables: dict[str, Any] | None, day: str | None = None) -> str:
        """Returns the rendered text. If `variables` is None, the template is only compiled, and "" is returned.

        `day` is the date of the template's clock as YYYY-MM-DD. Raises RenderError or LimitExceeded if the template
        gives no text.
        """
        request = json.dumps({"source": source, "variables": variables, "day": day})
        with self._lock:
            try:
                reply = json.loads(self._reply(request))
            except BaseException:  # also at Ctrl-C: a late reply would be taken for the reply to the next request
                self._stop()
                raise
        error = reply.get("error")
        if error == "MemoryError":
            raise LimitExceeded(f"it needs more than {MEMORY >> 20} MiB of memory")
        if error == "TooLong":
            raise LimitExceeded(reply["message"])
        if error:
            raise RenderError(reply["message"] or error)
        return reply["text"]

    def _reply(self, request: str) -> str:
        """Returns the line of a reply to a request."""
        if not self._is_running():
            self._start()
        self._send(request)
        return self._line(SECONDS)

    def _is_running(self) -> bool:
        return self._process is not None and self._owner == os.getpid() and self._process.poll() is None

    def _send(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the process may have ended: `_line` raises for it
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def _line(self, seconds: float) -> str:
        """Returns the next line that the process writes."""
        try:
            line = self._replies.get(timeout=seconds)
        except queue.Empty:
            raise LimitExceeded(f"it takes more than {seconds:.0f} seconds") from None
        if not line:
            raise LimitExceeded("the process that renders it has ended, as it needs too much memory or time")
        return line

    def _start(self) -> None:
        """Starts the process, and waits until it takes requests."""
        self._owner = os.getpid()
        self._replies = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),  # of Windows
        )
        threading.Thread(target=_read, args=(self._process.stdout, self._replies), daemon=True).start()
        # After these seconds of computing the system ends the renderer, even if this process was killed meanwhile. They
        # are more than SECONDS, so that `_line` gives up first.
        processor_seconds = int(SECONDS) + 1
        limits = {"memory": MEMORY, "seconds": processor_seconds, "characters": MAX_CHARACTERS}
        self._send(json.dumps({"path": [path for path in sys.path if path], **limits}))
        self._line(START_SECONDS)

    def _stop(self) -> None:
        """Ends the renderer's process, if the calling process has started it."""
        process = self._process
        self._process = None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            process.stdin.close()


def _read(lines: IO[str], replies: queue.SimpleQueue[str]) -> None:
    """Passes on the lines of a process, and "" at its end."""
    with lines:
        for line in lines:
            replies.put(line)
    replies.put("")


RENDERER = Renderer()
