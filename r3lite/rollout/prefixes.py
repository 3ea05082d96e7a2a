"""Common prefixes of sequences, which are prefilled once and then copied within the KV cache.

Runs no model: it yields the tokens that are prefilled next, and copies rows of the cache.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Several

from r3lite.models.kv_cache import KVCache
from r3lite.rollout.sequence import Sequence

LEAST_SHARED = 16  # a shorter common prefix is prefilled again rather than copied

Row = list[Sequence]  # sequences whose tokens are equal, in one row of the cache


def common_length(first: Sequence, second: Sequence) -> int:
    """Returns the length of the common prefix of two sequences without the last token of each.

    The last token of a sequence has to be run, to sample the next one.
    """
    one = first.tokens
    other = second.tokens
    low = 0  # at least so many tokens are equal
    high = min(len(one), len(other)) - 1  # at most so many
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def equal_parts(row: Row) -> list[Row]:
    """Divides the sequences of a row into lists with equal tokens."""
    parts: list[Row] = []
    for sequence in row:
        for part in parts:
            if part[0].tokens == sequence.tokens:
                part.append(sequence)
                break
        else:
            parts.append([sequence])
    return parts


def prefills(
    rows: Several[Row],
    running: int,
    cache: KVCache,
    limit: int,
) -> Iterator[list[tuple[int, list[int]]]]:
    """Yields the passes that prefill the first `running` rows, of at most `limit` tokens each: lists of (row, tokens).

    The caller must run each pass, which changes the lengths of the cache's rows, before it asks for the next one.

    All tokens of a row but the last are prefilled. If row A begins as row B does (with the same instructions, or with
    the same prompt, first turn and documents), the common prefix is copied from B to A in the cache. If B is itself
    still to be prefilled with the prefix, A waits until the passes of B have been run.
    """
    while True:
        tokens_of_rows: list[list[int]] = [[] for _ in range(running)]  # what is prefilled next
        for i in range(running):
            tokens = rows[i][0].tokens
            if cache.lengths[i] >= len(tokens) - 1:
                continue
            source, cached = _cached_prefix(i, rows, cache)
            future = _future_prefix(i, rows, cache, tokens_of_rows)
            least = cache.lengths[i] + LEAST_SHARED
            if future > cached and future >= least:
                continue  # the row waits
            if cached >= least:
                cache.copy(source, i, cached)
            tokens_of_rows[i] = tokens[cache.lengths[i] : -1]
        if not any(tokens_of_rows):
            return
        yield from passes(tokens_of_rows, limit)


def _cached_prefix(i: int, rows: Several[Row], cache: KVCache) -> tuple[int, int]:
    """Returns the row whose tokens in the cache have the longest prefix in common with row i, and this length."""
    source = i
    longest = cache.lengths[i]
    for j, row in enumerate(rows):
        if j == i:
            continue
        common = min(common_length(rows[i][0], row[0]), cache.lengths[j])
        available = cache.copyable(j, common)  # less where a layer carries a state, which cannot be cut anywhere
        if available > longest:
            source = j
            longest = available
    return source, longest


def _future_prefix(i: int, rows: Several[Row], cache: KVCache, tokens_of_rows: list[list[int]]) -> int:
    """Returns the length of the longest prefix of row i that other rows will have once `tokens_of_rows` are
    prefilled."""
    longest = 0
    for j, tokens in enumerate(tokens_of_rows):
        if j != i and tokens:
            common = common_length(rows[i][0], rows[j][0])
            available = cache.copyable(j, common, prefilled=len(rows[j][0].tokens) - 1)
            longest = max(longest, available)
    return longest


def passes(tokens_of_rows: list[list[int]], limit: int) -> Iterator[list[tuple[int, list[int]]]]:
    """Splits the tokens to prefill of rows 0, 1, ... into passes of at most `limit` tokens: lists of (row, tokens)."""
    parts = []
    free_tokens = limit
    for row, tokens in enumerate(tokens_of_rows):
        while tokens:
            part = tokens[:free_tokens]
            parts.append((row, part))
            tokens = tokens[len(part) :]
            free_tokens -= len(part)
            if not free_tokens:
                yield parts
                parts = []
                free_tokens = limit
    if parts:
        yield parts
