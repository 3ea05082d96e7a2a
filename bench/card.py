"""RL from a finished SFT adapter on a large card, within minutes: on last turns, on whole episodes, with evaluations.

    python -m bench.card --adapter runs/sft --data FRESH.json --eval-data DEV.json --minutes 8 --vram-budget 76GiB
    ... --seeds 0 1 --adapter runs/sft-0,runs/sft-1              # side by side
    ... --flags answer="--batch-size 32 --index runs/index" evaluate="--index runs/dev-index"

A seed goes through `ppo --learn answer`, then from its result, if time is left, `ppo --learn episode`. Beside each
training the adapter that it began with is evaluated; the last result is evaluated at the end. A training whose time is
over is ended by SIGTERM, and its newest checkpoint is the result; how much time the last evaluation needs is seen from
the earlier ones (bench/card_settings.py has the shares). A stage that fails stops nothing else.

Stages have their outputs and logs in --output. Its card.json has the whole state, at most 20 seconds old. At the end
the run is added to card.json in --results, also if it was interrupted. Documents are encoded on the processor at the
start of each stage, unless an index that was built before is passed by --flags; --query-cache there may be shared.
"""

import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench import card_state, records
from bench.card_settings import (
    COLD,
    ENDING,
    LEAST_EPISODES,
    TRAININGS,
    Settings,
    described,
    end_of_training,
    parse,
    reserved,
)
from bench.options import precision
from bench.recipe import terminate
from r3lite.core.errors import R3LiteError
from r3lite.core.exit_status import Terminated
from r3lite.core.files import sole_writer, write_json

STATE = "card.json"  # in the folder of the run
POLL = 0.1  # seconds between looks at the processes
NOTE = 20.0  # seconds between notes of the state
LEAST_GRACE = 10.0  # seconds that a stage has to end after SIGTERM, if ENDING of all is less
RUNNING = "running"
COMPLETE = "complete"
ENDED = "ended by the clock"
FAILED = "failed"
INTERRUPTED = "interrupted"
STATUSES = (143, -15, -9)  # of what was ended: by itself after SIGTERM, by SIGTERM before it could, by SIGKILL
ONLY_HERE = ("command", "log", "from")  # what results lack of a stage: paths of this machine


@dataclass(frozen=True)
class Stage:
    """A command of r3lite; `name` is also that of its output."""

    name: str
    kind: str  # train, evaluate or compare
    label: str  # what is trained or evaluated: cold, answer or episode
    seeds: tuple[int, ...]
    command: str
    arguments: list[str]
    adapter: str = ""  # that it begins with

    def words(self) -> list[str]:
        return [sys.executable, "-m", f"r3lite.{self.command}", *self.arguments]

    @property
    def command_line(self) -> str:
        return shlex.join(["python", "-m", f"r3lite.{self.command}", *self.arguments])


@dataclass
class Job:
    """A stage that was begun. Times are seconds since the beginning of the run."""

    stage: Stage
    process: subprocess.Popen
    begun: float
    ended: float | None = None
    terminated: float | None = None  # when it was told to end
    interrupted: bool = False  # it was told so as the run was interrupted
    result: Path | None = None  # the adapter that a training has left

    @property
    def state(self) -> str:
        if self.ended is None:
            return RUNNING
        if self.process.returncode == 0:
            return COMPLETE
        if self.interrupted:
            return INTERRUPTED
        if self.terminated is not None and self.process.returncode in STATUSES:
            return ENDED
        return FAILED


