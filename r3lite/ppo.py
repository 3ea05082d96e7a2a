"""Trains a LoRA adapter by reinforcement learning with retrieval in the loop: PPO, GRPO and their variants.

The trainer is in assembly/reinforcement.py.
"""

from collections import Counter

from r3lite.core import command
from r3lite.core.processes import shared_facts, world
from r3lite.settings import PpoConfig


def train(config: PpoConfig) -> None:
    """Trains the adapter, in as many processes as torchrun has started."""
    from r3lite.assembly import reinforcement  # after the arguments are read: torch takes seconds to load
    from r3lite.devices.ranks import joined

    with joined(world(), config.model.device, shared_facts(config)) as ranks:
        reinforcement.train(config, ranks)


def plan(config: PpoConfig) -> str:
    """Returns the memory plan, the sources and the validations of a run, for `--dry-run`."""
    from r3lite.assembly.reinforcement import check
    from r3lite.assembly.rl_setup import plan_memory

    check(config)
    text = f"\nMemory, for episodes of {config.lengths.max_length} tokens\n"
    text += plan_memory(config).table()
    text += describe_sources(config)
    validation = config.validation
    if validation.eval_data:
        text += f"\n\nValidation on up to {validation.eval_questions} questions of {validation.eval_data}, before the "
        text += f"first round, every {validation.eval_every} and after the last"
    if config.remote.rollout_server:
        from r3lite.assembly import remote_rollouts

        text += remote_rollouts.plan(config)
    return text


def describe_sources(config: PpoConfig) -> str:
    """Returns a table of the sources with their numbers of questions; empty without [[sources]].

    Missing data sets are not downloaded.
    """
    from r3lite.datasets.sources import missing_of, read_questions_of, table

    if not config.mixture.sources:
        return ""
    if missing := missing_of(config.data, config.mixture):
        return f"\n\n{missing} is not here yet: its questions are not counted"
    questions = read_questions_of(config.data, config.mixture)
    counts = Counter(question.source for question in questions)
    sources = table(config.mixture, config.protocol, counts).rstrip()
    rounds = config.rounds(len(questions))
    return f"\n\n{sources}\n{len(questions)} questions; {rounds} rounds of {config.rl.batch_size}"


main = command.Command("ppo", PpoConfig(), work=train, plan=plan)

if __name__ == "__main__":
    raise SystemExit(main())
