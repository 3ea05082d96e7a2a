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
    if config.cache.teacher_logprobs is None:
        write_trajectories(config)
        return
    from r3lite.assembly import teacher  # after the arguments are read: torch takes seconds to load

    teacher.write_cache(config)


def plan(config: CollectConfig) -> str:
    """The memory that a model on this device takes, for `--dry-run`."""
    length = config.lengths.max_length
    if config.cache.teacher_logprobs is None:
        if config.collect.source != "self":
            return ""
        from r3lite.assembly.answering import QUESTIONS_OF_DRY_RUN, plan_memory

        episodes = (config.data.limit or QUESTIONS_OF_DRY_RUN) * config.collect.num_generations
        return f"\nMemory, for episodes of {length} tokens\n{plan_memory(config, episodes).table()}"
    from r3lite.assembly import teacher

    message = f"\nMemory, for trajectories of {length} tokens\n{teacher.plan_cache(config).table()}\n\n"
    most = teacher.on_disk(1000 * length, config.cache.teacher_top)
    return f"{message}on disk: at most {most} for 1,000 trajectories, if every token has loss"


def write_trajectories(config: CollectConfig) -> None:
    if config.collect.source == "teacher" and config.judge.judge == "local":
        raise UsageError("--judge local cannot be a teacher: pass gemini, or openai with --judge-base-url")
    if (
        config.collect.source == "self"
        and is_greedy(config.sampling.temperature)
        and config.collect.num_generations > 1
    ):
        raise UsageError("--temperature 0, or next to it, always samples the same episode: pass --num-generations 1")
    if config.collect.baseline != "none" and config.retrieval.retriever == "none":
        raise UsageError("--baseline rag needs a retriever, but --retriever is none")
    output = Path(config.common.output or time.strftime("runs/collect-%Y%m%d-%H%M%S.jsonl"))
    check_output(output, config)
    with sole_writer(output, folder=False):
        earlier = read_earlier(output, config.collect.source, config)
        from r3lite.assembly import collecting  # after what is wrong was reported: torch takes seconds to load

        tally = collecting.collect(config, output, earlier)
    print(f"{tally.table()}\nwritten to {output}")
    if not (tally.kept or tally.kept_earlier):
        raise R3LiteError("no trajectory was kept", "The table above shows why.")


main = command.Command("collect", CollectConfig(), run, plan).entry(__name__)
