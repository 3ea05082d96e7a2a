"""Writes SFT trajectories: from gold decompositions without any teacher, or sampled from a teacher and filtered."""

import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from r3lite import command
from r3lite.errors import R3LiteError
from r3lite.settings import (
    CollectSettings,
    Common,
    DataSettings,
    JudgeSettings,
    ProtocolSettings,
    RetrievalSettings,
)


@dataclass(frozen=True)
class CollectConfig:
    """Writes trajectories to fine-tune on, one JSON object a line: question, steps with documents, answer.

    --source gold needs questions with decompositions or supporting facts (MuSiQue, HotpotQA, 2WikiMultiHopQA) and no
    teacher. --source teacher samples them from a Gemini model: its key is read from GOOGLE_API_KEY or GEMINI_API_KEY.
    """

    common: Common = Common()
    data: DataSettings = DataSettings()
    collect: CollectSettings = CollectSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    protocol: ProtocolSettings = ProtocolSettings()
    judge: JudgeSettings = JudgeSettings()


@dataclass
class Tally:
    """What came of the questions."""

    questions: int
    kept: int = 0
    rejected: Counter = field(default_factory=Counter)  # reason -> questions
    steps: int = 0  # of kept trajectories
    queries: int = 0  # with a known gold paragraph to find
    found: int = 0  # of those, how many brought it without help
    extra: dict[str, str] = field(default_factory=dict)

    def keep(self, steps: int) -> None:
        self.kept += 1
        self.steps += steps

    def table(self) -> str:
        rows = [("questions", self.questions), ("trajectories kept", self.kept)]
        rows += [(f"rejected: {reason}", n) for reason, n in self.rejected.most_common()]
        rows.append(("mean steps", f"{self.steps / self.kept:.2f}" if self.kept else "-"))
        rows.append(("gold paragraph found by its query", f"{self.found / self.queries:.3f}" if self.queries else "-"))
        rows += self.extra.items()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def work(config: CollectConfig) -> None:
    from r3lite.datasets.qa import read_questions
    from r3lite.retrieval.retriever import build_retriever

    if not config.data.data:
        raise R3LiteError("there are no questions to collect from", "Pass --data FILE or --data name,subset,split.")
    output = Path(config.common.output or time.strftime("runs/collect-%Y%m%d-%H%M%S.jsonl"))
    if output.is_dir():
        raise R3LiteError(f"--output {output} is a folder", "Name a file that ends in .jsonl.")
    questions = read_questions(config.data.data, config.data.limit, config.data.skip_bad_rows)
    retrieve = build_retriever(config.retrieval, questions)
    tally = gold(config, questions, retrieve, output) if config.collect.source == "gold" else None
    print(tally.table())
    print(f"written to {output}")
    if not tally.kept:
        raise R3LiteError("no trajectory was kept", "The table above says why.")


def gold(config: CollectConfig, questions, retrieve, output: Path) -> Tally:
    """Writes a trajectory for every question with a decomposition; documents come from the real retriever."""
    from r3lite.datasets.gold import obstacle, queries, steps, with_gold
    from r3lite.datasets.trajectories import Trajectory, check_steps
    from r3lite.files import write_jsonl
    from r3lite.formats import R3Format

    tally, usable = Tally(len(questions)), []
    for question in questions:
        reason = obstacle(question, config.collect.max_hops)
        reason = reason or check_steps(steps(question, [()] * len(question.hops)), R3Format())
        if reason:
            tally.rejected[reason] += 1
        else:
            usable.append(question)
    brought = [[] for _ in usable]  # documents by hop, of each question
    for hop in range(max((len(q.hops) for q in usable), default=0)):
        # The first query of all questions in one batch, then the second of all that have one, ...
        asking = [i for i, q in enumerate(usable) if hop < len(q.hops)]
        found = retrieve([(usable[i], queries(usable[i])[hop]) for i in asking])
        for i, documents in zip(asking, found, strict=True):
            seed = f"{config.common.seed}/{usable[i].id}/{hop}"
            documents, was_there = with_gold(usable[i], hop, documents, config.retrieval.top_k, seed)
            brought[i].append(documents)
            tally.queries, tally.found = tally.queries + 1, tally.found + was_there
    written = [Trajectory(q.id, q.text, q.answers, steps(q, d), "gold") for q, d in zip(usable, brought, strict=True)]
    for trajectory in written:
        tally.keep(len(trajectory.steps))
    write_jsonl(output, (t.to_json() for t in written))
    return tally


def main(argv: list[str] | None = None) -> int:
    return command.run("collect", CollectConfig(), work, argv)


if __name__ == "__main__":
    sys.exit(main())
