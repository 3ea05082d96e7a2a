"""Text cut into chunks: between sentences, within a budget of tokens, each beginning with the end of the one before.

Tokens are counted without a tokenizer, since chunks must not depend on the encoder. A token is a run of up to 5 letters
or digits, a sign, or an ideograph. On English prose and on Python these are 2 to 3 % more tokens than BERT's WordPiece
finds.
"""

import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

from r3lite.core.answer_match import SENTENCE

# 64 blanks count as a token, too, so that a chunk of few tokens is never long.
TOKEN = re.compile(r"[^\W\u2e80-\u9fff\uac00-\ud7af]{1,5}|[\u2e80-\u9fff\uac00-\ud7af]|[^\w\s]|\s{64}")
BREAKS = (SENTENCE, re.compile(r"\n"), re.compile(r"\s+"))  # finer ones are for parts longer than the budget


class Unit(NamedTuple):
    """A stretch of a text, which is not cut further, with the blanks that follow it."""

    start: int
    end: int
    tokens: int


def count_tokens(text: str, start: int = 0, end: int | None = None) -> int:
    """Returns the number of tokens of a text from `start` to `end`."""
    if end is None:
        end = len(text)
    return sum(1 for _ in TOKEN.finditer(text, start, end))


def chunks(text: str, budget: int, overlap: int) -> Iterator[str]:
    """Yields chunks of at most `budget` tokens; each begins with up to `overlap` tokens of whole sentences of the last
    one.

    A sentence longer than the budget is cut at its lines, a line between its words, a word anywhere.
    """
    units: list[Unit] = []  # of the chunk
    size = 0
    for unit in _units(text, 0, end=len(text), budget=budget, breaks=BREAKS):
        if units and size + unit.tokens > budget:
            yield _text(text, units)
            while units and (size > overlap or size + unit.tokens > budget):
                size -= units.pop(0).tokens
        units.append(unit)
        size += unit.tokens
    if units:
        yield _text(text, units)


def sentences(text: str, budget: int) -> Iterator[str]:
    """Yields the sentences of a text; one longer than `budget` tokens is cut as `chunks` cuts it."""
    start = 0
    stops = (match.end() for match in SENTENCE.finditer(text))
    for stop in itertools.chain(stops, (len(text),)):
        parts = map(str.strip, chunks(text[start:stop], budget, 0))
        yield from filter(None, parts)
        start = stop


def _units(
    text: str,
    start: int,
    end: int,
    budget: int,
    breaks: tuple[re.Pattern, ...],
) -> Iterator[Unit]:
    """Yields the stretches of a text between the first of `breaks`; a stretch of more than `budget` tokens is cut at
    the next of `breaks`, and after the last of them between tokens."""
    if not breaks:
        for match in TOKEN.finditer(text, start, end):
            yield Unit(match.start(), match.end(), 1)
        return
    stops = (match.end() for match in breaks[0].finditer(text, start, end))
    for stop in itertools.chain(stops, (end,)):
        tokens = count_tokens(text, start, stop)
        if tokens > budget:
            yield from _units(text, start, end=stop, budget=budget, breaks=breaks[1:])
        elif stop > start:
            yield Unit(start, stop, tokens)
        start = stop


def _text(text: str, units: list[Unit]) -> str:
    """Returns the text of units. Its first line keeps its indentation, which code needs."""
    chunk = text[units[0].start : units[-1].end]
    return chunk.lstrip("\r\n").rstrip()
