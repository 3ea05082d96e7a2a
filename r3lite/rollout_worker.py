"""Samples episodes for ppo --rollout-server on another machine, which sends it only the adapter."""

from r3lite.core import command
from r3lite.settings import RolloutWorkerConfig


def work(config: RolloutWorkerConfig) -> None:
    """Serves a run's requests for episodes until it is interrupted."""
    from r3lite.assembly import rollout_service  # after the arguments are read: torch takes seconds to load

    rollout_service.serve(config)


def plan(config: RolloutWorkerConfig) -> str:
    """Returns the memory that sampling takes, for `--dry-run`."""
    from r3lite.assembly.rollout_service import plan_memory

    memory = plan_memory(config)
    return f"\nMemory, for episodes of {config.lengths.max_length} tokens\n{memory.table()}"


# Inputs are not checked beforehand: settings shared with the run may name an adapter that only the run's machine has.
# A missing file that the worker itself needs is reported when the worker starts.
main = command.Command(
    "rollout_worker",
    RolloutWorkerConfig(),
    work=work,
    plan=plan,
    table="ppo",
    reads_inputs=False,
)

if __name__ == "__main__":
    raise SystemExit(main())
