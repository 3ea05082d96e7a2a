"""Improves a prompt file with a critic model."""

import time
from pathlib import Path

from r3lite.core import command, run_files
from r3lite.core.config import UsageError, flag
from r3lite.core.earlier_output import check_output
from r3lite.core.files import sole_writer, sweep, write_text
from r3lite.core.invocation import to_toml
from r3lite.settings import TunePromptConfig
from r3lite.tuning.history import History, all_episodes, most_prompts, score_text

HISTORY = "history.json"
CACHE = "judge-cache"


def tune(config: TunePromptConfig) -> None:
    """Improves the prompt in the output folder, or goes on where an interrupted run was."""
    if config.judge.judge == "none":
        raise UsageError(
            "--judge is missing: pass the critic: gemini, openai, or local for a model on this device",
            code="critic-missing",
        )
    output = output_of(config)
    with sole_writer(output):
        check_folder(config, output)
        improve(config, output)


def output_of(config: TunePromptConfig) -> Path:
    """Returns the folder of the run."""
    return Path(config.common.output or time.strftime("runs/tune_prompt-%Y%m%d-%H%M%S"))


def check_folder(config: TunePromptConfig, output: Path) -> None:
    """Raises R3LiteError if a folder holds anything but an earlier start of this run.

    The earlier start may have had another number of rounds.
    """
    check_output(output, "tune_prompt", config, free={"rounds"})


def improve(config: TunePromptConfig, output: Path) -> None:
    """Runs the rounds that are left, and prints the history of all rounds and the best prompt."""
    # Imported after the arguments are read: torch takes seconds to load.
    from r3lite.assembly.answering import build_engine
    from r3lite.assembly.local_client import client_maker
    from r3lite.assembly.prompt_tuner import BEST, PromptTuner, first_prompt, origin, read_pools

    prompt = first_prompt(config.protocol, config.tuning.improve)
    cache = Path(config.judge.judge_cache) if config.judge.judge_cache else output / CACHE
    make_client = client_maker(config.model, config.memory)
    client = make_client(config.judge, cache)  # before the model is loaded, so that a missing key is reported at once
    sampled, scored = read_pools(config)
    history = History(
        output / HISTORY,
        origin=origin(config, prompt, sampled, scored),
        metric=config.tuning.metric,
        prompt=prompt,
    )
    notes = []
    if len(history.rounds) <= config.tuning.rounds:
        count = all_episodes(config.tuning, len(sampled.questions), len(scored.questions))
        engine = build_engine(config, count, judge=config.judge)
        # From here on the folder belongs to this run: if it is killed, only the same run may be started there again.
        sweep(output)
        write_text(output / run_files.CONFIG, to_toml(config, "tune_prompt"))
        tuner = PromptTuner(
            config=config,
            output=output,
            history=history,
            engine=engine,
            client=client,
            sampled=sampled,
            scored=scored,
        )
        tuner.run()
        notes = tuner.notes()
    print("\n".join(["", history.table(), "", *notes]))
    best = history.best
    first = history.candidates[0]
    print(f"best: prompt {best.id}, {history.metric} {score_text(best.scores[history.metric])}", end="; ")
    print(f"the first had {score_text(first.scores[history.metric])}")
    print(f"written to {output / BEST}; all prompts: {output / HISTORY}")
    if best is not first:
        print("The score is optimistic, as the prompt was chosen by it. Evaluate it on other questions:", end=" ")
        print(f"evaluate {flag(config.tuning.improve)} {output / BEST}")


def plan(config: TunePromptConfig) -> str:
    """Checks --output, and returns the most calls, episodes and memory of a run, for `--dry-run`."""
    from r3lite.assembly.answering import plan_memory

    check_folder(config, output_of(config))
    tuning = config.tuning
    prompts = most_prompts(tuning.rounds, tuning.beam, tuning.branch)
    count = all_episodes(tuning, config.data.limit or tuning.sampled_questions, tuning.eval_questions)
    memory = plan_memory(config, count, config.judge)
    return (
        f"\nAt most {2 * prompts.edited} calls of the critic ({prompts.edited} critiques, {prompts.edited} edits) and "
        f"{prompts.scored} prompts scored:\n"
        f"{prompts.tried} x {tuning.sampled_questions} episodes to find failures and "
        f"{prompts.scored} x {tuning.eval_questions} to score prompts.\n"
        f"\nMemory, for episodes of {config.lengths.max_length} tokens\n{memory.table()}"
    )


main = command.Command("tune_prompt", TunePromptConfig(), work=tune, plan=plan)

if __name__ == "__main__":
    raise SystemExit(main())
