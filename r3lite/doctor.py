"""Checks whether r3lite computes correctly on this machine, and how fast, in about a minute."""

import contextlib
import io
import os
import time
from dataclasses import asdict
from pathlib import Path

import r3lite
from r3lite.core import command
from r3lite.core.errors import R3LiteError
from r3lite.core.files import write_json
from r3lite.settings import CommandConfig, DoctorSettings

FILE = "~/.cache/r3lite/doctor.json"


class DoctorConfig(CommandConfig):
    """Checks whether r3lite computes correctly on this machine, and how fast, in about a minute, without a download.

    Prints one line per check: ok; !! for a failure, with what to do; -- for a check that does not apply here, with the
    reason. The exit status is 1 if a check fails. The report is written to --output FILE.json, by default
    ~/.cache/r3lite/doctor.json; attach it to bug reports: it contains no paths and no user or host names.
    """

    doctor: DoctorSettings = DoctorSettings()


def examine(config: DoctorConfig) -> None:
    # Imported after the arguments are read: torch takes seconds to load.
    from r3lite.checks import card, registry, speeds
    from r3lite.checks.report import Report, print_line, users_own
    from r3lite.devices import machine
    from r3lite.devices.precision import Precision, dtype_name, resolve_device, resolve_dtype

    start, hide = time.perf_counter(), users_own()
    path = Path(config.common.output or os.path.expanduser(FILE))
    # Before CUDA is used.
    driver = machine.ask_driver(os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0")
    with contextlib.redirect_stderr(io.StringIO()):  # that a card is not used is a check's to say
        device = resolve_device(config.doctor.device)
    precision = Precision(resolve_dtype(config.doctor.dtype, device), device)
    here = machine.describe(device, driver)
    print(f"r3lite {r3lite.__version__}, {dtype_name(precision.dtype)} on {device.type}\n\nmachine")
    for what, which in machine.lines(here).items():
        print_line(f"   {what}", hide(which))
    print("\nspeed", flush=True)
    measured, report = [], Report(hide)
    report.make("speeds", speeds.measured_speeds, device, measured)
    print("\ncorrectness")
    for check in registry.CHECKS:
        report.make(check.name, check.run, precision)
    report.make(registry.BESIDE[0], card.beside_tensors, precision, driver, report.measured)
    seconds = time.perf_counter() - start
    found = {
        "r3lite": r3lite.__version__,
        "ok": not report.failed,
        "seconds": round(seconds, 1),
        "dtype": dtype_name(precision.dtype),
        "machine": {key: hide(value) if isinstance(value, str) else value for key, value in here.items()},
        "speeds": asdict(measured[0]) if measured else None,
        "checks": report.checks,
    }
    write_json(path, found)
    print(f"\n{seconds:.0f} s; written to {path}, without paths or names: attach it to bug reports")
    if report.failed:
        message = f"{len(report.failed)} of {len(report.checks)} checks failed: {', '.join(report.failed)}"
        raise R3LiteError(message, "See their lines for what to do.")


def listing(config: DoctorConfig) -> str:
    """The checks, for `--dry-run`."""
    from r3lite.checks.registry import BESIDE, CHECKS

    checks = [("speeds", "memory, matrix products, kernel launches"), *((c.name, c.about) for c in CHECKS), BESIDE]
    return "\n".join(["\nChecks", *(f"  {name:<19} {about}" for name, about in checks)])


main = command.Command("doctor", DoctorConfig(), examine, listing).entry(__name__)
