"""The stages of the quickstart with their arguments, and the table of their scores; used by quickstart."""

import contextlib
import io
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from r3lite.assembly import reinforcement
from r3lite.core import run_files
from r3lite.core.answer_match import exact_match, f1
from r3lite.core.errors import R3LiteError, UsageError
from r3lite.core.exit_status import INTERRUPTED, TERMINATED, check_status
from r3lite.core.files import read_jsonl, read_record, shipped, write_json
from r3lite.core.invocation import resolve
from r3lite.core.terminal import printable
from r3lite.evaluation.comparisons import compare
from r3lite.evaluation.folder import read_predictions
from r3lite.evaluation.scores import Marks
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.settings import PpoConfig, QuickstartConfig

# The trajectories for SFT are those of a hasty teacher: some answer one hop too early, so that there is something left
# for rewards to teach. With flawless trajectories and 160 steps, SFT alone answers 0.93 of the questions right.
TRAJECTORIES = 300
HURRIED = 0.5  # the share of the trajectories that answer too early
HURRIED_TRAJECTORIES = "trajectories.jsonl"
FLAWLESS = "flawless.jsonl"  # correct trajectories, for a teacher or for contexts
COLLECT_TITLE = f"collect trajectories for the cold start ({HURRIED:.0%} of them deliberately answer one hop too early)"
SFT_TITLE = "SFT: learn the step format and copying from documents"
# What --quick adds to the arguments of each stage.
QUICK_ARGUMENTS = {
    "collect": ["--limit", "40"],
    "sft": ["--max-steps", "3"],
    "ppo": ["--max-steps", "2"],
    "evaluate": ["--limit", "16"],
}
# The initial prompt of the preset, in words that the tiny model knows. With a format other than the preset's, it has to
# be passed as a flag.
INIT_PROMPT = ["--init-prompt", "prompts/tiny/init_prompt.txt"]
# What formats other than the preset's add to the arguments. In the format `dag` a turn plans up to four searches. Such
# turns are longer than the preset allows, and harder to learn: after the preset's 100 steps of SFT few questions are
# answered right.
LENGTHS_OF_FORMAT = {"dag": ["--max-new-tokens", "128"]}
SFT_STEPS_OF_FORMAT = {"dag": ["--max-steps", "250"]}
# The tiny model was pretrained on the words of the format r3 only, and stays unsure of the tokens of other formats. At
# a higher temperature it would often sample a wrong one.
SAMPLING_OF_OTHER_FORMATS = ["--temperature", "0.5"]
SCORES = ("em", "f1", "format_adherence", "retrieval_recall", "mean_searches")  # what `quickstart.json` has
# The columns of the table, and the scores that are printed after each evaluation: their titles by their names.
SHOWN = {"em": "EM", "f1": "F1", "format_adherence": "format", "retrieval_recall": "recall"}


@dataclass
class Stage:
    """One evaluated model: what it scored on the test questions."""

    name: str
    folder: Path  # of its evaluation
    minutes: float  # of its training

    @property
    def scores(self) -> dict:
        """The scores of scores.json."""
        return read_record(self.folder / run_files.SCORES, "").values

    def summary(self) -> str:
        """Returns a line with the scores, and a line for each step in which the first question was answered."""
        scores = self.scores
        values = ", ".join(f"{title} {scores[name]['value'] or 0.0:.3f}" for name, title in SHOWN.items())
        sample = next(read_jsonl(self.folder / run_files.PREDICTIONS)).values
        lines = [f"{values} ({scores['n']} questions)", f"a question: {sample['question']}"]
        for number, step in enumerate(sample["steps"], 1):
            # A step with several searches has a list of them; one with a single search has its query itself.
            for search in step.get("searches", [step]):
                if "query" in search:
                    lines.append(f"  {number} searches for: {search['query']}")
        answer = sample["prediction"]
        verdict = "right"
        if not sample["em"]:
            verdict = f"wrong; right: {sample['answers'][0]}"
        if answer:
            lines.append(f"  {len(sample['steps'])} answers: {answer} ({verdict})")
        else:
            lines.append(f"  no answer ({sample['finish'].replace('_', ' ')}); right: {sample['answers'][0]}")
        return printable("\n".join(lines))

    @property
    def marks(self) -> list[Marks]:
        """The marks of every question, in the order of the test file."""
        return [marks for _, marks in read_predictions(self.folder).values()]


