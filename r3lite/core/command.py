"""How each command starts and ends: arguments, `--dry-run`, errors, signals, exit statuses."""

import errno
import os
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from r3lite.core import inherited
from r3lite.core.command_names import DISTRIBUTED
from r3lite.core.config import check_required, flat, sections
from r3lite.core.environment import ignore_output, print_anything, spare_the_machine
from r3lite.core.errors import R3LiteError, UsageError, reason
from r3lite.core.exit_status import DONE, FAILED, INTERRUPTED, TERMINATED, USAGE, Terminated, terminate
from r3lite.core.inputs import check_inputs, missing_inputs
from r3lite.core.invocation import resolve
from r3lite.core.processes import say_error, world

# The numbers of errors of writing and flushing a file, which name no path. Errors of a network have other numbers.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def describe(config: Any, default: Any) -> str:
    """Returns the resolved settings for `--dry-run`: what differs from the defaults, missing inputs, then all by group.

    `default` are the command's settings without any that were set.
    """
    values = flat(config)
    width = max(map(len, values))
    lines = ["Differs from the defaults"]
    for name, value in flat(default).items():
        if values[name] != value:
            source = "by the preset or another setting"
            if name in config.set_by_user:
                source = config.set_by_user[name].value
            elif name in config.inherited:
                source = f"from {config.inherited[name]}"
            lines.append(f"  {name:<{width}}  {values[name]}  ({source})")
    lines += [f"missing: {missing.cause}" for missing in missing_inputs(config)]
    lines.append("")
    for section in sections(config).values():
        heading = type(section).__doc__.strip().splitlines()[0].rstrip(".")
        lines.append(heading)
        lines += [f"  {name:<{width}}  {value}" for name, value in vars(section).items()]
    return "\n".join(lines)


@dataclass(frozen=True)
class Command:
    """Runs a command: its name, its settings by default, and the work that it does with those that were resolved.

    `plan` adds lines to what `--dry-run` prints. `table` names the command whose table of a TOML file is read, by
    default this one's. `reads_inputs` is False if the inputs that settings name need not be there.
    """

    name: str
    default: Any
    work: Callable[[Any], None]
    plan: Callable[[Any], str] | None = None
    table: str | None = None
    reads_inputs: bool = True

    def __call__(self, argv: list[str] | None = None) -> int:
        """Resolves the settings, by default from the command line's arguments, does the work, and returns the status.

        See core/exit_status.py for what it means.
        """
        if not world().rank:
            return self._run(argv)
        # Of several processes the first alone prints; errors are printed by all (`say_error`).
        with open(os.devnull, "w", encoding="utf-8") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
            return self._run(argv)

    def _run(self, argv: list[str] | None) -> int:
        """Does the work and turns each foreseeable exception into a message and a status."""
        spare_the_machine()
        print_anything()
        try:
            self._resolve_and_work(sys.argv[1:] if argv is None else argv)
            sys.stdout.flush()  # here, where a broken pipe is caught
            return DONE
        except UsageError as error:
            say_error(f"r3lite.{self.name}: {error}")
            return USAGE
        except R3LiteError as error:
            return self._fail(error)
        except BrokenPipeError:
            ignore_output()
            return FAILED
        except OSError as error:
            if error.filename is None and error.errno not in DISK_ERRORS:  # an error of the network, or a bug of ours
                raise
            remedy = "Check the disk space and the permissions of the path, or pass another --output."
            place = f"{error.filename}: " if error.filename else ""
            return self._fail(R3LiteError(f"{place}{reason(error)}", remedy, code="system-error"))
        except RuntimeError as error:
            torch = sys.modules.get("torch")
            if torch is None or not isinstance(error, torch.OutOfMemoryError):
                raise
            remedy = "Pass a smaller --vram-budget, or close other programs that use the GPU."
            return self._fail(R3LiteError(str(error).splitlines()[0], remedy, code="device-memory"))
        except KeyboardInterrupt:
            say_error("\ninterrupted")
            return INTERRUPTED
        except Terminated:
            if world().size > 1:
                say_error("\nterminated: torchrun stops all processes when it is stopped, or when one of them fails")
            return TERMINATED

    def _resolve_and_work(self, argv: list[str]) -> None:
        config = resolve(self.name, self.default, argv, self.table)
        config.check_settings(self.table or self.name)
        processes = world().size
        if processes > 1 and self.name not in DISTRIBUTED:
            alone = f"torchrun has started {processes} processes, and {self.name} is one: python -m r3lite.{self.name}"
            raise UsageError(
                f"{alone}. Only {' and '.join(DISTRIBUTED)} can run in several", code="processes-unsupported"
            )
        if config.common.dry_run:
            print(describe(config, self.default))
            if self.plan:
                print(self.plan(config))
            return
        check_required(config)
        if self.reads_inputs:
            check_inputs(config)
        for line in inherited.lines_of_inherited(config):
            print(line, file=sys.stderr)
        signal.signal(signal.SIGTERM, terminate)
        self.work(config)

    def _fail(self, error: R3LiteError) -> int:
        say_error(f"\nr3lite.{self.name} stopped: {error}")
        return FAILED
