"""Which rows or questions a step takes: functions of the seed and the step's number, so that a resumed run needs no
position in the data."""

import functools
import random
from collections import Counter
from collections.abc import Sequence

from r3lite.core.episode import Question
from r3lite.datasets.mixture import Mixture
from r3lite.datasets.trajectories import Rows


def rows_of_step(
    step: int, count: int, per_step: int, seed: int, last: int | None, mixture: Mixture | None = None
) -> list[int]:
    """Indices of the rows of step 1, 2, ...: passes over all `count` rows, each shuffled anew, up to row `last`; or as
    a mixture of sources draws them."""
    stop = step * per_step if last is None else min(step * per_step, last)
    if mixture:
        return mixture.rows((step - 1) * per_step, stop)
    chosen = []
    for epoch in range((step - 1) * per_step // count, (stop - 1) // count + 1):
        order = _shuffled(count, f"{seed}/sft/{epoch}")
        chosen += order[max(0, (step - 1) * per_step - epoch * count) : stop - epoch * count]
    return chosen


def questions_of_round(
    questions: Sequence[Question],
    number: int,
    size: int,
    generations: int,
    seed: int,
    mixture: Mixture | None = None,
) -> tuple[list[Question], list[str]]:
    """The questions of round 1, 2, ..., each `generations` times, and for each of these episodes the seed of its
    random stream. The questions come in an order that is shuffled anew in each epoch, or as a mixture draws them."""
    drawn, seeds = [], []
    for i in range((number - 1) * size, number * size):
        epoch, place = divmod(i, len(questions))
        (row,) = mixture.rows(i, i + 1) if mixture else (_shuffled(len(questions), f"{seed}/epoch {epoch}")[place],)
        question = questions[row]
        drawn += [question] * generations
        seeds += [f"{seed}/{i}/{k}" for k in range(generations)]
    return drawn, seeds


def questions_of_refill(
    questions: Sequence[Question],
    number: int,
    attempt: int,
    size: int,
    generations: int,
    seed: int,
    used: set[str],
    mixture: Mixture | None = None,
) -> tuple[list[Question], list[str]]:
    """The same for attempt 1, 2, ... to replace groups of a round: other questions than those of the ids `used`, if
    there are enough, drawn by the seed, the round's number and the attempt's alone."""
    stream = f"{seed}/refill {number}/{attempt}"
    shuffled = mixture.shuffled(stream) if mixture else _shuffled(len(questions), stream)
    order = sorted(shuffled, key=lambda i: questions[i].id in used)  # stable: unused first
    drawn = [questions[order[i % len(order)]] for i in range(size) for _ in range(generations)]
    return drawn, [f"{stream}/{i}/{k}" for i in range(size) for k in range(generations)]


def hold_out(rows: Rows, fraction: float, most: int, seed: int) -> tuple[Rows, Rows]:
    """Rows to train on, and rows held out: at most `fraction` of them and at most `most`; each by their sources.

    Rows of one question stay together, whatever their source, since a held-out question's answer must not be known. At
    least one question is trained on.
    """
    of_id = Counter(row.id for some in rows.values() for row in some)
    ids = sorted(of_id)
    random.Random(f"{seed}/sft/validation").shuffle(ids)
    room, held_out = min(int(fraction * of_id.total()), most), set()
    for id in ids:
        if of_id[id] <= room and len(held_out) < len(ids) - 1:
            held_out.add(id)
            room -= of_id[id]
    trained = {name: [row for row in some if row.id not in held_out] for name, some in rows.items()}
    return trained, {name: [row for row in some if row.id in held_out] for name, some in rows.items()}


@functools.lru_cache(maxsize=2)
def _shuffled(count: int, seed: str) -> tuple[int, ...]:
    """The numbers below `count`, shuffled. A step asks for the same order several times: the last two are kept."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return tuple(order)
