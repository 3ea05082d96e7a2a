"""Trains a LoRA adapter by reinforcement learning with retrieval in the loop: PPO, GRPO and their variants.

The command is named after its first algorithm; `r3lite rl` is the same. The trainer is in assembly/reinforcement.py.
"""

from r3lite.core import command
from r3lite.core.processes import shared_facts, torchrun_world
from r3lite.settings import PpoConfig


def train(config: PpoConfig) -> None:
    """Trains the adapter, in as many processes as torchrun has started."""
    from r3lite.assembly import reinforcement  # after the arguments are read: torch takes seconds to load
    from r3lite.devices.ranks import join_ranks

    # Raises R3LiteError if the settings differ between the processes.
    with join_ranks(torchrun_world(), config.model.device, shared_facts(config)) as ranks:
        reinforcement.train(config, ranks)


def plan(config: PpoConfig) -> str:
    """Checks the settings and returns, for `--dry-run`, the plan of memory and time, the number of questions and
    rounds, and when the run validates."""
    from r3lite.assembly import reinforcement, rl_questions
    from r3lite.assembly.rl_setup import plan_memory
    from r3lite.datasets.summary import summary_of_rl
    from r3lite.training.run_folder import check_folder

    reinforcement.check(config)
    check_folder("ppo", config)
    data = summary_of_rl(config)
    if data.questions:  # empty if the data are not here yet
        rl_questions.check(config, data.questions)
        reinforcement.retrieval_setup(config, data.questions).check()
    memory = plan_memory(config, questions=data.count)
    text = f"\nMemory, for episodes of {config.lengths.max_length} tokens\n{memory.table()}\n\n{data.text}"
    validation = config.validation
    if validation.eval_data:
        text += f"\n\nValidation on up to {validation.eval_questions} questions of {validation.eval_data}, before the "
        text += f"first round, every {validation.eval_every} rounds and after the last"
    if config.remote.rollout_server:
        from r3lite.assembly import remote_rollouts

        text += remote_rollouts.plan(config)
    return text


main = command.Command("ppo", PpoConfig(), work=train, plan=plan)

if __name__ == "__main__":
    raise SystemExit(main())
