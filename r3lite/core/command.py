"""The names of the commands, and how each starts and ends: arguments, `--dry-run`, an earlier run's output, errors,
signals, exit codes, torchrun's several processes."""

import errno
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Collection
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import r3lite
from r3lite.core.config import Trait, check_required, flag, flat, sections, settings_with
from r3lite.core.errors import R3LiteError, UsageError
from r3lite.core.files import names_in
from r3lite.core.invocation import load_toml, resolve, with_values
from r3lite.core.terminal import printable, say
from r3lite.settings.uses import USES, Chosen

COMMANDS = (
    "sft", "ppo", "evaluate", "ask", "serve", "collect", "index", "retrieve", "plan", "doctor", "report", "export",
    "tune_prompt", "check_format", "prepare", "procedures", "rollout_worker",
    "quickstart",
)  # fmt: skip
CONFIG = "config.toml"  # the resolved settings, in the folder of a run
DISTRIBUTED = ("sft", "ppo")  # commands that torchrun may start in several processes
# Of writing and flushing a file, which name no path. (Those of a network have other numbers.)
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# How often a thread of GNU OpenMP, which PyTorch has on Linux, looks for the others before it sleeps; 300,000 times if
# nothing is set. While it looks it holds a core, which the thread that it waits for may need: docs/figures.md.
SPINS = 1000
# How many products compiled for a CPU, one for each size that is met, oneDNN keeps, and PyTorch what it knows of them.
# 1,024 if nothing is set: with rows of ever new lengths the process grew step by step. One takes 0.6 MiB
# in both together, and a pass of training has some 42 of them.
KEPT, CACHES = "64", ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


class Terminated(BaseException):
    """SIGTERM arrived. Training loops catch it to save first, then raise it again."""


def _terminate(signum, frame):
    raise Terminated


class World(NamedTuple):
    """Which of a run's processes this is."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among those of this machine


def world() -> World:
    """What torchrun has put into the environment; without it, one process."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not {*names, "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return World()
    return World(*(int(os.environ[name]) for name in names))


def shared_facts(config: Any) -> dict[str, Any]:
    """What the processes of a run must agree on before they begin: all settings but where files are."""
    settings = {flag(name): value for name, value in flat(config).items() if name not in ("config", "output")}
    return {"the version of r3lite": r3lite.__version__, **settings}


def say_error(message: str) -> None:
    """Prints an error; of several processes, those beside the first say which they are."""
    rank = world().rank
    if rank:
        print(printable(f"[rank {rank}] {message.lstrip()}"), file=sys.__stderr__)
    else:
        say(message)


def check_status(status: int, cause: str, remedy: str = "") -> None:
    """Raises what the exit status of a command that was run here stands for: an interruption, or R3LiteError."""
    if status == 130:
        raise KeyboardInterrupt
    if status == 143:
        raise Terminated
    if status:
        raise R3LiteError(f"{cause} with status {status}", remedy)


def spare_the_machine() -> None:
    """Has waiting threads sleep soon and few compiled products kept, unless the user has said otherwise.

    Works before torch is loaded.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
    for name in CACHES:
        os.environ.setdefault(name, KEPT)


def print_anything() -> None:
    """Has what a console's encoding lacks printed as an escape, such as \\u6570: on Windows it may have 256 letters."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it


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
    """A command's settings as the preset of `config` has them, with the choices that were made (Section.implied) and
    what these bring: what differs was asked for."""
    chosen, preset = flat(config), ["--preset", flat(config)["preset"]]
    plain = resolve(command, type(config)(), preset, COMMANDS)
    choices = {name for section in sections(config).values() for name in section.implied}
    changed = [name for name in sorted(choices) if chosen[name] != flat(plain)[name]]
    made = [x for name in changed for x in (flag(name), chosen[name]) if x is not True]
    return resolve(command, type(config)(), [*preset, *made], COMMANDS) if made else plain


def check_used(command: str, config: Any) -> None:
    """Raises UsageError for a setting that was asked for and, beside the others, would do nothing (settings/uses.py).

    Keys at the top of a TOML file are for all commands: those that this one has no use for are not asked of it, unless
    they would do harm. Nor are those of a run that is gone on with.
    """
    now, then = flat(config), flat(usual(command, config))
    shared = load_toml(Path(now["config"])) if now["config"] else {}
    begun = shared.get(command, {}) if now.get("resume") else {}
    chosen = Chosen(now | {"command": command})
    for use in USES:
        excused = begun if use.harmful else shared | begun
        for name in use.names.split():
            if now.get(name) in (None, then.get(name)) or use.works(chosen):
                continue
            if now[name] != excused.get(name):
                where = f" (in {now['config']} it may stand in the table of another command)" if name in shared else ""
                cause = f"{flag(name)} is {now[name]}, but has no effect here: it needs {use.purpose}{where}"
                raise UsageError(cause)


def free_settings(config: Any) -> set[str]:
    """Names of a command's settings that a resumed run may change."""
    return {name for section in sections(config).values() for name in settings_with(section, Trait.FREE)}


def changes(then: dict[str, Any], config: Any, free: Collection[str] = ()) -> str:
    """Settings that are not what an earlier run had, with both values; empty if there are none.

    Left out are those that a resumed run may change, those in `free`, and without a judge the judge's. A setting that
    the earlier run's version of r3lite lacked had its default.
    """
    default, now = (json.loads(json.dumps(flat(c))) for c in (type(config)(), config))  # as in a file: tuples are lists
    then = default | then
    fixed = then.keys() - free_settings(config) - set(free)  # every name: `default` has those of today
    if then.get("judge") == now.get("judge") == "none":
        fixed = {name for name in fixed if not name.startswith("judge_")}
    changed = [k for k in sorted(fixed) if then[k] != now.get(k)]
    return ", ".join(f"{k} (was {then[k]}, is {now.get(k)})" for k in changed)


