"""The findings of checks: printed line by line as the checks run, and collected for a file.

Paths, and the names of the user and of the machine, are removed from both.
"""

import contextlib
import getpass
import io
import math
import os
import platform
import re
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

import r3lite
from r3lite.checks.finding import REPORT, Finding
from r3lite.core.errors import R3LiteError

# Matches a path. A path in quotes may have blanks; any other path ends at a blank or a punctuation mark. Units (GB/s),
# addresses (https://) and closing tags (</s>) are no paths.
PATH = re.compile(
    r"""
    (?<!\w)(['"])[^'"\n]*[/\\][^'"\n]*\1  # in quotes, and not between two apostrophes
    | (?:  # /a  //server/a  ./a  ../a  C:\a  file:///a  path:/a
        (?<![\w./\\:<]) (?:[A-Za-z]:|\.{1,2}|file:/)? [/\\]{1,2}
        | (?<=:)/
    ) [\w.~-][^\s'",;)]*
    | (?<![\w./\\:<-])[A-Za-z_~][\w.~-]*(?:[/\\][\w.~-]+){2,}  # a/b/c
    """,
    re.VERBOSE,
)
MARKS = {"ok": "ok", "failed": "!!", "skipped": "--"}


@dataclass
class CheckLog:
    """Runs checks, prints their findings and collects them for the file."""

    hide: Callable[[str], str]  # returns a text without paths and names: see `hider`
    checks: list[dict] = field(default_factory=list)  # an entry for each check so far

    def run(self, name: str, check: Callable[..., Finding], *arguments) -> Finding:
        """Runs a check with these arguments, prints and collects its finding, and returns it.

        A check that raises an exception has failed; the exception is not raised again.
        """
        on_terminal = sys.stdout.isatty()
        printed = io.StringIO()
        start = time.perf_counter()
        raised_at: list[str] = []
        if on_terminal:
            print(f"   {name} ...", end="\r", flush=True)
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                finding = check(*arguments)
        except Exception as error:  # any kind: finding errors is what checks are for
            finding = Finding("failed", *message_of(error))
            raised_at = frames(error)
        # Of what the check printed, warnings and errors are kept. Errors of commands begin with `r3lite.COMMAND:`.
        lines = printed.getvalue().splitlines()
        warnings = [line for line in lines if line.startswith(("warning:", "r3lite."))]
        entry: dict = {"name": name, "state": finding.state, "told": self.hide(finding.message)}
        if finding.remedy:
            entry["remedy"] = self.hide(finding.remedy)
        if warnings:
            entry["warnings"] = list(dict.fromkeys(map(self.hide, warnings)))
        if raised_at:
            entry["where"] = raised_at
        entry["seconds"] = round(time.perf_counter() - start, 2)
        entry["measured"] = {figure: plain(value) for figure, value in finding.measured.items()}
        self.checks.append(entry)
        if on_terminal:
            print(" " * (len(name) + 7) + "\r", end="")  # erases the line `   NAME ...`
        print_line(f"{MARKS[finding.state]} {name:<19}", entry["told"])
        for line in (entry.get("remedy", ""), *entry.get("warnings", [])):
            print_line("", line)
        return finding

    @property
    def failed(self) -> list[str]:
        """The names of the checks that failed."""
        return [entry["name"] for entry in self.checks if entry["state"] == "failed"]

    @property
    def measured(self) -> dict[str, float | None]:
        """The figures of all checks so far; None for those that are not finite."""
        return {name: value for entry in self.checks for name, value in entry["measured"].items()}


def print_line(head: str, text: str) -> None:
    """Prints a head and a text beside it, on several lines if the text is long; prints nothing for an empty text."""
    for line in textwrap.wrap(text, 96, break_long_words=False, break_on_hyphens=False):
        print(f"{head:<22} {line}", flush=True)
        head = ""


def message_of(error: Exception) -> tuple[str, str]:
    """Returns a line about an error, and a remedy."""
    if isinstance(error, R3LiteError):
        return error.cause, error.remedy or REPORT
    first_line = (str(error).strip() or "no message").splitlines()[0]
    remedy = REPORT
    if isinstance(error, torch.OutOfMemoryError):
        remedy = "Close other programs that use the GPU."
    return f"{type(error).__name__}: {first_line}", remedy


def frames(error: Exception) -> list[str]:
    """Returns file, line and function of each frame of an error's traceback, the outermost first.

    Files of packages are relative to the package's parent folder; other files are called `elsewhere`.
    """
    places = []
    package = Path(r3lite.__file__).parent
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if path.is_relative_to(package):
            place = path.relative_to(package.parent).as_posix()
        elif "site-packages" in path.parts:
            place = "/".join(path.parts[path.parts.index("site-packages") + 1 :])
        else:
            place = "elsewhere"
        places.append(f"{place}:{frame.lineno} {frame.name}")
    return places


def plain(value: float) -> float | None:
    """Returns a figure for JSON: with six digits, and None for nan and infinity."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def hider(folders: list[str], names: list[str]) -> Callable[[str], str]:
    """Returns a function that replaces, in a text, all paths and the names of the user and of the machine.

    `folders` are folders whose paths may have blanks, which PATH would not match whole.
    """
    # `/` is left out, and so is `~`, which stands for a home folder that is not known.
    named_folders = {folder for folder in folders if len(folder) > 1}
    longest_first = sorted(named_folders, key=len, reverse=True)
    words = [re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE) for name in names if name]

    def hide(text: str) -> str:
        for folder in longest_first:
            text = text.replace(folder, "/folder")  # has no blanks, so that PATH below matches all of the path
        text = PATH.sub("<path>", text)
        for word in words:
            text = word.sub("<name>", text)
        return text

    return hide


def hider_of_process() -> Callable[[str], str]:
    """Returns the `hider` for this process: its folders, its user and its machine."""
    package = str(Path(r3lite.__file__).parent)
    home = os.path.expanduser("~")
    folders = [
        home,
        os.getcwd(),
        tempfile.gettempdir(),
        sys.prefix,
        package,
    ]
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # the user has no name
        user = ""
    machine = platform.node()
    names = [user, machine, machine.partition(".")[0]]
    if home != "~":
        names.append(Path(home).name)
    return hider(folders, names)
