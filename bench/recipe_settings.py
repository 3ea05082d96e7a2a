"""The flags of bench.recipe, the settings that are read from them, and the models that the settings lead to.

A "way" is all stages of one run of bench.recipe.
"""

import argparse
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from bench.options import RESULTS
from r3lite.core.invocation import resolve
from r3lite.evaluate import EvaluateConfig

# Labels of models, which are also the names of their outputs.
COLD = "sft"  # the cold start: SFT on the demonstrations of all questions
RAG_SFT = "rag-sft"  # a control: plain RAG, fine-tuned
SELF_CONTROL = "self-control"  # a control: SFT on the demonstrations alone, for as many steps as the self round took
LATER_STAGES = (RAG_SFT, "self", "rl")  # the values of --then
# Flags of `evaluate` for each baseline: a value of --baseline, or nothing for r3lite's own steps without training.
BASELINES = {
    "rag": ["--baseline", "rag", "--top-k", "5"],  # it retrieves only once, so it gets more documents than a step does
    "closed-book": ["--baseline", "closed-book"],
    "gold": ["--baseline", "gold"],
    "untrained": [],
}
KINDS = ("collect", "self", "sft", RAG_SFT, "ppo", "evaluate", *BASELINES)  # the kinds of stages that --flags can name
SET_NAME = re.compile(r"[\w-]+")


@dataclass(frozen=True)
class TrainedModel:
    """A model that a way trains.

    Its `kind` is COLD, RAG_SFT, "half" (SFT on the demonstrations of one half of the questions), "self" (SFT on
    demonstrations and sampled trajectories), SELF_CONTROL, "rl" (reinforcement learning on one half of the questions)
    or "mean" (the mean of other models' adapters).
    """

    label: str  # the name of the model and of its output
    kind: str
    half: int = 0  # the half of the questions that the model is trained on, 1 or 2; 0: all questions
    parents: tuple[str, ...] = ()  # labels of the models whose adapters it starts from; empty: it starts from the base


@dataclass(frozen=True)
class Settings:
    """The settings of a way, except its folders. The names of the fields are keys of recipe.json."""

    model: str
    encoder: str
    sets: dict[str, tuple[str, str]]  # name of a set -> (training file, dev file)
    weights: dict[str, float]  # name of a set -> its weight among the trajectories of SFT
    preset: str
    seed: int
    limit: int | None  # the number of dev questions of each set that are evaluated, the first ones; None: all
    then: tuple[str, ...] = ()  # stages after the cold start, from LATER_STAGES
    baselines: tuple[str, ...] = tuple(BASELINES)
    cross_fit: bool = False  # RL: also with the halves exchanged, and the mean of both adapters
    dtype: str = "auto"
    device: str = "auto"
    flags: dict[str, str] = field(default_factory=dict)  # kind of stage, from KINDS -> further flags of its commands

    @property
    def common_flags(self) -> list[str]:
        """The flags of every command that trains, evaluates, collects or exports."""
        return ["--preset", self.preset, "--seed", str(self.seed)]

    @property
    def model_flags(self) -> list[str]:
        """The flags of every command that runs the model; they include the common ones."""
        return [*self.common_flags, "--model", self.model, "--dtype", self.dtype, "--device", self.device]

    @property
    def search_flags(self) -> list[str]:
        """The flags of every command that retrieves documents."""
        return ["--encoder", self.encoder]

    @property
    def dev_files(self) -> list[str]:
        return [dev for _, dev in self.sets.values()]

    def extra_flags(self, *kinds: str) -> list[str]:
        """Returns the further flags that --flags has for these kinds of stages."""
        return [word for kind in kinds for word in shlex.split(self.flags.get(kind, ""))]

    def models(self) -> list[TrainedModel]:
        """Returns all models that the way trains, in the order of training.

        The stages "self" and "rl" share the models of the halves: each of those is trained once.
        """
        models = {COLD: TrainedModel(label=COLD, kind=COLD)}
        for stage in self.then:
            for model in self.models_of_stage(stage):
                models.setdefault(model.label, model)
        return list(models.values())

    def models_of_stage(self, stage: str) -> list[TrainedModel]:
        """Returns the models of a stage after the cold start, in the order of training."""
        if stage == RAG_SFT:
            return [TrainedModel(label=RAG_SFT, kind=RAG_SFT)]
        if stage == "self":
            self_round = TrainedModel(label="self", kind="self")
            control = TrainedModel(label=SELF_CONTROL, kind=SELF_CONTROL)
            # The model of each half samples trajectories for the questions of the other half.
            return [half_model(1), half_model(2), self_round, control]
        return self.rl_models()

    def rl_models(self) -> list[TrainedModel]:
        """Returns the models of the stage "rl".

        An adapter is trained on the demonstrations of half 1 of the questions and then by reinforcement learning on
        half 2, so that it cannot answer from memory. With `cross_fit`, a second adapter is trained with the halves
        exchanged, and the mean of both adapters is added: it has been trained on all questions.
        """
        models = []
        rl_labels = []
        for sft_half, rl_half in ((1, 2), (2, 1)) if self.cross_fit else ((1, 2),):
            sft_model = half_model(sft_half)
            rl_label = f"{sft_model.label}-rl"
            models.append(sft_model)
            models.append(TrainedModel(label=rl_label, kind="rl", half=rl_half, parents=(sft_model.label,)))
            rl_labels.append(rl_label)
        if self.cross_fit:
            models.append(TrainedModel(label="rl-mean", kind="mean", parents=tuple(rl_labels)))
        return models

    def labels(self) -> list[str]:
        """Returns the labels of all models that the way trains, in the order of training."""
        return [model.label for model in self.models()]


