"""Measures a retriever: recall of the gold paragraphs when the question itself is the query; or shows one query."""

import dataclasses
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from r3lite.core import command
from r3lite.core.config import UsageError
from r3lite.core.episode import Document, Failure, Question
from r3lite.core.errors import R3LiteError
from r3lite.settings import Common, DataSettings, RetrievalSettings, RetrieveSettings

if TYPE_CHECKING:  # its libraries are loaded after the arguments are read, so that --help answers at once
    from r3lite.retrieval.setup import Setup

CUTS = (2, 5, 10)
SHOWN = 160  # characters of a passage that --query prints


@dataclass(frozen=True)
class RetrieveConfig:
    """Recall of a retriever at 2, 5, 10 (and --top-k): the share of a question's gold paragraphs among the first so
    many passages that the question's own text brings, averaged over questions. Written to recall.json in --output.

    With --query, the passages that one query brings, their scores and the retriever that found each. With --serve, a
    server that answers POST /retrieve as Search-R1's does, and with --rerank POST /rerank.
    """

    common: Common = Common()
    retrieve: RetrieveSettings = RetrieveSettings()
    data: DataSettings = DataSettings()
    retrieval: RetrievalSettings = RetrievalSettings()


def retrieve(config: RetrieveConfig) -> None:
    config.retrieval.check_sources(plans=False)
    if config.retrieve.serve:
        answer_queries(config)
    elif config.retrieve.query:
        show_query(config)
    elif config.data.data:
        measure_recall(config)
    else:
        raise UsageError(
            "--data is missing: a question file of any supported format, or name,subset,split; or --query, or --serve"
        )


def answer_queries(config: RetrieveConfig) -> None:
    """Serves the retriever until it is interrupted."""
    from r3lite.retrieval.retriever import build_retriever
    from r3lite.retrieval.server import Server, Service

    if config.retrieve.query or config.retrieve.gap_report:
        raise UsageError("--serve answers the queries of others: leave --query and --gap-report out")
    if config.retrieval.context == "question" or config.retrieval.retriever in ("golden", "none"):
        raise UsageError(
            "--serve has queries and no questions of --data: leave --context question, golden and none out"
        )
    settings = config.retrieval
    setup = read_setup(config, settings.top_k)
    retrieve = build_retriever(setup)
    rerank = setup.reranker.scores if settings.rerank else None
    server = Server(Service(retrieve, rerank, settings.top_k), config.retrieve.host, config.retrieve.port)
    host, port = server.server_address[:2]
    print(f"serving     http://{host}:{port}/retrieve, up to {settings.top_k} documents a query (--top-k)", flush=True)
    if host not in ("127.0.0.1", "::1", "localhost"):
        print("warning: whoever reaches this address may ask", file=sys.stderr)
    with server:
        server.serve_forever()


def read_setup(config: RetrieveConfig, top_k: int) -> "Setup":
    """What the retriever is built from, asked for so many passages."""
    from r3lite.datasets.qa import read_questions
    from r3lite.retrieval.setup import Setup

    data = config.data
    questions = read_questions(data.data, data.limit, data.skip_bad_rows) if data.data else []
    settings = dataclasses.replace(config.retrieval, top_k=top_k)
    return Setup(settings, questions, config.common.seed, skip_bad_rows=data.skip_bad_rows)


def show_query(config: RetrieveConfig) -> None:
    """Prints the passages of --query, best first."""
    from r3lite.retrieval.retriever import build_retriever

    if config.retrieval.context == "question" or config.retrieval.retriever == "golden":
        raise UsageError("--query belongs to no question of --data: leave out --context question and golden")
    if config.retrieve.gap_report:
        raise UsageError("--gap-report is about the questions of --data: leave --query out")
    query, setup = config.retrieve.query, read_setup(config, config.retrieval.top_k)
    (outcome,) = build_retriever(setup)([(Question("query", query, ()), query)])
    if isinstance(outcome, Failure):
        raise R3LiteError(f"the retriever failed: {outcome.reason}")
    for rank, document in enumerate(outcome, 1):
        text = " ".join(document.text.split())
        text = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
        print(f"{rank:>3}  {document.score:.4f}  {document.source}  [{document.id}] {document.title}\n     {text}")
    if not outcome:
        print("nothing was found")


