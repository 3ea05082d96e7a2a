"""Text of strangers for a terminal: of passages, models, servers and files, none of which may steer it."""

import sys

JOINERS = "\u200c\u200d"  # not printed, but letters of Persian and parts of emoji are joined by them


def printable(text: str) -> str:
    """Returns a text without control characters, which could steer a terminal; line breaks and JOINERS stay."""
    harmless = JOINERS + "\n"
    return "".join(c if c.isprintable() or c in harmless else " " for c in text)


def say(text: str) -> None:
    """Prints a message on stderr that may quote strangers."""
    print(printable(text), file=sys.stderr)
