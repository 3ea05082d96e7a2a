"""All stages on the sample world and the tiny checkpoint: collect, index, SFT, RL, and an evaluation after each.

Every stage is the command that a user would run, with the arguments printed; nothing is downloaded.
"""

from r3lite.core import command
from r3lite.settings import QuickstartConfig


def run_all_stages(config: QuickstartConfig) -> None:
    """Runs the stages, each of which is a command."""
    # The commands themselves load torch; they are imported here so that --help stays instant.
    from r3lite import collect, evaluate, index, ppo, sft
    from r3lite.assembly import stages

    commands = {
        "collect": collect,
        "evaluate": evaluate,
        "index": index,
        "ppo": ppo,
        "sft": sft,
    }
    stages.run_all_stages(config, commands)


def plan(config: QuickstartConfig) -> str:
    """Checks what the command checks, and returns what happens and how long it takes, for `--dry-run`."""
    from r3lite.assembly import stages

    output = stages.output_of(config)
    stages.check_rl(config, output)
    return f"\n{stages.introduction(config, output)}"


main = command.Command("quickstart", QuickstartConfig(), work=run_all_stages, plan=plan)

if __name__ == "__main__":
    raise SystemExit(main())
