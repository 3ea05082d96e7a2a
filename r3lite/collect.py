"""Writes trajectories for SFT: from gold decompositions, or sampled from a teacher or the model itself.

Both are given the student's prompts and the documents retrieved for their own queries, never the answer.
"""

import time
from pathlib import Path

from r3lite.core import command
from r3lite.core.errors import R3LiteError, UsageError
from r3lite.core.files import sole_writer
from r3lite.datasets.collected import check_output, read_earlier
from r3lite.settings import CollectConfig
from r3lite.settings.rollout import is_greedy


def run(config: CollectConfig) -> None:
    """Writes trajectories, or with --teacher-logprobs a teacher's distributions along them."""
    if config.cache.teacher_logprobs is None:
        write_trajectories(config)
        return
    from r3lite.assembly import teacher_cache  # after the arguments are read: torch takes seconds to load

    teacher_cache.write_cache(config)


def plan(config: CollectConfig) -> str:
    """Returns the memory that a model on this device takes, for `--dry-run`."""
    length = config.lengths.max_length
    if config.cache.teacher_logprobs is None:
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
    """Writes trajectories to --output; raises R3LiteError if none was kept."""
    check(config)
    output = Path(config.common.output or time.strftime("runs/collect-%Y%m%d-%H%M%S.jsonl"))
    check_output(output, config)
    with sole_writer(output, folder=False):
        earlier = read_earlier(output, config.collect.source, config)
        from r3lite.assembly import collecting  # after what is wrong was reported: torch takes seconds to load

        tally = collecting.collect(config, output, earlier)
    print(f"{tally.table()}\nwritten to {output}")
    if not (tally.accepted or tally.accepted_earlier):
        raise R3LiteError("no trajectory was kept", "The table above shows why.", code="nothing-collected")


main = command.Command("collect", CollectConfig(), work=run, plan=plan).entry(__name__)
