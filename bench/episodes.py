"""Flags, settings and questions of the benches that sample episodes: drafts, lookup and sharing.

A flag that such a bench does not have itself is a setting of `r3lite.evaluate`, such as --preset, --model, --adapter,
--data, --retriever, --encoder and --dtype. By default the tiny model answers the sample world, on a CPU and in fp32.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench import options
from r3lite.core.episode import Question, Retrieve
from r3lite.core.files import shipped
from r3lite.core.invocation import resolve
from r3lite.datasets.qa import read_questions
from r3lite.evaluate import EvaluateConfig
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup

DEFAULTS = ["--preset", "tiny", "--model", "tiny", "--device", "cpu", "--dtype", "fp32"]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the flags that these benches share. A bench adds its own before it calls `parse`."""
    common_parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other flags are settings of r3lite.evaluate.",
        allow_abbrev=False,
    )
    common_parser.add_argument("--model-name", help="name in the results [--model]")
    common_parser.add_argument("--pairs", type=int, default=3, help="pairs of runs that are timed")
    common_parser.add_argument("--note", default="", help="what else the machine did, and whose adapter it is")
    common_parser.add_argument("--results", type=Path, default=options.RESULTS, help="folder that this run is added to")
    return common_parser


def parse(
    common_parser: argparse.ArgumentParser, world_file: str, argv: Sequence[str] | None = None
) -> tuple[argparse.Namespace, EvaluateConfig]:
    """Returns the flags of the bench and the settings of `evaluate`.

    `world_file`: the questions of the sample world that are taken without --data: train.jsonl or test.jsonl.
    """
    flags, settings = common_parser.parse_known_args(argv)
    defaults = list(DEFAULTS)
    if "--data" not in settings:
        world = shipped("data", "world")
        defaults += ["--data", str(world / world_file), "--corpus", str(world / "corpus.jsonl")]
    config = resolve("evaluate", EvaluateConfig(), [*defaults, *settings])
    if flags.model_name is None:
        flags.model_name = config.model.model
    return flags, config


def questions_and_retriever(config: EvaluateConfig, count: int) -> tuple[list[Question], Retrieve]:
    """Returns the first `count` questions of --data, and what finds documents for them."""
    questions = read_questions(config.data.data, count)
    return questions, build_retriever(Setup(config.retrieval, questions))
