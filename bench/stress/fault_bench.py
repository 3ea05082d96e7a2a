"""What benches of faults share: a case without a fault, killed, or with another fault, and whether that held."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.stress.fault_cases import PLACE, Case, Server, fixtures
from bench.stress.fault_runs import ROOT, THREADS, Ended, Fault, run
from bench.stress.folder_content import content, differences


@dataclass
class Bench:
    """The faults of a run of this bench, in its folder."""

    folder: Path
    server: Server
    rng: random.Random
    records: list[dict]
    save: Callable[[], None]  # called after each record
    brief: bool = False  # its cases have learned little

    def __post_init__(self):
        self.fixtures, self.place = fixtures(self.folder, self.brief), self.folder / PLACE
        self.wholes: dict[str, tuple[dict, Ended, list[str]]] = {}

    def begin(self, case: Case) -> list[str]:
        """Makes the place as it is before the case, and returns the arguments of its command."""
        case.begin(self.fixtures, self.place)
        self.server.asked.clear()
        return case.arguments(self.fixtures, self.place, self.server.url)

    def once(self, case: Case, arguments: list[str], fault: Fault | None = None, plain: bool = False) -> Ended:
        return run(case.command, arguments, self.place, self.folder / "run.log", fault, plain)

    def whole(self, case: Case) -> tuple[dict, Ended, list[str]]:
        """What the case leaves without a fault, how it ended and what it asked."""
        if case.name not in self.wholes:
            ended = self.once(case, self.begin(case))
            assert ended.status == 0, f"{case.name}: {ended.said}"
            self.wholes[case.name] = content(self.place), ended, list(self.server.asked)
        return self.wholes[case.name]

    def note(self, case: str, fault: str, at: object, faults: list[str], **more) -> None:
        """Writes down whether something held; `faults` are the reasons why it did not."""
        self.records.append({"case": case, "fault": fault, "at": at, "held": not faults, **more})
        if faults:
            self.records[-1]["why"] = faults
        self.save()
        held = "held" if not faults else f"BROKE: {'; '.join(faults)}"
        print(f"{len(self.records):>4} {case:<34} {fault:<9} {at!s:<44} {held}", flush=True)

    def kill(self, case: Case, at: int, kind: str = "kill", again: int | None = None) -> None:
        """Kills the case at a moment, perhaps the run after it as well, and goes on."""
        whole, ended, asked = self.whole(case)
        seed = self.rng.randrange(1 << 30)
        arguments = self.begin(case)
        first = self.once(case, arguments, Fault(kind, at, seed))
        moment = " ".join(ended.moments[at]) if at < len(ended.moments) else "the end"
        kills, goes_on = int(first.status is None), [*arguments, *case.again]
        lost = len(self.server.asked) - self.replies_kept()
        second = self.once(case, goes_on, None if again is None else Fault("kill", again))
        if second.status is None:
            kills, lost = kills + 1, len(self.server.asked) - self.replies_kept()
            second = self.once(case, goes_on)
        faults = self.faults(case, second, whole)
        twice = len(self.server.asked) - len(asked)
        if case.asks and twice > lost:
            faults.append(f"{twice} requests were sent again, and {lost} replies had not been kept")
        more = {"moment": moment, "kills": kills, "seed": seed} | ({"second": again} if again is not None else {})
        self.note(case.name, kind, at, faults, **more)

    def replies_kept(self) -> int:
        return sum(1 for path in self.place.rglob("*.json") if "cache" in path.parent.name)

    def faults(self, case: Case, ended: Ended, whole: dict) -> list[str]:
        """What is wrong with a case after it has gone on."""
        faults = []
        if ended.status != 0 and not (case.done and ended.status == 1 and case.done in ended.said):
            faults.append(f"goes on with status {ended.status}: {ended.said[-400:].strip()}")
        if "Traceback" in ended.said:
            faults.append("a traceback")
        return faults + differences(whole, content(self.place))[:6]

    def other(self, case: Case, kind: str, at: int) -> None:
        """Another fault at a moment: a clear end, if it ends, and the same after the cause is gone."""
        whole, ended, _ = self.whole(case)
        arguments = self.begin(case)
        broken = self.once(case, arguments, Fault(kind, at), plain=kind == "locked")
        faults = []
        if broken.status != 0 and not broken.clear:
            faults.append(f"ends with status {broken.status}: {broken.said[-600:].strip()}")
        if kind == "locked":
            for path in (self.place, *self.place.rglob("*")):
                os.chmod(path, 0o755 if path.is_dir() else 0o644)
        if broken.status != 0:
            faults += self.faults(case, self.once(case, [*arguments, *case.again]), whole)
        else:
            faults += differences(whole, content(self.place))[:6]
        moment = " ".join(ended.moments[at])
        self.note(case.name, kind, at, faults, moment=moment, status=broken.status)

    def timed(self, case: Case) -> None:
        """SIGKILL by the clock, to a process of its own with a hash seed of its own, once it has begun to write."""
        whole, ended, _ = self.whole(case)
        arguments = self.begin(case)
        words = [sys.executable, "-m", f"r3lite.{case.command}"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(THREADS)}
        log = open(self.folder / "timed.log", "w")  # noqa: SIM115 (a process writes to it)
        process = subprocess.Popen([*words, *arguments], cwd=ROOT, env=environment, stdout=log, stderr=log)
        while process.poll() is None and not any(self.place.iterdir()):
            time.sleep(0.01)
        after = self.rng.uniform(0, ended.seconds)
        try:
            process.wait(after)
        except subprocess.TimeoutExpired:
            process.kill()
        killed = process.wait() < 0
        log.close()
        with open(self.folder / "timed.log", "w") as log:
            words += [*arguments, *case.again]
            status = subprocess.run(words, cwd=ROOT, env=environment, stdout=log, stderr=log).returncode
        said = (self.folder / "timed.log").read_text(encoding="utf-8")
        faults = self.faults(case, Ended(status, said, [], 0.0), whole)
        self.note(case.name, "timed", f"{after:.2f} s", faults, kills=int(killed))
