"""Measures the recall of a retriever with questions as queries, shows the result of a query, or serves queries."""

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from r3lite.core import command
from r3lite.core.episode import Failure, Question
from r3lite.core.errors import R3LiteError, UsageError
from r3lite.core.needs import NeedsOthers
from r3lite.core.terminal import printable
from r3lite.settings import CommandConfig, DataSettings, RetrievalSettings, RetrieveSettings

if TYPE_CHECKING:  # its libraries are loaded after the arguments are read, so that --help answers at once
    from r3lite.retrieval.setup import Setup

SHOWN = 160  # the most characters of a passage that --query prints


class RetrieveConfig(CommandConfig):
    """Measures recall at 2, 5, 10 and --top-k: the share of a question's gold paragraphs among the first passages found
    with the question as query, averaged over questions. Writes recall.json to --output.

    With --query, prints the passages found by one query, their scores and the retriever that found each. With --serve,
    answers POST /retrieve in Search-R1's format and, with --rerank, POST /rerank.
    """

    needs: ClassVar = (NeedsOthers("limit", "--data", lambda s: s.data),)

    retrieve: RetrieveSettings = RetrieveSettings()
    data: DataSettings = DataSettings()
    retrieval: RetrievalSettings = RetrievalSettings()


def retrieve(config: RetrieveConfig) -> None:
    """Serves the retriever, shows the passages of --query, or measures the recall of --data."""
    if config.retrieve.serve:
        answer_queries(config)
    elif config.retrieve.query:
        show_query(config)
    elif config.data.data:
        measure_recall(config)
    else:
        raise UsageError(
            "--data is missing: pass a question file, or name,subset,split; or pass --query or --serve",
            code="data-missing",
        )


def check(config: RetrieveConfig) -> None:
    """Raises UsageError for a retriever that cannot answer the queries of --serve or --query."""
    retriever = config.retrieval.retriever
    needs_questions = config.retrieval.context == "question" or retriever == "golden"
    if config.retrieve.serve and (needs_questions or retriever == "none"):
        raise UsageError(
            "--serve does not work with --context question, nor with --retriever golden or none",
            code="serve-without-index",
        )
    if config.retrieve.query and needs_questions:
        raise UsageError(
            "--query does not work with --context question or --retriever golden", code="query-without-index"
        )


def plan(config: RetrieveConfig) -> str:
    """Checks for `--dry-run` what the command checks before it reads anything; returns no text."""
    from r3lite.retrieval import recall

    check(config)
    measures = not (config.retrieve.serve or config.retrieve.query)
    if measures and config.common.output:
        recall.check_free(Path(config.common.output), config.retrieve.gap_report)
    return ""


def answer_queries(config: RetrieveConfig) -> None:
    """Serves the retriever until it is interrupted. Token and address are checked before anything is loaded."""
    from r3lite.core.listening import listen, token_of
    from r3lite.retrieval.server import serve

    check(config)
    token = token_of(config.retrieve.host)
    with listen(config.retrieve.host, config.retrieve.port) as listening:
        serve(read_setup(config, config.retrieval.top_k), listening, token)


def read_setup(config: RetrieveConfig, top_k: int) -> "Setup":
    """Returns what a retriever is built from. The retriever will return `top_k` passages per query."""
    from r3lite.datasets.qa import read_questions
    from r3lite.retrieval.setup import Setup

    data = config.data
    questions = []
    if data.data:
        questions = read_questions(data.data, data.limit, data.skip_bad_rows)
    settings = dataclasses.replace(config.retrieval, top_k=top_k)
    return Setup(
        settings,
        questions,
        config.common.seed,
        skip_bad_rows=data.skip_bad_rows,
        gives_up=not config.retrieve.serve,
    )


def show_query(config: RetrieveConfig) -> None:
    """Prints the passages of --query, best first."""
    from r3lite.retrieval.retriever import build_retriever

    check(config)
    setup = read_setup(config, config.retrieval.top_k)
    query = config.retrieve.query
    question = Question("query", query, answers=())
    (outcome,) = build_retriever(setup)([(question, query)])
    if isinstance(outcome, Failure):
        raise R3LiteError(f"the retriever failed: {outcome.reason}", code="retriever-failed")
    for rank, document in enumerate(outcome, 1):
        title = " ".join(document.title.split())
        text = " ".join(document.text.split())
        if len(text) > SHOWN:
            text = f"{text[:SHOWN]}..."
        # A server of another program may return no scores.
        score = "-" if document.score is None else f"{document.score:.4f}"
        heading = f"{rank:>3}  {score}  {document.source}  [{document.id}] {title}"
        print(printable(f"{heading}\n     {text}"))
    if not outcome:
        print("nothing found")


def measure_recall(config: RetrieveConfig) -> None:
    """Writes the recall with the questions of --data as queries, and with --gap-report what the corpus lacks."""
    from r3lite.retrieval import recall

    output = Path(config.common.output or time.strftime("runs/retrieve-%Y%m%d-%H%M%S"))
    recall.check_output(output, config.retrieve.gap_report)
    cuts = sorted({*recall.CUTS, config.retrieval.top_k})
    # Without --corpus and --index, the corpus is the paragraphs of all questions, even of those without gold.
    setup = read_setup(config, cuts[-1])
    questions = [question for question in setup.questions if question.gold]
    if not questions:
        remedy = "Use a HotpotQA, 2WikiMultiHopQA or MuSiQue file."
        raise R3LiteError(
            f"no question in {config.data.data} has gold paragraphs, which recall needs",
            remedy,
            code="no-gold-paragraphs",
        )
    recall.measure(setup, questions, cuts, output)
    if config.retrieve.gap_report:
        recall.write_gaps(setup.documents, questions, cuts, Path(config.retrieve.gap_report))


main = command.Command("retrieve", RetrieveConfig(), work=retrieve, plan=plan)

if __name__ == "__main__":
    raise SystemExit(main())
