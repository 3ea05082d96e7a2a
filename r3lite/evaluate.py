"""Answers a question set with retrieval and scores it; writes scores.json and predictions.jsonl."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from r3lite import command
from r3lite.config import to_toml
from r3lite.errors import R3LiteError
from r3lite.settings import (
    Common,
    EvaluateSettings,
    JudgeSettings,
    LengthSettings,
    MemorySettings,
    ModelSettings,
    ProtocolSettings,
    QuestionSettings,
    RetrievalSettings,
    SamplingSettings,
    TruncationSettings,
)

if TYPE_CHECKING:  # torch is loaded after the arguments are read, so that --help answers at once
    from r3lite.memory.plan import Plan
    from r3lite.rollout.engine import Engine

TITLES = {
    "em": "exact match",
    "f1": "F1",
    "judge_accuracy": "judged right",
    "format_adherence": "format adherence",
    "retrieval_recall": "retrieval recall",
    "combined": "combined",
    "mean_searches": "searches",
}
CONFIG, PREDICTIONS, SCORES = "config.toml", "predictions.jsonl", "scores.json"
UNFINISHED = {CONFIG, PREDICTIONS, "judge-cache"}  # what is there before SCORES, which is written last
MANY = 1000  # questions of a dry run without --limit, which does not count them
LEAST_ADHERENCE = 0.5  # below it, scores say little about anything else


@dataclass(frozen=True)
class EvaluateConfig:
    """Answers questions step by step with a retriever, greedily by default, and scores the answers.

    Writes scores.json (exact match, F1, format adherence, retrieval recall, combined score and mean searches, each
    with a 95 % bootstrap interval, also by number of hops) and predictions.jsonl (every answer with its steps and
    documents) to --output. The step that --baseline single-retrieval gives the model counts as well-formed.
    """

    common: Common = Common()
    evaluate: EvaluateSettings = EvaluateSettings()
    model: ModelSettings = ModelSettings()
    memory: MemorySettings = MemorySettings()
    data: QuestionSettings = QuestionSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    protocol: ProtocolSettings = ProtocolSettings()
    lengths: LengthSettings = LengthSettings()
    sampling: SamplingSettings = SamplingSettings(temperature=0.0)
    truncation: TruncationSettings = TruncationSettings()
    judge: JudgeSettings = JudgeSettings()


def evaluate(config: EvaluateConfig) -> None:
    from r3lite.files import sole_writer
    from r3lite.protocols.registry import build_protocol

    output = Path(config.common.output or time.strftime("runs/evaluate-%Y%m%d-%H%M%S"))
    if config.evaluate.baseline == "single-retrieval":
        if config.retrieval.retriever == "none":
            raise R3LiteError("--baseline single-retrieval retrieves, and --retriever is none", "Choose a retriever.")
        if not build_protocol(config.protocol).searches:
            raise R3LiteError(
                f"--baseline single-retrieval searches, and --format {config.protocol.format} has no search",
                "Choose another baseline or format.",
            )
    with sole_writer(output):
        check_output(config, output)
        answer_and_score(config, output)


def check_output(config: EvaluateConfig, output: Path) -> None:
    """Refuses a folder that holds anything but what this very evaluation has left unfinished."""
    from r3lite.files import names_in

    names, remedy = names_in(output), f"Name another folder, such as {output / 'evaluation'}."
    if SCORES in names:
        raise R3LiteError(f"--output {output} holds an evaluation already", remedy)
    if names and (CONFIG not in names or not names <= UNFINISHED):
        other = min(names - UNFINISHED or names)
        raise R3LiteError(f"--output {output} is not an empty folder: it holds {other}", remedy)
    if names:
        command.refuse_another_run(output / CONFIG, "evaluate", config, output)


def answer_and_score(config: EvaluateConfig, output: Path) -> None:
    # Imported after the arguments are read: torch takes seconds to load.
    from r3lite.datasets.qa import read_questions
    from r3lite.evaluation.scores import Marks, scores, scores_by_hops
    from r3lite.files import write_json, write_jsonl, write_text
    from r3lite.retrieval.retriever import build_retriever
    from r3lite.retrieval.setup import Setup
    from r3lite.rewards.judge import build_judge

    questions = read_questions(config.data.data, config.data.limit, config.data.skip_bad_rows)
    judge = build_judge(config.judge, output)  # before the long part, so that a missing key shows at once
    engine = build_engine(config, len(questions))
    setup = Setup(config.retrieval, questions, config.common.seed, skip_bad_rows=config.data.skip_bad_rows)
    retrieve = build_retriever(setup)
    # From here on the folder is this evaluation's: if it is killed, only the same one may be begun there again.
    write_text(output / CONFIG, to_toml(config, "evaluate"))
    seeds = [f"{config.common.seed}/{i}" for i in range(len(questions))]
    episodes = [s.episode() for s in engine.run(questions, seeds, retrieve, progress="evaluate")]
    verdicts = [None] * len(episodes)
    # The predictions are written before the judge is asked: its calls may fail or be capped.
    write_jsonl(output / PREDICTIONS, records(episodes, verdicts))
    if judge:
        verdicts = judge.verdicts(episodes, progress="judge")
        write_jsonl(output / PREDICTIONS, records(episodes, verdicts))
    marks = [Marks.of(e, v.correct if v else None) for e, v in zip(episodes, verdicts, strict=True) if not e.failure]
    if not marks:
        raise R3LiteError(f"the retriever failed at every question: {episodes[0].failure}", "Mend that, and try again.")
    found = scores(marks, config.common.seed) | {"by_hops": scores_by_hops(marks, config.common.seed)}
    found["finish"] = {f: sum(e.finish == f for e in episodes) for f in sorted({e.finish for e in episodes})}
    if len(marks) < len(episodes):
        found["retrieval_failures"] = len(episodes) - len(marks)
    if judge:
        found["judge"] = judge.counts() | {"judge/missing": verdicts.count(None)}
    write_json(output / SCORES, found)
    print(table(found))
    print(f"written to {output / SCORES}; what it said: {output / PREDICTIONS}")


def build_engine(config: EvaluateConfig, questions: int) -> "Engine":
    """The model with its adapter in an engine that answers so many questions as the settings say."""
    from r3lite.models.weights import resolve_folder
    from r3lite.policy import load_policy
    from r3lite.protocols.registry import build_protocol
    from r3lite.protocols.tokenizer import Tokenizer
    from r3lite.protocols.transcript import OPENINGS, Layout
    from r3lite.rollout.engine import Engine
    from r3lite.rollout.sampling import Sampler

    # Prompts and plan come first: what is wrong with them is told before a model is downloaded.
    protocol, plan = build_protocol(config.protocol), plan_memory(config, questions)
    folder = resolve_folder(config.model.model)
    layout = Layout(Tokenizer.load(folder), protocol, config.lengths, OPENINGS[config.evaluate.baseline])
    policy = load_policy(folder, config.model, config.memory, plan)
    sampler = Sampler(config.sampling.temperature, config.truncation.top_k_sampling, config.truncation.top_p)
    return Engine(policy.model, layout, sampler, policy.grant, autocast=policy.precision.autocast)


def plan_memory(config: EvaluateConfig, questions: int) -> "Plan":
    """The memory plan of answering so many questions."""
    from r3lite.memory.plan import make_plan
    from r3lite.memory.workloads import evaluate_workload

    workload = evaluate_workload(config.model, config.lengths, config.retrieval, questions)
    return make_plan(workload, config.memory, config.sampling)


def records(episodes: list, verdicts: list) -> list[dict]:
    """The lines of predictions.jsonl: each episode with its scores, and whether a judge called it right."""
    from r3lite.evaluation.scores import Marks

    lines = []
    for episode, verdict in zip(episodes, verdicts, strict=True):
        marks = Marks.of(episode, verdict.correct if verdict else None)
        line = episode.to_json() | {"em": marks.em, "f1": marks.f1, "recall": marks.recall, "hops": marks.hops}
        lines.append(line | ({"judged": marks.judged} if verdict else {}))
    return lines


def table(found: dict) -> str:
    """The scores as text, with those by number of hops below if the questions differ in it."""

    def number(value: float | None, width: int = 8) -> str:
        return f"{'-':>{width}}" if value is None else f"{value:>{width}.3f}"

    ends = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in found["finish"].items())
    lines = [f"\n{found['n']} questions: {ends}", f"{'':<18}{'value':>8}   95 % interval"]
    shown = [name for name in TITLES if name in found]
    for name in shown:
        entry = found[name]
        lines.append(f"{TITLES[name]:<18}{number(entry['value'])}  {number(entry['low'])}{number(entry['high'])}")
    if len(found["by_hops"]) > 1:
        lines.append("\n" + f"{'hops':<6}{'n':>6}" + "".join(f"{TITLES[name]:>18}" for name in shown))
        for hops, part in found["by_hops"].items():
            values = (part[name]["value"] if name in part else None for name in shown)
            lines.append(f"{hops:<6}{part['n']:>6}" + "".join(number(v, 18) for v in values))
    if missing := found.get("judge", {}).get("judge/missing"):
        lines.append(f"\n{missing} verdicts of the judge are missing and left out")
    if failed := found.get("retrieval_failures"):
        lines.append(f"\n{failed} questions at which the retriever failed are left out")
    if (found["format_adherence"]["value"] or 0.0) < LEAST_ADHERENCE:
        lines.append(
            "\nFew steps keep to the format, so the other scores say little: is --adapter missing, "
            "or was it trained with other prompt files?"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    def plan(config: EvaluateConfig) -> str:
        told = plan_memory(config, config.data.limit or MANY)
        return f"\nMemory, for episodes of {config.lengths.max_length} tokens\n{told.table()}"

    return command.run("evaluate", EvaluateConfig(), evaluate, argv, plan)


if __name__ == "__main__":
    sys.exit(main())
