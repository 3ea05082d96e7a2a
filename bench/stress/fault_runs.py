"""Runs a command in a forked process and injects a fault (kill, full disk, ...) at a chosen moment of the run.

Moments are events that are counted from 0. In the watched folder they are fsync and each opening of a file for writing,
renaming, removal and the like (seen by Python's audit events or, for native code, by wrapped functions). Everywhere
they are each batch of sampled tokens, optimizer step, request to a server, reply from it and write of query vectors. A
kill at moment N thus hits the same point of every run, and can fall between two writes without luck.

Commands run in forks of this process, because importing torch takes longer than the commands themselves. Nothing may
compute with torch before the fork: PyTorch's threads do not exist in the child. POSIX only.
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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from r3lite.core.environment import spare_the_machine
from r3lite.devices import speed
from r3lite.devices.cards import MEASURED, Speeds

ROOT = Path(__file__).parent.parent.parent
RUN_LIMIT = 400  # seconds after which a run is killed, and after which a paused run continues
POLL_INTERVAL = 0.005  # seconds between two checks of whether a run has ended
ONE_DAY = 86_400.0  # seconds
THREADS = 1  # PyTorch threads of a forked process

# Exit statuses of a run that the command itself did not choose.
TIMED_OUT = 124  # the run took longer than RUN_LIMIT
RAISED = 98  # the command raised an exception; its traceback is in the output
RAISED_SILENTLY = 99  # the command raised an exception, and its traceback could not be printed

COMMANDS = ("sft", "ppo", "collect", "index", "tune_prompt", "export", "prepare", "evaluate", "report", "retrieve")
# Modules that the commands import inside functions.
LATE_IMPORTS = (
    "assembly.supervised",
    "assembly.reinforcement",
    "assembly.collecting",
    "assembly.exporter",
    "assembly.evaluating",
    "assembly.prompt_tuner",
    "assembly.teacher",
    "retrieval.building",
    "llm.gemini",
    "exporting.gguf",
)
# Modules that process data in blocks, and a block size so small that the test data fill several blocks.
BLOCK_SIZES = (("retrieval.building", 64), ("retrieval.index", 64), ("datasets.self_taught", 8))

WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT  # a file opened with one of them may be changed
# Audit events that change files: (path_index, dir_fd_index) say which argument is the path, and which is the descriptor
# of the folder that a relative path starts from (None: the event has no such argument).
PATH_EVENTS = {
    "os.rename": (0, 2),
    "os.remove": (0, 1),
    "os.rmdir": (0, 1),
    "os.mkdir": (0, 2),
    "os.truncate": (0, None),
}
NO_DIR_FD = -1  # an audit event passes it if the caller named no folder
# Functions whose calls are moments: module, class, function, kind of the moment.
CALLS = (
    ("r3lite.rollout.engine", "Engine", "_sample", "sample"),
    ("r3lite.training.state", "TrainState", "update", "update"),
    ("r3lite.llm.transport", "Calls", "run", "request"),
    ("r3lite.llm.client", "Client", "_count_and_store", "reply"),
    ("r3lite.retrieval.query_cache", "QueryCache", "_write", "cache"),
)
# Functions that write a file from native code (Rust, C++), in the same form as CALLS. These writes raise no audit
# events, and a kill can leave half of the file. The file's path is the second argument.
NATIVE_WRITERS = (
    ("r3lite.models.tensor_files", None, "save_file", "tensors"),
    ("r3lite.retrieval.building", None, "write_vectors", "vectors"),
    ("r3lite.retrieval.index", None, "write_vectors", "vectors"),
)
# Kinds of moments that work without free disk space: the first four write no file themselves (each file that is opened
# meanwhile is a moment of its own), the others free space.
NEED_NO_SPACE = ("sample", "update", "request", "reply", "remove", "rmdir")

CAPABILITY_VERSION_3 = 0x20080522  # _LINUX_CAPABILITY_VERSION_3 of linux/capability.h
THIS_PROCESS = 0  # as a process id of capset


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and at which moment (counted from 0) of the run.

    Kinds:
        kill: SIGKILL.
        torn: SIGKILL, after the file that the previous moment opened or wrote was truncated at a random length.
        full: from this moment on, writes fail as on a full disk (ENOSPC). Removing files still works.
        readonly: from this moment on, writes fail for lack of permission (EACCES). Removing files still works.
        locked: all folders become read-only by chmod. That stops root only in an unprivileged run.
        pause: the run waits until `resume_file` exists, at most RUN_LIMIT seconds.
        clock: the wall clock of the process jumps back by one day.
    """

    kind: str
    moment: int
    seed: int = 0  # of the random length of a torn file
    resume_file: Path | None = None


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    status: int | None  # exit status; None if the run was killed by SIGKILL, TIMED_OUT if it took too long
    output: str  # stdout and stderr together
    moments: list[tuple[str, str]]  # (kind, path relative to the watched folder) of each moment
    seconds: float

    @property
    def is_clear_error(self) -> bool:
        """Whether the run ended with an error for users: status 1 or 2, one message, no traceback."""
        messages = [line for line in self.output.splitlines() if line.startswith("r3lite.")]
        return self.status in (1, 2) and len(messages) == 1 and "Traceback" not in self.output


