"""The whole way on real weights and real questions: baselines, demonstrations, SFT, a self round, RL, evaluations.

    python -m bench.recipe --model MODEL --encoder ENCODER --output runs/recipe \\
      --set hotpotqa=TRAIN.json,DEV.json --set 2wiki=TRAIN.json,DEV.json --set musique=TRAIN.jsonl,DEV.jsonl
    ... --then rag-sft rl --cross-fit              # after the cold start plain RAG fine-tuned, then RL on both halves
    ... --flags sft="--epochs 2" rag="--top-k 5"   # more flags, of commands or of kinds of stages

Every stage is a command of r3lite with its output in --output, and one whose result is there is not run again, so the
same command goes on where it was stopped; --then and --baselines may name more by then. No question of a dev file is
trained on, and RL and the self round ask an adapter only questions whose demonstrations it has not learned
(Settings.of_stage). A way is one run of bench/results/recipe.json, which it is added to when it is complete, fails or
is interrupted; bench/recipe_page.py says what the page tells.
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
from bench.recipe_page import SHOWN, page, tables
from bench.recipe_settings import (
    BASELINES,
    COLD,
    RAG_SFT,
    SELF_CONTROL,
    Settings,
    Trained,
    name_of,
    parse,
    taught_half,
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

MORE = ("then", "baselines", "cross_fit", "flags")  # settings that may change, as long as no stage that was begun does
POLL, TELL = 0.1, 30.0  # seconds between looks at a process, and between notes of its time


@dataclass(frozen=True)
class Stage:
    """One command of the way; `name` is also that of its output.

    `grows`: it samples trajectories; a result may be there that is not whole, and a whole one may be empty.
    """

    name: str
    command: str
    arguments: list[str]
    result: Path
    grows: bool = False

    def words(self) -> list[str]:
        return [sys.executable, "-m", f"r3lite.{self.command}", *self.arguments]

    def is_empty(self) -> bool:
        """Whether it has sampled all its questions and kept no trajectory, which `collect` calls a failure."""
        if not self.grows or not self.result.exists() or self.result.stat().st_size:
            return False
        config = resolve("collect", CollectConfig(), self.arguments)
        return {question.id for question in new_questions(config.data)} <= rejected_ids(self.result)


class Way:
    """A way in its folder: its stages, and what is known of each one's cost (stages.json)."""

    def __init__(self, folder: Path, settings: Settings):
        self.folder, self.settings = folder, settings
        self.costs_file = folder / "stages.json"
        self.costs: dict[str, dict] = read_json(self.costs_file) if self.costs_file.exists() else {}

    def go(self) -> None:
        """All stages, but for those whose result is there."""
        for baseline in self.settings.baselines:
            self.evaluate(baseline, BASELINES[baseline], baseline)
        gold = {name: self.demonstrations(name) for name in self.settings.sets}
        for model in self.settings.models():
            adapter = ["--adapter", str(self.folder / model.label)]
            if model.kind == RAG_SFT:
                self.taught(model.label, {name: [self.demonstrations_for_rag(name)] for name in gold}, RAG_SFT)
                self.evaluate(model.label, [*BASELINES["rag"], *adapter], "rag")
            else:
                self.train(model, gold)
                self.evaluate(model.label, adapter)

    def train(self, model: Trained, gold: dict[str, Path]) -> None:
        """Trains a model that answers in steps; `gold` has the demonstrations of each set."""
        begins = [self.folder / label for label in model.begins]
        data = {name: [file] for name, file in gold.items()}
        if model.kind == "rl":
            self.reinforced(model.label, begins[0], model.half)
        elif model.kind == "mean":
            self.averaged(model.label, begins)
        elif model.kind == "half":
            self.taught(model.label, {name: [self.part_of(model.half, file)] for name, file in gold.items()})
        elif model.kind == "self":
            for name, files in data.items():
                files += [self.sampled(1, name), self.sampled(2, name)]
            self.taught(model.label, data)
        elif model.kind == SELF_CONTROL:
            self.taught(model.label, data, steps=amounts(self.folder / "self")["steps"])
        else:
            self.taught(model.label, data)

    def evaluate(self, label: str, what: list[str], *kinds: str) -> None:
        """The scores of a model or baseline on the dev questions of each set, and how they differ from plain RAG's and
        the cold start's."""
        given = self.settings
        limit = ["--limit", str(given.limit)] if given.limit else []
        for name, (_, dev) in given.sets.items():
            output = self.evaluation(label, name)
            arguments = [*given.runs_model, *given.searches, "--data", dev, *limit, *what]
            arguments += [*given.more("evaluate", *kinds), "--output", str(output)]
            self.run(Stage(output.name, "evaluate", arguments, output / run_files.SCORES))
            for other, compared in self.comparisons(label, name).items():
                pair = ["--compare", str(self.evaluation(other, name)), str(output), "--seed", str(given.seed)]
                arguments = [*pair, "--output", str(compared)]
                self.run(Stage(compared.name, "evaluate", arguments, compared / COMPARISON))

    def evaluation(self, label: str, name: str) -> Path:
        """The folder of a model's evaluation on a set."""
        return self.folder / f"evaluate-{label}-{name}"

    def comparisons(self, label: str, name: str) -> dict[str, Path]:
        """The folders of a model's comparisons on a set, by what it is compared with: plain RAG and the cold start."""
        folders = {}
        if label != "rag" and "rag" in self.settings.baselines:
            folders["rag"] = self.folder / f"compare-{label}-{name}"
        if label in self.settings.labels() and label != COLD:
            folders[COLD] = self.folder / f"over-{COLD}-{label}-{name}"
        return folders

    def demonstrations(self, name: str) -> Path:
        """Gold trajectories of a set's training questions."""
        settings = self.settings
        path = self.folder / f"gold-{name}.jsonl"
        arguments = [*settings.common, "--source", "gold", *settings.searches, "--data", settings.sets[name][0]]
        arguments += ["--exclude", ",".join(settings.dev_files), "--output", str(path), *settings.more("collect")]
        self.run(Stage(path.stem, "collect", arguments, path))
        return path

    def sampled(self, half: int, name: str) -> Path:
        """Right and grounded trajectories of a set's training questions of a half, sampled by the adapter that has
        learned the demonstrations of the other half: it may not answer from memory."""
        settings = self.settings
        other = 3 - half
        path = self.folder / f"own-self-half{half}-{name}.jsonl"
        learned = [str(file) for file in self.questions_of(other)]
        arguments = [*settings.runs_model, "--adapter", str(self.folder / taught_half(other).label)]
        arguments += ["--source", "self", "--num-generations", "4", *settings.searches]
        arguments += ["--data", settings.sets[name][0], "--exclude", ",".join([*settings.dev_files, *learned])]
        arguments += ["--output", str(path), *settings.more("collect", "self")]
        self.run(Stage(path.stem, "collect", arguments, path, grows=True))
        return path

    def demonstrations_for_rag(self, name: str) -> Path:
        """A set's training questions as plain RAG asks them, with the flags of its evaluation, and their answers."""
        given, path = self.settings, self.folder / f"rag-{name}.jsonl"
        arguments = [*given.common, "--model", given.model, "--source", "gold", *BASELINES["rag"], *given.searches]
        arguments += ["--data", given.sets[name][0], "--exclude", ",".join(given.dev_files), "--output", str(path)]
        self.run(Stage(path.stem, "collect", [*arguments, *given.more("collect", "rag")], path))
        return path

    def part_of(self, half: int, file: Path) -> Path:
        """A file of the trajectories in another one whose questions are of a half."""
        path = file.with_name(f"{file.stem}-half{half}.jsonl")
        rows = [row for row in read_jsonl(file) if half_of(row.text("question"), self.settings.seed) == half]
        write_jsonl(path, [row.values for row in rows])
        return path

    def questions_of(self, half: int) -> list[Path]:
        """A file for each set with its training questions of a half, for --exclude."""
        paths = {name: self.folder / f"questions-{name}-half{half}.jsonl" for name in self.settings.sets}
        for name, path in paths.items():
            if not path.exists():  # it does not change, and large sets take long to read
                questions = read_questions(self.settings.sets[name][0], skip_bad_rows=True)
                rows = [{"question": q.text, "answer": q.answers[0]} for q in questions]
                write_jsonl(path, [row for row in rows if half_of(row["question"], self.settings.seed) == half])
        return list(paths.values())

    def taught(self, label: str, data: dict[str, list[Path]], *kinds: str, steps: int | None = None) -> None:
        """SFT from the base, on the trajectories of each set; `steps`: how many, whatever the flags say."""
        output = self.folder / label
        flags = self.settings.more("sft", *kinds)
        if steps is not None:
            flags = [*without_length(flags), "--max-steps", str(steps)]
        sources = [source for name, files in data.items() for source in self.weighed(name, files)]
        arguments = [*self.settings.runs_model, "--sources", ",".join(sources), *flags]
        arguments += ["--output", str(output), "--resume", "auto"]
        self.run(Stage(label, "sft", arguments, output / run_files.SUMMARY))

    def weighed(self, name: str, files: Sequence[Path]) -> list[str]:
        """A set's files as --sources has them: they share its weight by their numbers of rows; empty ones are left
        out."""
        rows = {file: sum(1 for _ in read_jsonl(file)) for file in files}
        shares = {file: count / sum(rows.values()) for file, count in rows.items() if count}
        return [f"{file}={self.settings.weights[name] * share:g}" for file, share in shares.items()]

    def reinforced(self, label: str, adapter: Path, half: int) -> None:
        """Reinforcement learning from an adapter, on the questions of a half; all sets weigh the same, as the mean over
        them counts."""
        given, output, config = self.settings, self.folder / label, self.folder / "rl.toml"
        tables = [
            f'[[sources]]\nname = {json.dumps(name)}\nfile = {json.dumps(train)}\ntype = "qa"\n'
            for name, (train, _) in given.sets.items()
        ]
        write_text(config, "\n".join(tables))
        arguments = [*given.runs_model, *given.searches, "--config", str(config), "--adapter", str(adapter)]
        others = [str(file) for file in self.questions_of(3 - half)]
        arguments += ["--exclude", ",".join([*given.dev_files, *others])]
        arguments += [*given.more("ppo"), "--output", str(output), "--resume", "auto"]
        self.run(Stage(label, "ppo", arguments, output / run_files.SUMMARY))

    def averaged(self, label: str, adapters: Sequence[Path]) -> None:
        """The mean of adapters, as one."""
        output = self.folder / label
        arguments = [*self.settings.common, "--model", self.settings.model, "--prompts", "0"]
        arguments += ["--average", ",".join(map(str, adapters)), "--output", str(output)]
        self.run(Stage(label, "export", arguments, output / ADAPTER_CONFIG))

    def run(self, stage: Stage) -> None:
        """Runs a stage as a user would, unless its result is there, and notes its cost; R3LiteError if it fails."""
        cost = self.costs.get(stage.name, {"command": stage.command, "seconds": 0.0, "starts": 0, "commits": []})
        if cost.setdefault("arguments", stage.arguments) != stage.arguments:
            raise R3LiteError(
                f"the stage {stage.name} was begun with other flags",
                "Name another --output.",
                code="stage-flags-differ",
            )
        if stage.result.exists() and not (stage.grows and not cost.get("complete")):
            return
        self.costs[stage.name] = cost
        cost["starts"] += 1
        cost["commits"] = list(dict.fromkeys([*cost["commits"], records.commit(records.ROOT)]))
        print(f"\n$ python -m r3lite.{stage.command} {shlex.join(stage.arguments)}", flush=True)
        process = subprocess.Popen(stage.words())
        try:
            self.wait(process, cost)
        except BaseException:  # Ctrl-C, SIGTERM: what trains saves first
            process.terminate()
            self.wait(process, cost)
            raise
        if process.returncode and not stage.is_empty():
            message = f"the stage {stage.name} failed with status {process.returncode}"
            raise R3LiteError(
                message, "Its own message stands above; the same command again goes on with it.", code="stage-failed"
            )
        cost["complete"] = True
        self.note()

    def wait(self, process: subprocess.Popen, cost: dict) -> None:
        """Waits until a process ends, and adds its seconds and its largest resident size to the cost of its stage."""
        before, start = cost["seconds"], time.monotonic()
        noted = start
        while process.returncode is None:
            if hasattr(os, "wait4"):
                ended, status, usage = os.wait4(process.pid, os.WNOHANG)
                if ended:
                    process.returncode = os.waitstatus_to_exitcode(status)
                    size = usage.ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)
                    cost["peak_mib"] = max(round(size), cost.get("peak_mib", 0))
            else:  # Windows
                process.poll()
            now = time.monotonic()
            cost["seconds"] = round(before + now - start, 3)
            if process.returncode is not None or now - noted > TELL:  # so that even SIGKILL loses little
                noted = now
                self.note()
            if process.returncode is None:
                time.sleep(POLL)

    def note(self) -> None:
        write_json(self.costs_file, self.costs)

    def stages(self) -> list[dict]:
        """What each stage took: seconds, starts, resident size, tokens, trajectories."""
        known = {name: {key: cost[key] for key in cost if key != "arguments"} for name, cost in self.costs.items()}
        return [{"stage": name, **cost, **amounts(self.folder / name)} for name, cost in known.items()]

    def scores(self) -> list[dict]:
        """The scores of every evaluation that is there, with its differences from plain RAG and the cold start."""
        found = []
        for label in (*self.settings.baselines, *self.settings.labels()):
            for name in self.settings.sets:
                output = self.evaluation(label, name)
                if (output / run_files.SCORES).exists():
                    scores = read_json(output / run_files.SCORES)
                    row = {"model": label, "set": name, "n": scores["n"], "finish": scores["finish"]}
                    row |= {key: scores.get(key) for key in SHOWN}
                    for other, compared in self.comparisons(label, name).items():
                        if (compared / COMPARISON).exists():
                            metrics = read_json(compared / COMPARISON)["metrics"]
                            row[f"over_{other}"] = {key: metrics[key] for key in ("em", "f1") if key in metrics}
                    found.append(row)
        return found


