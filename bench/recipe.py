"""Trains and evaluates on real weights and real questions: baselines, demonstrations, SFT, a self round and RL.

    python -m bench.recipe --model MODEL --encoder ENCODER --output runs/recipe \\
      --set hotpotqa=TRAIN.json,DEV.json --set 2wiki=TRAIN.json,DEV.json --set musique=TRAIN.jsonl,DEV.jsonl
    ... --then rag-sft rl --cross-fit              # after the cold start: plain RAG fine-tuned, then RL on both halves
    ... --flags sft="--epochs 2" rag="--top-k 5"   # more flags for commands or kinds of stages

The stages of one run of this bench are together called a way. Each stage runs a command of r3lite, with its output in
the folder --output. A stage whose result exists already is not run again. So the same command continues a way that was
stopped; it may name more stages in --then and --baselines than before.

No question of a dev file is trained on. In the self round (SFT on demonstrations and on trajectories that two adapters
sampled) and in RL, an adapter is asked only questions whose demonstrations it was not trained on
(Settings.models_of_stage). When a way is complete, fails or is interrupted, it is added to bench/results/recipe.json as
one run, and bench/recipe_page.py writes the page bench/results/recipe.md.
"""

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import options, records
from bench.recipe_page import SCORE_TITLES, page, tables
from bench.recipe_settings import (
    BASELINES,
    COLD,
    RAG_SFT,
    SELF_CONTROL,
    Settings,
    TrainedModel,
    half_model,
    name_of,
    parse,
    without_length,
)
from r3lite.core import run_files
from r3lite.core.answer_match import question_key
from r3lite.core.errors import R3LiteError
from r3lite.core.exit_status import Terminated
from r3lite.core.files import read_jsonl, shipped, sole_writer, write_json, write_jsonl, write_text
from r3lite.core.inherited import ADAPTER_CONFIG
from r3lite.core.invocation import resolve
from r3lite.datasets.collected import rejected_ids
from r3lite.datasets.qa import read_questions
from r3lite.datasets.splits import new_questions
from r3lite.evaluation.folder import COMPARISON
from r3lite.settings import CollectConfig

# Settings that may differ when a way is continued. The flags of a stage that has already started may not.
CHANGEABLE_SETTINGS = ("then", "baselines", "cross_fit", "flags")
POLL_SECONDS = 0.1  # between two checks whether a process has ended
SAVE_SECONDS = 30.0  # between two writes of the costs while a process runs
MIB = 1 << 20
MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1 << 10  # the unit of `ru_maxrss`
SELF_GENERATIONS = 4  # trajectories that the self round samples for each question
EXIT_SIGINT = 130
EXIT_SIGTERM = 143


@dataclass(frozen=True)
class Stage:
    """One command of the way. `name` is also the name of its output."""

    name: str
    command: str
    arguments: list[str]
    result: Path  # the file that exists when the stage is complete
    # The stage samples trajectories and appends them to its result. The file may therefore exist before the stage is
    # complete, and it is empty if no trajectory was good enough.
    grows: bool = False

    def command_line(self) -> list[str]:
        return [sys.executable, "-m", f"r3lite.{self.command}", *self.arguments]

    def is_empty(self) -> bool:
        """Returns whether the stage sampled all its questions and accepted no trajectory.

        `collect` exits with an error then, but for the way this is no failure.
        """
        if not self.grows or not self.result.exists() or self.result.stat().st_size:
            return False
        config = resolve("collect", CollectConfig(), self.arguments)
        return {question.id for question in new_questions(config.data)} <= rejected_ids(self.result)


