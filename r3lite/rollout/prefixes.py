"""What sequences have in common at their beginnings, which a KV cache needs to be filled with only once.

Knows no model: it says which tokens of which rows are prefilled next, and copies rows of the cache.
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
    equal = 0  # tokens that are known to be equal
    limit = min(len(one), len(other)) - 1  # tokens that may be
    while equal < limit:
        middle = (equal + limit + 1) // 2
        if one[equal:middle] == other[equal:middle]:
            equal = middle
        else:
            limit = middle - 1
    return max(limit, 0)


def equal_parts(row: Row) -> list[Row]:
    """Returns the sequences of a row in lists of those whose tokens are equal."""
    parts: list[Row] = []
    for sequence in row:
        for part in parts:
            if part[0].tokens == sequence.tokens:
                part.append(sequence)
                break
        else:
            parts.append([sequence])
    return parts


def samplings(rows: Several[Row]) -> Iterator[tuple[slice | list[int], list[Sequence]]]:
    """Yields rows and a sequence of each: first those of all rows, then the others that share a row with one of these.

    So logits are copied only of rows that several sequences share, and never of more than all sequences together.
    """
    yield slice(None), [row[0] for row in rows]
    places = []
    sequences = []
    for i, row in enumerate(rows):
        for sequence in row[1:]:
            places.append(i)
            sequences.append(sequence)
    if sequences:
        yield places, sequences


def prefills(
    rows: Several[Row],
    running: int,
    cache: KVCache,
    limit: int,
) -> Iterator[list[tuple[int, list[int]]]]:
    """Yields the passes that prefill the first `running` rows, of at most `limit` tokens each: lists of (row, tokens).

    All but the last token of a sequence are prefilled. A prefix that another row has in the cache (the prompt of the
    same question with a first turn and its documents, or the instructions) is copied from it. If that row is yet to be
    prefilled with it, the row waits, and the prefix is copied after that pass. Each pass must be run, which changes the
    lengths of the cache's rows, before the next one is asked for.
    """
    while True:
        tokens_of_rows: list[list[int]] = [[] for _ in range(running)]
        for i in range(running):
            if cache.lengths[i] < len(rows[i][0].tokens) - 1 and not _waits(i, rows, cache, tokens_of_rows):
                tokens_of_rows[i] = rows[i][0].tokens[cache.lengths[i] : -1]
        if not any(tokens_of_rows):
            return
        yield from passes(tokens_of_rows, limit)


def _waits(i: int, rows: Several[Row], cache: KVCache, tokens_of_rows: list[list[int]]) -> bool:
    """Returns whether row i waits for a row that is prefilled in this pass; if not, copies what another one has."""
    source = i
    cached = cache.lengths[i]  # the longest prefix that is in the cache
    later = 0  # the longest one that will be after this pass
    for j, row in enumerate(rows):
        if j == i:
            continue
        common = common_length(rows[i][0], row[0])
        if j < len(tokens_of_rows) and tokens_of_rows[j]:
            later = max(later, cache.copyable(j, common, prefilled=len(row[0].tokens) - 1))
        available = cache.copyable(j, min(common, cache.lengths[j]))
        if available > cached:
            source = j
            cached = available
    least = cache.lengths[i] + LEAST_SHARED
    if later > cached and later >= least:
        return True
    if cached >= least:
        cache.copy(source, i, cached)
    return False


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
