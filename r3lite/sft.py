"""Fine-tunes a LoRA adapter, or all weights, on trajectories and conversations (SFT).

The trainer is in assembly/supervised.py.
"""

from r3lite.core import command
from r3lite.settings import SftConfig


def train(config: SftConfig) -> None:
    from r3lite.assembly import supervised  # after the arguments are read: torch takes seconds to load
    from r3lite.devices.ranks import joined

    with joined(command.world(), config.model.device, command.shared_facts(config)) as ranks:
        supervised.train(config, ranks)


def plan(config: SftConfig) -> str:
    """The memory plan and the number of rows and steps, for `--dry-run`; missing data sets are not downloaded."""
    from r3lite.datasets.sources import missing_of, read_data, table
    from r3lite.memory.plan import make_plan
    from r3lite.memory.workloads import sft_workload

    memory = make_plan(sft_workload(config), config.memory)
    message = f"\nMemory, for rows of {config.sft.max_length} tokens\n{memory.table()}\n\n"
    if missing := missing_of(config.data, config.mixture):
        return message + f"{missing} is not here yet: its rows are not counted"
    _, rows, validation = read_data(config)
    count, held_out = (sum(map(len, some.values())) for some in (rows, validation))
    message += table(config.mixture, config.protocol, {name: len(some) for name, some in rows.items()})
    steps = f"{config.length(count)[0]} steps of {config.rows_per_step} rows"
    return message + f"{count} rows, {held_out} more held out; {steps}"


main = command.Command("sft", SftConfig(), train, plan).entry(__name__)
