"""Predicts the memory and the time of a run: a table by phase, and the settings chosen to fit."""

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from r3lite.core import command
from r3lite.core.errors import UsageError
from r3lite.core.files import load_toml
from r3lite.settings import CardSettings, DataSettings, OptionalRlQuestionSettings, PlanSettings, PpoConfig, SftConfig
from r3lite.settings.rl import Algorithm

if TYPE_CHECKING:
    from r3lite.memory.plan import Plan


class PlanSftConfig(SftConfig):
    """Predicts the memory and the time of a run without loading weights. Pass the flags of the run: those of `sft` or,
    with --algorithm, those of `ppo`; --data is counted if it is here. The sizes of the models in docs/models.md are
    known offline. --card plans for another card; --output FOLDER also writes plan.json.
    """

    data: DataSettings = DataSettings()  # unlike in `sft`, --data may be missing
    plan: PlanSettings = PlanSettings()
    elsewhere: CardSettings = CardSettings()


class PlanRlConfig(PpoConfig):
    __doc__ = PlanSftConfig.__doc__
    data: OptionalRlQuestionSettings = OptionalRlQuestionSettings()
    elsewhere: CardSettings = CardSettings()


def make(config: PlanSftConfig | PlanRlConfig, count: int | None = None) -> "Plan":
    """Returns the plan of the run with these settings. `count` is its number of rows or questions; None: not known."""
    # Imported after the arguments are read: torch takes seconds to load.
    from r3lite.assembly.rl_setup import round_workload
    from r3lite.memory.plan import make_plan, plan_for_card
    from r3lite.memory.workloads import sft_workload
    from r3lite.rl import algorithms

    if isinstance(config, PlanSftConfig):
        sampling = None
        workload = sft_workload(config, steps=config.steps(count))
    else:
        algorithms.check(config.rl, config.set_by_user, config.lengths)
        sampling = config.sampling
        workload = round_workload(config, questions=count)
    if config.elsewhere.card:
        return plan_for_card(
            name=config.elsewhere.card,
            workload=workload,
            dtype=config.model.dtype,
            settings=config.memory,
            sampling=sampling,
        )
    return make_plan(workload, config.memory, sampling)


def title(config: PlanSftConfig | PlanRlConfig) -> str:
    """Returns the title of a plan: the kind of run, what is trained, and the model."""
    if isinstance(config, PlanSftConfig):
        trained_part = "all weights" if config.lora.no_lora else "a LoRA adapter"
        return f"SFT of {trained_part} for {config.model.model}"
    start = config.model.adapter or "a fresh adapter"
    return f"Reinforcement learning with {config.rl.algorithm} from {start} for {config.model.model}"


def card_of(plan: "Plan") -> str:
    """Returns the card of --card in words, with its memory; "" if the plan is for this machine."""
    speeds = plan.workload.speeds
    if not speeds or not speeds.memory:
        return ""
    return f" on the {speeds.name} ({speeds.memory / (1 << 30):.0f} GiB)"


def print_plan(config: PlanSftConfig | PlanRlConfig) -> None:
    """Prints the plan, and writes it to plan.json in --output, if that is given."""
    from r3lite.core.files import write_json
    from r3lite.datasets.summary import summary_of_rl, summary_of_sft

    data = summary_of_sft(config) if isinstance(config, PlanSftConfig) else summary_of_rl(config)
    plan = make(config, data.count)
    print(f"{title(config)}{card_of(plan)}\n\n{plan.table()}")
    if data.text:
        print(f"\n{data.text}")
    if config.common.output:
        path = Path(config.common.output) / "plan.json"
        write_json(path, plan.report())
        print(f"written to {path}")


def is_rl(argv: list[str]) -> bool:
    """Tells whether the arguments describe a run of reinforcement learning: by --algorithm, else by the file --config.

    This decides which other flags exist. So these two flags are read before the others.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--algorithm", "--config"):
        parser.add_argument(flag, nargs="?")
    flags, _ = parser.parse_known_args(argv)
    tables = {}
    if flags.config and not flags.algorithm:
        with contextlib.suppress(UsageError):  # the same error is raised again when all settings are read
            tables = load_toml(Path(flags.config))
    algorithm = flags.algorithm or tables.get("algorithm")
    if algorithm is None:  # the config.toml of a run has one table, with the name of its command
        return "ppo" in tables and "sft" not in tables
    return algorithm in get_args(Algorithm)


def main(argv: list[str] | None = None) -> int:
    """Plans a run of `sft` or of `ppo`, whichever the arguments describe, and returns the exit status."""
    if argv is None:
        argv = sys.argv[1:]
    if is_rl(argv):
        return command.Command("plan", PlanRlConfig(), print_plan, table="ppo", reads_inputs=False)(argv)
    return command.Command("plan", PlanSftConfig(), print_plan, table="sft", reads_inputs=False)(argv)


if __name__ == "__main__":
    raise SystemExit(main())
