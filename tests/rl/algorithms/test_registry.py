from typing import get_args, get_type_hints

from r3lite.rl.algorithms import ALGORITHMS
from r3lite.settings import RLSettings


def test_every_algorithm_can_be_chosen():
    assert set(ALGORITHMS) == set(get_args(get_type_hints(RLSettings)["algorithm"]))
