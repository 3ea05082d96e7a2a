"""Runs a case without a fault, killed, or with another fault, and records whether the result is the same each time."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.stress.fault_cases import OUTPUT_NAME, Case, Server, fixtures
from bench.stress.fault_runs import ROOT, THREADS, Fault, RunResult, run
from bench.stress.folder_content import content, differences

SHOWN_DIFFERENCES = 6  # differences between folders that a record lists


class Reference(NamedTuple):
    """A run of a case without a fault: what the runs with faults are compared with."""

    content: dict[str, object]  # of the output folder, as `folder_content.content` returns it
    result: RunResult
    requests: list[str]  # bodies of the requests that it sent to the server


@dataclass
class Bench:
    """One run of the bench of faults: its folder, its server, and the records of the faults it has tried."""

    folder: Path
    server: Server
    rng: random.Random
    records: list[dict]
    save: Callable[[], None]  # called after each record
    brief: bool = False  # whether its fixtures are trained for a few steps only, see `fixtures`

    def __post_init__(self):
        self.fixtures = fixtures(self.folder, self.brief)
        self.output = self.folder / OUTPUT_NAME  # the folder that cases write to
        self.references: dict[str, Reference] = {}  # by name of the case

    def prepare(self, case: Case) -> list[str]:
        """Resets the output folder to its state before the case, and returns the arguments of the case's command."""
        case.reset(self.fixtures, self.output)
        self.server.requests.clear()
        return case.arguments(self.fixtures, self.output, self.server.url)

    def run_once(
        self, case: Case, arguments: list[str], fault: Fault | None = None, unprivileged: bool = False
    ) -> RunResult:
        """Runs the command of a case on the output folder as it is."""
        log = self.folder / "run.log"
        return run(case.command, arguments, folder=self.output, log=log, fault=fault, unprivileged=unprivileged)

    def reference(self, case: Case) -> Reference:
        """Returns the run of the case without a fault; it runs only the first time."""
        if case.name not in self.references:
            result = self.run_once(case, self.prepare(case))
            assert result.status == 0, f"{case.name}: {result.output}"
            self.references[case.name] = Reference(content(self.output), result, list(self.server.requests))
        return self.references[case.name]

    def record(self, case: str, fault: str, position: object, problems: list[str], **extra) -> None:
        """Saves and prints whether a case held against a fault, that is, whether there are no problems.

        `position` is where the fault struck: the number of a moment, a time, a file.
        """
        self.records.append({"case": case, "fault": fault, "at": position, "held": not problems, **extra})
        if problems:
            self.records[-1]["why"] = problems
        self.save()
        verdict = "held" if not problems else f"BROKE: {'; '.join(problems)}"
        print(f"{len(self.records):>4} {case:<34} {fault:<9} {position!s:<44} {verdict}", flush=True)

    def kill_and_resume(self, case: Case, moment: int, kind: str = "kill", second_moment: int | None = None) -> None:
        """Kills the case at a moment and resumes it; `second_moment`: kills the resumed run as well, and resumes again.

        The output must then equal the reference, and only requests whose replies were lost may be sent again.
        """
        reference = self.reference(case)
        seed = self.rng.randrange(1 << 30)
        arguments = self.prepare(case)
        resume_arguments = [*arguments, *case.resume_flags]
        killed_run = self.run_once(case, arguments, Fault(kind, moment, seed))
        kills = int(killed_run.status is None)
        lost_replies = len(self.server.requests) - self.count_cached_replies()
        second_fault = None if second_moment is None else Fault("kill", second_moment)
        resumed_run = self.run_once(case, resume_arguments, second_fault)
        if resumed_run.status is None:
            kills += 1
            lost_replies = len(self.server.requests) - self.count_cached_replies()
            resumed_run = self.run_once(case, resume_arguments)
        problems = self.problems_after_resuming(case, resumed_run, reference.content)
        repeated_requests = len(self.server.requests) - len(reference.requests)
        if case.sends_requests and repeated_requests > lost_replies:
            problems.append(
                f"{repeated_requests} requests were sent again, and {lost_replies} replies had not been kept"
            )
        moments = reference.result.moments
        extra = {"moment": " ".join(moments[moment]) if moment < len(moments) else "the end"}
        extra |= {"kills": kills, "seed": seed}
        if second_moment is not None:
            extra["second"] = second_moment
        self.record(case.name, kind, position=moment, problems=problems, **extra)

    def count_cached_replies(self) -> int:
        """Returns how many replies of the server are in the caches of the output folder."""
        return sum(1 for path in self.output.rglob("*.json") if "cache" in path.parent.name)

    def problems_after_resuming(self, case: Case, result: RunResult, expected: dict[str, object]) -> list[str]:
        """Returns what is wrong after the last run of a case, whose output should be as expected."""
        problems = []
        was_complete = case.complete_message and result.status == 1 and case.complete_message in result.output
        if result.status != 0 and not was_complete:
            problems.append(f"goes on with status {result.status}: {result.output[-400:].strip()}")
        if "Traceback" in result.output:
            problems.append("a traceback")
        return problems + differences(expected, content(self.output))[:SHOWN_DIFFERENCES]

    def inject_and_resume(self, case: Case, kind: str, moment: int) -> None:
        """Injects a fault other than a kill at a moment, and resumes the case without the fault.

        If the run with the fault fails, its error must be clear. If it succeeds, it is not resumed. In both cases the
        output must then equal the reference.
        """
        reference = self.reference(case)
        arguments = self.prepare(case)
        faulty_run = self.run_once(case, arguments, Fault(kind, moment), unprivileged=kind == "locked")
        problems = []
        if faulty_run.status != 0 and not faulty_run.is_clear_error:
            problems.append(f"ends with status {faulty_run.status}: {faulty_run.output[-600:].strip()}")
        if kind == "locked":
            for path in (self.output, *self.output.rglob("*")):
                os.chmod(path, 0o755 if path.is_dir() else 0o644)
        if faulty_run.status != 0:
            resumed_run = self.run_once(case, [*arguments, *case.resume_flags])
            problems += self.problems_after_resuming(case, resumed_run, reference.content)
        else:
            problems += differences(reference.content, content(self.output))[:SHOWN_DIFFERENCES]
        moment_text = " ".join(reference.result.moments[moment])
        extra = {"moment": moment_text, "status": faulty_run.status}
        self.record(case.name, kind, position=moment, problems=problems, **extra)

    def kill_after_random_time(self, case: Case) -> None:
        """Kills the case after a random time since its first file, and resumes it.

        Unlike a forked run, the command is started as users start it, and thus with another hash seed.
        """
        reference = self.reference(case)
        arguments = self.prepare(case)
        command = [sys.executable, "-m", f"r3lite.{case.command}", *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(THREADS)}
        log_path = self.folder / "timed.log"
        with open(log_path, "w") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
            while process.poll() is None and not any(self.output.iterdir()):
                time.sleep(0.01)
            delay = self.rng.uniform(0, reference.result.seconds)
            try:
                process.wait(delay)
            except subprocess.TimeoutExpired:
                process.kill()
            was_killed = process.wait() < 0
        with open(log_path, "w") as log:
            command += case.resume_flags
            status = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log).returncode
        output = log_path.read_text(encoding="utf-8")
        result = RunResult(status=status, output=output, moments=[], seconds=0.0)  # only the first two are compared
        problems = self.problems_after_resuming(case, result, reference.content)
        self.record(case.name, "timed", position=f"{delay:.2f} s", problems=problems, kills=int(was_killed))