def teacher_scores(trajectories: Path) -> dict:
    """Returns the scores of the trajectories that SFT imitates, for `quickstart.json`."""
    em_scores = []
    f1_scores = []
    for row in read_jsonl(trajectories):
        answer = row.values["steps"][-1]["answer"]
        gold_answers = row.values["answers"]
        em_scores.append(exact_match(answer, gold_answers))
        f1_scores.append(f1(answer, gold_answers))
    n = len(em_scores)
    return {"n": n, "em": sum(em_scores) / n, "f1": sum(f1_scores) / n, "hurried_share": HURRIED}


def run_stage(
    title: str,
    commands: Mapping[str, ModuleType],
    name: str,
    arguments: list[str],
    evaluation: Sequence[str] = (),
) -> float:
    """Runs one command and prints its arguments; returns the minutes that it took.

    An interrupted training prints the command that continues it. This function then prints the command that scores the
    result: `evaluate` with the arguments `evaluation`. The long table that `evaluate` prints is left out, because
    `Stage.summary` has the scores that matter here. If the command fails or is interrupted, raises as `check_status`
    does.
    """
    print(f"\n== {title}\n$ {shlex.join(['python', '-m', f'r3lite.{name}', *arguments])}", flush=True)
    start = time.monotonic()
    with contextlib.ExitStack() as quiet:
        if name == "evaluate":
            quiet.enter_context(contextlib.redirect_stdout(io.StringIO()))
        status = commands[name].main(arguments)
    if status in (INTERRUPTED, TERMINATED) and evaluation:
        command = shlex.join(["python", "-m", "r3lite.evaluate", *evaluation])
        print(f"quickstart ends here. Once the training is over, score it with: {command}", file=sys.stderr)
    check_status(status, f"the stage {name} failed", "See its message above.")
    return (time.monotonic() - start) / 60


def output_of(config: QuickstartConfig) -> Path:
    """Returns the folder of the run; raises R3LiteError unless it is empty or does not exist.

    SFT and RL would refuse a folder in use, too, but only after the stages before them have run.
    """
    out = Path(config.common.output or time.strftime("runs/quickstart-%Y%m%d-%H%M%S"))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise R3LiteError(
            f"--output {out} exists and is not an empty folder", "Pass a new folder.", code="output-not-empty"
        )
    return out


def format_arguments(format: str) -> list[str]:
    """Returns the arguments that choose a format, which is that of the preset or another one."""
    if format == "r3":
        return []  # the preset has this format
    return ["--format", format, *INIT_PROMPT]


def retrieval_arguments(format: str, out: Path) -> list[str]:
    """Returns the arguments that choose a format and its retriever: none for `solution`, which does not search."""
    if format == "solution":
        return [*format_arguments(format), "--retriever", "none"]
    return [*format_arguments(format), "--index", str(out / "index")]


def sampling_arguments(format: str, out: Path) -> list[str]:
    """Returns the arguments that choose a format, its retriever and the lengths of its episodes."""
    return [*retrieval_arguments(format, out), *LENGTHS_OF_FORMAT.get(format, [])]


def folder_of_scores(out: Path, name: str) -> Path:
    """Returns the folder of the evaluation of a stage."""
    return out / f"evaluate-{name.lower()}"


def common_arguments(config: QuickstartConfig) -> list[str]:
    """Returns the arguments of all commands but `index`."""
    return ["--preset", config.common.preset, "--seed", str(config.common.seed)]


def evaluation_arguments(config: QuickstartConfig, out: Path, name: str, adapter: Path | None) -> list[str]:
    """Returns the arguments of `evaluate` for the adapter of a stage; None: the untrained model."""
    arguments = [*common_arguments(config), "--data", str(shipped("data", "world") / "test.jsonl")]
    arguments += [*sampling_arguments(config.quickstart.format, out), "--output", str(folder_of_scores(out, name))]
    if config.quickstart.quick:
        arguments += QUICK_ARGUMENTS["evaluate"]
    if adapter:
        arguments += ["--adapter", str(adapter)]
    return arguments