class Way:
    """A way in its folder. Runs the stages, and stores their costs (time, memory and more) in stages.json.

    Parameters called `name` are names of data sets. `label` is the name of a trained model or of a baseline.
    """

    def __init__(self, folder: Path, settings: Settings):
        self.folder = folder
        self.settings = settings
        self.costs_file = folder / "stages.json"
        self.costs: dict[str, dict] = read_json(self.costs_file) if self.costs_file.exists() else {}

    def run_all(self) -> None:
        """Runs all stages whose results do not exist yet."""
        for baseline in self.settings.baselines:
            self.evaluate(baseline, BASELINES[baseline], baseline)
        gold = {name: self.collect_gold(name) for name in self.settings.sets}
        for model in self.settings.models():
            adapter = ["--adapter", str(self.folder / model.label)]
            if model.kind == RAG_SFT:
                self.train_sft(model.label, {name: [self.collect_rag(name)] for name in gold}, RAG_SFT)
                self.evaluate(model.label, [*BASELINES["rag"], *adapter], "rag")
            else:
                self.train(model, gold)
                self.evaluate(model.label, adapter)

    def train(self, model: TrainedModel, gold: dict[str, Path]) -> None:
        """Trains a model that answers in steps. `gold` has the file of demonstrations of each set."""
        parents = [self.folder / label for label in model.parents]
        data = {name: [file] for name, file in gold.items()}
        if model.kind == "rl":
            self.train_rl(model.label, parents[0], model.half)
        elif model.kind == "mean":
            self.average(model.label, parents)
        elif model.kind == "half":
            self.train_sft(model.label, {name: [self.write_half(model.half, file)] for name, file in gold.items()})
        elif model.kind == "self":
            for name, file in gold.items():
                data[name] = [file, self.collect_samples(1, name), self.collect_samples(2, name)]
            self.train_sft(model.label, data)
        elif model.kind == SELF_CONTROL:
            self.train_sft(model.label, data, steps=amounts(self.folder / "self")["steps"])
        else:
            self.train_sft(model.label, data)

    def evaluate(self, label: str, model_flags: list[str], *kinds: str) -> None:
        """Evaluates a model or baseline on the dev questions of each set, and compares it with others.

        The others are those of `comparisons`. `kinds`: the kinds of --flags that apply besides "evaluate".
        """
        settings = self.settings
        limit = ["--limit", str(settings.limit)] if settings.limit else []
        for name, (_, dev) in settings.sets.items():
            output = self.evaluation(label, name)
            arguments = [*settings.model_flags, *settings.search_flags, "--data", dev, *limit, *model_flags]
            arguments += [*settings.extra_flags("evaluate", *kinds), "--output", str(output)]
            self.run(Stage(name=output.name, command="evaluate", arguments=arguments, result=output / run_files.SCORES))
            for reference, comparison in self.comparisons(label, name).items():
                arguments = ["--compare", str(self.evaluation(reference, name)), str(output)]
                arguments += ["--seed", str(settings.seed), "--output", str(comparison)]
                result = comparison / COMPARISON
                self.run(Stage(name=comparison.name, command="evaluate", arguments=arguments, result=result))

    def evaluation(self, label: str, name: str) -> Path:
        """Returns the folder of a model's evaluation on a set."""
        return self.folder / f"evaluate-{label}-{name}"

    def comparisons(self, label: str, name: str) -> dict[str, Path]:
        """Returns the folders of a model's comparisons on a set, by the label of the reference.

        The references are plain RAG, if it is among the baselines, and for trained models also the cold start.
        """
        folders = {}
        if label != "rag" and "rag" in self.settings.baselines:
            folders["rag"] = self.folder / f"compare-{label}-{name}"
        if label in self.settings.labels() and label != COLD:
            folders[COLD] = self.folder / f"over-{COLD}-{label}-{name}"
        return folders

    def collect_gold(self, name: str) -> Path:
        """Collects demonstrations (gold trajectories) of a set's training questions; returns their file."""
        settings = self.settings
        path = self.folder / f"gold-{name}.jsonl"
        arguments = [*settings.common_flags, "--source", "gold", *settings.search_flags]
        arguments += ["--data", settings.sets[name][0], "--exclude", ",".join(settings.dev_files)]
        arguments += ["--output", str(path), *settings.extra_flags("collect")]
        self.run(Stage(name=path.stem, command="collect", arguments=arguments, result=path))
        return path

    def collect_samples(self, half: int, name: str) -> Path:
        """Samples right and grounded trajectories for one half of a set's training questions; returns their file.

        They are sampled with the adapter that was trained on the demonstrations of the other half, so that it cannot
        answer from memory.
        """
        settings = self.settings
        trained_half = other_half(half)
        path = self.folder / f"own-self-half{half}-{name}.jsonl"
        excluded = [*settings.dev_files, *map(str, self.write_questions(trained_half))]
        arguments = [*settings.model_flags, "--adapter", str(self.folder / half_model(trained_half).label)]
        arguments += ["--source", "self", "--num-generations", str(SELF_GENERATIONS), *settings.search_flags]
        arguments += ["--data", settings.sets[name][0], "--exclude", ",".join(excluded)]
        arguments += ["--output", str(path), *settings.extra_flags("collect", "self")]
        self.run(Stage(name=path.stem, command="collect", arguments=arguments, result=path, grows=True))
        return path

    def collect_rag(self, name: str) -> Path:
        """Collects training rows for plain RAG: a set's training questions with retrieved documents, and the answers.

        The prompts are those of plain RAG's evaluation, as the same flags apply. Returns the file.
        """
        settings = self.settings
        path = self.folder / f"rag-{name}.jsonl"
        arguments = [*settings.common_flags, "--model", settings.model, "--source", "gold"]
        arguments += [*BASELINES["rag"], *settings.search_flags, "--data", settings.sets[name][0]]
        arguments += ["--exclude", ",".join(settings.dev_files), "--output", str(path)]
        arguments += settings.extra_flags("collect", "rag")
        self.run(Stage(name=path.stem, command="collect", arguments=arguments, result=path))
        return path

    def write_half(self, half: int, file: Path) -> Path:
        """Writes the trajectories of a file whose questions are in the half to a new file, and returns its path."""
        path = file.with_name(f"{file.stem}-half{half}.jsonl")
        rows = [row for row in read_jsonl(file) if half_of(row.text("question"), self.settings.seed) == half]
        write_jsonl(path, [row.values for row in rows])
        return path

    def write_questions(self, half: int) -> list[Path]:
        """Writes a file for each set with its training questions of the half, for --exclude; returns their paths."""
        paths = {name: self.folder / f"questions-{name}-half{half}.jsonl" for name in self.settings.sets}
        for name, path in paths.items():
            if not path.exists():  # the file would not change, and reading a large set takes long
                questions = read_questions(self.settings.sets[name][0], skip_bad_rows=True)
                rows = [{"question": q.text, "answer": q.answers[0]} for q in questions]
                write_jsonl(path, [row for row in rows if half_of(row["question"], self.settings.seed) == half])
        return list(paths.values())

    def train_sft(self, label: str, data: dict[str, list[Path]], *kinds: str, steps: int | None = None) -> None:
        """Trains an adapter of the base by SFT on the trajectories of each set.

        `kinds`: the kinds of --flags that apply besides "sft". `steps` is the number of optimizer steps, and overrides
        the flags; None: the flags decide.
        """
        output = self.folder / label
        flags = self.settings.extra_flags("sft", *kinds)
        if steps is not None:
            flags = [*without_length(flags), "--max-steps", str(steps)]
        sources = [source for name, files in data.items() for source in self.weighted_sources(name, files)]
        arguments = [*self.settings.model_flags, "--sources", ",".join(sources), *flags]
        arguments += ["--output", str(output), "--resume", "auto"]
        self.run(Stage(name=label, command="sft", arguments=arguments, result=output / run_files.SUMMARY))

    def weighted_sources(self, name: str, files: Sequence[Path]) -> list[str]:
        """Returns the files of a set in the notation of --sources, FILE=WEIGHT, without empty files.

        The set's weight is divided among the files in proportion to their numbers of rows.
        """
        row_counts = {file: sum(1 for _ in read_jsonl(file)) for file in files}
        shares = {file: count / sum(row_counts.values()) for file, count in row_counts.items() if count}
        return [f"{file}={self.settings.weights[name] * share:g}" for file, share in shares.items()]

    def train_rl(self, label: str, adapter: Path, half: int) -> None:
        """Trains an adapter further by reinforcement learning, on one half of the training questions.

        All sets have the same weight, because the result of a way is the mean of their scores.
        """
        settings = self.settings
        output = self.folder / label
        config = self.folder / "rl.toml"
        sources = [
            f'[[sources]]\nname = {json.dumps(name)}\nfile = {json.dumps(train)}\ntype = "qa"\n'
            for name, (train, _) in settings.sets.items()
        ]
        write_text(config, "\n".join(sources))
        arguments = [*settings.model_flags, *settings.search_flags, "--config", str(config)]
        excluded = [*settings.dev_files, *map(str, self.write_questions(other_half(half)))]
        arguments += ["--adapter", str(adapter), "--exclude", ",".join(excluded)]
        arguments += [*settings.extra_flags("ppo"), "--output", str(output), "--resume", "auto"]
        self.run(Stage(name=label, command="ppo", arguments=arguments, result=output / run_files.SUMMARY))

    def average(self, label: str, adapters: Sequence[Path]) -> None:
        """Writes one adapter that is the mean of several."""
        output = self.folder / label
        # --prompts 0: the result is not compared with one original, as it has several.
        arguments = [*self.settings.common_flags, "--model", self.settings.model, "--prompts", "0"]
        arguments += ["--average", ",".join(map(str, adapters)), "--output", str(output)]
        self.run(Stage(name=label, command="export", arguments=arguments, result=output / ADAPTER_CONFIG))

    def run(self, stage: Stage) -> None:
        """Runs the command of a stage in a new process unless the stage is complete, and stores its cost.

        Raises R3LiteError if the command fails, or if the stage was started with other arguments before.
        """
        cost = self.costs.get(stage.name, {"command": stage.command, "seconds": 0.0, "starts": 0, "commits": []})
        cost.setdefault("arguments", stage.arguments)  # those of the stage's first start
        if cost["arguments"] != stage.arguments:
            raise R3LiteError(
                f"the stage {stage.name} was begun with other flags",
                "Name another --output.",
                code="stage-flags-differ",
            )
        is_complete = stage.result.exists() and (not stage.grows or cost.get("complete"))
        if is_complete:
            return
        self.costs[stage.name] = cost
        cost["starts"] += 1
        cost["commits"] = list(dict.fromkeys([*cost["commits"], records.commit(records.ROOT)]))
        print(f"\n$ python -m r3lite.{stage.command} {shlex.join(stage.arguments)}", flush=True)
        process = subprocess.Popen(stage.command_line())
        try:
            self.wait(process, cost)
        except BaseException:  # Ctrl-C or SIGTERM: a training saves a checkpoint before it ends
            process.terminate()
            self.wait(process, cost)
            raise
        if process.returncode and not stage.is_empty():
            message = f"the stage {stage.name} failed with status {process.returncode}"
            raise R3LiteError(
                message, "Its own message stands above; the same command again goes on with it.", code="stage-failed"
            )
        cost["complete"] = True
        self.save_costs()

    def wait(self, process: subprocess.Popen, cost: dict) -> None:
        """Waits until a process ends, and adds its seconds and its largest resident size to the cost of its stage."""
        earlier_seconds = cost["seconds"]  # of earlier starts of the stage
        start = time.monotonic()
        last_save = start
        while process.returncode is None:
            if hasattr(os, "wait4"):
                ended_pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                if ended_pid:
                    process.returncode = os.waitstatus_to_exitcode(status)
                    peak_mib = round(usage.ru_maxrss * MAXRSS_BYTES / MIB)
                    cost["peak_mib"] = max(peak_mib, cost.get("peak_mib", 0))
            else:  # Windows
                process.poll()
            time_of_check = time.monotonic()
            cost["seconds"] = round(earlier_seconds + time_of_check - start, 3)
            # Regular saves: if this bench is killed by SIGKILL, only the last seconds are missing.
            if process.returncode is not None or time_of_check - last_save > SAVE_SECONDS:
                last_save = time_of_check
                self.save_costs()
            if process.returncode is None:
                time.sleep(POLL_SECONDS)

    def save_costs(self) -> None:
        write_json(self.costs_file, self.costs)

    def stages(self) -> list[dict]:
        """Returns the cost of each stage: seconds, starts, resident size, and numbers of tokens or trajectories."""
        stages = []
        for name, cost in self.costs.items():
            shown_cost = {key: cost[key] for key in cost if key != "arguments"}
            stages.append({"stage": name, **shown_cost, **amounts(self.folder / name)})
        return stages

    def scores(self) -> list[dict]:
        """Returns the scores of every evaluation that exists, with the differences from plain RAG and the cold start.

        The differences have the keys "over_rag" and "over_sft".
        """
        rows = []
        for label in (*self.settings.baselines, *self.settings.labels()):
            for name in self.settings.sets:
                output = self.evaluation(label, name)
                if (output / run_files.SCORES).exists():
                    scores = read_json(output / run_files.SCORES)
                    row = {"model": label, "set": name, "n": scores["n"], "finish": scores["finish"]}
                    row |= {key: scores.get(key) for key in SCORE_TITLES}
                    for reference, comparison in self.comparisons(label, name).items():
                        if (comparison / COMPARISON).exists():
                            metrics = read_json(comparison / COMPARISON)["metrics"]
                            row[f"over_{reference}"] = {key: metrics[key] for key in ("em", "f1") if key in metrics}
                    rows.append(row)
        return rows


