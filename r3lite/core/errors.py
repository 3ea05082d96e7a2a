"""The exceptions that a user should see, and messages for a misspelled name or a missing package."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class R3LiteError(Exception):
    """A foreseeable failure: what went wrong, and what the user can do about it.

    Commands print both lines without a traceback and exit with status 1.
    """

    def __init__(self, cause: str, remedy: str = ""):
        super().__init__(f"{cause}\n  {remedy}" if remedy else cause)
        self.cause = cause
        self.remedy = remedy


class UsageError(Exception):
    """A bad flag, key or value: one line, exit status 2."""


class NotFinite(R3LiteError):
    """Numbers of the model are inf or nan. A run that has a good checkpoint can go back to it."""


def nearest(word: str, names: Iterable[str]) -> str:
    """` (did you mean X?)`, or nothing."""
    close = difflib.get_close_matches(word, list(names), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


@contextlib.contextmanager
def explained(kinds: type[Exception] | tuple[type[Exception], ...], cause: str, remedy: str) -> Iterator[None]:
    """Turns exceptions of these kinds into an R3LiteError: `cause`, followed by their message, and `remedy`."""
    try:
        yield
    except kinds as error:
        message = error.cause if isinstance(error, R3LiteError) else " ".join(str(error).split())[:300]
        raise R3LiteError(f"{cause}: {message or type(error).__name__}", remedy) from error


@contextlib.contextmanager
def extra(name: str, what: str, instead: str = "") -> Iterator[None]:
    """Around imports of packages that the extra `name` installs, and that `what` needs: an R3LiteError says so if one
    is not there; `instead` is what else can be done."""
    try:
        yield
    except ImportError as error:
        cause = f"{what} needs the package {error.name}, which is not installed"
        raise R3LiteError(cause, f"Install it with: pip install 'r3lite[{name}]'. {instead}".strip()) from error
