"""How a command ends: 0 done, 1 a foreseeable failure, 2 a usage error, 130 Ctrl-C, 143 SIGTERM."""

from r3lite.core.errors import R3LiteError

DONE = 0
FAILED = 1  # cause and remedy are on stderr
USAGE = 2
INTERRUPTED = 130
TERMINATED = 143


class Terminated(BaseException):
    """Reports that SIGTERM arrived. Training loops catch it to save first, then raise it again."""


def terminate(signum, frame):
    """Handles SIGTERM."""
    raise Terminated


def check_status(status: int, cause: str, remedy: str = "") -> None:
    """Raises the exception that the exit status of a command stands for; nothing if the status is DONE.

    The exception is KeyboardInterrupt, Terminated or, for a failure, R3LiteError with `cause` and the status.
    """
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if status == TERMINATED:
        raise Terminated
    if status:
        raise R3LiteError(f"{cause} with status {status}", remedy, code="command-failed")
