"""The exceptions that a user should see, and messages for a misspelled name or a missing package."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class R3LiteError(Exception):
    """Reports a foreseeable failure: what went wrong, and what the user can do about it.

    Commands print both lines without a traceback and exit with status 1. `code` is a short name of the failure, which
    stays when the sentence is rewritten: programs and tests compare it.
    """

    def __init__(self, cause: str, remedy: str = "", *, code: str):
        message = f"{cause}\n  {remedy}" if remedy else cause
        super().__init__(message)
        self.cause = cause
        self.remedy = remedy
        self.code = code


class UsageError(Exception):
    """Reports a bad flag, key or value in one line, with exit status 2.

    `code` is as in R3LiteError.
    """

    def __init__(self, message: str, *, code: str):
        super().__init__(message)
        self.code = code


class NotFinite(R3LiteError):
    """Reports that numbers of the model are inf or nan. A run that has a good checkpoint can go back to it."""


def nearest(word: str, names: Iterable[str], prefix: str = "") -> str:
    """Returns ` (did you mean X?)` with the name that is most like the word, or "" if no name is similar.

    `prefix` is printed before the name, such as the folder of a file.
    """
    cutoff = 0.6
    if len(word) == 2:
        cutoff = 0.5  # one of the two letters may be wrong
    matches = difflib.get_close_matches(word, list(names), n=1, cutoff=cutoff)
    return f" (did you mean {prefix}{matches[0]}?)" if matches else ""


def reason(error: Exception) -> str:
    """Returns what an exception says in one line; an error of the operating system loses its number and path."""
    if isinstance(error, R3LiteError):
        return error.cause
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    return " ".join(text.split())[:300] or type(error).__name__


@contextlib.contextmanager
def explained(
    kinds: type[Exception] | tuple[type[Exception], ...], cause: str, remedy: str, *, code: str
) -> Iterator[None]:
    """Turns exceptions of these kinds that its block raises into an R3LiteError with this remedy.

    Its cause is `cause` followed by the exception's message and, unless `cause` has it, the exception's file.
    """
    try:
        yield
    except kinds as error:
        message = reason(error)
        filename = str(getattr(error, "filename", None) or "")
        if filename not in cause:  # "" is in any cause
            message = f"{message}: {filename}"
        raise R3LiteError(f"{cause}: {message}", remedy, code=code) from error


@contextlib.contextmanager
def extra(name: str, feature: str, instead: str = "") -> Iterator[None]:
    """Raises an R3LiteError if an import in its block fails: the `feature` needs what the extra `name` installs.

    `instead` is a sentence about what else can be done.
    """
    try:
        yield
    except ImportError as error:
        cause = f"{feature} needs the package {error.name}, which is not installed"
        remedy = f"Install it with: pip install 'r3lite[{name}]'. {instead}".strip()
        raise R3LiteError(cause, remedy, code="package-missing") from error
