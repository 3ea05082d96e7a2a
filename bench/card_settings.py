"""The flags of bench.card, the commands of its stages, and the shares of its minutes."""

import argparse
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from bench.options import RESULTS
from bench.recipe_settings import name_of
from r3lite.assembly import reinforcement
from r3lite.core.config import check_required
from r3lite.core.errors import UsageError
from r3lite.core.invocation import resolve
from r3lite.settings import EvaluateConfig, PpoConfig
from r3lite.settings.common import budget_bytes

COLD = "cold"  # label of the SFT adapter that RL starts from
TRAININGS = ("answer", "episode")  # values of --learn, in the order of the trainings
KINDS = (*TRAININGS, "evaluate")  # kinds of stages that --flags takes
MIB = 1 << 20
# A training goes on until its time is over. Its number of rounds is not known before, so the learning rate is constant:
# it never falls below 1 times its peak.
BY_THE_CLOCK = ("--max-steps", "10000", "--warmup", "0", "--min-learning-rate", "1", "--save-every", "5")

# Shares of the time of the whole run.
EVALUATION = 0.25  # reserved for the last evaluation and the end, as long as no evaluation was measured
ENDING = 0.05  # reserved for saving the last checkpoint, and for comparisons
MOST_RESERVED = 0.6  # limit of what is reserved
LEAST_EPISODE_TIME = 0.1  # RL on whole episodes is not started with less time left
# Relative to other times.
MARGIN = 1.5  # time reserved for the last evaluation, as a multiple of the longest one so far
ANSWERS = 0.6  # share of `--learn answer` in the time of both trainings