def half_of(question: str, seed: int) -> int:
    """Returns the half of the questions, 1 or 2, that a question belongs to.

    It depends only on the seed and on the normalized text (see question_key). So it is the same in all files.
    """
    digest = hashlib.sha256(f"{seed}/{question_key(question)}".encode()).digest()
    return 1 + digest[0] % 2


def other_half(half: int) -> int:
    """Returns 2 for 1, and 1 for 2."""
    return 3 - half


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def amounts(output: Path) -> dict[str, int]:
    """Returns the amounts of work in a stage's output.

    Of an evaluation: the tokens that the model wrote. Of a training: the tokens that it processed, and its steps. Of a
    collection: its trajectories. Empty if there is no output yet.
    """
    predictions = output / run_files.PREDICTIONS
    metrics = output / run_files.METRICS
    trajectories = output.with_name(f"{output.name}.jsonl")
    if predictions.exists():
        return {"tokens": sum(round(row.number("reasoning_tokens", 0)) for row in read_jsonl(predictions))}
    if metrics.exists():
        rows = list(read_jsonl(metrics))
        return {"tokens": rows[-1].whole("num_tokens", 0), "steps": rows[-1].whole("step")} if rows else {}
    return {"trajectories": sum(1 for _ in read_jsonl(trajectories))} if trajectories.exists() else {}


