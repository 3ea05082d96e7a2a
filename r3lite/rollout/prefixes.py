"""Common prefixes of sequences, which are prefilled once and then copied within the KV cache.

This file runs no model: it yields the tokens that are to be prefilled next, and copies rows of the cache.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Several

from r3lite.models.kv_cache import KVCache
from r3lite.rollout.sequence import Sequence

LEAST_SHARED = 16  # a shorter common prefix is prefilled again rather than copied

Row = list[Sequence]  # sequences whose tokens are equal, in one row of the cache


def common_length(first: Sequence, second: Sequence) -> int:
    """Returns the length of the common prefix of two sequences without the last token of each.

    The last token of a sequence is never copied, because it has to be run to sample the next one.
    """
    first_tokens = first.tokens
    second_tokens = second.tokens
    low = 0  # the length is at least `low`, and the first `low` tokens are equal
    high = min(len(first_tokens), len(second_tokens)) - 1  # the length is at most `high`
    while low < high:
        middle = (low + high + 1) // 2
        if first_tokens[low:middle] == second_tokens[low:middle]:
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
    """Yields passes of at most `limit` tokens that prefill the first `running` rows. A pass is a list of (row, tokens).

    The caller must run each pass, which changes the lengths of the cache's rows, before it asks for the next one.

    All tokens of a row but the last are prefilled. If row A begins like row B (with the same instructions, or with the
    same prompt, first turn and documents), the common prefix is copied from B to A in the cache. If the prefix is not
    yet in row B of the cache, A waits until the passes of B have been run.
    """
    while True:
        tokens_of_rows: list[list[int]] = [[] for _ in range(running)]  # what the next passes prefill of each row
        for i in range(running):
            tokens = rows[i][0].tokens
            if cache.lengths[i] >= len(tokens) - 1:
                continue
            source_row, cached_length = _cached_prefix(i, rows, cache)
            future_length = _future_prefix(i, rows, cache, tokens_of_rows)
            worthwhile_length = cache.lengths[i] + LEAST_SHARED  # a shorter prefix is not worth a copy
            if future_length > cached_length and future_length >= worthwhile_length:
                continue  # the row waits for the passes of another row
            if cached_length >= worthwhile_length:
                cache.copy(source_row, i, cached_length)
            tokens_of_rows[i] = tokens[cache.lengths[i] : -1]
        if not any(tokens_of_rows):
            return
        yield from passes(tokens_of_rows, limit)


def _cached_prefix(i: int, rows: Several[Row], cache: KVCache) -> tuple[int, int]:
    """Returns the row of the cache with the longest prefix in common with row i, and the length of this prefix.

    If no other row has a longer one than row i itself, these are row i and its length in the cache.
    """
    source_row = i
    longest = cache.lengths[i]
    for j, row in enumerate(rows):
        if j == i:
            continue
        common = min(common_length(rows[i][0], row[0]), cache.lengths[j])
        # `copyable` may be less than `common` if a layer carries a state, which cannot be cut at any token.
        copyable = cache.copyable(j, common)
        if copyable > longest:
            source_row = j
            longest = copyable
    return source_row, longest


def _future_prefix(i: int, rows: Several[Row], cache: KVCache, tokens_of_rows: list[list[int]]) -> int:
    """Returns the length of the longest prefix of row i that another row will have after `tokens_of_rows` are run."""
    longest = 0
    for j, tokens in enumerate(tokens_of_rows):
        if j != i and tokens:
            common = common_length(rows[i][0], rows[j][0])
            copyable = cache.copyable(j, common, prefilled=len(rows[j][0].tokens) - 1)
            longest = max(longest, copyable)
    return longest


def passes(tokens_of_rows: list[list[int]], limit: int) -> Iterator[list[tuple[int, list[int]]]]:
    """Splits `tokens_of_rows[i]`, the tokens to prefill in row i, into passes of at most `limit` tokens each.

    A pass is a list of (row, tokens). The tokens of a row may be divided among several passes.
    """
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