def measure_recall(config: RetrieveConfig) -> None:
    from r3lite.core.files import write_json
    from r3lite.retrieval.retriever import build_retriever

    output = Path(config.common.output or time.strftime("runs/retrieve-%Y%m%d-%H%M%S"))
    check_output(output, config.retrieve.gap_report)
    cuts = sorted({*CUTS, config.retrieval.top_k})
    # If no corpus is named, the paragraphs of all questions are, including those of questions without gold.
    setup = read_setup(config, cuts[-1])
    questions, known = setup.questions, [q for q in setup.questions if q.gold]
    if not known:
        raise R3LiteError(
            f"no question in {config.data.data} has gold paragraphs, so there is no recall to measure",
            "Use a HotpotQA, 2WikiMultiHopQA or MuSiQue file.",
        )
    search = build_retriever(setup)
    start = time.perf_counter()
    outcomes = search([(q, q.text) for q in known])
    seconds = time.perf_counter() - start
    answered = [(q, found) for q, found in zip(known, outcomes, strict=True) if not isinstance(found, Failure)]
    if not answered:
        raise R3LiteError(f"the retriever failed at every question: {outcomes[0].reason}")
    bare = f" ({len(questions) - len(known)} without gold left out)" if len(questions) > len(known) else ""
    failed = f" ({len(known) - len(answered)} at which the retriever failed left out)"
    asked, found = zip(*answered, strict=True)
    recall = {str(k): mean_recall(asked, found, k) for k in cuts}
    print(f"questions  {len(answered)}{bare}{failed if len(answered) < len(known) else ''}")
    for k, value in recall.items():
        print(f"recall@{k:<3} {value:.4f}")
    print(f"{seconds:.2f} s for {len(known)} queries, {1000 * seconds / len(known):.1f} ms each")
    if setup.query_cache:
        print(setup.query_cache.line())
    write_json(output / "recall.json", {"n": len(answered), "recall": recall})
    print(f"written to {output / 'recall.json'}")
    if config.retrieve.gap_report:
        write_gaps(setup, known, cuts, Path(config.retrieve.gap_report))


def check_output(output: Path, gap_report: str | None) -> None:
    """Refuses, before anything is read, an output that is there already or cannot be written."""
    from r3lite.core.files import check_writable

    if output.is_file():
        raise R3LiteError(f"--output {output} is a file", "Name a folder.")
    for taken in ("recall.json", "manifest.json"):  # an earlier measurement; an index
        if (output / taken).exists():
            raise R3LiteError(f"--output {output} holds a {taken} already", "Name a new folder.")
    if gap_report:
        if Path(gap_report).exists():
            raise R3LiteError(f"--gap-report {gap_report} is there already", "Name a new file.")
        check_writable(Path(gap_report).absolute().parent)


def write_gaps(setup: "Setup", known: list[Question], cuts: list[int], path: Path) -> None:
    """Writes and tells which gold paragraphs the corpus lacks."""
    from r3lite.core.files import write_json
    from r3lite.retrieval import gaps

    told = gaps.report(gaps.gaps(known, setup.documents), cuts)
    best = ", ".join(f"{value:.4f} at {k}" for k, value in told["best_recall_at"].items())
    print(f"the corpus lacks {told['missing']} of {told['gold']} gold paragraphs of {len(told['questions'])} questions")
    print(f"the best recall that a retriever could have is {told['best_recall']:.4f}: {best}")
    write_json(path, told)
    print(f"written to {path}")


def mean_recall(questions: list[Question], found: list[list[Document]], k: int) -> float:
    """Share of gold paragraphs among the first `k` documents of each question, averaged over questions."""
    shares = [len(q.gold_found(documents[:k])) / len(q.gold) for q, documents in zip(questions, found, strict=True)]
    return sum(shares) / len(shares)


def main(argv: list[str] | None = None) -> int:
    return command.run("retrieve", RetrieveConfig(), retrieve, argv)


if __name__ == "__main__":
    sys.exit(main())
