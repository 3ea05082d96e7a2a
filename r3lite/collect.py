"""Writes trajectories for SFT: from gold decompositions, or sampled from a teacher or the model itself.

Teacher and model are given the student's prompts and the documents retrieved for their own queries, never the answer.
"""

import shlex
import time
from pathlib import Path

from r3lite.core import command
from r3lite.core.errors import R3LiteError, UsageError
from r3lite.core.files import sole_writer
from r3lite.core.invocation import flags_by_user
from r3lite.datasets.collected import Tally, check_earlier, check_output, questions_of, read_earlier
from r3lite.settings import CollectConfig
from r3lite.settings.rollout import is_greedy


def run(config: CollectConfig) -> None:
    """Writes trajectories, or with --teacher-logprobs a teacher's distributions along them."""
    if config.collect.source != "documents" and not config.data.data:
        raise UsageError(
            "--data is missing: pass a question file in any supported format, or name,subset,split", code="data-missing"
        )
    if config.cache.teacher_logprobs is None:
        write_trajectories(config)
        return
    from r3lite.assembly import teacher_cache  # after the arguments are read: torch takes seconds to load

    teacher_cache.write_cache(config)


def plan(config: CollectConfig) -> str:
    """Checks what the command checks, and returns the memory that a model on this device takes, for `--dry-run`.

    Returns "" if no model is loaded here.
    """
    length = config.lengths.max_length
    if config.cache.teacher_logprobs is None:
        check(config)
        if config.common.output:
            check_earlier(Path(config.common.output), config.collect.source, config)
        if config.collect.source != "self":
            return ""
        from r3lite.assembly.answering import QUESTIONS_OF_DRY_RUN, plan_memory

        episodes = (config.data.limit or QUESTIONS_OF_DRY_RUN) * config.collect.num_generations
        return f"\nMemory, for episodes of {length} tokens\n{plan_memory(config, episodes).table()}"
    from r3lite.assembly import teacher_cache

    memory = teacher_cache.plan_memory(config)
    message = f"\nMemory, for trajectories of {length} tokens\n{memory.table()}\n\n"
    size = teacher_cache.size_on_disk(1000 * length, config.cache.teacher_top)
    return f"{message}on disk: at most {size} for 1,000 trajectories, if every token has loss"


def check(config: CollectConfig) -> None:
    """Raises UsageError for settings of trajectories that contradict each other."""
    collect = config.collect
    if collect.source == "documents" and not (config.retrieval.index or config.retrieval.corpus):
        raise UsageError(
            "--index is missing: --source documents makes questions from an index folder, or from --corpus FILE; "
            "python -m r3lite.index --documents FOLDER --output my-index makes one of your documents",
            code="documents-missing",
        )
    if collect.source == "teacher" and config.judge.judge == "local":
        raise UsageError(
            "--judge local cannot be a teacher: pass gemini, or openai with --judge-base-url", code="local-teacher"
        )
    if collect.source == "self" and collect.num_generations > 1 and is_greedy(config.sampling.temperature):
        raise UsageError(
            "--temperature 0, or next to it, always samples the same episode: pass --num-generations 1",
            code="greedy-samples",
        )
    if collect.baseline != "none" and config.retrieval.retriever == "none":
        raise UsageError("--baseline rag needs a retriever, but --retriever is none", code="baseline-without-retriever")


def write_trajectories(config: CollectConfig) -> None:
    """Writes trajectories to --output; raises R3LiteError if it holds none afterwards."""
    check(config)
    output = Path(config.common.output or time.strftime("runs/collect-%Y%m%d-%H%M%S.jsonl"))
    check_output(output, config)
    with sole_writer(output, folder=False):
        earlier = read_earlier(output, config.collect.source, config)
        from r3lite.assembly import collecting  # after the checks: torch takes seconds to load

        tally = collecting.collect(config, output, earlier)
    print(tally.table())
    if not (tally.accepted or tally.accepted_earlier):
        raise nothing_collected(config, tally, output)
    print(f"written to {output}")


def nothing_collected(config: CollectConfig, tally: Tally, output: Path) -> R3LiteError:
    """Returns the error for a run that kept no trajectory: the most frequent reasons, and what to do next."""
    reasons = [f"{reason} ({count})" for reason, count in tally.rejected.most_common(3)]
    cause = "no trajectory was kept"
    if reasons:
        cause = f"{cause}: {', '.join(reasons)}"
    return R3LiteError(cause, remedy_of(config, tally, output), code="nothing-collected")


def remedy_of(config: CollectConfig, tally: Tally, output: Path) -> str:
    """Returns the remedy for a run that kept no trajectory: advice and, for the sources gold and self, commands."""
    from r3lite.training.earlier_run import result_of_run

    shared = flags_by_user(config, ("preset", "model", "format", "retriever", "corpus", "index", "encoder", "top_k"))
    source = config.collect.source
    if source == "teacher":
        return "The table above counts all reasons."
    if source == "documents":
        return f"Raise --top-k, so that the sentences are found. The questions are in {questions_of(output)}."
    if source == "gold" and tally.rejected["no decomposition"]:
        advice = "--source gold needs questions with reasoning steps or supporting facts. Without any:"
        return f"{advice}\n{lines_of(*first_demonstrations(config, shared))}"
    if source == "gold":
        flags_of_retrieve = flags_by_user(config, ("preset", "retriever", "corpus", "index", "encoder", "top_k"))
        words = ["retrieve", *flags_of_retrieve, "--data", config.data.data]
        return f"See what the retriever finds, and raise --top-k:\n{lines_of(words)}"
    trained = result_of_run(config.model.model, config.model.adapter)
    if trained is None:
        advice = "Pass --adapter RUN: only a model that was trained on the step format follows it. To train one:"
        return f"{advice}\n{lines_of(*first_demonstrations(config, shared))}"
    words = ["evaluate", *shared, "--adapter", trained, "--data", config.data.data, "--output", "runs/scores"]
    return f"Train the adapter for longer, or see what it answers:\n{lines_of(words)}"


def first_demonstrations(config: CollectConfig, shared: list[str]) -> list[list[str]]:
    """Returns two commands, as words: one makes demonstrations without an API key, the other trains on them.

    The demonstrations come from the user's passages if there are any. Otherwise they come from the user's questions if
    --source was self, and from a public data set if it was gold, which has just failed with the user's questions.
    """
    output = ["--output", "demonstrations.jsonl"]
    if config.retrieval.index or config.retrieval.corpus:
        collect = ["collect", *shared, "--source", "documents", *output]
    elif config.collect.source == "self":
        collect = ["collect", *shared, "--source", "gold", "--data", config.data.data, *output]
    else:
        collect = ["collect", *shared, "--source", "gold", "--data", "hotpotqa", "--limit", "2000", *output]
    model = flags_by_user(config, ("preset", "model", "format"))
    return [collect, ["sft", *model, "--data", "demonstrations.jsonl", "--output", "runs/sft"]]


def lines_of(*commands: list[str]) -> str:
    """Returns commands of r3lite as indented lines that can be copied."""
    return "\n".join(f"    python -m r3lite.{shlex.join(words)}" for words in commands)


main = command.Command("collect", CollectConfig(), work=run, plan=plan)

if __name__ == "__main__":
    raise SystemExit(main())
