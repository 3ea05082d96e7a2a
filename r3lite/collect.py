"""Writes SFT trajectories: from gold decompositions without a teacher, or sampled from a teacher and filtered.

The teacher is given the student's prompts and the documents that its own queries brought, never the answer.
"""

import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from r3lite import command
from r3lite.config import UsageError, to_toml
from r3lite.episode import Document, Failure, Question, Retrieve, Search, retrieve_all
from r3lite.errors import R3LiteError
from r3lite.files import append_jsonl, check_writable, recover_jsonl, sole_writer, write_jsonl, write_text
from r3lite.protocols.base import Protocol
from r3lite.settings import (
    CollectSettings,
    Common,
    JudgeSettings,
    MemorySettings,
    ModelSettings,
    ProtocolSettings,
    QuestionSettings,
    RetrievalSettings,
    TeacherCacheSettings,
)

if TYPE_CHECKING:
    from r3lite.datasets.trajectories import Trajectory

WRITER = "collect --source teacher"  # as errors name what writes the files that it goes on with
MORE = ("limit", "skip_bad_rows")  # settings with which a teacher's run may go on: they add questions


@dataclass(frozen=True)
class CollectConfig:
    """Writes trajectories to fine-tune on, one JSON object a line: question, steps with documents, answer.

    --source gold needs questions with decompositions or supporting facts (MuSiQue, HotpotQA, 2WikiMultiHopQA) and no
    teacher. --source teacher samples them from --judge-model, of Gemini or with --judge openai of another server, whose
    key is read from the environment.
    --teacher-logprobs writes what --model would have said along trajectories that are there already.
    """

    common: Common = Common()
    data: QuestionSettings = QuestionSettings()
    collect: CollectSettings = CollectSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    protocol: ProtocolSettings = ProtocolSettings()
    judge: JudgeSettings = JudgeSettings()
    cache: TeacherCacheSettings = TeacherCacheSettings()
    model: ModelSettings = ModelSettings()
    memory: MemorySettings = MemorySettings()


@dataclass(frozen=True)
class Earlier:
    """Ids of the questions that earlier runs of a teacher have done with."""

    kept: set[str]
    rejected: set[str]


@dataclass
class Tally:
    """Counts of the questions: kept, rejected for what reason, and what their trajectories hold."""

    questions: int
    kept: int = 0
    rejected: Counter = field(default_factory=Counter)  # reason -> questions
    steps: int = 0  # of kept trajectories
    gold: int = 0  # gold paragraphs that they need
    found: int = 0  # of those, how many the retriever found itself
    extra: dict[str, object] = field(default_factory=dict)

    def keep(self, steps: int, gold: int, found: int) -> None:
        self.kept, self.steps = self.kept + 1, self.steps + steps
        self.gold, self.found = self.gold + gold, self.found + found

    def table(self) -> str:
        rows = [("questions", self.questions), ("trajectories kept", self.kept)]
        rows += [(f"rejected: {reason}", n) for reason, n in self.rejected.most_common()]
        rows.append(("mean steps", f"{self.steps / self.kept:.2f}" if self.kept else "-"))
        rows.append(("gold paragraphs that the retriever found", f"{self.found / self.gold:.3f}" if self.gold else "-"))
        rows += self.extra.items()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def run(config: CollectConfig) -> None:
    if config.cache.teacher_logprobs is None:
        write_trajectories(config)
        return
    from r3lite import teacher  # after the arguments are read: torch takes seconds to load

    if config.common.output:
        raise UsageError("--teacher-logprobs names what is written: leave --output out")
    teacher.write_cache(config)


def plan(config: CollectConfig) -> str:
    """What a teacher takes, for `--dry-run`."""
    if config.cache.teacher_logprobs is None:
        return ""
    from r3lite import teacher

    cache = config.cache
    told = f"\nMemory, for trajectories of {cache.max_length} tokens\n{teacher.plan_cache(config).table()}\n\n"
    most = teacher.on_disk(1000 * cache.max_length, cache.teacher_top)
    return f"{told}on disk: at most {most} for 1,000 trajectories, if every token has loss"


def write_trajectories(config: CollectConfig) -> None:
    if config.collect.source == "teacher" and config.judge.judge == "local":
        raise UsageError("--judge local cannot teach: pass gemini, or openai with the address of a server of your own")
    output = Path(config.common.output or time.strftime("runs/collect-%Y%m%d-%H%M%S.jsonl"))
    check_output(output, config)
    with sole_writer(output, folder=False):
        earlier = read_earlier(output, config)
        tally = collect(config, output, earlier)
    print(tally.table())
    print(f"written to {output}")
    if not (tally.kept or tally.extra.get("kept by earlier runs")):
        raise R3LiteError("no trajectory was kept", "The table above says why.")


