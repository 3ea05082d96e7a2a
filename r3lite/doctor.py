"""What this machine can do and whether r3lite is right on it, in about a minute: a line a check, with what to do."""

import contextlib
import getpass
import io
import math
import os
import platform
import re
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import r3lite
from r3lite.core import command
from r3lite.core.errors import R3LiteError
from r3lite.settings import Common, DoctorSettings

if TYPE_CHECKING:  # torch is loaded after the arguments are read, so that --help answers at once
    import torch

    from r3lite.checks.finding import Finding
    from r3lite.devices.cards import Speeds

FILE = "~/.cache/r3lite/doctor.json"
MARKS = {"ok": "ok", "failed": "!!", "skipped": "--"}
# A path: in quotes, where it may have blanks, or else from its beginning to the next blank. Not the `/` of a unit.
PATH = re.compile(r"""(['"])[^'"\n]*[/\\][^'"\n]*\1|(?<![\w./\\:<])(?:[A-Za-z]:)?[/\\]{1,2}[\w.~-][^\s'",;)]*""")


@dataclass(frozen=True)
class DoctorConfig:
    """Finds out what this machine can do and whether r3lite is right on it, in about a minute and without a download.

    Each check is a line: ok; !! with what to do; -- with the reason why it does not apply here. If any failed, the exit
    status is 1. Times are predicted from the speeds that it measures. All of it is written to --output FILE.json, by
    default ~/.cache/r3lite/doctor.json, for a bug report: it holds no path and no name of yours.
    """

    common: Common = Common()
    doctor: DoctorSettings = DoctorSettings()


@dataclass
class Report:
    """The findings, printed as they are made, and kept for the file without what names the user."""

    hide: Callable[[str], str]
    checks: list[dict] = field(default_factory=list)

    def make(self, name: str, check: "Callable[..., Finding]", *arguments) -> "Finding":
        """Makes a check and tells what it found. One that raises has failed, and the others go on."""
        from r3lite.checks.finding import Finding

        terminal, said, start, where = sys.stdout.isatty(), io.StringIO(), time.perf_counter(), []
        if terminal:
            print(f"   {name} ...", end="\r", flush=True)
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                found = check(*arguments)
        except Exception as error:  # of any kind: this is what a check may find
            found, where = Finding("failed", *told_by(error)), frames(error)
        warnings = [line for line in said.getvalue().splitlines() if line.startswith(("warning:", "r3lite."))]
        entry = {"name": name, "state": found.state, "told": self.hide(found.told)}
        entry |= {"remedy": self.hide(found.remedy)} if found.remedy else {}
        entry |= {"warnings": list(dict.fromkeys(map(self.hide, warnings)))} if warnings else {}
        entry |= {"where": where} if where else {}
        entry |= {"seconds": round(time.perf_counter() - start, 2)}
        self.checks.append(entry | {"measured": {k: plain(v) for k, v in found.measured.items()}})
        print(" " * (len(name) + 7) + "\r" if terminal else "", end="")
        print_line(f"{MARKS[found.state]} {name:<19}", entry["told"])
        for line in (entry.get("remedy", ""), *entry.get("warnings", [])):
            print_line("", line)
        return found

    @property
    def failed(self) -> list[str]:
        return [entry["name"] for entry in self.checks if entry["state"] == "failed"]

    @property
    def measured(self) -> dict[str, float]:
        """The figures of all checks so far."""
        return {name: value for entry in self.checks for name, value in entry["measured"].items()}


def print_line(head: str, told: str) -> None:
    """Prints a text beside its head, in as many lines as it takes; an empty one not at all."""
    for i, line in enumerate(textwrap.wrap(told, 96, break_long_words=False, break_on_hyphens=False)):
        print(f"{'' if i else head:<22} {line}", flush=True)


def told_by(error: Exception) -> tuple[str, str]:
    """What an error says in a line, and what to do about it."""
    import torch

    from r3lite.checks.finding import REPORT

    if isinstance(error, R3LiteError):
        return error.cause, error.remedy or REPORT
    first = (str(error).strip() or "no message").splitlines()[0]
    out_of_memory = isinstance(error, torch.OutOfMemoryError)
    return f"{type(error).__name__}: {first}", "Close what else uses the card." if out_of_memory else REPORT


def frames(error: Exception) -> list[str]:
    """Where an error was raised, outermost first: file, line and function, and no folder above the packages."""
    found, package = [], Path(r3lite.__file__).parent
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if path.is_relative_to(package):
            place = path.relative_to(package.parent).as_posix()
        elif "site-packages" in path.parts:
            place = "/".join(path.parts[path.parts.index("site-packages") + 1 :])
        else:
            place = "elsewhere"
        found.append(f"{place}:{frame.lineno} {frame.name}")
    return found


