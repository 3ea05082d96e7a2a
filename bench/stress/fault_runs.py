"""A command run in a process of its own that a fault is done to at one of its moments.

Moments are counted: each change to a file under the folder (by Python's audit events), each fsync, each sampled token,
optimizer step, request and write of a cache. So a kill at moment N is the same in every run, and needs no luck to fall
between two writes. Processes are forked, since loading torch takes longer than all that they do: nothing here may
compute with torch before that. POSIX only.
"""

import contextlib
import ctypes
import errno
import importlib
import json
import os
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from r3lite.core.environment import spare_the_machine

ROOT = Path(__file__).parent.parent.parent
LONGEST = 400  # seconds of a run
THREADS = 1  # of PyTorch, in forked processes
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# Audit events, and how their arguments name a path: its place, and the place of the folder that it is relative to.
CHANGES = {"os.rename": (0, 2), "os.remove": (0, 1), "os.rmdir": (0, 1), "os.mkdir": (0, 2), "os.truncate": (0, None)}
# Functions that are moments themselves, by module, class and name, and what the moment is called.
CALLS = (
    ("r3lite.rollout.engine", "Engine", "_sample", "sample"),
    ("r3lite.training.state", "TrainState", "update", "update"),
    ("r3lite.llm.transport", "Calls", "run", "request"),
    ("r3lite.llm.client", "Client", "_count_and_store", "reply"),
    ("r3lite.retrieval.query_cache", "QueryCache", "_write", "cache"),
)
# Functions that write a file in another language: half of it may be there.
WRITERS = (
    ("r3lite.models.tensor_files", None, "save_file", "tensors"),
    ("r3lite.retrieval.building", None, "write_vectors", "vectors"),
    ("r3lite.retrieval.index", None, "write_vectors", "vectors"),
)


@dataclass(frozen=True)
class Fault:
    """What happens at moment `at`, counted from 0.

    kill: SIGKILL. torn: the same, and of the file that was last opened or written a part is there. full, readonly:
    from then on nothing can be written. pause: waits until the file `go` is there. clock: the time is a day earlier.
    """

    kind: str
    at: int
    seed: int = 0
    go: Path | None = None


@dataclass(frozen=True)
class Ended:
    """How a run ended; `status` is None if it was killed."""

    status: int | None
    said: str
    moments: list[tuple[str, str]]
    seconds: float

    @property
    def clear(self) -> bool:
        """Whether an end with an error is one that a user can read: status 1 or 2, one message, no traceback."""
        told = [line for line in self.said.splitlines() if line.startswith("r3lite.")]
        return self.status in (1, 2) and len(told) == 1 and "Traceback" not in self.said


def preload() -> None:
    """Imports what the commands need, so that forked processes have it."""
    spare_the_machine()
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
    for name in (
        "sft",
        "ppo",
        "collect",
        "index",
        "tune_prompt",
        "export",
        "prepare",
        "evaluate",
        "report",
        "retrieve",
    ):
        importlib.import_module(f"r3lite.{name}")
    more = ("supervised", "reinforcement", "collecting", "exporter", "evaluating", "prompt_tuner", "teacher")
    for name in [f"assembly.{n}" for n in more] + ["retrieval.building", "llm.gemini", "exporting.gguf"]:
        importlib.import_module(f"r3lite.{name}")
    for name, size in (("retrieval.building", 64), ("retrieval.index", 64), ("datasets.self_taught", 8)):
        importlib.import_module(f"r3lite.{name}").BLOCK = size  # several blocks also of what is small


@dataclass(frozen=True)
class Started:
    """A run under way."""

    pid: int
    log: Path
    began: float

    def wait(self) -> Ended:
        status = None
        while True:
            pid, code = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                status = os.waitstatus_to_exitcode(code)
                break
            if time.monotonic() - self.began > LONGEST:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                status = 124
                break
            time.sleep(0.005)
        said = self.log.read_text(encoding="utf-8", errors="replace")
        lines = self.log.with_suffix(".moments").read_text(encoding="utf-8").splitlines()
        seconds = time.monotonic() - self.began
        return Ended(
            None if status == -signal.SIGKILL else status, said, [tuple(json.loads(x)) for x in lines], seconds
        )

    def kill(self) -> None:
        """SIGKILL, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def start(command: str, arguments: list[str], place: Path, log: Path, fault: Fault | None = None, plain: bool = False):
    """Starts a command whose changes under `place` are its moments; `plain`: root's, too, obeys the modes of files."""
    for path in (log, log.with_suffix(".moments")):
        path.write_text("")
        path.chmod(0o666)
    sys.stdout.flush()
    sys.stderr.flush()
    began = time.monotonic()
    pid = os.fork()
    if pid:
        return Started(pid, log, began)
    status = 99
    try:
        out = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(ROOT)
        if plain:
            drop_capabilities()
        sys.modules["torch"].set_num_threads(THREADS)
        moments = Moments(place, log.with_suffix(".moments"), fault)
        module = importlib.import_module(f"r3lite.{command}")
        moments.watch()
        status = module.main(arguments)
    except BaseException:
        traceback.print_exc()
        status = 98
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def run(
    command: str, arguments: list[str], place: Path, log: Path, fault: Fault | None = None, plain: bool = False
) -> Ended:
    return start(command, arguments, place, log, fault, plain).wait()