def preload() -> None:
    """Imports all modules that the commands need, so that forked processes have them already."""
    spare_the_machine()
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
    for name in (*COMMANDS, *LATE_IMPORTS):
        importlib.import_module(f"r3lite.{name}")
    for name, size in BLOCK_SIZES:
        importlib.import_module(f"r3lite.{name}").BLOCK = size
    speed.measure = _unmeasured  # each forked process would measure the machine anew


def _unmeasured(device: torch.device, product: speed.Product, dtypes: Iterable[str]) -> Speeds:
    """Returns figures as `speed.measure` does, but the same for every machine."""
    figures = dict.fromkeys(dtypes, 1e10)
    return Speeds(name="any", bandwidth=figures, flops=figures, launch=1e-5, source=MEASURED)


@dataclass(frozen=True)
class ActiveRun:
    """A forked process that runs a command."""

    pid: int
    log: Path  # file of its output
    start_time: float  # time.monotonic() at the fork

    def wait(self) -> RunResult:
        """Returns the result once the process has ended; kills it after RUN_LIMIT seconds."""
        while True:
            pid, wait_status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                status = os.waitstatus_to_exitcode(wait_status)
                break
            if time.monotonic() - self.start_time > RUN_LIMIT:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                status = TIMED_OUT
                break
            time.sleep(POLL_INTERVAL)
        output = self.log.read_text(encoding="utf-8", errors="replace")
        lines = moments_file(self.log).read_text(encoding="utf-8").splitlines()
        return RunResult(
            status=None if status == -signal.SIGKILL else status,
            output=output,
            moments=[tuple(json.loads(line)) for line in lines],
            seconds=time.monotonic() - self.start_time,
        )

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended; its status is still there for `wait`."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill(self) -> None:
        """Sends SIGKILL, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def moments_file(log: Path) -> Path:
    """Returns the file beside a log that has one line for each moment of the run."""
    return log.with_suffix(".moments")


def start(
    command: str, arguments: list[str], folder: Path, log: Path, fault: Fault | None = None, unprivileged: bool = False
) -> ActiveRun:
    """Starts a command in a forked process; changes to files in `folder` are moments of the run.

    An unprivileged run drops root's privileges, so that file modes bind it as they bind every other user.
    """
    for path in (log, moments_file(log)):
        path.write_text("")
        path.chmod(0o666)  # an unprivileged run must be able to open it
    sys.stdout.flush()
    sys.stderr.flush()
    start_time = time.monotonic()
    pid = os.fork()
    if pid:
        return ActiveRun(pid, log, start_time)

    # From here on this is the child. It must leave by os._exit, else it would go on as a second bench.
    status = RAISED_SILENTLY
    try:
        output = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(ROOT)
        if unprivileged:
            drop_privileges()
        sys.modules["torch"].set_num_threads(THREADS)
        watcher = MomentWatcher(folder, moments_file(log), fault)
        module = importlib.import_module(f"r3lite.{command}")
        watcher.watch()
        status = module.main(arguments)
    except BaseException:
        traceback.print_exc()
        status = RAISED
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def run(
    command: str, arguments: list[str], folder: Path, log: Path, fault: Fault | None = None, unprivileged: bool = False
) -> RunResult:
    """Runs a command to its end; for the parameters see `start`."""
    active = start(command, arguments, folder=folder, log=log, fault=fault, unprivileged=unprivileged)
    return active.wait()


class MomentWatcher:
    """Logs the moments of this process, and injects a fault at one of them."""

    def __init__(self, folder: Path, log: Path, fault: Fault | None):
        self.prefix = f"{folder}{os.sep}"  # of the paths of watched files
        self.fault = fault
        self.log = os.open(log, os.O_WRONLY | os.O_APPEND)
        self.count = 0  # moments so far
        self.active = True  # False while a moment is handled: the handling itself causes no moments
        self.writes_fail = False  # since a fault `full` or `readonly`
        # Path of the file that the last moment opened for writing, and its size at that time: a torn file keeps at
        # least that much. None if the last moment opened no file.
        self.open_file: tuple[str, int] | None = None
        self.rng = random.Random(fault.seed if fault else 0)

    def watch(self) -> None:
        """Watches this process from now on; there is no way to stop."""
        for module, owner, name, kind in CALLS:
            self._wrap(module, owner=owner, name=name, kind=kind, writes_file=False)
        for module, owner, name, kind in NATIVE_WRITERS:
            self._wrap(module, owner=owner, name=name, kind=kind, writes_file=True)
        real_fsync = os.fsync

        def fsync(descriptor):
            self.moment("fsync", _path_of_descriptor(descriptor))
            real_fsync(descriptor)

        os.fsync = fsync
        sys.addaudithook(self._audit)

    def _wrap(self, module: str, owner: str | None, name: str, kind: str, writes_file: bool) -> None:
        """Replaces a function by one that counts a moment and then calls it.

        A native writer has a second moment after its call, at which the complete file can be torn.
        """
        holder = importlib.import_module(module)
        if owner:
            holder = getattr(holder, owner)
        function = getattr(holder, name)

        def counted_call(*arguments, **keywords):
            self.moment(kind, "", everywhere=True)
            return function(*arguments, **keywords)

        def counted_write(*arguments, **keywords):
            path = os.fspath(arguments[1])
            self.moment(kind, path)
            result = function(*arguments, **keywords)
            self.open_file = (path, 0)
            self.moment(f"{kind}, written", path)
            return result

        setattr(holder, name, counted_write if writes_file else counted_call)

    def _audit(self, event: str, arguments: tuple) -> None:
        """Counts a moment for each audit event that changes a file."""
        if event == "open":
            path, mode, flags = arguments
            if isinstance(path, int) or not (flags or 0) & WRITE_FLAGS:
                return
            self.moment("open", os.fsdecode(path), open_mode=str(mode))
        elif event in PATH_EVENTS:
            path_index, dir_fd_index = PATH_EVENTS[event]
            path = arguments[path_index]
            if isinstance(path, int):
                return
            path = os.fsdecode(path)
            dir_fd = NO_DIR_FD if dir_fd_index is None else arguments[dir_fd_index]
            if dir_fd != NO_DIR_FD and not os.path.isabs(path):
                path = os.path.join(_path_of_descriptor(dir_fd), path)
            self.moment(event.removeprefix("os."), path)

    def moment(self, kind: str, path: str, everywhere: bool = False, open_mode: str | None = None) -> None:
        """Counts a moment just before its action takes place; raises OSError if a fault makes that action fail.

        A path outside of the watched folder is no moment, unless `everywhere`. `open_mode` is the mode of open(), such
        as "wb", if the action is to open a file for writing; "None" if it is opened by os.open().
        """
        path = os.path.abspath(path) if path else ""
        if not self.active or not (everywhere or path.startswith(self.prefix)):
            return
        self.active = False
        try:
            os.write(self.log, (json.dumps([kind, path.removeprefix(self.prefix)]) + "\n").encode())
            number = self.count
            self.count += 1
            if self.fault and number == self.fault.moment:
                self._inject()
            self.open_file = None
            # A mode with "+" updates a file in place. A kill does not shorten such a file, so it is never torn.
            if open_mode is not None and "+" not in open_mode:
                size = os.path.getsize(path) if os.path.exists(path) and "a" in open_mode else 0
                self.open_file = (path, size)
        finally:
            self.active = True
        if self.writes_fail and kind not in NEED_NO_SPACE:
            if self.fault.kind == "full":  # without a path: errors of write and flush name none
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)

    def _inject(self) -> None:
        """Injects the fault; see `Fault` for the kinds."""
        kind = self.fault.kind
        if kind == "torn" and self.open_file and os.path.exists(self.open_file[0]):
            path, size_before = self.open_file
            size = os.path.getsize(path)
            os.truncate(path, self.rng.randint(min(size_before, size), size))
        if kind in ("kill", "torn"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind in ("full", "readonly"):
            self.writes_fail = True
        elif kind == "locked":
            for folder, _, _ in os.walk(self.prefix):
                os.chmod(folder, 0o555)
        elif kind == "pause":
            end = time.monotonic() + RUN_LIMIT
            while not self.fault.resume_file.exists() and time.monotonic() < end:
                time.sleep(0.01)
        elif kind == "clock":
            set_clock_back()


def _path_of_descriptor(descriptor: int) -> str:
    """Returns the path of an open file or folder (Linux)."""
    return os.readlink(f"/proc/self/fd/{descriptor}")


def drop_privileges() -> None:
    """Gives up all capabilities of this process: from then on file modes bind root, too."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, THIS_PROCESS)
    no_capabilities = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable ones, twice 32 bits each
    if libc.capset(header, no_capabilities):
        raise OSError(ctypes.get_errno(), "capset")


