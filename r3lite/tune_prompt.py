"""Improves a prompt file by critiques of what it brings about; its rounds are in prompt_tuner.py."""

import random
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from r3lite.assembly.answering import build_engine, plan_memory
from r3lite.core import command
from r3lite.core.config import UsageError, flag, to_toml
from r3lite.core.errors import R3LiteError
from r3lite.settings import (
    Common,
    JudgeSettings,
    LengthSettings,
    MemorySettings,
    ModelSettings,
    ProtocolSettings,
    QuestionSettings,
    RetrievalSettings,
    SamplingSettings,
    TruncationSettings,
    TuningSettings,
)
from r3lite.tuning.history import History, most, shown

if TYPE_CHECKING:  # torch is loaded after the arguments are read, so that --help answers at once
    from r3lite.assembly.local_client import LocalClient
    from r3lite.assembly.prompt_tuner import Pool
    from r3lite.llm.client import Client

CONFIG, HISTORY, CACHE = "config.toml", "history.json", "judge-cache"
FREE = {"rounds"}  # a run may go on with more of them
CAUTION = """\
It was chosen for this score, which flatters it: see how good it is on other questions by evaluate {flag} {best}"""
# The formats' own prompts, by --format and --improve.
SHIPPED = {
    ("r3", "init_prompt"): "prompts/init_prompt.txt",
    ("r3", "step_prompt"): "prompts/step_prompt.txt",
    ("tags", "init_prompt"): "prompts/tags/init_prompt.txt",
    ("solution", "init_prompt"): "prompts/solution/init_prompt.txt",
    ("dag", "init_prompt"): "prompts/dag/init_prompt.txt",
    ("dag", "step_prompt"): "prompts/dag/step_prompt.txt",
}


@dataclass(frozen=True)
class TunePromptConfig:
    """Improves a prompt: has a critic say what in it makes the model fail, and write better ones, round after round.

    The critic is named by --judge (gemini, openai or local) and limited by --judge-max-calls and --judge-max-cost. Each
    prompt is scored on --eval-data. Writes best_prompt.txt, history.json (every prompt, the critique that it was made
    of, its score with an interval, and what each round gained) and candidates/ (each prompt as a file, with its
    predictions) to --output. The same command again goes on where a run was stopped. docs/tune_prompt.md has more.
    """

    common: Common = Common()
    tuning: TuningSettings = TuningSettings()
    judge: JudgeSettings = JudgeSettings()
    model: ModelSettings = ModelSettings()
    memory: MemorySettings = MemorySettings()
    data: QuestionSettings = QuestionSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    protocol: ProtocolSettings = ProtocolSettings()
    lengths: LengthSettings = LengthSettings()
    sampling: SamplingSettings = SamplingSettings(temperature=0.0)
    truncation: TruncationSettings = TruncationSettings()


def tune(config: TunePromptConfig) -> None:
    from r3lite.core.files import sole_writer

    if config.judge.judge == "none":
        raise UsageError("--judge is missing: who criticizes: gemini, openai, or local for a model on this device")
    output = Path(config.common.output or time.strftime("runs/tune_prompt-%Y%m%d-%H%M%S"))
    with sole_writer(output):
        check_output(config, output)
        improve(config, output)


def check_output(config: TunePromptConfig, output: Path) -> None:
    """Refuses a folder that holds anything but what this very run has done so far."""
    from r3lite.core.files import names_in

    names = names_in(output)
    if names and CONFIG not in names:
        remedy = f"Name another folder, such as {output / 'tuning'}."
        raise R3LiteError(f"--output {output} is not an empty folder: it holds {min(names)}", remedy)
    if names:
        free = command.free_settings(config) | FREE
        command.refuse_another_run(output / CONFIG, "tune_prompt", config, output, free)


def improve(config: TunePromptConfig, output: Path) -> None:
    # Imported after the arguments are read: torch takes seconds to load.
    from r3lite.assembly.local_client import client_maker
    from r3lite.assembly.prompt_tuner import BEST

    prompt = first_prompt(config.protocol, config.tuning.improve)
    cache = Path(config.judge.judge_cache) if config.judge.judge_cache else output / CACHE
    client = client_maker(config.model, config.memory)(config.judge, cache)  # a missing key shows at once
    pools = read_pools(config)
    history = History(output / HISTORY, origin(config, prompt, *pools), config.tuning.metric, prompt)
    notes = go_on(config, output, history, client, *pools) if len(history.rounds) <= config.tuning.rounds else []
    print("\n".join(["", history.table(), "", *notes]))
    best, first = history.best, history.candidates[0]
    print(f"best: prompt {best.id}, {history.metric} {shown(best.scores[history.metric])}", end="; ")
    print(f"the first had {shown(first.scores[history.metric])}")
    print(f"written to {output / BEST}; all prompts: {output / HISTORY}")
    if best is not first:
        print(CAUTION.format(flag=flag(config.tuning.improve), best=output / BEST))