class Run:
    """A run in its folder: which stages were begun, which may begin, and which must end."""

    def __init__(self, folder: Path, settings: Settings, conditions: dict):
        """`conditions` are what measurements depend on (`records.provenance`)."""
        self.folder = folder
        self.settings = settings
        self.conditions = conditions
        self.total = 60 * settings.minutes
        self.start = time.monotonic()
        self.noted = 0.0
        self.jobs: dict[str, Job] = {}  # by the name of the stage
        self.stopped: str | None = None

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.start

    @property
    def running(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.ended is None]

    def go(self) -> None:
        """Goes on until all stages have ended and none may begin."""
        self.note()
        while self.running:
            self.look()
            self.advance()
            if self.now - self.noted > NOTE:
                self.note()
            time.sleep(POLL)

    def advance(self) -> None:
        """Begins every stage whose turn has come."""
        for seed, adapter in self.settings.adapters.items():
            self.advance_seed(seed, adapter)
        if len(self.settings.adapters) > 1 and not self.running:
            for label in TRAININGS:
                self.compare_means(label)

    def advance_seed(self, seed: int, adapter: str) -> None:
        cold = self.evaluate(COLD, seed, adapter)
        for label in TRAININGS:
            training = self.train(label, seed, adapter)
            if training is None or training.ended is None:
                return
            if training.result is None:
                continue
            adapter = str(training.result)
            evaluation = self.evaluate(label, seed, adapter)
            if is_complete(cold) and is_complete(evaluation):
                self.compare(label, [seed])

    def train(self, label: str, seed: int, adapter: str) -> Job | None:
        """The training of a seed, which is begun unless it was; None if there is no time for it."""
        name = f"{label}-{seed}"
        if name not in self.jobs:
            left = end_of_training(label, self.total, self.reserve()) - self.now
            if label == "episode" and left < LEAST_EPISODES * self.total:
                return None
            arguments = self.settings.training(label, seed, adapter, self.folder / name)
            self.begin(Stage(name, "train", label, (seed,), "ppo", arguments, adapter))
        return self.jobs[name]

    def evaluate(self, label: str, seed: int, adapter: str) -> Job | None:
        """The evaluation of an adapter, which is begun unless it was; None if the time is over."""
        seeds = [seed]
        if label == COLD:  # seeds that begin with the same adapter share its evaluation
            seeds = [other for other, start in self.settings.adapters.items() if start == adapter]
        name = f"evaluate-{label}-{seeds[0]}"
        if name not in self.jobs:
            if self.now >= self.total:
                return None
            arguments = self.settings.evaluation(adapter, self.folder / name)
            self.begin(Stage(name, "evaluate", label, tuple(seeds), "evaluate", arguments, adapter))
        return self.jobs[name]

    def compare(self, label: str, seeds: list[int]) -> None:
        """Begins to compare the results of seeds with the adapters that they began with, unless that was begun."""
        name = "-".join(["compare", label, *map(str, seeds)])
        if name in self.jobs:
            return
        cold = []
        results = []
        for seed in seeds:
            evaluation = self.evaluate(COLD, seed, self.settings.adapters[seed])
            cold.append(evaluation.stage.name)
            results.append(f"evaluate-{label}-{seed}")
        sides = [",".join(str(self.folder / side) for side in names) for names in (cold, results)]
        arguments = ["--compare", *sides, "--output", str(self.folder / name)]
        self.begin(Stage(name, "compare", label, tuple(seeds), "evaluate", arguments))

    def compare_means(self, label: str) -> None:
        """Compares the means over the seeds whose comparison there is, if these are several."""
        seeds = [seed for seed in self.settings.adapters if is_complete(self.jobs.get(f"compare-{label}-{seed}"))]
        if len(seeds) > 1:
            self.compare(label, seeds)

    def begin(self, stage: Stage) -> None:
        print(f"{self.now:6.1f} s  {stage.name}\n          $ {stage.command_line}", flush=True)
        with open(self.folder / f"{stage.name}.log", "wb") as log:
            environment = self.settings.environment()
            process = subprocess.Popen(stage.words(), stdout=log, stderr=subprocess.STDOUT, env=environment)
        self.jobs[stage.name] = Job(stage, process, self.now)

    def look(self) -> None:
        """Notes which stages have ended, and ends those whose time is over."""
        for job in self.running:
            if job.process.poll() is not None:
                self.has_ended(job)
            elif job.terminated is not None and self.now > job.terminated + self.grace:
                job.process.kill()
            elif job.terminated is None and self.now > self.end_of(job.stage):
                job.terminated = self.now
                job.process.terminate()

    @property
    def grace(self) -> float:
        """Seconds between SIGTERM and SIGKILL: an update that was begun is completed before a training saves."""
        return max(ENDING * self.total, LEAST_GRACE)

    def end_of(self, stage: Stage) -> float:
        """The second at which a stage must end. Comparisons take seconds on the processor."""
        if stage.kind == "train":
            return end_of_training(stage.label, self.total, self.reserve())
        if stage.kind == "evaluate":
            return self.total
        return float("inf")

    def reserve(self) -> float:
        """Seconds that are kept for the last evaluation, by what is known of evaluations now."""
        evaluations = [job for job in self.jobs.values() if job.stage.kind == "evaluate"]
        measured = [job.ended - job.begun for job in evaluations if is_complete(job)]
        if measured:
            return reserved(self.total, max(measured))
        estimates = [reserved(self.total, None)]
        for job in evaluations:
            if job.ended is None:
                estimates.append(reserved(self.total, self.now - job.begun))
        return max(estimates)

    def has_ended(self, job: Job) -> None:
        job.ended = self.now
        if job.stage.kind == "train":
            job.result = card_state.adapter_of(self.folder / job.stage.name)
        print(f"{self.now:6.1f} s  {job.stage.name}: {job.state} after {job.ended - job.begun:.1f} s", flush=True)
        if job.state == FAILED:
            for line in card_state.last_lines(self.folder / f"{job.stage.name}.log", self.folder):
                print(f"          {line}", file=sys.stderr)
        self.note()

    def end_all(self) -> None:
        """Ends what still runs, as the run is interrupted."""
        for job in self.running:
            job.interrupted = True
            job.process.terminate()
        end = self.now + self.grace
        while self.running:
            self.look()
            if self.now > end:
                for job in self.running:
                    job.process.kill()
            time.sleep(POLL)

    def rows(self) -> list[dict]:
        """What is known of each stage that was begun."""
        return [self.row(job) for job in self.jobs.values()]

    def row(self, job: Job) -> dict:
        stage = job.stage
        output = self.folder / stage.name
        end = self.now if job.ended is None else job.ended
        row = {"stage": stage.name, "kind": stage.kind, "label": stage.label, "seeds": list(stage.seeds)}
        row |= {"state": job.state, "status": job.process.returncode, "seconds": round(end - job.begun, 1)}
        row |= {"command": stage.command_line, "log": f"{output}.log", "from": stage.adapter}
        if job.state == FAILED:
            row["last_lines"] = card_state.last_lines(Path(f"{output}.log"), self.folder)
        if stage.kind == "train":
            row["adapter"] = None
            if job.result:
                row["adapter"] = job.result.relative_to(self.folder).as_posix()
            return row | card_state.training_of(output)
        if not is_complete(job):
            return row
        if stage.kind == "evaluate":
            return row | card_state.scores_of(output)
        return row | card_state.comparison_of(output)

    def note(self) -> None:
        """Writes the whole state, and tells how far the trainings are."""
        self.noted = self.now
        rows = self.rows()
        state = {"settings": vars(self.settings), **self.conditions, "seconds": round(self.now, 1)}
        write_json(self.folder / STATE, state | {"stopped": self.stopped, "stages": rows})
        for row in rows:
            if row["state"] == RUNNING and row.get("rounds"):
                progress = f"{row['rounds']} rounds, {row['samples']} samples, {row['samples_per_hour']} an hour"
                print(f"{self.now:6.1f} s  {row['stage']}: {progress}", flush=True)

    def results(self) -> dict:
        """The run as bench/results has it."""
        stages = []
        missing = []  # stages that have failed, and evaluations that have no scores
        for row in self.rows():
            stages.append({name: value for name, value in row.items() if name not in ONLY_HERE})
            if row["state"] == FAILED or (row["state"] == ENDED and row["kind"] == "evaluate"):
                missing.append(row["stage"])
        complete = self.stopped is None and not missing
        ending = {"complete": complete, "stopped": self.stopped, "missing": missing, "seconds": round(self.now, 1)}
        return described(self.settings, self.folder) | self.conditions | ending | {"stages": stages}


def is_complete(job: Job | None) -> bool:
    return job is not None and job.state == COMPLETE


def main(argv: list[str] | None = None) -> int:
    settings, options = parse(argv, __doc__)
    signal.signal(signal.SIGTERM, terminate)
    status = 0
    try:
        with sole_writer(options.output):
            if (options.output / STATE).exists():
                raise R3LiteError(f"{options.output} has a run", "Name another --output.", code="output-not-empty")
            run = Run(options.output, settings, records.provenance(precision(options)))
            try:
                run.advance()
                run.go()
            except KeyboardInterrupt:
                status = 130
            except Terminated:
                status = 143
            finally:
                run.end_all()
            if status:
                run.stopped = INTERRUPTED
            run.note()
            results = run.results()
            records.add(options.results / STATE, results)
            print("\n" + card_state.tables(results["stages"]))
    except R3LiteError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    if results["missing"] and not status:
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