def collect(config: CollectConfig, output: Path, earlier: Earlier) -> Tally:
    from r3lite.datasets.qa import read_questions
    from r3lite.protocols.registry import build_protocol
    from r3lite.retrieval.retriever import build_retriever
    from r3lite.retrieval.setup import Setup

    questions = read_questions(config.data.data, config.data.limit, config.data.skip_bad_rows)
    protocol = build_protocol(config.protocol)
    config.retrieval.check_sources(protocol.plans)
    setup = Setup(config.retrieval, questions, config.common.seed, skip_bad_rows=config.data.skip_bad_rows)
    retrieve = build_retriever(setup)
    if config.collect.source == "gold":
        return gold(config, questions, protocol, retrieve, output)
    return teacher(config, questions, protocol, retrieve, output, earlier)


def check_output(output: Path, config: CollectConfig) -> None:
    """Refuses, before any question is read, an output that is an input, no file, or cannot be written."""
    remedy = "Name a new file that ends in .jsonl."
    try:
        for flag, given in (("--data", config.data.data), ("--corpus", config.retrieval.corpus)):
            if given and output.exists() and Path(given).exists() and output.samefile(given):
                raise R3LiteError(f"--output {output} is the file of {flag}", remedy)
        if output.exists() and not output.is_file():
            raise R3LiteError(f"--output {output} is a {'folder' if output.is_dir() else 'device'}", remedy)
        check_writable(Path(os.path.realpath(output)).parent)
        if output.exists():
            open(output, "ab").close()
    except OSError as error:
        raise R3LiteError(f"--output {output} cannot be written: {error}", "Name another file.") from error


def read_earlier(output: Path, config: CollectConfig) -> Earlier:
    """What an earlier run into the same file has done. Refuses a file that this run may not go on writing.

    Gold trajectories are written all at once, so a file with anything in it is not this run's. A teacher's run goes on
    with its own file only: the settings that it had are kept in `<output>.config.toml`.
    """
    if config.collect.source == "gold":
        if output.exists() and output.stat().st_size:
            raise R3LiteError(f"--output {output} is there and is not empty", "Name a new file, or remove it.")
        return Earlier(set(), set())
    settings = config_of(output)
    files = (output, rejections_of(output))
    if known := settings.exists() and any(path.exists() and path.stat().st_size for path in files):
        command.refuse_another_run(settings, "collect", config, output, MORE)
    kept, rejected = (
        recover_jsonl(path, is_ours, WRITER, known)
        for path, is_ours in zip(files, (is_teachers, is_rejection), strict=True)
    )
    return Earlier({str(r["id"]) for r in kept}, {str(r["id"]) for r in rejected})


def gold(
    config: CollectConfig, questions: list[Question], protocol: Protocol, retrieve: Retrieve, output: Path
) -> Tally:
    """Writes a trajectory for every question with a decomposition whose hops the retriever finds."""
    from r3lite.datasets.evidence import demonstrate
    from r3lite.datasets.gold import obstacle, shown
    from r3lite.datasets.teacher import WITHOUT_SEARCH
    from r3lite.datasets.trajectories import Trajectory, check_steps

    tally, usable, written = Tally(len(questions)), [], []
    for question in questions:
        reason = obstacle(question, config.collect.max_hops, protocol.searches)
        if not reason:
            steps = shown(question, [()] * len(question.hops), protocol)
            idle = config.collect.without_search == "drop" and not any(step.searches for step in steps)
            reason = WITHOUT_SEARCH if idle else check_steps(steps, protocol)
        if reason:
            tally.rejected[reason] += 1
        else:
            usable.append(question)
    if config.collect.demonstrations == "quotes" and protocol.searches and not protocol.plans:
        for made in demonstrate(usable, retrieve, config.lengths.max_hops, config.lengths.max_document_tokens):
            if reason := made.rejected or check_steps(made.steps, protocol):
                tally.rejected[reason] += 1
                continue
            q = made.question
            written.append(Trajectory(q.id, q.text, q.answers, tuple(made.steps), "gold"))
            tally.keep(len(made.steps), len(q.gold), len(q.gold))
    else:
        written = by_sub_questions(config, usable, protocol, retrieve, tally)
    write_jsonl(output, (t.to_json() for t in written))
    return tally