def go_on(
    config: TunePromptConfig,
    output: Path,
    history: History,
    client: "Client | LocalClient",
    sampled: "Pool",
    scored: "Pool",
) -> list[str]:
    """Takes the rounds that are left; what is to be said of the critic, in lines."""
    from r3lite.assembly.prompt_tuner import PromptTuner
    from r3lite.core.files import write_text

    count = all_episodes(config.tuning, len(sampled.questions), len(scored.questions))
    engine = build_engine(config, count, judge=config.judge)
    # From here on the folder is this run's: if it is killed, only the same one may be begun there again.
    write_text(output / CONFIG, to_toml(config, "tune_prompt"))
    tuner = PromptTuner(config, output, history, engine, client, sampled, scored)
    tuner.run()
    counts = client.counts()
    parts = [f"{counts['calls']} requests", f"{counts['cache_hits']} replies from the cache"]
    parts += [f"{counts['failures']} failed"] if counts["failures"] else []
    parts += [f"{counts['cost']:.4f} US dollars"] if "cost" in counts else []
    notes = [f"critic: {', '.join(parts)}"]
    if tuner.capped:
        notes += [
            f"stopped before its last round was over: {tuner.capped}; with a higher cap, the same command goes on"
        ]
    return notes


def first_prompt(protocol: ProtocolSettings, which: str) -> str:
    """The text of the prompt that is to be improved, as its file has it."""
    from r3lite.protocols.registry import build_protocol
    from r3lite.protocols.templates import read_prompt

    build_protocol(protocol)  # which says what is wrong with prompt files
    name = getattr(protocol, which) or SHIPPED.get((protocol.format, which))
    if name is None:
        raise UsageError(f"--improve {which}: --format {protocol.format} has no such prompt of its own")
    return read_prompt(name)


def read_pools(config: TunePromptConfig) -> "tuple[Pool, Pool]":
    """The questions of --data, and those of --eval-data that are drawn, each with what retrieves for them."""
    from r3lite.assembly.prompt_tuner import Pool
    from r3lite.datasets.qa import read_questions
    from r3lite.protocols.registry import build_protocol
    from r3lite.retrieval.retriever import build_retriever
    from r3lite.retrieval.setup import Setup

    tuning, seed, skip = config.tuning, config.common.seed, config.data.skip_bad_rows
    sampled = read_questions(config.data.data, config.data.limit, skip)
    scored = read_questions(tuning.eval_data, None, skip)
    draw = random.Random(f"{seed}/validation")
    scored = draw.sample(scored, min(tuning.eval_questions, len(scored)))
    known = {question.text for question in sampled}
    if shared := sum(question.text in known for question in scored):
        told = f"{shared} of {len(scored)} questions of --eval-data are in --data as well: critiques may tell of them"
        print(f"warning: {told}", file=sys.stderr)
    config.retrieval.check_sources(build_protocol(config.protocol).plans)
    retrieve = build_retriever(Setup(config.retrieval, sampled, seed, skip_bad_rows=skip))
    if not config.retrieval.from_questions:
        return Pool(sampled, retrieve), Pool(scored, retrieve)
    return Pool(sampled, retrieve), Pool(scored, build_retriever(Setup(config.retrieval, scored, seed)))


def origin(config: TunePromptConfig, prompt: str, *pools: "Pool") -> str:
    """A digest of what the scores of a run depend on beside its settings: files may change under their names."""
    from r3lite.core.files import folder_fingerprint
    from r3lite.models.lora import adapter_folder

    adapter = config.model.adapter and folder_fingerprint(adapter_folder(config.model.adapter))
    asked = [[(q.id, q.text, q.answers) for q in pool.questions] for pool in pools]
    return f"{zlib.crc32(repr([prompt, adapter, asked]).encode()):08x}"


def all_episodes(tuning: TuningSettings, sampled: int, scored: int) -> int:
    """The most episodes that a run over so many questions of --data and of --eval-data samples."""
    made = most(tuning.rounds, tuning.beam, tuning.branch)
    return made.tried * min(sampled, tuning.sampled_questions) + made.scored * min(scored, tuning.eval_questions)


def plan(config: TunePromptConfig) -> str:
    """The most that a run does and holds, for --dry-run."""
    tuning = config.tuning
    made = most(tuning.rounds, tuning.beam, tuning.branch)
    count = all_episodes(tuning, config.data.limit or tuning.sampled_questions, tuning.eval_questions)
    told = plan_memory(config, count, config.judge)
    return (
        f"\nAt most {2 * made.made} calls of the critic ({made.made} critiques and as many edits) and {made.scored} "
        f"prompts scored:\n{made.tried} x {tuning.sampled_questions} episodes to be criticized and {made.scored} x "
        f"{tuning.eval_questions} to score prompts.\n"
        f"\nMemory, for episodes of {config.lengths.max_length} tokens\n{told.table()}"
    )


def main(argv: list[str] | None = None) -> int:
    return command.run("tune_prompt", TunePromptConfig(), tune, argv, plan)


if __name__ == "__main__":
    sys.exit(main())
