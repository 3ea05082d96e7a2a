"""Prints text that r3lite did not write (of passages, models, servers, files) so that it cannot control a terminal."""

import sys

# Invisible characters that are harmless: they decide whether letters of Persian and parts of emoji are joined.
JOINERS = "\u200c\u200d"


def printable(text: str) -> str:
    """Returns a text with a space for each control character. Line breaks and JOINERS stay."""
    harmless = JOINERS + "\n"
    return "".join(c if c.isprintable() or c in harmless else " " for c in text)


def say(text: str) -> None:
    """Prints a message on stderr; the message may quote text that r3lite did not write."""
    print(printable(text), file=sys.stderr)
