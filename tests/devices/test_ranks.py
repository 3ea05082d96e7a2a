"""How rows are divided among ranks, and that one process needs nothing of it."""

import random
import subprocess
import sys

import pytest

from r3lite.devices.ranks import ALONE, shares


def lengths(kind: str, count: int) -> list[int]:
    """Lengths as they are measured: rows of chats, and episodes of which a part runs into the limit."""
    draw = random.Random(f"{kind}/{count}")
    if kind == "rows":
        return [min(2048, int(draw.lognormvariate(5.8, 0.7)) + 20) for _ in range(count)]
    return [1024 if draw.random() < 0.2 else 300 + 180 * draw.randrange(4) + draw.randrange(60) for _ in range(count)]


@pytest.mark.parametrize("kind", ["rows", "episodes"])
@pytest.mark.parametrize(("size", "count"), [(2, 8), (2, 32), (4, 32), (8, 64), (64, 512)])
def test_no_rank_waits_more_than_a_tenth(kind, size, count):
    tokens = lengths(kind, count)
    rows_of_ranks = shares(tokens, size)
    assert sorted(row for rows in rows_of_ranks for row in rows) == list(range(count))
    largest = max(sum(tokens[row] for row in rows) for rows in rows_of_ranks)
    mean = sum(tokens) / size
    assert largest <= 1.1 * mean


def test_rows_are_divided_the_same_way_each_time_and_none_is_lost():
    assert shares([5, 5, 9, 1, 5], 2) == [[2, 4], [0, 1, 3]]  # 9 + 5 and 5 + 5 + 1
    assert shares([7], 3) == [[0], [], []]
    assert shares([], 2) == [[], []]


def test_one_process_divides_nothing_and_imports_no_torch_distributed():
    assert ALONE.rows_of_rank([3, 9, 1]) == [0, 1, 2]
    assert ALONE.gather("x") == ["x"] and ALONE.from_first(lambda: 1) == 1
    script = (
        "import sys\n"
        "import torch\n"
        "sys.modules['torch.distributed'] = None  # torch has imported it; whoever imports it now has an ImportError\n"
        "from r3lite.core.processes import torchrun_world\n"
        "from r3lite.devices.ranks import ALONE, join_ranks\n"
        "before = set(sys.modules)\n"
        "with join_ranks(torchrun_world(), 'auto', {}) as ranks:\n"
        "    assert ranks is ALONE\n"
        "assert set(sys.modules) == before\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
