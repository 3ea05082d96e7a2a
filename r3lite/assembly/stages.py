"""The stages of the quickstart with their arguments, and the table of their scores; used by quickstart."""

import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from r3lite.core.answer_match import exact_match, f1
from r3lite.core.errors import R3LiteError
from r3lite.core.exit_status import check_status
from r3lite.core.files import read_jsonl, read_record, shipped, write_json
from r3lite.evaluation.comparisons import compare
from r3lite.evaluation.folder import read_predictions
from r3lite.evaluation.scores import Marks
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.settings import QuickstartConfig

# The cold start's teacher is hasty: half of its trajectories leave out the last hop, so that there is something left
# for rewards to teach. With flawless trajectories and 160 steps, SFT alone answers 0.93 of the questions.
TRAJECTORIES = 300
HURRIED = 0.5
# What --quick makes of each stage.
FEW = {
    "collect": ["--limit", "40"],
    "sft": ["--max-steps", "3"],
    "ppo": ["--max-steps", "2"],
    "evaluate": ["--limit", "16"],
}
# The preset's opening prompt, whose words the tiny model knows, is for its own format only unless it is named.
OWN_PROMPT = ["--init-prompt", "prompts/tiny/init_prompt.txt"]
ROOM = {"dag": ["--max-new-tokens", "128"]}  # a plan of four searches is longer than the preset's turns
# The base was trained on r3's words alone: of the tokens of other formats it stays unsure, and would stumble over them.
SAMPLING = ["--temperature", "0.5"]
LESSONS = {"dag": ["--max-steps", "250"]}  # and harder to learn: after the preset's 100 steps few are answered right


@dataclass
class Stage:
    """One evaluated model: what it scored on the test questions."""

    name: str
    folder: Path
    minutes: float

    @property
    def scores(self) -> dict:
        return read_record(self.folder / "scores.json", "").values

    @property
    def marks(self) -> list[Marks]:
        """What was counted of every question, in the order of the test file."""
        return [marks for _, marks in read_predictions(self.folder).values()]


def teacher(trajectories: Path) -> dict:
    """How often the teacher of the cold start answers right: what SFT is asked to imitate."""
    rows = [(row.values["steps"][-1]["answer"], row.values["answers"]) for row in read_jsonl(trajectories)]
    scores = {"em": sum(exact_match(*r) for r in rows) / len(rows), "f1": sum(f1(*r) for r in rows) / len(rows)}
    return {"n": len(rows), **scores, "hurried_share": HURRIED}


def run_stage(title: str, commands: Mapping[str, ModuleType], name: str, arguments: list[str]) -> float:
    """Runs one command with its arguments shown; minutes it took."""
    print(f"\n== {title}\n$ python -m r3lite.{name} {' '.join(arguments)}", flush=True)
    start = time.monotonic()
    check_status(commands[name].main(arguments), f"the stage {name} failed", "See its message above.")
    return (time.monotonic() - start) / 60


def output_of(config: QuickstartConfig) -> Path:
    """The folder of the run. SFT and RL refuse one that is in use, too, but only after the stages before them."""
    out = Path(config.common.output or time.strftime("runs/quickstart-%Y%m%d-%H%M%S"))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise R3LiteError(f"--output {out} exists and is not an empty folder", "Pass a new folder.")
    return out


def arguments_of(format: str, out: Path) -> tuple[list[str], list[str], list[str]]:
    """What a command is given of a format: one that reads its texts, one that retrieves, and one that samples."""
    spoken = ["--format", format, *OWN_PROMPT] if format != "r3" else []
    search = [*spoken, *(["--retriever", "none"] if format == "solution" else ["--index", str(out / "index")])]
    return spoken, search, [*search, *ROOM.get(format, [])]


