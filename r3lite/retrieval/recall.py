"""Recall of a retriever: the share of the gold paragraphs that the texts of questions bring, told and written down."""

import time
from pathlib import Path

from r3lite.core.episode import Document, Failure, Question
from r3lite.core.errors import R3LiteError
from r3lite.core.files import check_writable, sole_writer, sweep, write_json
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup

CUTS = (2, 5, 10)


def check_output(output: Path, gap_report: str | None) -> None:
    """Refuses, before anything is read, an output that is there already or cannot be written."""
    if output.is_file():
        raise R3LiteError(f"--output {output} is a file", "Name a folder.")
    for taken in ("recall.json", "manifest.json"):  # an earlier measurement; an index
        if (output / taken).exists():
            raise R3LiteError(f"--output {output} holds a {taken} already", "Name a new folder.")
    if gap_report:
        if Path(gap_report).exists():
            raise R3LiteError(f"--gap-report {gap_report} is there already", "Name a new file.")
        check_writable(Path(gap_report).absolute().parent)


def measure(setup: Setup, known: list[Question], cuts: list[int], output: Path) -> None:
    """Prints the recall of the `known` questions, which have gold paragraphs, and writes it to recall.json."""
    search = build_retriever(setup)
    start = time.perf_counter()
    outcomes = search([(q, q.text) for q in known])
    seconds = time.perf_counter() - start
    answered = [(q, found) for q, found in zip(known, outcomes, strict=True) if not isinstance(found, Failure)]
    if not answered:
        raise R3LiteError(f"the retriever failed at every question: {outcomes[0].reason}")
    bare = f" ({len(setup.questions) - len(known)} without gold left out)" if len(setup.questions) > len(known) else ""
    failed = f" ({len(known) - len(answered)} at which the retriever failed left out)"
    asked, found = zip(*answered, strict=True)
    recall = {str(k): mean_recall(asked, found, k) for k in cuts}
    print(f"questions  {len(answered)}{bare}{failed if len(answered) < len(known) else ''}")
    for k, value in recall.items():
        print(f"recall@{k:<3} {value:.4f}")
    print(f"{seconds:.2f} s for {len(known)} queries, {1000 * seconds / len(known):.1f} ms each")
    if setup.query_cache:
        print(setup.query_cache.line())
    path = output / "recall.json"
    with sole_writer(path, folder=False):
        sweep(path)
        write_json(path, {"n": len(answered), "recall": recall})
    print(f"written to {path}")


def mean_recall(questions: list[Question], found: list[list[Document]], k: int) -> float:
    """Share of gold paragraphs among the first `k` documents of each question, averaged over questions."""
    shares = [len(q.gold_found(documents[:k])) / len(q.gold) for q, documents in zip(questions, found, strict=True)]
    return sum(shares) / len(shares)
