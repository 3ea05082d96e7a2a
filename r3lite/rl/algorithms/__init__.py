"""The algorithms, by the name that --algorithm takes. A new one is a file in this folder and a line here."""

from r3lite.rl.algorithms.base import Algorithm
from r3lite.rl.algorithms.grpo import Grpo
from r3lite.rl.algorithms.ppo import Ppo

ALGORITHMS: dict[str, type[Algorithm]] = {
    "ppo": Ppo,
    "grpo": Grpo,
}
