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
from r3lite.core.environment import escape_unencodable, ignore_output, spare_the_machine
from r3lite.core.errors import R3LiteError, UsageError, reason
from r3lite.core.exit_status import DONE, FAILED, INTERRUPTED, TERMINATED, USAGE, Terminated, terminate
from r3lite.core.inputs import check_inputs, wrong_inputs
from r3lite.core.invocation import resolve
from r3lite.core.processes import say_error, torchrun_world

# The error numbers of an OSError from writing or flushing a file. Such an error names no path. Errors of a network name
# none either, but have other numbers.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def describe(config: Any, default: Any) -> str:
    """Returns what `--dry-run` prints: the settings that differ from the defaults, wrong inputs, then all settings.

    `default` has the command's settings before any is set.
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
    lines += [f"missing: {wrong_input.cause}" for wrong_input in wrong_inputs(config)]
    lines.append("")
    for section in sections(config).values():
        heading = type(section).__doc__.strip().splitlines()[0].rstrip(".")
        lines.append(heading)
        lines += [f"  {name:<{width}}  {value}" for name, value in vars(section).items()]
    return "\n".join(lines)


@dataclass(frozen=True)
class Command:
    """A command: resolves its settings, does its work and turns errors into messages and an exit status."""

    name: str
    default: Any  # the command's settings before any is set
    work: Callable[[Any], None]  # takes the resolved settings
    plan: Callable[[Any], str] | None = None  # takes the resolved settings; returns what `--dry-run` prints below them
    table: str | None = None  # the table of a TOML file that is read; None: the one with the command's name
    reads_inputs: bool = True  # False: files and folders that settings name need not exist

    def __call__(self, argv: list[str] | None = None) -> int:
        """Runs the command with the arguments `argv`, by default those of the process; returns its exit status.

        See core/exit_status.py for what the status means.
        """
        if argv is None:
            argv = sys.argv[1:]
        is_first_process = torchrun_world().rank == 0
        if is_first_process:
            return self._run(argv)
        # Every other process started by torchrun prints nothing but errors: `say_error` writes to the original stderr.
        with open(os.devnull, "w", encoding="utf-8") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
            return self._run(argv)

    def _run(self, argv: list[str]) -> int:
        """Does the work and turns each foreseeable exception into a message and a status."""
        spare_the_machine()
        escape_unencodable()
        try:
            self._resolve_and_work(argv)
            sys.stdout.flush()  # so that a broken pipe raises here, where it is caught
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
            is_about_file = error.filename is not None or error.errno in DISK_ERRORS
            if not is_about_file:  # an error of the network, or a bug of r3lite: shown with its traceback
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
            if torchrun_world().size > 1:
                say_error("\nterminated: torchrun stops all processes when it is stopped, or when one of them fails")
            return TERMINATED

    def _resolve_and_work(self, argv: list[str]) -> None:
        config = resolve(self.name, self.default, argv, self.table)
        config.check_settings(self.table or self.name)
        processes = torchrun_world().size
        if processes > 1 and self.name not in DISTRIBUTED:
            cause = (
                f"torchrun has started {processes} processes, but {self.name} runs in one: python -m r3lite.{self.name}"
            )
            raise UsageError(
                f"{cause}. Only {' and '.join(DISTRIBUTED)} can run in several", code="processes-unsupported"
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
