"""The processes of a run that torchrun has started: which one this is, what all must agree on, and their errors."""

import os
import sys
from typing import Any, NamedTuple

import r3lite
from r3lite.core.config import flag, flat
from r3lite.core.terminal import printable, say


class World(NamedTuple):
    """Says which of a run's processes this is."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # the rank among the processes of this machine


def torchrun_world() -> World:
    """Returns the ranks and the size that torchrun has put into the environment; without torchrun, the defaults."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not {*names, "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return World()
    return World(*(int(os.environ[name]) for name in names))


def shared_facts(config: Any) -> dict[str, Any]:
    """Returns what the processes of a run must agree on before they begin.

    This is the version of r3lite, and all settings but --config and --output.
    """
    facts = {"the version of r3lite": r3lite.__version__}
    for name, value in flat(config).items():
        if name not in ("config", "output"):
            facts[flag(name)] = value
    return facts


def say_error(message: str) -> None:
    """Prints an error on stderr; every process but the first puts its rank before the message."""
    rank = torchrun_world().rank
    if rank:
        # To the original stderr: Command.__call__ discards what these processes print to `sys.stderr`.
        print(printable(f"[rank {rank}] {message.lstrip()}"), file=sys.__stderr__)
    else:
        say(message)