def half_of(question: str, seed: int) -> int:
    """The half of the questions, 1 or 2, that a question is of: the same in all files, however it is spelled."""
    digest = hashlib.sha256(f"{seed}/{question_key(question)}".encode()).digest()
    return 1 + digest[0] % 2


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def amounts(output: Path) -> dict[str, int]:
    """How many tokens a training processed or an evaluated model wrote, or how many trajectories a collection has."""
    predictions, metrics = output / run_files.PREDICTIONS, output / run_files.METRICS
    trajectories = output.with_name(f"{output.name}.jsonl")
    if predictions.exists():
        return {"tokens": sum(round(row.number("reasoning_tokens", 0)) for row in read_jsonl(predictions))}
    if metrics.exists():
        rows = list(read_jsonl(metrics))
        return {"tokens": rows[-1].whole("num_tokens", 0), "steps": rows[-1].whole("step")} if rows else {}
    return {"trajectories": sum(1 for _ in read_jsonl(trajectories))} if trajectories.exists() else {}


def begun(folder: Path, settings: Settings, precision: Any) -> dict:
    """What the way in a folder was begun with and on; R3LiteError if that was with other settings."""
    path, now = folder / "recipe.json", json.loads(json.dumps(vars(settings)))
    if not path.exists():
        write_json(path, {"settings": now, "on": records.provenance(precision)})
    known = read_json(path)
    if changed := [key for key in now if key not in MORE and known["settings"].get(key) != now[key]]:
        changes = ", ".join(f"{key} (was {known['settings'].get(key)}, is {now[key]})" for key in changed)
        raise R3LiteError(
            f"{folder} holds a way with other settings: {changes}",
            "Name another --output.",
            code="recipe-settings-differ",
        )
    return known["on"]


def described(settings: Settings, folder: Path, model: str) -> dict:
    """The settings as results keep them: files by their names, and what the preset says at this commit."""
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
    settings, given = parse(argv, __doc__)
    signal.signal(signal.SIGTERM, terminate)
    status, stopped = 0, None
    try:
        with sole_writer(given.output):
            on = begun(given.output, settings, options.precision(given))
            way = Way(given.output, settings)
            try:
                way.go()
            except (KeyboardInterrupt, Terminated) as stop:
                status, stopped = (130 if isinstance(stop, KeyboardInterrupt) else 143), "interrupted"
            except R3LiteError as error:
                status, stopped = 1, error.cause
                print(f"\n{error}", file=sys.stderr)
            told = described(settings, given.output, given.model_name or name_of(settings.model))
            run = told | on | {"complete": stopped is None, "stopped": stopped}
            run |= {"stages": way.stages(), "scores": way.scores()}
            runs = records.add(given.results / "recipe.json", run)
            write_text(given.results / "recipe.md", page(runs))
            print("\n" + tables(run))
    except R3LiteError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    return status


def terminate(*_: Any) -> None:
    raise Terminated


if __name__ == "__main__":
    sys.exit(main())
