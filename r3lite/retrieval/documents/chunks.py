"""Text cut into chunks: between sentences, within a budget of tokens, each beginning with the end of the one before.

Tokens are counted without a tokenizer, since chunks must not depend on the encoder. A token is a run of up to 5 letters
or digits, a sign, or an East Asian character. On English prose and on Python these are 2 to 3 % more tokens than BERT's
WordPiece finds.
"""

import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

from r3lite.core.answer_match import SENTENCE

# 64 blanks count as a token, too, so that a chunk of few tokens is never long.
TOKEN = re.compile(r"[^\W\u2e80-\u9fff\uac00-\ud7af]{1,5}|[\u2e80-\u9fff\uac00-\ud7af]|[^\w\s]|\s{64}")
# Where a text is cut, the coarsest first: after sentences, lines, words. The next finer one is for parts that are
# longer than the budget. Empty lines belong to the line before them.
BREAKS = (SENTENCE, re.compile(r"(?<!\s)\s*\n"), re.compile(r"\s+"))


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
    """Yields chunks of at most `budget` tokens. Each repeats the end of the one before: whole sentences of at most
    `overlap` tokens together.

    A sentence longer than the budget is cut at its lines, a line between its words, a word anywhere; then whole lines
    or words are repeated.
    """
    for start, end in _stretches(text, budget, overlap):
        # The first line keeps its indentation, which code needs.
        chunk = text[start:end].lstrip("\r\n").rstrip()
        if chunk:
            yield chunk


def _stretches(text: str, budget: int, overlap: int) -> Iterator[tuple[int, int]]:
    """Yields where each chunk begins and ends in a text, also of chunks that have only blanks."""
    units: list[Unit] = []  # of the chunk that grows
    size = 0  # its tokens
    for unit in _units(text, 0, end=len(text), budget=budget, breaks=BREAKS):
        if units and size + unit.tokens > budget:
            yield units[0].start, units[-1].end
            # The last units of the chunk begin the next one: at most `overlap` tokens, and so few that `unit` fits.
            while units and (size > overlap or size + unit.tokens > budget):
                size -= units.pop(0).tokens
        units.append(unit)
        size += unit.tokens
    if units:
        yield units[0].start, units[-1].end


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
    """Yields the stretches of a text from `start` to `end`, cut where the first pattern of `breaks` matches.

    A stretch of more than `budget` tokens is cut again with the next pattern; without a pattern, after each token.
    """
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