def start_or_continue(folder: Path, settings: Settings, precision: Any) -> dict:
    """Returns the conditions (see records.provenance) under which the way in a folder was started.

    If the folder has no way yet, stores the settings and the current conditions. Raises R3LiteError if the way was
    started with other settings; CHANGEABLE_SETTINGS may differ.
    """
    path = folder / "recipe.json"
    new_settings = json.loads(json.dumps(vars(settings)))
    if not path.exists():
        write_json(path, {"settings": new_settings, "on": records.provenance(precision)})
    stored = read_json(path)
    changes = []
    for key, new_value in new_settings.items():
        old_value = stored["settings"].get(key)
        if key not in CHANGEABLE_SETTINGS and old_value != new_value:
            changes.append(f"{key} (was {old_value}, is {new_value})")
    if changes:
        raise R3LiteError(
            f"{folder} holds a way with other settings: {', '.join(changes)}",
            "Name another --output.",
            code="recipe-settings-differ",
        )
    return stored["on"]


def settings_record(settings: Settings, folder: Path, model: str) -> dict:
    """Returns the settings for the results: with the names of files, not their paths, and the preset's values.

    `model` is the name of the model in the results.
    """
    preset = shipped("presets", f"{settings.preset}.toml").read_text(encoding="utf-8")
    return {
        "section": f"{folder.resolve().name}: {model}, seed {settings.seed}",
        "model": model,
        "encoder": name_of(settings.encoder),
        "sets": {name: [Path(file).name for file in files] for name, files in settings.sets.items()},
        "weights": settings.weights,
        "seed": settings.seed,
        "limit": settings.limit,
        "preset": settings.preset,
        "preset_values": tomllib.loads(preset),
        "flags": settings.flags,
    }


