"""Collects trajectories of questions: from the data set, from a teacher, or from the model itself; used by collect."""

from pathlib import Path

from r3lite.assembly.answering import build_engine
from r3lite.assembly.inputs import fingerprints_of_collecting
from r3lite.core.episode import Episode, Question
from r3lite.core.files import sweep
from r3lite.core.invocation import to_toml
from r3lite.datasets.cloze import make_questions, split
from r3lite.datasets.collected import (
    Earlier,
    Tally,
    config_of,
    held_out_of,
    questions_of,
    rejections_of,
    write_questions,
    write_settings,
)
from r3lite.datasets.demonstrations import write_gold
from r3lite.datasets.plain_rag import write_plain_rag
from r3lite.datasets.qa import read_questions
from r3lite.datasets.self_taught import Harvest
from r3lite.datasets.splits import new_questions
from r3lite.datasets.teacher import Teacher
from r3lite.llm.client import Client
from r3lite.models.weights import resolve_folder
from r3lite.protocols.base import Protocol
from r3lite.protocols.layout import OPENINGS, Layout
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.settings import CollectConfig


def collect(config: CollectConfig, output: Path, earlier: Earlier) -> Tally:
    """Adds to the file `output` the trajectories of the questions, from the source of --source; returns the counts.

    `earlier` has the records of the earlier runs that this one continues; it is empty if this one continues none.
    """
    reply_cache = Path(f"{output}.cache")
    sweep(output, config_of(output), rejections_of(output), reply_cache)
    if config.collect.source == "documents":
        return collect_from_documents(config, output)
    questions = new_questions(config.data)
    opening = OPENINGS[config.collect.baseline]
    protocol = build_protocol(config.protocol, opening)
    setup = Setup(
        config.retrieval,
        questions=questions,
        seed=config.common.seed,
        skip_bad_rows=config.data.skip_bad_rows,
    )
    if config.collect.source == "self":
        return collect_from_model(
            config,
            protocol=protocol,
            setup=setup,
            output=output,
            earlier=earlier,
        )
    retrieve = build_retriever(setup)
    if opening.plain:
        layout = Layout(
            tokenizer=Tokenizer.load(resolve_folder(config.model.model), config.model.thinking),
            protocol=protocol,
            lengths=config.lengths,
            opening=opening,
        )
        return write_plain_rag(
            questions,
            retrieve=retrieve,
            layout=layout,
            output=output,
        )
    if config.collect.source == "gold":
        return write_gold(
            config,
            questions=questions,
            protocol=protocol,
            retrieve=retrieve,
            output=output,
        )
    client = Client(config.judge, Path(config.judge.judge_cache or reply_cache))
    begin_or_continue(
        config,
        protocol=protocol,
        output=output,
        earlier=earlier,
    )
    teacher = Teacher(
        config,
        client=client,
        protocol=protocol,
        retrieve=retrieve,
    )
    return teacher.gather(
        questions,
        output=output,
        earlier=earlier,
        size=4 * config.judge.judge_concurrency,  # questions at a time
    )


def collect_from_documents(config: CollectConfig, output: Path) -> Tally:
    """Makes questions from the passages of --index or --corpus: some to train on, the others to test with.

    Writes both to files beside `output`, and demonstrations of the training questions to `output`. Returns the counts.
    """
    seed = config.common.seed
    setup = Setup(
        config.retrieval,
        questions=[],
        seed=seed,
        skip_bad_rows=config.data.skip_bad_rows,
    )
    questions = make_questions(setup.documents, seed, config.data.limit)
    training, testing = split(questions, config.collect.test_share, seed)
    files = {questions_of(output): training, held_out_of(output): testing}
    sweep(*files)
    for path, part in files.items():
        write_questions(path, [question.to_json() for question in part])
    tally = write_gold(
        config,
        questions=read_questions(questions_of(output)),
        protocol=build_protocol(config.protocol),
        retrieve=build_retriever(setup),
        output=output,
    )
    for path, part in files.items():
        linked = sum(len(question.statements) > 1 for question in part)  # questions that need two documents
        tally.extra[f"questions in {path.name}"] = f"{len(part)}, {linked} of them of two documents"
    return tally


def collect_from_model(
    config: CollectConfig, protocol: Protocol, setup: Setup, output: Path, earlier: Earlier
) -> Tally:
    """Adds to `output` those of the model's own episodes that are right; returns the counts.

    The questions that are done in `earlier` are not sampled again.
    """
    harvest = Harvest.after(
        earlier,
        questions=setup.questions,
        protocol=protocol,
        output=output,
    )
    episodes_per_question = config.collect.num_generations
    if harvest.waiting:
        engine = build_engine(config, episodes_per_question * len(harvest.waiting))
        retrieve = build_retriever(setup)
        begin_or_continue(
            config,
            protocol=protocol,
            output=output,
            earlier=earlier,
        )

        def sample(questions: list[Question], seeds: list[str]) -> list[Episode]:
            return [sequence.episode() for sequence in engine.run(questions, seeds, retrieve, "sampling")]

        harvest.gather(sample, config, protocol)
    return harvest.tally(episodes_per_question)


def begin_or_continue(config: CollectConfig, protocol: Protocol, output: Path, earlier: Earlier) -> None:
    """Writes the settings of this run beside `output`.

    Raises R3LiteError if it continues an earlier run that has read other inputs.
    """
    write_settings(
        output,
        earlier=earlier,
        settings=to_toml(config, "collect"),
        inputs=fingerprints_of_collecting(config, protocol),
    )