class Moments:
    """The moments of this process: written down, and the fault done at its one."""

    def __init__(self, place: Path, log: Path, fault: Fault | None):
        self.place, self.fault = f"{place}{os.sep}", fault
        self.log = os.open(log, os.O_WRONLY | os.O_APPEND)
        self.count, self.active, self.broken = 0, True, False
        self.opened: tuple[str, int] | None = None  # the file that the last moment opened to write, and its size then
        self.rng = random.Random(fault.seed if fault else 0)

    def watch(self) -> None:
        for module, owner, name, kind in CALLS:
            self._wrap(module, owner, name, kind)
        for module, owner, name, kind in WRITERS:
            self._wrap(module, owner, name, kind, writes=True)
        sync = os.fsync

        def fsync(descriptor):
            self.moment("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
            sync(descriptor)

        os.fsync = fsync
        sys.addaudithook(self._audit)

    def _wrap(self, module: str, owner: str | None, name: str, kind: str, writes: bool = False) -> None:
        holder = importlib.import_module(module)
        holder = getattr(holder, owner) if owner else holder
        work = getattr(holder, name)

        def wrapped(*arguments, **named):
            if not writes:
                self.moment(kind, "", everywhere=True)
                return work(*arguments, **named)
            path = os.fspath(arguments[1])
            self.moment(kind, path)
            found = work(*arguments, **named)
            self.opened = (path, 0)
            self.moment(f"{kind}, written", path)
            return found

        setattr(holder, name, wrapped)

    def _audit(self, event: str, arguments: tuple) -> None:
        if event == "open":
            path, mode, flags = arguments
            if isinstance(path, int) or not (flags or 0) & WRITES:
                return
            self.moment("open", os.fsdecode(path), opens=str(mode))
        elif event in CHANGES:
            place, folder = CHANGES[event]
            path = arguments[place]
            if isinstance(path, int):
                return
            path = os.fsdecode(path)
            if folder is not None and arguments[folder] != -1 and not os.path.isabs(path):
                path = os.path.join(os.readlink(f"/proc/self/fd/{arguments[folder]}"), path)
            self.moment(event.removeprefix("os."), path)

    def moment(self, kind: str, path: str, everywhere: bool = False, opens: str | None = None) -> None:
        """Counts a moment, before what it is of is done."""
        path = os.path.abspath(path) if path else ""
        if not self.active or not (everywhere or path.startswith(self.place)):
            return
        self.active = False
        try:
            os.write(self.log, (json.dumps([kind, path.removeprefix(self.place)]) + "\n").encode())
            number, self.count = self.count, self.count + 1
            if self.fault and number == self.fault.at:
                self._happen()
            self.opened = None
            if opens is not None and "+" not in opens:
                there = os.path.getsize(path) if os.path.exists(path) and "a" in opens else 0
                self.opened = (path, there)
        finally:
            self.active = True
        if self.broken and (opens or kind not in ("sample", "update", "request", "reply", "remove", "rmdir")):
            if self.fault.kind == "full":  # as of writing and flushing, which name no path
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)

    def _happen(self) -> None:
        kind = self.fault.kind
        if kind == "torn" and self.opened and os.path.exists(self.opened[0]):
            path, before = self.opened
            os.truncate(path, self.rng.randint(min(before, os.path.getsize(path)), os.path.getsize(path)))
        if kind in ("kill", "torn"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind in ("full", "readonly"):
            self.broken = True
        elif kind == "locked":
            for folder, _, _ in os.walk(self.place):
                os.chmod(folder, 0o555)
        elif kind == "pause":
            end = time.monotonic() + LONGEST
            while not self.fault.go.exists() and time.monotonic() < end:
                time.sleep(0.01)
        elif kind == "clock":
            put_back()


def drop_capabilities() -> None:
    """Root may write where modes forbid it, until this."""
    libc, header = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(0x20080522, 0)
    if libc.capset(header, (ctypes.c_uint32 * 6)()):
        raise OSError(ctypes.get_errno(), "capset")


def put_back(seconds: float = 86400.0) -> None:
    """The clock of this process jumps back; a monotonic one does not."""
    now, now_ns = time.time, time.time_ns
    time.time, time.time_ns = lambda: now() - seconds, lambda: now_ns() - int(seconds * 1e9)


def classes(moments: list[tuple[str, str]]) -> dict[tuple[str, str], list[int]]:
    """Moments by what they are of: numbers in names count for nothing."""
    found: dict[tuple[str, str], list[int]] = {}
    for i, (kind, name) in enumerate(moments):
        found.setdefault((kind, re.sub(r"[0-9a-f]{64}|\d+|(?<=\.)[a-z0-9_]{8}(?=/)", "#", name)), []).append(i)
    return found


def chosen(moments: list[tuple[str, str]], count: int, rng: random.Random) -> Iterator[int]:
    """Moments to do a fault at: one of each class in random order, then anew."""
    groups = list(classes(moments).values())
    while groups and count > 0:
        rng.shuffle(groups)
        for group in groups[:count]:
            yield rng.choice(group)
        count -= len(groups)
