"""Measures a retriever: recall of the gold paragraphs when the question itself is the query."""

import dataclasses
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from r3lite import command
from r3lite.errors import R3LiteError
from r3lite.settings import Common, QuestionSettings, RetrievalSettings

CUTS = (2, 5, 10)


@dataclass(frozen=True)
class RetrieveConfig:
    """Recall of a retriever at 2, 5, 10 (and --top-k): the share of a question's gold paragraphs among the first so
    many passages that the question's own text brings, averaged over questions. Written to recall.json in --output.
    """

    common: Common = Common()
    data: QuestionSettings = QuestionSettings()
    retrieval: RetrievalSettings = RetrievalSettings()


def measure_recall(config: RetrieveConfig) -> None:
    from r3lite.datasets.qa import read_questions
    from r3lite.files import write_json
    from r3lite.retrieval.retriever import build_retriever

    output = Path(config.common.output or time.strftime("runs/retrieve-%Y%m%d-%H%M%S"))
    if output.is_file():
        raise R3LiteError(f"--output {output} is a file", "Name a folder.")
    for taken in ("recall.json", "manifest.json"):  # an earlier measurement; an index
        if (output / taken).exists():
            raise R3LiteError(f"--output {output} holds a {taken} already", "Name a new folder.")
    questions = read_questions(config.data.data, config.data.limit, config.data.skip_bad_rows)
    known = [q for q in questions if q.gold]
    if not known:
        raise R3LiteError(
            f"no question in {config.data.data} has gold paragraphs, so there is no recall to measure",
            "Use a HotpotQA, 2WikiMultiHopQA or MuSiQue file.",
        )
    cuts = sorted({*CUTS, config.retrieval.top_k})
    # If no corpus is named, the paragraphs of all questions are, including those of questions without gold.
    settings = dataclasses.replace(config.retrieval, top_k=cuts[-1])
    retrieve = build_retriever(settings, questions, skip_bad_rows=config.data.skip_bad_rows)
    start = time.perf_counter()
    found = retrieve([(q, q.text) for q in known])
    seconds = time.perf_counter() - start
    left_out = f" ({len(questions) - len(known)} without gold left out)" if len(questions) > len(known) else ""
    recall = {str(k): mean_recall(known, found, k) for k in cuts}
    print(f"questions  {len(known)}{left_out}")
    for k, value in recall.items():
        print(f"recall@{k:<3} {value:.4f}")
    print(f"{seconds:.2f} s for {len(known)} queries")
    write_json(output / "recall.json", {"n": len(known), "recall": recall})
    print(f"written to {output / 'recall.json'}")


def mean_recall(questions, found, k: int) -> float:
    """Share of gold paragraphs among the first `k` documents of each question, averaged over questions."""
    shares = [len(q.gold_found(documents[:k])) / len(q.gold) for q, documents in zip(questions, found, strict=True)]
    return sum(shares) / len(shares)


def main(argv: list[str] | None = None) -> int:
    return command.run("retrieve", RetrieveConfig(), measure_recall, argv)


if __name__ == "__main__":
    sys.exit(main())
