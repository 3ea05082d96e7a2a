"""The algorithms, by the name that --algorithm takes. A new one is a file in this folder and a line here."""

from collections.abc import Collection

from r3lite.core.config import UsageError, flag
from r3lite.rl.algorithms.base import Algorithm
from r3lite.rl.algorithms.dapo import Dapo
from r3lite.rl.algorithms.dgpo import Dgpo
from r3lite.rl.algorithms.dpo import Dpo
from r3lite.rl.algorithms.dr_grpo import DrGrpo
from r3lite.rl.algorithms.exgrpo import ExGrpo
from r3lite.rl.algorithms.grpo import Grpo
from r3lite.rl.algorithms.gspo import Gspo
from r3lite.rl.algorithms.hybrid import Hybrid
from r3lite.rl.algorithms.luffy import Luffy
from r3lite.rl.algorithms.ppo import Ppo
from r3lite.rl.algorithms.reinforce_baseline import ReinforceBaseline
from r3lite.rl.algorithms.reinforce_pp import ReinforcePlusPlus
from r3lite.rl.algorithms.rloo import Rloo
from r3lite.rl.algorithms.verifree import VeriFree
from r3lite.settings import LengthSettings, RLSettings

ALGORITHMS: dict[str, type[Algorithm]] = {
    "ppo": Ppo,
    "grpo": Grpo,
    "dr-grpo": DrGrpo,
    "dapo": Dapo,
    "gspo": Gspo,
    "rloo": Rloo,
    "reinforce++": ReinforcePlusPlus,
    "reinforce++-baseline": ReinforceBaseline,
    "luffy": Luffy,
    "exgrpo": ExGrpo,
    "hybrid": Hybrid,
    "dgpo": Dgpo,
    "dpo": Dpo,
    "verifree": VeriFree,
}


def check(settings: RLSettings, set_by_user: Collection[str], lengths: LengthSettings) -> None:
    """Raises UsageError if settings contradict each other, or if the algorithm ignores a setting that the user set."""
    algorithm = ALGORITHMS[settings.algorithm](settings, lengths)
    own_settings_of_all: set[str] = set()
    for cls in ALGORITHMS.values():
        own_settings_of_all |= cls.own_settings
    ignored = own_settings_of_all - algorithm.own_settings
    for setting, value in vars(settings).items():
        if setting not in ignored or setting not in set_by_user:
            continue
        readers = ", ".join(name for name, cls in ALGORITHMS.items() if setting in cls.own_settings)
        problem = f"{flag(setting)} is {value}, but has no effect with --algorithm {settings.algorithm}"
        raise UsageError(f"{problem}: it needs one of {readers}", code="algorithm-option-unused")
