"""Predicts the memory and the time of a run: a table by phase, and the settings chosen to fit."""

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from r3lite.core import command
from r3lite.core.errors import UsageError
from r3lite.core.files import load_toml
from r3lite.settings import CardSettings, DataSettings, OptionalQuestionSettings, PlanSettings, PpoConfig, SftConfig
from r3lite.settings.rl import Algorithm

if TYPE_CHECKING:
    from r3lite.memory.plan import Plan


class PlanSftConfig(SftConfig):
    """Predicts the memory and the time of a run without loading weights. Pass the flags of the run: those of `sft` or,
    with --algorithm, those of `ppo`; --data is counted if it is here. The sizes of the models in docs/models.md are
    known offline. --card plans for another card; --output FOLDER also writes plan.json.
    """

    data: DataSettings = DataSettings()  # a plan needs no data, but counts those that are here
    plan: PlanSettings = PlanSettings()
    elsewhere: CardSettings = CardSettings()


class PlanRlConfig(PpoConfig):
    __doc__ = PlanSftConfig.__doc__
    data: OptionalQuestionSettings = OptionalQuestionSettings()
    elsewhere: CardSettings = CardSettings()


def make(config: PlanSftConfig | PlanRlConfig, count: int | None = None) -> "Plan":
    """Returns the plan of the run that `config` describes; `count` is how many rows or questions it has, if known."""
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
    """Returns the stage that is planned, its algorithm and its model, in words."""
    if isinstance(config, PlanSftConfig):
        trained = "all weights" if config.lora.no_lora else "a LoRA adapter"
        return f"SFT of {trained} for {config.model.model}"
    start = config.model.adapter or "a fresh adapter"
    return f"Reinforcement learning with {config.rl.algorithm} from {start} for {config.model.model}"


def card_of(plan: "Plan") -> str:
    """Returns the card that is planned for, with its memory; nothing for this machine's device."""
    speeds = plan.workload.speeds
    if not speeds or not speeds.memory:
        return ""
    return f" on the {speeds.name} ({speeds.memory / (1 << 30):.0f} GiB)"


def print_plan(config: PlanSftConfig | PlanRlConfig) -> None:
    """Prints the plan, and writes it to plan.json in --output."""
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


def learns(argv: list[str]) -> bool:
    """Returns whether the run is one of reinforcement learning, by --algorithm or else by the file of --config.

    This decides which flags there are, so these two flags are looked up before the others are read.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--algorithm", "--config"):
        parser.add_argument(flag, nargs="?")
    flags, _ = parser.parse_known_args(argv)
    tables = {}
    if flags.config and not flags.algorithm:
        with contextlib.suppress(UsageError):  # it is raised again when the settings are read
            tables = load_toml(Path(flags.config))
    algorithm = flags.algorithm or tables.get("algorithm")
    if algorithm is None:  # the config.toml of a run has one table, with the name of its command
        return "ppo" in tables and "sft" not in tables
    return algorithm in get_args(Algorithm)


def main(argv: list[str] | None = None) -> int:
    """Plans a run of `sft`, or of `ppo` if the arguments are of one, and returns the exit status."""
    if argv is None:
        argv = sys.argv[1:]
    if learns(argv):
        return command.Command("plan", PlanRlConfig(), print_plan, table="ppo", reads_inputs=False)(argv)
    return command.Command("plan", PlanSftConfig(), print_plan, table="sft", reads_inputs=False)(argv)


if __name__ == "__main__":
    raise SystemExit(main())