@dataclass(frozen=True)
class Settings:
    """The settings of a run, without its output folders."""

    model: str
    encoder: str
    adapters: dict[int, str]  # by seed
    questions: tuple[str, str]  # for RL: the flag --data or --config, and its value
    exclude: tuple[str, ...]
    eval_data: str
    limit: int
    preset: str
    minutes: float
    vram_budget: str | None = None  # of all processes together; None: the default budget of each
    dtype: str = "auto"
    device: str = "auto"
    flags: dict[str, str] = field(default_factory=dict)  # further flags by kind of stage

    @property
    def processes(self) -> int:
        """The number of processes that use the device at once: a training and an evaluation for each seed."""
        return 2 * len(self.adapters)

    @property
    def common(self) -> list[str]:
        """The flags that all stages which load the model have in common."""
        words = ["--preset", self.preset, "--model", self.model, "--encoder", self.encoder]
        words += ["--dtype", self.dtype, "--device", self.device]
        if self.vram_budget:
            share = budget_bytes(self.vram_budget) // self.processes // MIB
            words += ["--vram-budget", f"{share}MiB"]
        return words

    def extra_flags(self, kind: str) -> list[str]:
        """Returns the user's --flags for a kind of stage."""
        return shlex.split(self.flags.get(kind, ""))

    def training(self, label: str, seed: int, adapter: str, output: Path) -> list[str]:
        """Returns the flags of ppo for a training that starts from an adapter; `label` is the value of --learn."""
        exclude = ",".join([self.eval_data, *self.exclude])
        words = [*self.common, "--seed", str(seed), *self.questions, "--exclude", exclude]
        words += ["--adapter", adapter, "--learn", label, *BY_THE_CLOCK, *self.extra_flags(label)]
        return [*words, "--output", str(output)]

    def evaluation(self, adapter: str, output: Path) -> list[str]:
        """Returns the flags of an evaluation.

        All evaluations have the same seed, so their bootstrap intervals are computed with the same draws.
        """
        words = [*self.common, "--data", self.eval_data, "--limit", str(self.limit), "--adapter", adapter]
        return [*words, *self.extra_flags("evaluate"), "--output", str(output)]

    def environment(self) -> dict[str, str]:
        """Returns the environment of all stages.

        Each process gets an equal share of the CPU's cores, on which documents are retrieved, unless OMP_NUM_THREADS is
        set.
        """
        cores = os.cpu_count() or 1
        return {"OMP_NUM_THREADS": str(max(1, cores // self.processes))} | os.environ


def parse(argv: list[str] | None, description: str | None) -> tuple[Settings, argparse.Namespace]:
    """Returns the checked settings of a run, and all flags, among them the output folders.

    A usage error ends the process. `description` is shown by --help.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", required=True, metavar="A[,B,...]", help="SFT adapter: one, or one for each seed")
    questions = parser.add_mutually_exclusive_group(required=True)
    questions.add_argument("--data", help="file with the questions of RL")
    questions.add_argument("--config", help="instead of --data, TOML file with [[sources]]")
    parser.add_argument("--exclude", default="", help="comma-separated files whose questions RL leaves out")
    parser.add_argument("--eval-data", required=True, help="file of the evaluations; RL leaves out its questions")
    parser.add_argument("--limit", type=int, default=400, metavar="N", help="first questions of --eval-data [400]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="SEED", help="run side by side [0]")
    parser.add_argument("--minutes", type=float, default=8.0, help="time of the whole run [8]")
    parser.add_argument("--model", help="folder, hub id or tiny; by default the preset's")
    parser.add_argument("--encoder", help="folder, hub id or hashing; by default the preset's")
    parser.add_argument("--preset", default="hotpotqa")
    parser.add_argument("--vram-budget", help="memory of all processes together, such as 76GiB; by default 4GiB each")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--dtype", default="auto", choices=["auto", "fp32", "bf16", "fp16"])
    parser.add_argument("--flags", nargs="+", default=[], metavar="KIND=FLAGS", help=f"KIND: {', '.join(KINDS)}")
    parser.add_argument("--output", type=Path, default=Path("runs/card"), help="folder of the run")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to which the run is added")
    options = parser.parse_args(argv)
    if options.minutes <= 0:
        parser.error(f"--minutes is {options.minutes}; it must be above 0")
    if len(set(options.seeds)) < len(options.seeds):
        parser.error("--seeds has a seed twice")
    adapters = options.adapter.split(",")
    if len(adapters) == 1:
        adapters = adapters * len(options.seeds)
    if len(adapters) != len(options.seeds) or not all(adapters):
        parser.error(f"--adapter {options.adapter}: pass one, or one for each of {len(options.seeds)} seeds")
    flags = {}
    for text in options.flags:
        kind, _, words = text.partition("=")
        if kind not in KINDS:
            parser.error(f"--flags {kind}: write it as KIND=FLAGS, KIND one of {', '.join(KINDS)}")
        flags[kind] = words
    if options.data:
        questions_flag = ("--data", options.data)
    else:
        questions_flag = ("--config", options.config)
    try:
        defaults = resolve("evaluate", EvaluateConfig(), ["--preset", options.preset])
        settings = Settings(
            model=options.model or defaults.model.model,
            encoder=options.encoder or defaults.retrieval.encoder,
            adapters=dict(zip(options.seeds, adapters, strict=True)),
            questions=questions_flag,
            exclude=tuple(file for file in options.exclude.split(",") if file),
            eval_data=options.eval_data,
            limit=options.limit,
            preset=options.preset,
            minutes=options.minutes,
            vram_budget=options.vram_budget,
            dtype=options.dtype,
            device=options.device,
            flags=flags,
        )
        check(settings)
    except UsageError as error:
        parser.error(str(error))
    return settings, options


def check(settings: Settings) -> None:
    """Raises UsageError if a stage would refuse its flags: some stages start, and would fail, only minutes later."""
    output = Path("output")
    for seed, adapter in settings.adapters.items():
        for label in TRAININGS:
            config = resolve("ppo", PpoConfig(), settings.training(label, seed, adapter=adapter, output=output))
            config.check_settings("ppo")
            check_required(config)
            reinforcement.check(config)
            if config.rl.learn != label:
                raise UsageError(f"--flags {label} changes --learn: remove it", code="flags-change-learn")
            if settings.eval_data not in (config.data.exclude or ()):
                raise UsageError(
                    f"--flags {label} has --exclude: pass --exclude to the bench, which adds --eval-data",
                    code="flags-exclude",
                )
        resolve("evaluate", EvaluateConfig(), settings.evaluation(adapter, output)).check_settings("evaluate")


def reserved(total: float, evaluation: float | None) -> float:
    """Returns how many of the run's `total` seconds are reserved for the last evaluation and the end of the run.

    `evaluation` is the time in seconds of the longest evaluation so far; None if there was none.
    """
    if evaluation is None:
        return EVALUATION * total
    return min(MARGIN * evaluation + ENDING * total, MOST_RESERVED * total)


def end_of_training(label: str, total: float, reserve: float) -> float:
    """Returns when a training is ended, in seconds from the start of the run.

    The run has `total` seconds, of which `reserve` are reserved for the last evaluation.
    """
    if label == "answer":
        return ANSWERS * (total - reserve)
    return total - reserve


def described(settings: Settings, folder: Path) -> dict:
    """Returns the settings as results record them: of files only the names, because paths are of this machine."""
    model = name_of(settings.model)
    seeds = " and ".join(map(str, settings.adapters))
    return {
        "section": f"{folder.resolve().name}: {model}, seeds {seeds}",
        "model": model,
        "encoder": name_of(settings.encoder),
        "adapters": {str(seed): Path(adapter).name for seed, adapter in settings.adapters.items()},
        "questions": Path(settings.questions[1]).name,
        "exclude": [Path(file).name for file in settings.exclude],
        "eval_data": Path(settings.eval_data).name,
        "limit": settings.limit,
        "preset": settings.preset,
        "minutes": settings.minutes,
        "vram_budget": settings.vram_budget,
        "flags": settings.flags,
    }
