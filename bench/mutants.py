"""Removes guards of the package, one at a time, and runs the tests that should notice.

python -m bench.mutants                     # all of mutants.toml; results in bench/results/mutants.json
python -m bench.mutants --survivors         # guards whose removal the last run did not notice; adds the results
python -m bench.mutants --only NAME ...     # some of them; writes no results

A guard is a line that does nothing as long as nothing goes wrong: a check of untrusted input, a limit, a flush to the
disk. So nobody notices if its test is missing. Each guard is removed in a copy of the repository, and one of its tests
must fail there.
"""

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIST = ROOT / "bench" / "mutants.toml"
RESULTS = ROOT / "bench" / "results" / "mutants.json"
COPIED = ("r3lite", "tests", "bench", "data", "prompts", "docs", "checkpoints", "pyproject.toml", "README.md")
SECONDS = 600.0  # limit of the time of one guard's tests
POLL_SECONDS = 0.05  # from one look at the process of the tests to the next
FAILED_TO_START = 70  # exit status of a fork in which pytest could not be run
# Packages that tests import and that load slowly. They are imported once, before the process of each guard is forked.
PRELOADED = ("torch", "numpy", "tokenizers", "safetensors.torch", "faiss", "hypothesis", "fastapi", "uvicorn", "httpx")
NOTICED = "noticed"
SURVIVED = "survived"  # its tests passed without the guard
HUNG = "hung"  # its tests did not end in time
BROKEN = "broken"  # its tests could not be run


@dataclass(frozen=True)
class Mutant:
    """A guard of the package, and how it is removed."""

    guard: str  # the name of the guard
    file: str
    find: str  # the text of the guard, which is in the file once
    put: str  # the text that replaces it
    tests: list[str]  # files or ids of tests, one of which has to fail
    slow: bool = False  # True if a test marked `slow` removes the guard, too

    def mutated(self, text: str) -> str:
        """Returns the text of the file without the guard."""
        count = text.count(self.find)
        if count != 1:
            raise ValueError(f"{self.guard}: {self.file} has the text {count} times: {self.find!r}")
        return text.replace(self.find, self.put)


def read_list() -> list[Mutant]:
    """Returns the guards of mutants.toml."""
    entries = tomllib.loads(LIST.read_text(encoding="utf-8"))["mutants"]
    return [Mutant(**entry) for entry in entries]


def outcomes(mutants: list[Mutant]) -> dict[str, str]:
    """Removes the guards one by one in a copy of the repository; returns the outcome of each, by the guard's name."""
    states = {}
    with tempfile.TemporaryDirectory(prefix="r3lite-mutants-") as folder:
        work = Path(folder).resolve()
        copy_repository(work)
        for mutant in mutants:
            start = time.monotonic()
            states[mutant.guard] = outcome(mutant, work)
            print(f"{states[mutant.guard]:<10}{time.monotonic() - start:6.0f} s  {mutant.guard}", flush=True)
    return states


def copy_repository(work: Path) -> None:
    """Copies the files of the repository that tests need into the folder `work`."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, work / name, ignore=ignored)
        elif source.exists():
            shutil.copy(source, work / name)


def outcome(mutant: Mutant, work: Path) -> str:
    """Runs a guard's tests while the copy in `work` is without the guard; returns NOTICED, SURVIVED, HUNG or BROKEN."""
    path = work / mutant.file
    text = path.read_text(encoding="utf-8")
    mutated = mutant.mutated(text)
    compile(mutated, mutant.file, "exec")
    _write(path, mutated)
    try:
        status = run_tests(mutant.tests, work)
    finally:
        _write(path, text)
    if status is None:
        return HUNG
    # Exit statuses of pytest: 0 if all tests passed, 1 if a test failed; all others mean that it could not run them.
    return {0: SURVIVED, 1: NOTICED}.get(status, BROKEN)


def _write(path: Path, text: str) -> None:
    """Writes a module, and deletes its compiled code.

    Python would run old compiled code if both texts have the same length and were written in the same second.
    """
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def run_tests(tests: list[str], work: Path) -> int | None:
    """Runs tests in the copy in `work`; returns pytest's exit status, or None if they do not end within SECONDS."""
    arguments = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(work)}
    log = work / "log.txt"
    if hasattr(os, "fork"):
        return _run_forked(arguments, environment, work=work, log=log)
    with open(log, "wb") as file, contextlib.suppress(subprocess.TimeoutExpired):
        command = [sys.executable, "-m", "pytest", *arguments]
        finished = subprocess.run(command, cwd=work, env=environment, stdout=file, stderr=file, timeout=SECONDS)
        return finished.returncode
    return None


def _run_forked(arguments: list[str], environment: dict[str, str], work: Path, log: Path) -> int | None:
    """Runs pytest in a fork of this process; returns its exit status, or None if it does not end within SECONDS.

    The fork inherits the imports of `preload`, which would take most of the time.
    """
    pid = os.fork()
    if pid == 0:
        status = FAILED_TO_START
        try:
            os.setsid()
            _move_to(work, environment, log)
            import pytest

            status = int(pytest.main(arguments))
        finally:
            os._exit(status)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        ended_pid, status = os.waitpid(pid, os.WNOHANG)  # ended_pid is 0 while the process runs
        if ended_pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(POLL_SECONDS)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _move_to(work: Path, environment: dict[str, str], log: Path) -> None:
    """Makes this process work in the copy in `work`, import its modules, and write to the log."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(work)
    os.environ.update(environment)

    sys.path[:] = [str(work), *(path for path in sys.path if path and Path(path).resolve() != ROOT)]
    for name in list(sys.modules):
        if name.partition(".")[0] in ("r3lite", "bench", "tests"):
            del sys.modules[name]


def preload() -> None:
    """Imports pytest and the packages of PRELOADED that are installed."""
    for name in ("pytest", *PRELOADED):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def head() -> str:
    """Returns the hash of the commit that is checked out."""
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def summary(mutants: list[Mutant], states: dict[str, str], commit: str) -> dict:
    """Returns the results of a run: how many guards were removed and noticed, and those that were not noticed."""
    return {
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
        "removed": len(mutants),
        "noticed": sum(states[mutant.guard] == NOTICED for mutant in mutants),
        "not_noticed": [
            asdict(mutant) | {"outcome": states[mutant.guard]} for mutant in mutants if states[mutant.guard] != NOTICED
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="guards of mutants.toml by name")
    parser.add_argument("--survivors", action="store_true", help="guards that the last run's tests did not notice")
    arguments = parser.parse_args()
    mutants = read_list()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    names = arguments.only
    if arguments.survivors:
        if not results:
            parser.error(f"--survivors needs the results of an earlier run, {RESULTS}")
        names = [mutant["guard"] for mutant in results["last_run"]["not_noticed"]]
    if names is not None:
        mutants = [mutant for mutant in mutants if mutant.guard in names]
    if hasattr(os, "fork"):
        preload()
    commit = head()
    states = outcomes(mutants)
    noticed = sum(state == NOTICED for state in states.values())
    print(f"{len(states)} removed, {noticed} noticed")
    if arguments.survivors:
        results["survivors_again"] = summary(mutants, states, commit)
    elif names is None:
        results["last_run"] = summary(mutants, states, commit)
        results.setdefault("first_run", results["last_run"])
    if arguments.survivors or names is None:
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0 if noticed == len(states) else 1


if __name__ == "__main__":
    raise SystemExit(main())
