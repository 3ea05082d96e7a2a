"""The names of the commands, and how each starts and ends: arguments, `--dry-run`, errors, signals, exit codes."""

import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from r3lite.config import UsageError, check_required, flat, resolve, sections
from r3lite.errors import R3LiteError

COMMANDS = ("sft", "ppo", "evaluate", "collect", "index", "retrieve", "plan", "quickstart")


class Terminated(BaseException):
    """SIGTERM arrived. Training loops catch it to save first, then raise it again."""


def _terminate(signum, frame):
    raise Terminated


def ignore_output() -> None:
    """Discards what is still to be printed, also at exit: the reader of a pipe, such as `head`, has closed it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def describe(config: Any) -> str:
    """The resolved settings, by group, for `--dry-run`."""
    width = max(map(len, flat(config)))
    lines = []
    for section in sections(config).values():
        lines.append(type(section).__doc__.strip().splitlines()[0].rstrip("."))
        lines += [f"  {k:<{width}}  {v}" for k, v in vars(section).items()]
    return "\n".join(lines)


def usual(command: str, config: Any) -> Any:
    """A command's settings as the preset of `config` has them, and nothing else: what differs was asked for."""
    return resolve(command, type(config)(), ["--preset", flat(config)["preset"]], COMMANDS)


def run(
    command: str,
    default: Any,
    work: Callable[[Any], None],
    argv: list[str] | None = None,
    plan: Callable[[Any], str] | None = None,
    table: str | None = None,
) -> int:
    """Resolves the settings and does the work; returns the exit status.

    0 done, 1 a foreseeable failure (cause and remedy on stderr), 2 a usage error, 130 Ctrl-C, 143 SIGTERM.
    `plan` adds lines to what `--dry-run` prints. `table` names the command whose table of a TOML file is read, by
    default this one's.
    """
    try:
        config = resolve(command, default, sys.argv[1:] if argv is None else argv, COMMANDS, table)
        if flat(config)["dry_run"]:
            print(describe(config))
            if plan:
                print(plan(config))
        else:
            check_required(config)
            signal.signal(signal.SIGTERM, _terminate)
            work(config)
        sys.stdout.flush()  # here, where a broken pipe is caught
        return 0
    except UsageError as error:
        print(f"r3lite.{command}: {error}", file=sys.stderr)
        return 2
    except R3LiteError as error:
        print(f"\nr3lite.{command} stopped: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        ignore_output()
        return 1
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:  # an error of the network, or a bug of ours
            raise
        print(f"\nr3lite.{command} stopped: {error}", file=sys.stderr)
        print(
            "  Check that there is room and that the path can be read and written, or pass another (--output).",
            file=sys.stderr,
        )
        return 1
    except RuntimeError as error:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(error, torch.OutOfMemoryError):
            raise
        print(f"\nr3lite.{command} stopped: {str(error).splitlines()[0]}", file=sys.stderr)
        print("  Pass a smaller --vram-budget, or close what else uses the card.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except Terminated:
        return 143