def run_all_stages(config: QuickstartConfig, commands: Mapping[str, ModuleType]) -> None:
    """Runs the stages one after another, then prints the table."""
    start = time.monotonic()
    common, settings = config.common, config.quickstart
    out = output_of(config)
    world = shipped("data", "world")
    shared = ["--preset", common.preset, "--seed", str(common.seed)]
    spoken, search, samples = arguments_of(settings.format, out)
    quick = {name: arguments if settings.quick else [] for name, arguments in FEW.items()}

    def evaluated(name: str, adapter: Path | None, minutes: float) -> Stage:
        folder = out / f"evaluate-{name.lower()}"
        arguments = [*shared, "--data", str(world / "test.jsonl"), *samples, "--output", str(folder)]
        arguments += [*quick["evaluate"], *(["--adapter", str(adapter)] if adapter else [])]
        title = f"evaluate the {name} model on questions about new entities"
        run_stage(title, commands, "evaluate", arguments)
        return Stage(name, folder, minutes)

    def collected(title: str, output: Path, *more: str) -> None:
        arguments = [*shared, "--data", str(world / "train.jsonl"), *search, "--output", str(output)]
        run_stage(title, commands, "collect", [*arguments, "--limit", str(TRAJECTORIES), *more, *quick["collect"]])

    def taught(title: str, data: Path, adapter: Path) -> float:
        arguments = [*shared, *spoken, "--data", str(data), "--output", str(adapter)]
        return run_stage(title, commands, "sft", [*arguments, *LESSONS.get(settings.format, []), *quick["sft"]])

    if settings.format != "solution":
        passages = ["--preset", common.preset, "--corpus", str(world / "corpus.jsonl")]
        run_stage("index the encyclopedia", commands, "index", [*passages, "--output", str(out / "index")])
    trajectories = out / "trajectories.jsonl"
    title = f"collect trajectories for the cold start ({HURRIED:.0%} of them deliberately answer one hop too early)"
    collected(title, trajectories, "--hurried-share", str(HURRIED))
    stages = [evaluated("base", None, 0.0)]
    minutes = taught("SFT: learn the step format and copying from documents", trajectories, out / "sft")
    stages.append(evaluated("SFT", out / "sft", minutes))
    name, teacher_of_failures = settings.algorithm, []
    if ALGORITHMS[name].has_teacher:
        flawless, adapter = out / "flawless.jsonl", out / "teacher"
        collected("collect correct trajectories for a teacher", flawless)
        taught("SFT of the teacher, a second adapter", flawless, adapter)
        teacher_of_failures = ["--teacher", "tiny", "--teacher-adapter", str(adapter), "--teacher-quantize", "none"]
    arguments = [*shared, "--algorithm", name, "--adapter", str(out / "sft"), "--data", str(world / "train.jsonl")]
    if ALGORITHMS[name].has_traces:  # the hasty ones among them have too small a reward, and fall out
        arguments += ["--traces", str(trajectories), "--limit", str(TRAJECTORIES)]  # of questions that may have one
    arguments += [*samples, "--output", str(out / name), *teacher_of_failures, *quick["ppo"]]
    arguments += SAMPLING if settings.format != "r3" else []
    title = f"{name.upper()}: learn from rewards on questions and answers"
    minutes = run_stage(title, commands, "ppo", arguments)
    stages.append(evaluated(name.upper(), out / name, minutes))
    report(stages, teacher(trajectories), out, (time.monotonic() - start) / 60, config)
    print_what_next(out, config)


def report(stages: list[Stage], taught_by: dict, out: Path, minutes: float, config: QuickstartConfig) -> None:
    """The table, and what RL changed with its paired interval; `quickstart.json` has the same."""
    keys = ("em", "f1", "format_adherence", "retrieval_recall", "mean_searches")
    n = stages[0].scores["n"]
    wide = max(len(name) for name in ("teacher", *(stage.name for stage in stages)))
    head = "".join(f"{c:>10}" for c in ("EM", "F1", "format", "recall", "searches", "minutes"))
    print(f"\n== {n} test questions, greedy, real retrieval\n{'stage':<{wide}}{head}")
    rows = []
    about = f"   the {taught_by['n']} trajectories for SFT; deliberately hasty"
    print(f"{'teacher':<{wide}}{taught_by['em']:>10.3f}{taught_by['f1']:>10.3f}{about}")
    for stage in stages:
        values = {key: stage.scores[key]["value"] for key in keys}
        rows.append({"stage": stage.name, "n": n, **values, "minutes": round(stage.minutes, 2)})
        print(f"{stage.name:<{wide}}" + "".join(f"{v:>10.3f}" for v in values.values()) + f"{stage.minutes:>10.1f}")
    before, after = stages[-2:]
    em = compare(before.marks, after.marks, seed=config.common.seed)["em"]
    gain = {"value": em["difference"]} | {key: em[key] for key in ("low", "high", "p")}
    interval = f"95 % interval {gain['low']:+.3f} to {gain['high']:+.3f}, p {gain['p']:.4f}, paired bootstrap"
    print(f"\nexact match, {after.name} - {before.name}: {gain['value']:+.3f} ({interval})")
    print(f"{minutes:.1f} minutes in total")
    if config.quickstart.quick:
        print("--quick only shows that everything runs; without it, the model learns")
    total = {"teacher": taught_by, "stages": rows, "em_gain": gain, "minutes": round(minutes, 2)}
    write_json(out / "quickstart.json", total)


def print_what_next(out: Path, config: QuickstartConfig) -> None:
    """Where to look next, with the commands that use the trained model."""
    *_, samples = arguments_of(config.quickstart.format, out)
    rl = out / config.quickstart.algorithm
    command, preset = ["python", "-m"], ["--preset", config.common.preset]
    question = next(read_jsonl(shipped("data", "world", "test.jsonl"))).text("question")
    ask = [*command, "r3lite.ask", *preset, "--adapter", str(rl), *samples, question]
    serve = [*command, "r3lite.serve", *preset, "--adapters", f"sft={out / 'sft'},rl={rl}", *samples]
    print(f"""
where to look next
  answers:          {out / f"evaluate-{rl.name}" / "predictions.jsonl"}
  rewards:          {rl / "episodes.jsonl"}
  training curves:  {rl / "metrics.jsonl"}
  report:           python -m r3lite.report {out}
  your own data:    docs/tutorial.md, and README.md, "Train on HotpotQA"
  ask it yourself:
    {shlex.join(ask)}
  on a page in the browser (pip install -e '.[serve]'):
    {shlex.join(serve)}
""")
