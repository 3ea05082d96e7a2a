"""Collects trajectories of questions: from the data set, from a teacher, or from the model itself; used by collect."""

from pathlib import Path

from r3lite.assembly.answering import build_engine
from r3lite.assembly.inputs import of_collecting
from r3lite.core.episode import Episode, Question
from r3lite.core.files import sweep
from r3lite.core.invocation import to_toml
from r3lite.datasets.collected import Earlier, Tally, config_of, go_on, rejections_of
from r3lite.datasets.demonstrations import write_gold
from r3lite.datasets.plain_rag import write_plain_rag
from r3lite.datasets.self_taught import Harvest
from r3lite.datasets.splits import new_questions
from r3lite.datasets.teacher import Teacher
from r3lite.llm.client import Client
from r3lite.models.weights import resolve_folder
from r3lite.protocols.base import Protocol
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.protocols.transcript import OPENINGS, Layout
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.settings import CollectConfig


def collect(config: CollectConfig, output: Path, earlier: Earlier) -> Tally:
    """Adds to the file what the source has of the questions; an earlier run is gone on with."""
    questions, replies = new_questions(config.data), Path(f"{output}.cache")
    sweep(output, config_of(output), rejections_of(output), replies)
    opening = OPENINGS[config.collect.baseline]
    protocol = build_protocol(config.protocol, opening)
    setup = Setup(config.retrieval, questions, config.common.seed, skip_bad_rows=config.data.skip_bad_rows)
    if config.collect.source == "self":
        return self_taught(config, protocol, setup, output, earlier)
    retrieve = build_retriever(setup)
    if opening.plain:
        tokenizer = Tokenizer.load(resolve_folder(config.model.model), config.model.thinking)
        return write_plain_rag(questions, retrieve, Layout(tokenizer, protocol, config.lengths, opening), output)
    if config.collect.source == "gold":
        return write_gold(config, questions, protocol, retrieve, output)
    client = Client(config.judge, Path(config.judge.judge_cache or replies))
    go_on(output, earlier, to_toml(config, "collect"), of_collecting(config, protocol))
    teacher = Teacher(config, client, protocol, retrieve)
    return teacher.gather(questions, output, earlier, 4 * config.judge.judge_concurrency)


def self_taught(config: CollectConfig, protocol: Protocol, setup: Setup, output: Path, earlier: Earlier) -> Tally:
    """Adds to the file the model's own right episodes; questions that earlier runs have done are not sampled again."""
    harvest, many = Harvest.after(earlier, setup.questions, protocol, output), config.collect.num_generations
    if harvest.waiting:
        engine, retrieve = build_engine(config, many * len(harvest.waiting)), build_retriever(setup)
        go_on(output, earlier, to_toml(config, "collect"), of_collecting(config, protocol))

        def sample(questions: list[Question], seeds: list[str]) -> list[Episode]:
            return [sequence.episode() for sequence in engine.run(questions, seeds, retrieve)]

        harvest.gather(sample, config, protocol)
    return harvest.tally(many)
