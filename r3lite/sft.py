"""Fine-tunes a LoRA adapter, or all weights, on trajectories and conversations (SFT).

The trainer is in assembly/supervised.py.
"""

from r3lite.core import command
from r3lite.core.processes import shared_facts, torchrun_world
from r3lite.settings import SftConfig


def train(config: SftConfig) -> None:
    """Trains the adapter or the weights, in as many processes as torchrun has started."""
    from r3lite.assembly import supervised  # after the arguments are read: torch takes seconds to load
    from r3lite.devices.ranks import join_ranks

    # Raises R3LiteError if the settings differ between the processes.
    with join_ranks(torchrun_world(), config.model.device, shared_facts(config)) as ranks:
        supervised.train(config, ranks)


def plan(config: SftConfig) -> str:
    """Returns the plan of memory and time, and the number of rows and steps, for `--dry-run`."""
    from r3lite.assembly.supervised import few_steps_warning
    from r3lite.datasets.summary import summary_of_sft
    from r3lite.memory.plan import make_plan
    from r3lite.memory.workloads import sft_workload
    from r3lite.training.run_folder import check_folder

    check_folder("sft", config)
    data = summary_of_sft(config)
    workload = sft_workload(config, steps=config.steps(data.count))
    memory = make_plan(workload, config.memory)
    text = f"\nMemory, for rows of {config.sft.max_length} tokens\n{memory.table()}\n\n{data.text}"
    if data.count:  # None if the data are not here yet
        message = few_steps_warning(config, data.count)
        if message:
            text += f"\nwarning: {message}"
    return text


main = command.Command("sft", SftConfig(), work=train, plan=plan)

if __name__ == "__main__":
    raise SystemExit(main())