def refuse_another_run(kept: Path, command: str, config: Any, output: Path, free: Collection[str] = ()) -> None:
    """Raises R3LiteError unless `kept`, which `to_toml` wrote beside an output, is of this command and these settings.

    Settings that came with a later version of r3lite count as unchanged.
    """
    remedy = "Pass another --output; this one is not changed."
    table = load_toml(kept).get(command)
    if not isinstance(table, dict):
        raise R3LiteError(f"{output} is not a run of {command}: {kept} has no [{command}]", remedy)
    then = json.loads(json.dumps(flat(with_values(config, table, f"{kept}: "))))
    if changed := changes(then, config, free):
        raise R3LiteError(
            f"{output} is from another run of {command}: {changed}", f"Pass --config {kept}. Or: {remedy}"
        )


def refuse_other_inputs(then: dict[str, str], now: dict[str, str], remedy: str) -> None:
    """Raises R3LiteError if a fingerprint of what a run reads is not what it was when the run started; by its names.

    What only one of the two has counts as unchanged: earlier versions knew less.
    """
    if changed := [name for name, value in now.items() if then.get(name, value) != value]:
        raise R3LiteError(f"what the run reads has changed since it started: {', '.join(changed)}", remedy)


def check_output(
    output: Path, command: str, config: Any, known: Collection[str] = (), free: Collection[str] = ()
) -> set[str]:
    """What an output folder holds: nothing, or what an earlier start of this very run has left, CONFIG among it.

    Raises R3LiteError for anything else; `known` are the names of all that such a start may leave, if that is fixed.
    """
    names, others = names_in(output), names_in(output).difference(known)
    if names and (CONFIG not in names or (known and others)):
        cause = f"--output {output} is not an empty folder: it holds {min(others or names)}"
        raise R3LiteError(cause, f"Pass another folder, such as {output / command}.")
    if names:
        refuse_another_run(output / CONFIG, command, config, output, free)
    return names


@dataclass(frozen=True)
class Command:
    """A command: its name, its settings by default, and what it does with those that were resolved.

    `plan` adds lines to what `--dry-run` prints. `table` names the command whose table of a TOML file is read, by
    default this one's.
    """

    name: str
    default: Any
    work: Callable[[Any], None]
    plan: Callable[[Any], str] | None = None
    table: str | None = None

    def __call__(self, argv: list[str] | None = None) -> int:
        """Resolves the settings and does the work, by default with the command line's arguments; the exit status.

        0 done, 1 a foreseeable failure (cause and remedy on stderr), 2 a usage error, 130 Ctrl-C, 143 SIGTERM.
        """
        if not world().rank:
            return self._run(argv)
        # Of several processes the first alone prints; errors are printed by all (`say_error`).
        with open(os.devnull, "w", encoding="utf-8") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
            return self._run(argv)

    def entry(self, module: str) -> "Command":
        """Itself, as `main` in the last line of its file, whose `__name__` is the `module`.

        If that file is being run, as by `python -m r3lite.sft`, it begins at once, and the process ends with it.
        """
        if module == "__main__":
            raise SystemExit(self())
        return self

    def _run(self, argv: list[str] | None) -> int:
        spare_the_machine()
        print_anything()
        try:
            config = resolve(self.name, self.default, sys.argv[1:] if argv is None else argv, COMMANDS, self.table)
            for section in sections(config).values():
                section.check()
            check_used(self.table or self.name, config)
            if (size := world().size) > 1 and self.name not in DISTRIBUTED:
                alone = f"torchrun has started {size} processes, and {self.name} is one: python -m r3lite.{self.name}"
                raise UsageError(f"{alone}. Only {' and '.join(DISTRIBUTED)} can run in several")
            if flat(config)["dry_run"]:
                print(describe(config))
                if self.plan:
                    print(self.plan(config))
            else:
                check_required(config)
                signal.signal(signal.SIGTERM, _terminate)
                self.work(config)
            sys.stdout.flush()  # here, where a broken pipe is caught
            return 0
        except UsageError as error:
            say_error(f"r3lite.{self.name}: {error}")
            return 2
        except R3LiteError as error:
            return self._stopped(error)
        except BrokenPipeError:
            ignore_output()
            return 1
        except OSError as error:
            if error.filename is None and error.errno not in DISK_ERRORS:  # an error of the network, or a bug of ours
                raise
            remedy = "Check the disk space and the permissions of the path, or pass another --output."
            return self._stopped(R3LiteError(str(error), remedy))
        except RuntimeError as error:
            torch = sys.modules.get("torch")
            if torch is None or not isinstance(error, torch.OutOfMemoryError):
                raise
            remedy = "Pass a smaller --vram-budget, or close other programs that use the GPU."
            return self._stopped(R3LiteError(str(error).splitlines()[0], remedy))
        except KeyboardInterrupt:
            say_error("\ninterrupted")
            return 130
        except Terminated:
            if world().size > 1:
                say_error("\nterminated: torchrun stops all processes when it is stopped, or when one of them fails")
            return 143

    def _stopped(self, error: R3LiteError) -> int:
        say_error(f"\nr3lite.{self.name} stopped: {error}")
        return 1