def set_clock_back(seconds: float = ONE_DAY) -> None:
    """Sets back time.time and time.time_ns of this process. time.monotonic goes on, as after a real change."""
    real_time = time.time
    real_time_ns = time.time_ns
    time.time = lambda: real_time() - seconds
    time.time_ns = lambda: real_time_ns() - int(seconds * 1e9)


def group_by_class(moments: list[tuple[str, str]]) -> dict[tuple[str, str], list[int]]:
    """Returns the numbers of the moments of each class.

    Moments are of one class if kind and path agree. Digests, numbers and random parts of temporary names in the path
    are replaced by "#", so that checkpoint-1 and checkpoint-2 count as the same.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for number, (kind, path) in enumerate(moments):
        pattern = re.sub(r"[0-9a-f]{64}|\d+|(?<=\.)[a-z0-9_]{8}(?=/)", "#", path)
        groups.setdefault((kind, pattern), []).append(number)
    return groups


def draw_moments(moments: list[tuple[str, str]], count: int, rng: random.Random) -> Iterator[int]:
    """Draws the numbers of `count` moments: a random one of each class, in random order, then the same again.

    A file with a thousand writes thus gets no more faults than a file with one.
    """
    groups = list(group_by_class(moments).values())
    while groups and count > 0:
        rng.shuffle(groups)
        for group in groups[:count]:
            yield rng.choice(group)
        count -= len(groups)
