"""Checks whether r3lite computes correctly on this machine, and how fast, in about a minute."""

import contextlib
import io
import os
import time
from dataclasses import asdict
from pathlib import Path

import r3lite
from r3lite.core import cache, command
from r3lite.core.errors import R3LiteError
from r3lite.core.files import write_json
from r3lite.settings import CommandConfig, DoctorSettings

FILE = f"{cache.CACHE}/doctor.json"


class DoctorConfig(CommandConfig):
    """Checks whether r3lite computes correctly on this machine, and how fast, in about a minute, without a download.

    Prints one line per check: ok; !! for a failure, with what to do; -- for a check that does not apply here, with the
    reason. The exit status is 1 if a check fails. The report is written to --output FILE.json, by default
    ~/.cache/r3lite/doctor.json; attach it to bug reports: it contains no paths and no user or host names.
    """

    doctor: DoctorSettings = DoctorSettings()


def examine(config: DoctorConfig) -> None:
    """Runs all checks, prints a line for each, and writes the report; raises R3LiteError if one failed."""
    if config.doctor.clear_cache:
        before = cache.summary()
        cache.clear()
        print(f"deleted {before}")
        return
    # Imported after the arguments are read: torch takes seconds to load.
    from r3lite.checks import card, registry, speeds
    from r3lite.checks.report import CheckLog, hider_of_process, print_line
    from r3lite.devices import machine
    from r3lite.devices.precision import Precision, dtype_name, resolve_device, resolve_dtype

    start = time.perf_counter()
    hide = hider_of_process()
    path = Path(config.common.output or os.path.expanduser(FILE))
    if path.is_dir():  # checked now, and not after a minute of checks
        raise R3LiteError(f"--output {path} is a folder, not a file", "Pass a file.", code="not-a-file")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    driver = machine.ask_driver(visible or "0")  # before CUDA is used
    with contextlib.redirect_stderr(io.StringIO()):  # no warning about an unused card: the check `card` reports it
        device = resolve_device(config.doctor.device)
    precision = Precision(resolve_dtype(config.doctor.dtype, device), device)
    facts = machine.describe(device, driver)
    print(f"r3lite {r3lite.__version__}, {dtype_name(precision.dtype)} on {device.type}\n\nmachine")
    for label, text in machine.lines(facts).items():
        print_line(f"   {label}", hide(text))
    print_line("   cache", f"{cache.summary()}; --clear-cache deletes it")
    print("\nspeed", flush=True)
    measured_speeds = []  # the check appends the speeds, unless it fails
    log = CheckLog(hide)
    log.run("speeds", speeds.measured_speeds, device, measured_speeds)
    print("\ncorrectness")
    for check in registry.CHECKS:
        log.run(check.name, check.run, precision)
    name_of_last, _ = registry.BESIDE
    log.run(name_of_last, card.beside_tensors, precision, driver, log.measured)
    seconds = time.perf_counter() - start
    public_facts = {}  # of the machine
    for name, value in facts.items():
        public_facts[name] = hide(value) if isinstance(value, str) else value
    results = {
        "r3lite": r3lite.__version__,
        "ok": not log.failed,
        "seconds": round(seconds, 1),
        "dtype": dtype_name(precision.dtype),
        "machine": public_facts,
        "speeds": asdict(measured_speeds[0]) if measured_speeds else None,
        "checks": log.checks,
    }
    write_json(path, results)
    print(f"\n{seconds:.0f} s; written to {path}, without paths or names: attach it to bug reports")
    if log.failed:
        message = f"{len(log.failed)} of {len(log.checks)} checks failed: {', '.join(log.failed)}"
        raise R3LiteError(message, "See their lines for what to do.", code="checks-failed")


def listing(config: DoctorConfig) -> str:
    """Returns the names of the checks and what each is about, for `--dry-run`."""
    from r3lite.checks.registry import BESIDE, CHECKS

    checks = [("speeds", "memory, matrix products, kernel launches")]
    checks += [(check.name, check.about) for check in CHECKS]
    checks.append(BESIDE)
    lines = [f"  {name:<19} {about}" for name, about in checks]
    return "\n".join(["\nChecks", *lines])


main = command.Command("doctor", DoctorConfig(), work=examine, plan=listing)

if __name__ == "__main__":
    raise SystemExit(main())
