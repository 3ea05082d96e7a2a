"""Runs RL from a finished SFT adapter on a large card within minutes: on last turns of episodes, then on whole ones.

    python -m bench.card --adapter runs/sft --data FRESH.json --eval-data DEV.json --minutes 8 --vram-budget 76GiB
    ... --seeds 0 1 --adapter runs/sft-0,runs/sft-1              # side by side
    ... --flags answer="--batch-size 32 --index runs/index" evaluate="--index runs/dev-index"

Each seed runs `ppo --learn answer`. If time is left, it then runs `ppo --learn episode`, starting from the result.
While a training runs, the adapter that it started from is evaluated; the last result is evaluated at the end. A
training whose time is over gets SIGTERM, and its newest checkpoint is the result. The time of the last evaluation is
estimated from the earlier ones (the shares are in bench/card_settings.py). If a stage fails, other stages go on.

The outputs and logs of the stages are in --output. card.json there has the whole state and is at most 20 seconds old.
At the end the run is added to card.json in --results, even if it was interrupted. A training or an evaluation encodes
the documents on the CPU when it starts, unless --flags passes an index that was built before. Stages may share a
--query-cache.
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
    LEAST_EPISODE_TIME,
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

STATE = "card.json"  # file of the state in the run's folder, and of all runs in the folder of results
POLL = 0.1  # seconds from one look at the processes to the next
SAVE_EVERY = 20.0  # seconds from one writing of the state to the next
LEAST_GRACE = 10.0  # seconds that a stage has at least to end after SIGTERM (see `Run.grace`)
RUNNING = "running"
COMPLETE = "complete"
ENDED = "ended by the clock"
FAILED = "failed"
INTERRUPTED = "interrupted"
# Exit statuses of a stage that was told to end: it exited by itself after SIGTERM; SIGTERM killed it before it could
# handle the signal; SIGKILL killed it after the time of grace.
TERMINATED_STATUSES = (143, -15, -9)
LOCAL_KEYS = ("command", "log", "from")  # keys of a stage that results leave out: they have paths of this machine
FAILED_STATUS = 1
INTERRUPTED_STATUS = 130
TERMINATED_STATUS = 143


@dataclass(frozen=True)
class Stage:
    """One command of r3lite. `name` is also the name of its output folder."""

    name: str
    kind: str  # train, evaluate or compare
    label: str  # the model that is trained, evaluated or compared: cold, answer or episode
    seeds: tuple[int, ...]
    command: str
    arguments: list[str]
    adapter: str = ""  # the adapter that the command starts from; empty for a comparison

    def words(self) -> list[str]:
        """Returns the words of the command as it is started."""
        return [sys.executable, "-m", f"r3lite.{self.command}", *self.arguments]

    @property
    def command_line(self) -> str:
        """The command as a user would type it."""
        return shlex.join(["python", "-m", f"r3lite.{self.command}", *self.arguments])


@dataclass
class Job:
    """A stage whose process was started. Times are seconds since the start of the run."""

    stage: Stage
    process: subprocess.Popen
    start_time: float
    end_time: float | None = None
    terminated: float | None = None  # when it got SIGTERM
    interrupted: bool = False  # it got SIGTERM because the run was interrupted
    result: Path | None = None  # the folder of the adapter that an ended training wrote

    @property
    def state(self) -> str:
        """RUNNING, COMPLETE, INTERRUPTED, ENDED or FAILED."""
        if self.end_time is None:
            return RUNNING
        if self.process.returncode == 0:
            return COMPLETE
        if self.interrupted:
            return INTERRUPTED
        if self.terminated is not None and self.process.returncode in TERMINATED_STATUSES:
            return ENDED
        return FAILED


class Run:
    """One run of the bench. Starts each stage when its turn comes, and ends it when its time is over."""

    def __init__(self, folder: Path, settings: Settings, conditions: dict):
        """`conditions` are the machine, versions and commit that measurements depend on (`records.provenance`)."""
        self.folder = folder
        self.settings = settings
        self.conditions = conditions
        self.total = 60 * settings.minutes  # seconds of the whole run
        self.start = time.monotonic()
        self.saved_at = 0.0  # the second at which the state was last written
        self.jobs: dict[str, Job] = {}  # by the name of the stage
        self.stopped: str | None = None  # why the run was not completed; None if nothing has stopped it

    @property
    def now(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self.start

    @property
    def running(self) -> list[Job]:
        """The jobs whose processes have not ended."""
        return [job for job in self.jobs.values() if job.end_time is None]

    def go(self) -> None:
        """Starts and ends stages until all have ended and no other may start."""
        self.save_state()
        while self.running:
            self.look()
            self.advance()
            if self.now - self.saved_at > SAVE_EVERY:
                self.save_state()
            time.sleep(POLL)

    def advance(self) -> None:
        """Starts every stage whose turn has come."""
        for seed, adapter in self.settings.adapters.items():
            self.advance_seed(seed, adapter)
        if len(self.settings.adapters) > 1 and not self.running:
            for label in TRAININGS:
                self.compare_means(label)

    def advance_seed(self, seed: int, adapter: str) -> None:
        """Starts the stages of a seed whose turn has come; `adapter` is the SFT adapter of the seed.

        A training starts from the result of the training before it.
        """
        cold = self.evaluate(COLD, seed, adapter)
        for label in TRAININGS:
            training = self.train(label, seed, adapter)
            if training is None or training.end_time is None:
                return
            if training.result is None:
                continue
            adapter = str(training.result)
            evaluation = self.evaluate(label, seed, adapter)
            if is_complete(cold) and is_complete(evaluation):
                self.compare(label, [seed])

    def train(self, label: str, seed: int, adapter: str) -> Job | None:
        """Returns the training of a seed, and starts it at the first call; None if there is no time for it."""
        name = f"{label}-{seed}"
        if name not in self.jobs:
            seconds_left = end_of_training(label, self.total, self.reserve()) - self.now
            if label == "episode" and seconds_left < LEAST_EPISODE_TIME * self.total:
                return None
            arguments = self.settings.training(label, seed, adapter=adapter, output=self.folder / name)
            stage = Stage(
                name=name,
                kind="train",
                label=label,
                seeds=(seed,),
                command="ppo",
                arguments=arguments,
                adapter=adapter,
            )
            self.begin(stage)
        return self.jobs[name]

    def evaluate(self, label: str, seed: int, adapter: str) -> Job | None:
        """Returns the evaluation of an adapter, and starts it at the first call; None if the time is over."""
        seeds = [seed]
        if label == COLD:  # seeds that begin with the same adapter share its evaluation
            seeds = [each for each, start_adapter in self.settings.adapters.items() if start_adapter == adapter]
        name = f"evaluate-{label}-{seeds[0]}"
        if name not in self.jobs:
            if self.now >= self.total:
                return None
            arguments = self.settings.evaluation(adapter, self.folder / name)
            stage = Stage(
                name=name,
                kind="evaluate",
                label=label,
                seeds=tuple(seeds),
                command="evaluate",
                arguments=arguments,
                adapter=adapter,
            )
            self.begin(stage)
        return self.jobs[name]

    def compare(self, label: str, seeds: list[int]) -> None:
        """Starts the comparison of the results of seeds with their SFT adapters, unless it was started before."""
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
        stage = Stage(
            name=name,
            kind="compare",
            label=label,
            seeds=tuple(seeds),
            command="evaluate",
            arguments=arguments,
        )
        self.begin(stage)

    def compare_means(self, label: str) -> None:
        """Compares the means over the seeds if at least two of them have a complete comparison of their own."""
        seeds = [seed for seed in self.settings.adapters if is_complete(self.jobs.get(f"compare-{label}-{seed}"))]
        if len(seeds) > 1:
            self.compare(label, seeds)

    def begin(self, stage: Stage) -> None:
        """Prints a stage's command and starts it; its output goes to a log in the run's folder."""
        print(f"{self.now:6.1f} s  {stage.name}\n          $ {stage.command_line}", flush=True)
        with open(self.folder / f"{stage.name}.log", "wb") as log:
            environment = self.settings.environment()
            process = subprocess.Popen(stage.words(), stdout=log, stderr=subprocess.STDOUT, env=environment)
        self.jobs[stage.name] = Job(stage, process, self.now)

    def look(self) -> None:
        """Records the stages that have ended. Ends those whose time is over: by SIGTERM, after `grace` by SIGKILL."""
        for job in self.running:
            if job.process.poll() is not None:
                self.record_end(job)
            elif job.terminated is not None and self.now > job.terminated + self.grace:
                job.process.kill()
            elif job.terminated is None and self.now > self.end_of(job.stage):
                job.terminated = self.now
                job.process.terminate()

    @property
    def grace(self) -> float:
        """Seconds from SIGTERM to SIGKILL. A training needs them to complete its step and to write a checkpoint."""
        return max(ENDING * self.total, LEAST_GRACE)

    def end_of(self, stage: Stage) -> float:
        """Returns the second at which a stage must end. A comparison has no end: it takes a few seconds of the CPU."""
        if stage.kind == "train":
            return end_of_training(stage.label, self.total, self.reserve())
        if stage.kind == "evaluate":
            return self.total
        return float("inf")

    def reserve(self) -> float:
        """Returns the seconds that are reserved for the last evaluation.

        They are estimated from the longest complete evaluation. As long as there is none, the share EVALUATION of all
        seconds is reserved, or more if the time of a running evaluation so far calls for more.
        """
        evaluations = [job for job in self.jobs.values() if job.stage.kind == "evaluate"]
        measured = [job.end_time - job.start_time for job in evaluations if is_complete(job)]
        if measured:
            return reserved(self.total, max(measured))
        estimates = [reserved(self.total, None)]
        for job in evaluations:
            if job.end_time is None:
                estimates.append(reserved(self.total, self.now - job.start_time))
        return max(estimates)

    def record_end(self, job: Job) -> None:
        """Records that a job has ended, and prints its state; of a failed one also the end of its log."""
        job.end_time = self.now
        if job.stage.kind == "train":
            job.result = card_state.adapter_of(self.folder / job.stage.name)
        print(
            f"{self.now:6.1f} s  {job.stage.name}: {job.state} after {job.end_time - job.start_time:.1f} s", flush=True
        )
        if job.state == FAILED:
            for line in card_state.last_lines(self.folder / f"{job.stage.name}.log", self.folder):
                print(f"          {line}", file=sys.stderr)
        self.save_state()

    def end_all(self) -> None:
        """Ends the stages that still run, because the run was interrupted or has failed."""
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
        """Returns a record of each stage that was started."""
        return [self.row(job) for job in self.jobs.values()]

    def row(self, job: Job) -> dict:
        """Returns the record of a stage: its state and command, and the figures that its output has so far."""
        stage = job.stage
        output = self.folder / stage.name
        end = self.now if job.end_time is None else job.end_time
        row = {"stage": stage.name, "kind": stage.kind, "label": stage.label, "seeds": list(stage.seeds)}
        row |= {"state": job.state, "status": job.process.returncode, "seconds": round(end - job.start_time, 1)}
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

    def save_state(self) -> None:
        """Writes the state of the run to its folder, and prints how far the trainings are."""
        self.saved_at = self.now
        rows = self.rows()
        state = {"settings": vars(self.settings), **self.conditions, "seconds": round(self.now, 1)}
        write_json(self.folder / STATE, state | {"stopped": self.stopped, "stages": rows})
        for row in rows:
            if row["state"] == RUNNING and row.get("rounds"):
                progress = f"{row['rounds']} rounds, {row['samples']} samples, {row['samples_per_hour']} an hour"
                print(f"{self.now:6.1f} s  {row['stage']}: {progress}", flush=True)

    def results(self) -> dict:
        """Returns the run as it is added to bench/results."""
        stages = []
        missing = []  # names of failed stages, and of evaluations that were ended before they had scores
        for row in self.rows():
            stages.append({name: value for name, value in row.items() if name not in LOCAL_KEYS})
            if row["state"] == FAILED or (row["state"] == ENDED and row["kind"] == "evaluate"):
                missing.append(row["stage"])
        complete = self.stopped is None and not missing
        ending = {"complete": complete, "stopped": self.stopped, "missing": missing, "seconds": round(self.now, 1)}
        return described(self.settings, self.folder) | self.conditions | ending | {"stages": stages}


def is_complete(job: Job | None) -> bool:
    """Returns whether a job was started and has ended without an error."""
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
                status = INTERRUPTED_STATUS
            except Terminated:
                status = TERMINATED_STATUS
            finally:
                run.end_all()
            if status:
                run.stopped = INTERRUPTED
            run.save_state()
            results = run.results()
            records.add(options.results / STATE, results)
            print("\n" + card_state.tables(results["stages"]))
    except R3LiteError as error:
        print(f"\n{error}", file=sys.stderr)
        return FAILED_STATUS
    if results["missing"] and not status:
        return FAILED_STATUS
    return status


if __name__ == "__main__":
    sys.exit(main())