def half_model(half: int) -> TrainedModel:
    """Returns the model that is trained by SFT on the demonstrations of one half of the questions."""
    return TrainedModel(label=f"half{half}", kind="half", half=half)


def without_length(words: list[str]) -> list[str]:
    """Returns the flags of an `sft` command without those that set the length of training, --epochs and --max-steps."""
    length_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    length_parser.add_argument("--epochs")
    length_parser.add_argument("--max-steps")
    return length_parser.parse_known_args(words)[1]


def parse(argv: list[str] | None, description: str) -> tuple[Settings, argparse.Namespace]:
    """Returns the settings that the flags select, and the flags themselves. Exits with a message if they are wrong."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, hub id or tiny; by default the preset's")
    parser.add_argument("--model-name", help="what the results call it; by default the folder's or the hub's name")
    parser.add_argument("--encoder", help="folder, hub id or hashing; by default the preset's")
    parser.add_argument(
        "--set",
        action="append",
        required=True,
        metavar="NAME=TRAIN,DEV[,WEIGHT]",
        help="one data set's files, and its weight among the trajectories of SFT (1); RL asks of all sets alike",
    )
    parser.add_argument(
        "--then",
        nargs="*",
        choices=LATER_STAGES,
        default=[],
        help=f"stages after the cold start, in this order; {RAG_SFT}: plain RAG fine-tuned on the same questions; "
        "self: two adapters each learn the demonstrations of one half of the questions and sample the other half, then "
        "SFT on gold and these samples, and on gold alone for as many steps; rl: SFT on the demonstrations of one "
        "half, then RL on the other half",
    )
    parser.add_argument("--cross-fit", action="store_true", help="rl: also the reverse, and the mean of both adapters")
    parser.add_argument("--baselines", nargs="*", choices=BASELINES, default=tuple(BASELINES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N dev questions of each set")
    parser.add_argument("--preset", default="hotpotqa")
    parser.add_argument("--flags", nargs="+", default=[], metavar="KIND=FLAGS", help=f"KIND: {', '.join(KINDS)}")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--dtype", default="auto", choices=["auto", "fp32", "bf16", "fp16"])
    parser.add_argument("--output", type=Path, default=Path("runs/recipe"), help="folder of the way")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to which the way is added")
    flags = parser.parse_args(argv)
    set_parts = {name: files.split(",") for name, _, files in (text.partition("=") for text in flags.set)}
    for name, parts in set_parts.items():
        if not SET_NAME.fullmatch(name) or len(parts) not in (2, 3) or not all(parts):
            parser.error(
                f"--set {name}: write it as NAME=TRAIN,DEV or NAME=TRAIN,DEV,WEIGHT, NAME of letters, digits, - and _"
            )
    try:
        weights = {name: float(parts[2]) if len(parts) == 3 else 1.0 for name, parts in set_parts.items()}
    except ValueError as error:
        parser.error(f"--set: a weight is a number: {error}")
    files = {name: (train, dev) for name, (train, dev, *_) in set_parts.items()}
    extra_flags = {kind: words for kind, _, words in (text.partition("=") for text in flags.flags)}
    if unknown := [kind for kind in extra_flags if kind not in KINDS]:
        parser.error(f"--flags {unknown[0]}: write it as KIND=FLAGS, KIND one of {', '.join(KINDS)}")
    if repeated := [stage for stage in LATER_STAGES if flags.then.count(stage) > 1]:
        parser.error(f"--then has {repeated[0]} twice, which would train the same again")
    if flags.cross_fit and "rl" not in flags.then:
        parser.error("--cross-fit works only with --then rl")
    preset_config = resolve("evaluate", EvaluateConfig(), ["--preset", flags.preset])
    settings = Settings(
        model=flags.model or preset_config.model.model,
        encoder=flags.encoder or preset_config.retrieval.encoder,
        sets=files,
        weights=weights,
        preset=flags.preset,
        seed=flags.seed,
        limit=flags.limit,
        then=tuple(flags.then),
        baselines=tuple(name for name in BASELINES if name in flags.baselines),  # plain RAG first: others are compared
        cross_fit=flags.cross_fit,
        dtype=flags.dtype,
        device=flags.device,
        flags=extra_flags,
    )
    return settings, flags


def name_of(model: str) -> str:
    """Returns the last part of the path if `model` is a folder, else `model` itself, which is a hub id."""
    return Path(model).resolve().name if Path(model).is_dir() else model