def main(argv: list[str] | None = None) -> int:
    settings, flags = parse(argv, __doc__)
    signal.signal(signal.SIGTERM, terminate)
    status = 0
    stop_reason = None
    try:
        with sole_writer(flags.output):
            conditions = start_or_continue(flags.output, settings, options.precision(flags))
            way = Way(flags.output, settings)
            try:
                way.run_all()
            except (KeyboardInterrupt, Terminated) as interrupt:
                status = EXIT_SIGINT if isinstance(interrupt, KeyboardInterrupt) else EXIT_SIGTERM
                stop_reason = "interrupted"
            except R3LiteError as error:
                status = 1
                stop_reason = error.cause
                print(f"\n{error}", file=sys.stderr)
            record = settings_record(settings, flags.output, flags.model_name or name_of(settings.model))
            run = record | conditions | {"complete": stop_reason is None, "stopped": stop_reason}
            run |= {"stages": way.stages(), "scores": way.scores()}
            runs = records.add(flags.results / "recipe.json", run)
            write_text(flags.results / "recipe.md", page(runs))
            print("\n" + tables(run))
    except R3LiteError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    return status


def terminate(*_: Any) -> None:
    """Handles SIGTERM: raises Terminated."""
    raise Terminated


if __name__ == "__main__":
    sys.exit(main())
