"""Fine-tunes a LoRA adapter, or all weights, on trajectories and conversations (SFT).

The trainer is in assembly/supervised.py.
"""

from r3lite.core import command
from r3lite.core.processes import shared_facts, world
from r3lite.settings import SftConfig


def train(config: SftConfig) -> None:
    """Trains the adapter or the weights, in as many processes as torchrun has started."""
    from r3lite.assembly import supervised  # after the arguments are read: torch takes seconds to load
    from r3lite.devices.ranks import joined

    with joined(world(), config.model.device, shared_facts(config)) as ranks:
        supervised.train(config, ranks)


def plan(config: SftConfig) -> str:
    """Returns the memory plan and the number of rows and steps, for `--dry-run`.

    Missing data sets are not downloaded.
    """
    from r3lite.datasets.sources import missing_of, read_data, table
    from r3lite.memory.plan import make_plan
    from r3lite.memory.workloads import sft_workload

    memory = make_plan(sft_workload(config), config.memory)
    text = f"\nMemory, for rows of {config.sft.max_length} tokens\n{memory.table()}\n\n"
    if missing := missing_of(config.data, config.mixture):
        return text + f"{missing} is not here yet: its rows are not counted"
    _, training_rows, validation_rows = read_data(config)
    counts = {source: len(rows) for source, rows in training_rows.items()}
    count = sum(counts.values())
    held_out = sum(map(len, validation_rows.values()))
    steps, _ = config.length(count)
    text += table(config.mixture, config.protocol, counts)
    text += f"{count} rows, {held_out} more held out; {steps} steps of {config.rows_per_step} rows"
    return text


main = command.Command("sft", SftConfig(), work=train, plan=plan)

if __name__ == "__main__":
    raise SystemExit(main())
