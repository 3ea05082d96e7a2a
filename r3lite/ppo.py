"""Reinforcement learning with retrieval in the loop: PPO, GRPO and their variants.

The trainer is in assembly/reinforcement.py.
"""

from collections import Counter

from r3lite.core import command
from r3lite.settings import PpoConfig


def train(config: PpoConfig) -> None:
    from r3lite.assembly import reinforcement  # after the arguments are read: torch takes seconds to load
    from r3lite.devices.ranks import joined

    with joined(command.world(), config.model.device, command.shared_facts(config)) as ranks:
        reinforcement.train(config, ranks)


def plan(config: PpoConfig) -> str:
    """What a run would do, for `--dry-run`."""
    from r3lite.assembly.reinforcement import check
    from r3lite.assembly.rl_setup import plan_memory

    check(config)
    told = plan_memory(config).table() + told_of_sources(config)
    if (held_out := config.validation).eval_data:
        told += f"\n\nValidation on up to {held_out.eval_questions} questions of {held_out.eval_data}, before the "
        told += f"first round, every {held_out.eval_every} and after the last"
    return f"\nMemory, for episodes of {config.lengths.max_length} tokens\n{told}"


def told_of_sources(config: PpoConfig) -> str:
    """The sources for `--dry-run`, if there are several; those that would have to be downloaded are not counted."""
    from r3lite.datasets.sources import missing_of, read_questions_of, table

    if not config.mixture.sources:
        return ""
    if missing := missing_of(config.data, config.mixture):
        return f"\n\n{missing} is not here yet: its questions are not counted"
    questions = read_questions_of(config.data, config.mixture)
    counts = Counter(question.source for question in questions)
    told = table(config.mixture, config.protocol, counts).rstrip()
    size, rounds = config.rl.batch_size, config.rounds(len(questions))
    return f"\n\n{told}\n{len(questions)} questions; {rounds} rounds of {size}"


main = command.entry("ppo", PpoConfig(), train, plan)

if __name__ == "__main__":
    raise SystemExit(main())