def rl_arguments(config: QuickstartConfig, out: Path) -> list[str]:
    """Returns the arguments of `ppo`."""
    format = config.quickstart.format
    algorithm = config.quickstart.algorithm
    arguments = [*common_arguments(config), "--algorithm", algorithm]
    arguments += ["--adapter", str(out / "sft"), "--data", str(shipped("data", "world") / "train.jsonl")]
    if ALGORITHMS[algorithm].has_traces:  # RL leaves out the hasty traces, whose reward is too small
        # Only the first TRAJECTORIES questions may have a trace.
        arguments += ["--traces", str(out / HURRIED_TRAJECTORIES), "--limit", str(TRAJECTORIES)]
    arguments += [*sampling_arguments(format, out), "--output", str(out / algorithm)]
    if ALGORITHMS[algorithm].learns_right_answers:
        arguments += ["--contexts", str(out / FLAWLESS)]
    if ALGORITHMS[algorithm].has_teacher:
        arguments += ["--teacher", "tiny", "--teacher-adapter", str(out / "teacher"), "--teacher-quantize", "none"]
    if config.quickstart.quick:
        arguments += QUICK_ARGUMENTS["ppo"]
    if format != "r3":
        arguments += SAMPLING_OF_OTHER_FORMATS
    return arguments


def check_rl(config: QuickstartConfig, out: Path) -> None:
    """Raises UsageError if RL would refuse its settings, after the minutes that the stages before it take."""
    rl_config = resolve("ppo", PpoConfig(), rl_arguments(config, out))
    settings = config.quickstart
    try:
        rl_config.check_settings("ppo")
        reinforcement.check(rl_config)
    except UsageError as error:
        raise UsageError(
            f"--algorithm {settings.algorithm} does not work with --format {settings.format}: {error}",
            code="algorithm-with-format",
        ) from error


def introduction(config: QuickstartConfig, out: Path) -> str:
    """Returns what happens and how long it takes, in two lines."""
    minutes = "5 to 15 minutes on two CPU cores"
    if config.quickstart.quick:
        minutes = "about half a minute on two CPU cores, in which it learns almost nothing"
    learns = "search an invented encyclopedia: it imitates demonstrations (SFT), then learns from rewards (RL)"
    return f"A tiny model learns to {learns}.\nThis takes {minutes}, and downloads nothing. Results: {out}"


def run_all_stages(config: QuickstartConfig, commands: Mapping[str, ModuleType]) -> None:
    """Runs the stages one after another, then prints the table."""
    start = time.monotonic()
    format = config.quickstart.format
    algorithm = config.quickstart.algorithm
    out = output_of(config)
    world = shipped("data", "world")
    shared = common_arguments(config)
    check_rl(config, out)
    print(introduction(config, out), flush=True)
    quick_arguments: dict[str, list[str]] = {name: [] for name in QUICK_ARGUMENTS}
    if config.quickstart.quick:
        quick_arguments = QUICK_ARGUMENTS

    def evaluate(name: str, adapter: Path | None, minutes: float) -> Stage:
        model_name = "untrained" if adapter is None else name
        title = f"evaluate the {model_name} model on questions about new entities"
        arguments = evaluation_arguments(config, out, name=name, adapter=adapter)
        run_stage(title, commands=commands, name="evaluate", arguments=arguments)
        stage = Stage(name, folder_of_scores(out, name), minutes)
        print(stage.summary(), flush=True)
        return stage

    def collect(title: str, trajectories: Path, *more_arguments: str) -> None:
        arguments = [*shared, "--data", str(world / "train.jsonl"), *retrieval_arguments(format, out)]
        arguments += ["--output", str(trajectories), "--limit", str(TRAJECTORIES), *more_arguments]
        arguments += quick_arguments["collect"]
        run_stage(title, commands=commands, name="collect", arguments=arguments)

    def train(title: str, trajectories: Path, adapter: Path, name: str) -> float:
        arguments = [*shared, *format_arguments(format), "--data", str(trajectories), "--output", str(adapter)]
        arguments += [*SFT_STEPS_OF_FORMAT.get(format, []), *quick_arguments["sft"]]
        evaluation = evaluation_arguments(config, out, name=name, adapter=adapter)
        return run_stage(title, commands=commands, name="sft", arguments=arguments, evaluation=evaluation)

    if format != "solution":
        index_arguments = ["--preset", config.common.preset, "--corpus", str(world / "corpus.jsonl")]
        index_arguments += ["--output", str(out / "index")]
        run_stage(
            "index the encyclopedia",
            commands=commands,
            name="index",
            arguments=index_arguments,
        )
    trajectories = out / HURRIED_TRAJECTORIES
    collect(COLLECT_TITLE, trajectories, "--hurried-share", str(HURRIED))
    stages = [evaluate("base", None, 0.0)]
    minutes = train(SFT_TITLE, trajectories, adapter=out / "sft", name="SFT")
    stages.append(evaluate("SFT", out / "sft", minutes))
    flawless = out / FLAWLESS
    if ALGORITHMS[algorithm].has_teacher or ALGORITHMS[algorithm].learns_right_answers:
        collect("collect correct trajectories for a teacher or for contexts", flawless)
    if ALGORITHMS[algorithm].has_teacher:
        train("SFT of the teacher, a second adapter", flawless, adapter=out / "teacher", name="teacher")
    minutes = run_stage(
        f"{algorithm.upper()}: learn from rewards on questions and answers",
        commands=commands,
        name="ppo",
        arguments=rl_arguments(config, out),
        evaluation=evaluation_arguments(config, out, name=algorithm.upper(), adapter=out / algorithm),
    )
    stages.append(evaluate(algorithm.upper(), out / algorithm, minutes))
    report(
        stages,
        teacher=teacher_scores(trajectories),
        out=out,
        minutes=(time.monotonic() - start) / 60,
        config=config,
    )
    print_what_next(out, config)


