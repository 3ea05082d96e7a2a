"""The flags of bench.recipe, and the settings that they make."""

import argparse
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from bench.options import RESULTS
from r3lite.core.command import COMMANDS
from r3lite.core.invocation import resolve
from r3lite.evaluate import EvaluateConfig

COLD = "sft"  # the name of the cold start, and of its adapter
THEN = ("self", "rl")
# What the model does without training: the values of --baseline, or the steps of r3lite itself.
BASELINES = {
    "rag": ["--baseline", "rag", "--top-k", "5"],  # one retrieval only: it gets more documents than a step
    "closed-book": ["--baseline", "closed-book"],
    "gold": ["--baseline", "gold"],
    "untrained": [],
}
KINDS = ("collect", "self", "sft", "ppo", "evaluate", *BASELINES)  # what --flags can be for
NAME = re.compile(r"[\w-]+")  # of a set


@dataclass(frozen=True)
class Settings:
    """What a way is made of, apart from where it goes."""

    model: str
    encoder: str
    sets: dict[str, tuple[str, str]]  # by name: training file, dev file
    weights: dict[str, float]  # by name: share in what is trained on
    preset: str
    seed: int
    limit: int | None
    then: tuple[str, ...] = ()
    baselines: tuple[str, ...] = tuple(BASELINES)
    dtype: str = "auto"
    device: str = "auto"
    flags: dict[str, str] = field(default_factory=dict)  # by kind

    @property
    def common(self) -> list[str]:
        return ["--preset", self.preset, "--seed", str(self.seed)]

    @property
    def runs_model(self) -> list[str]:
        return [*self.common, "--model", self.model, "--dtype", self.dtype, "--device", self.device]

    @property
    def searches(self) -> list[str]:
        return ["--encoder", self.encoder]

    @property
    def dev_files(self) -> list[str]:
        return [dev for _, dev in self.sets.values()]

    def more(self, *kinds: str) -> list[str]:
        """The flags that the user gave for kinds of stages."""
        return [word for kind in kinds for word in shlex.split(self.flags.get(kind, ""))]

    def labels(self) -> list[str]:
        """The names of the models that are trained, in their order: sft, self, self-rl."""
        return [COLD, *("-".join(self.then[: i + 1]) for i in range(len(self.then)))]


def parse(argv: list[str] | None, description: str) -> tuple[Settings, argparse.Namespace]:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", help="folder, hub id or tiny; by default the preset's")
    made.add_argument("--model-name", help="what the results call it; by default the folder's or the hub's name")
    made.add_argument("--encoder", help="folder, hub id or hashing; by default the preset's")
    made.add_argument(
        "--set",
        action="append",
        required=True,
        metavar="NAME=TRAIN,DEV[,WEIGHT]",
        help="one data set's files, and its weight among the trajectories of SFT (1); RL asks of all sets alike",
    )
    made.add_argument("--then", nargs="*", choices=THEN, default=[], help="stages after the cold start, in this order")
    made.add_argument("--baselines", nargs="*", choices=BASELINES, default=tuple(BASELINES))
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--limit", type=int, metavar="N", help="only the first N dev questions of each set")
    made.add_argument("--preset", default="hotpotqa")
    made.add_argument("--flags", nargs="+", default=[], metavar="KIND=FLAGS", help=f"KIND: {', '.join(KINDS)}")
    made.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    made.add_argument("--dtype", default="auto", choices=["auto", "fp32", "bf16", "fp16"])
    made.add_argument("--output", type=Path, default=Path("runs/recipe"), help="folder of the way")
    made.add_argument("--results", type=Path, default=RESULTS, help="folder to which the way is added")
    given = made.parse_args(argv)
    named = {name: files.split(",") for name, _, files in (text.partition("=") for text in given.set)}
    for name, parts in named.items():
        if not NAME.fullmatch(name) or len(parts) not in (2, 3) or not all(parts):
            made.error(
                f"--set {name}: write it as NAME=TRAIN,DEV or NAME=TRAIN,DEV,WEIGHT, NAME of letters, digits, - and _"
            )
    try:
        weights = {name: float(parts[2]) if len(parts) == 3 else 1.0 for name, parts in named.items()}
    except ValueError as error:
        made.error(f"--set: a weight is a number: {error}")
    files = {name: (train, dev) for name, (train, dev, *_) in named.items()}
    flags = {kind: words for kind, _, words in (text.partition("=") for text in given.flags)}
    if unknown := [kind for kind in flags if kind not in KINDS]:
        made.error(f"--flags {unknown[0]}: write it as KIND=FLAGS, KIND one of {', '.join(KINDS)}")
    usual = resolve("evaluate", EvaluateConfig(), ["--preset", given.preset], COMMANDS)
    model, encoder = given.model or usual.model.model, given.encoder or usual.retrieval.encoder
    stages = {"then": tuple(given.then), "baselines": tuple(given.baselines)}
    on = {"dtype": given.dtype, "device": given.device}
    return Settings(
        model, encoder, files, weights, given.preset, given.seed, given.limit, **stages, **on, flags=flags
    ), given


def name_of(model: str) -> str:
    """The name of a model's folder, or a hub id."""
    return Path(model).resolve().name if Path(model).is_dir() else model