def by_sub_questions(
    config: CollectConfig, questions: list[Question], protocol: Protocol, retrieve: Retrieve, tally: Tally
) -> "list[Trajectory]":
    """Trajectories whose queries are the sub-questions of the decompositions; for a protocol without search nothing is
    retrieved. A question of which a gold paragraph is not found is rejected, unless --insert-gold puts it there."""
    from r3lite.datasets.evidence import MISSED
    from r3lite.datasets.gold import planned_searches, queries, shown, with_gold
    from r3lite.datasets.trajectories import Trajectory

    asked = planned_searches if protocol.plans else lambda question: list(map(Search, queries(question)))
    documents_of: list[list[list[Document]]] = [[] for _ in questions]  # by question and hop
    found, rejected = [0] * len(questions), {}
    for hop in range(max((len(q.hops) for q in questions), default=0) if protocol.searches else 0):
        # One batch for the first queries of all questions, then one for the second queries, ...
        asking = [i for i, q in enumerate(questions) if hop < len(q.hops)]
        answers = retrieve_all(retrieve, [(questions[i], asked(questions[i])[hop]) for i in asking])
        for i, outcome in zip(asking, answers, strict=True):
            if isinstance(outcome, Failure):
                rejected[i] = "the retriever failed"
                outcome = []
            seed = f"{config.common.seed}/{questions[i].id}/{hop}"
            documents, was_there = with_gold(questions[i], hop, outcome, config.retrieval.top_k, seed)
            documents_of[i].append(documents)
            found[i] += was_there
            if not (was_there or config.collect.insert_gold):
                rejected.setdefault(i, MISSED)
    share = config.collect.hurried_share
    draws = [random.Random(f"{config.common.seed}/{q.id}/hurried").random() for q in questions]
    written = []
    for i, (q, documents) in enumerate(zip(questions, documents_of, strict=True)):
        if i in rejected:
            tally.rejected[rejected[i]] += 1
            continue
        hurried = draws[i] < share and len(q.hops) > 1
        written.append(Trajectory(q.id, q.text, q.answers, shown(q, documents, protocol, hurried), "gold"))
        tally.keep(len(written[-1].steps), len(documents), found[i])
    return written


def teacher(
    config: CollectConfig,
    questions: list[Question],
    protocol: Protocol,
    retrieve: Retrieve,
    output: Path,
    earlier: Earlier,
) -> Tally:
    """Adds to the file the teacher's right answers in well-formed steps, a block of questions at a time.

    Continues an earlier run: questions that are in the file, and those whose replies were rejected (named in
    `<output>.rejected.jsonl`), are not asked again. Questions that got no reply are.
    """
    from tqdm import tqdm

    from r3lite.datasets.teacher import Teacher, Try
    from r3lite.datasets.trajectories import Trajectory
    from r3lite.llm.client import Client

    rejected = rejections_of(output)
    waiting = [q for q in questions if q.id not in earlier.kept | earlier.rejected]
    tally = Tally(len(questions))
    if len(waiting) < len(questions):
        tally.extra["kept by earlier runs"] = sum(q.id in earlier.kept for q in questions)
        tally.extra["rejected by earlier runs"] = sum(q.id in earlier.rejected for q in questions)
    client = Client(config.judge, Path(config.judge.judge_cache or f"{output}.cache"))
    sampler, size = (
        Teacher(config.collect, client, protocol, retrieve, config.common.seed),
        4 * config.judge.judge_concurrency,
    )
    write_text(config_of(output), to_toml(config, "collect"))
    bar = tqdm(total=len(waiting), desc="teacher", unit="question", disable=None)
    for start in range(0, len(waiting), size):
        block = waiting[start : start + size]
        last = {q.id: Try(q, failure="not tried") for q in block}
        for number in range(config.collect.attempts):
            failed = [t.question for t in last.values() if t.failure]
            last |= {t.question.id: t for t in sampler.attempt(failed, number)}
        right = [t for t in last.values() if not (t.failure or t.missing)]
        wrong = [t for t in last.values() if t.failure]
        made = [
            Trajectory(t.question.id, t.question.text, t.question.answers, tuple(t.steps), "teacher") for t in right
        ]
        append_jsonl(output, [t.to_json() for t in made])
        append_jsonl(rejected, [{"id": t.question.id, "reason": t.failure} for t in wrong])
        for this in right:
            documents = [d for s in this.steps for d in s.documents]
            tally.keep(len(this.steps), len(this.question.gold), len(this.question.gold_found(documents)))
        tally.rejected.update(t.failure for t in wrong)
        missing = [t.missing for t in last.values() if t.missing]
        tally.rejected.update(f"no reply ({m.partition(':')[0]}), asked again next time" for m in missing)
        bar.update(len(block))
        if capped := next((m for m in missing if m.startswith("capped")), None):
            tally.extra["stopped"] = capped.partition(": ")[2]
            tally.extra["questions left"] = len(waiting) - start - len(block) + len(missing)
            break
        if len(missing) == len(last):
            remedy = "What was kept is in the file; run the same command again to go on."
            raise R3LiteError(f"the teacher does not reply: {missing[0]}", remedy)
    bar.close()
    counts = client.counts()
    tally.extra |= {"requests": counts["calls"], "replies from the cache": counts["cache_hits"]}
    unknown = "unknown: pass --judge-input-price and --judge-output-price"
    tally.extra["US dollars"] = f"{counts['cost']:.4f}" if "cost" in counts else unknown
    return tally


def rejections_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.rejected.jsonl")


def config_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.config.toml")


def is_teachers(record: dict) -> bool:
    """Whether a record is a trajectory that a teacher's run wrote."""
    return "id" in record and "steps" in record and record.get("source") == "teacher"


def is_rejection(record: dict) -> bool:
    return record.keys() == {"id", "reason"}


def main(argv: list[str] | None = None) -> int:
    return command.run("collect", CollectConfig(), run, argv, plan)


if __name__ == "__main__":
    sys.exit(main())