def report(stages: list[Stage], teacher: dict, out: Path, minutes: float, config: QuickstartConfig) -> None:
    """Prints the table of the stages and how much RL changed exact match; writes the same to `quickstart.json`.

    `teacher` has the scores of the trajectories (`teacher_scores`), `minutes` is the time of all stages.
    """
    n = stages[0].scores["n"]
    width = max(len(name) for name in ("teacher", *(stage.name for stage in stages)))
    columns = "".join(f"{title:>10}" for title in (*SHOWN.values(), "minutes"))
    print(f"\n== {n} test questions, greedy, real retrieval\n{'stage':<{width}}{columns}")
    about = f"   the {teacher['n']} trajectories for SFT; deliberately hasty"
    print(f"{'teacher':<{width}}{teacher['em']:>10.3f}{teacher['f1']:>10.3f}{about}")
    rows = []
    for stage in stages:
        values = {score: stage.scores[score]["value"] for score in SCORES}
        rows.append({"stage": stage.name, "n": n, **values, "minutes": round(stage.minutes, 2)})
        cells = "".join(f"{values[name]:>10.3f}" for name in SHOWN)
        print(f"{stage.name:<{width}}{cells}{stage.minutes:>10.1f}")
    gain = print_gain(stages[-2], stages[-1], config.common.seed)
    print(f"{minutes:.1f} minutes in total")
    if config.quickstart.quick:
        print("--quick only shows that everything runs; without it, the model learns")
    record = {"teacher": teacher, "stages": rows, "em_gain": gain, "minutes": round(minutes, 2)}
    write_json(out / "quickstart.json", record)


def print_gain(sft: Stage, rl: Stage, seed: int) -> dict:
    """Prints and returns how much exact match changed from SFT to RL, with the 95 % interval and the p of a paired
    bootstrap."""
    em = compare(sft.marks, rl.marks, seed=seed)["em"]
    gain = {"value": em["difference"], "low": em["low"], "high": em["high"], "p": em["p"]}
    interval = f"95 % interval {gain['low']:+.3f} to {gain['high']:+.3f}, p {gain['p']:.4f}, paired bootstrap"
    print(f"\nexact match, {rl.name} - {sft.name}: {gain['value']:+.3f} ({interval})")
    return gain


def print_what_next(out: Path, config: QuickstartConfig) -> None:
    """Prints where to look next, with the commands that use the trained model."""
    sampling = sampling_arguments(config.quickstart.format, out)
    rl = out / config.quickstart.algorithm
    question = next(read_jsonl(shipped("data", "world", "test.jsonl"))).text("question")
    preset = ["--preset", config.common.preset]
    ask = ["python", "-m", "r3lite.ask", *preset, "--adapter", str(rl), *sampling, question]
    serve = ["python", "-m", "r3lite.serve", *preset, "--adapters", f"sft={out / 'sft'},rl={rl}", *sampling]
    print(f"""
where to look next
  answers:          {out / f"evaluate-{rl.name}" / run_files.PREDICTIONS}
  rewards:          {rl / run_files.EPISODES}
  training curves:  {rl / run_files.METRICS}
  report:           python -m r3lite.report {out}
  ask it yourself:
    {shlex.join(ask)}
  on a page in the browser (pip install -e '.[serve]'):
    {shlex.join(serve)}

your own documents, with a 0.5B model (README.md, "Train on your own data"; docs/tutorial.md)
    python -m r3lite.index --documents FOLDER --output my-index
    python -m r3lite.collect --source documents --index my-index --output steps.jsonl
    python -m r3lite.sft --data steps.jsonl --output runs/sft
    python -m r3lite.ask --adapter runs/sft --index my-index "YOUR QUESTION"
""")