def plain(value: float) -> float | None:
    """A figure as JSON has it: not more digits than were measured, and nothing for what is not a number."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def hider(folders: list[str], names: list[str]) -> Callable[[str], str]:
    """A function that takes paths out of a text, and the names of the user and of the machine."""
    known = sorted({folder for folder in folders if len(folder) > 1}, key=len, reverse=True)  # the longest first
    words = [re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE) for name in names if name]

    def hide(text: str) -> str:
        for folder in known:
            text = text.replace(folder, "/folder")
        text = PATH.sub("<path>", text)
        for word in words:
            text = word.sub("<name>", text)
        return text

    return hide


def users_own() -> Callable[[str], str]:
    """A `hider` of this process's folders and of its user."""
    folders = [
        os.path.expanduser("~"),
        os.getcwd(),
        tempfile.gettempdir(),
        sys.prefix,
        str(Path(r3lite.__file__).parent),
    ]
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a user without a name
        user = ""
    home = Path.home().name
    return hider(folders, [user, home, platform.node(), platform.node().partition(".")[0]])


def examine(config: DoctorConfig) -> None:
    # Imported after the arguments are read: torch takes seconds to load.
    from r3lite.checks.card import beside_tensors
    from r3lite.checks.registry import BESIDE, CHECKS
    from r3lite.core.files import write_json
    from r3lite.devices import machine
    from r3lite.devices.precision import Precision, dtype_name, resolve_device, resolve_dtype

    start, hide = time.perf_counter(), users_own()
    path = Path(config.common.output or os.path.expanduser(FILE))
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    driver = machine.ask_driver(card)  # before CUDA is used
    with contextlib.redirect_stderr(io.StringIO()):  # that a card is not used is a check's to say
        device = resolve_device(config.doctor.device)
    precision = Precision(resolve_dtype(config.doctor.dtype, device), device)
    here = machine.describe(device, driver)
    print(f"r3lite {r3lite.__version__}, {dtype_name(precision.dtype)} on {device.type}\n\nwhat this machine is")
    for what, which in here.lines():
        print_line(f"   {what}", hide(which))
    print("\nwhat it can do", flush=True)
    speeds: list[Speeds] = []
    report = Report(hide)
    report.make("speeds", measured_speeds, device, speeds)
    print("\nwhether r3lite is right on it")
    for check in CHECKS:
        report.make(check.name, check.run, precision)
    report.make(BESIDE[0], beside_tensors, precision, driver, report.measured)
    seconds = time.perf_counter() - start
    facts = {key: hide(value) if isinstance(value, str) else value for key, value in asdict(here).items()}
    write_json(
        path,
        {
            "r3lite": r3lite.__version__,
            "ok": not report.failed,
            "seconds": round(seconds, 1),
            "dtype": dtype_name(precision.dtype),
            "machine": facts,
            "speeds": asdict(speeds[0]) if speeds else None,
            "checks": report.checks,
        },
    )
    print(f"\n{seconds:.0f} s; written to {path}, without a path or name of yours: send it with a bug report")
    if report.failed:
        told = f"{len(report.failed)} of {len(report.checks)} checks failed: {', '.join(report.failed)}"
        raise R3LiteError(told, "Their lines say what to do.")


def measured_speeds(device: "torch.device", kept: "list[Speeds]") -> "Finding":
    """How fast the device is; the figures are added to `kept`."""
    from r3lite.checks.finding import judged
    from r3lite.devices import cards, speed
    from r3lite.models.linear import linear

    found = speed.measure(device, linear)
    kept.append(found)
    why = cards.keep(found)
    products = ", ".join(f"{name} {short(flops / 1e9)}" for name, flops in found.flops.items())
    told = (
        f"memory {short(found.bandwidth / 1e9)} GB/s; products {products} GFLOPS; a kernel {found.launch * 1e6:.1f} us"
    )
    told += f"; not kept for predictions: {why}" if why else ""
    if device.type == "cuda":
        told += f"; from the host {speed.host_copy_speed(device, pinned=False) / 1e9:.1f} GB/s"
        with contextlib.suppress(RuntimeError):  # memory cannot be pinned here, as the lines above say
            told += f", pinned {speed.host_copy_speed(device, pinned=True) / 1e9:.1f}"
        if found.flops["fp16"] < found.flops["fp32"]:
            told += "; fp16 is the slower: where a run fits, --dtype fp32 is faster"
    return judged(True, told)


def short(figure: float) -> str:
    """A figure in three digits, or as a whole number."""
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def listing(config: DoctorConfig) -> str:
    """The checks, for `--dry-run`."""
    from r3lite.checks.registry import BESIDE, CHECKS

    lines = [("speeds", "memory, matrix products, the cost of a kernel")]
    lines += [(check.name, check.about) for check in CHECKS] + [BESIDE]
    return "\n".join(["\nChecks", *(f"  {name:<19} {about}" for name, about in lines)])


def main(argv: list[str] | None = None) -> int:
    return command.run("doctor", DoctorConfig(), examine, argv, listing)


if __name__ == "__main__":
    sys.exit(main())
