"""The flags of bench.recipe, and the settings that they make."""

import argparse
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from bench.options import RESULTS
from r3lite.core.invocation import resolve
from r3lite.evaluate import EvaluateConfig

COLD = "sft"  # the name of the cold start, and of its adapter
RAG_SFT = "rag-sft"  # of the control: plain RAG, fine-tuned
SELF_CONTROL = "self-control"  # of the control: gold alone, for as many steps as the self round took
THEN = (RAG_SFT, "self", "rl")
# What the model does without training: the values of --baseline, or the steps of r3lite itself.
BASELINES = {
    "rag": ["--baseline", "rag", "--top-k", "5"],  # one retrieval only: it gets more documents than a step
    "closed-book": ["--baseline", "closed-book"],
    "gold": ["--baseline", "gold"],
    "untrained": [],
}
KINDS = ("collect", "self", "sft", RAG_SFT, "ppo", "evaluate", *BASELINES)  # what --flags can be for
NAME = re.compile(r"[\w-]+")  # of a set


@dataclass(frozen=True)
class Trained:
    """A model that the way trains, of a `kind`: the cold start (COLD), RAG_SFT, "half" (SFT on the demonstrations of
    one half of the questions), "self" (SFT on gold and sampled trajectories), SELF_CONTROL, "rl" (on one half of the
    questions) or "mean" (of adapters)."""

    label: str  # its name, and that of its output
    kind: str
    half: int = 0  # the half of the questions that it is trained on, 1 or 2; 0: all
    begins: tuple[str, ...] = ()  # labels of the models whose adapters it is made from; others are made from the base


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
    cross_fit: bool = False
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

    def models(self) -> list[Trained]:
        """The models that are trained, in their order; the stages "self" and "rl" share those of the halves."""
        models = {COLD: Trained(COLD, COLD)}
        for what in self.then:
            for model in self.of_stage(what):
                models.setdefault(model.label, model)
        return list(models.values())

    def of_stage(self, what: str) -> list[Trained]:
        """The models of a stage after the cold start, in their order."""
        if what == RAG_SFT:
            return [Trained(RAG_SFT, RAG_SFT)]
        if what == "self":
            halves = [taught_half(1), taught_half(2)]  # each samples the questions of the other half
            return [*halves, Trained("self", "self"), Trained(SELF_CONTROL, SELF_CONTROL)]
        return self.reinforced()

    def reinforced(self) -> list[Trained]:
        """The models of the stage "rl": an adapter learns the demonstrations of one half of the questions and is
        reinforced on the other half, which it may not answer from memory.

        With `cross_fit` another one does the reverse, and the mean of both has learned from all questions.
        """
        models, ends = [], []
        for half, other in ((1, 2), (2, 1)) if self.cross_fit else ((1, 2),):
            taught = taught_half(half)
            ends.append(Trained(f"{taught.label}-rl", "rl", other, begins=(taught.label,)))
            models += [taught, ends[-1]]
        if self.cross_fit:
            models.append(Trained("rl-mean", "mean", begins=tuple(model.label for model in ends)))
        return models

    def labels(self) -> list[str]:
        """The names of the models that are trained, in their order."""
        return [model.label for model in self.models()]


def taught_half(half: int) -> Trained:
    """The model that learns the demonstrations of a half of the questions."""
    return Trained(f"half{half}", "half", half)


def without_length(words: list[str]) -> list[str]:
    """The flags of an `sft` but for those that set its length, --epochs and --max-steps."""
    length = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    length.add_argument("--epochs")
    length.add_argument("--max-steps")
    return length.parse_known_args(words)[1]


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
    made.add_argument(
        "--then",
        nargs="*",
        choices=THEN,
        default=[],
        help=f"stages after the cold start, in this order; {RAG_SFT}: plain RAG fine-tuned on the same questions; "
        "self: two adapters each learn the demonstrations of one half of the questions and sample the other half, then "
        "SFT on gold and these samples, and on gold alone for as many steps; rl: SFT on the demonstrations of one "
        "half, then RL on the other half",
    )
    made.add_argument("--cross-fit", action="store_true", help="rl: also the reverse, and the mean of both adapters")
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
    if twice := [what for what in THEN if given.then.count(what) > 1]:
        made.error(f"--then has {twice[0]} twice, which would train the same again")
    if given.cross_fit and "rl" not in given.then:
        made.error("--cross-fit works only with --then rl")
    usual = resolve("evaluate", EvaluateConfig(), ["--preset", given.preset])
    model, encoder = given.model or usual.model.model, given.encoder or usual.retrieval.encoder
    stages = {"then": tuple(given.then), "baselines": tuple(given.baselines), "cross_fit": given.cross_fit}
    on = {"dtype": given.dtype, "device": given.device}
    return Settings(
        model, encoder, files, weights, given.preset, given.seed, given.limit, **stages, **on, flags=flags
    ), given


def name_of(model: str) -> str:
    """The name of a model's folder, or a hub id."""
    return Path(model).resolve().name if Path(model).is_dir() else model
