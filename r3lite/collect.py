"""Writes SFT trajectories: from gold decompositions without a teacher, or sampled from a teacher and filtered.

The teacher is given the student's prompts and the documents that its own queries brought, never the answer.
"""

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from r3lite import command
from r3lite.episode import Document, Question, Retrieve, Step
from r3lite.errors import R3LiteError
from r3lite.files import check_writable, write_jsonl
from r3lite.protocols.base import Protocol
from r3lite.settings import (
    CollectSettings,
    Common,
    JudgeSettings,
    ProtocolSettings,
    QuestionSettings,
    RetrievalSettings,
)

# Failures of a reply that asking again would not mend: they come from the question, not from network or account.
FINAL = ("blocked", "cut", "empty")


@dataclass(frozen=True)
class CollectConfig:
    """Writes trajectories to fine-tune on, one JSON object a line: question, steps with documents, answer.

    --source gold needs questions with decompositions or supporting facts (MuSiQue, HotpotQA, 2WikiMultiHopQA) and no
    teacher. --source teacher samples them from a Gemini model: its key is read from GOOGLE_API_KEY or GEMINI_API_KEY.
    """

    common: Common = Common()
    data: QuestionSettings = QuestionSettings()
    collect: CollectSettings = CollectSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    protocol: ProtocolSettings = ProtocolSettings()
    judge: JudgeSettings = JudgeSettings()


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


def write_trajectories(config: CollectConfig) -> None:
    from r3lite.datasets.qa import read_questions
    from r3lite.protocols.registry import build_protocol
    from r3lite.retrieval.retriever import build_retriever

    output = Path(config.common.output or time.strftime("runs/collect-%Y%m%d-%H%M%S.jsonl"))
    check_output(output, config)
    questions = read_questions(config.data.data, config.data.limit, config.data.skip_bad_rows)
    protocol = build_protocol(config.protocol)
    collect = gold if config.collect.source == "gold" else teacher
    retrieve = build_retriever(config.retrieval, questions, skip_bad_rows=config.data.skip_bad_rows)
    tally = collect(config, questions, protocol, retrieve, output)
    print(tally.table())
    print(f"written to {output}")
    if not (tally.kept or tally.extra.get("kept by earlier runs")):
        raise R3LiteError("no trajectory was kept", "The table above says why.")


def check_output(output: Path, config: CollectConfig) -> None:
    """Refuses, before any question is read, an output that cannot be written or that must not be replaced."""
    remedy = "Name a new file that ends in .jsonl."
    try:
        for flag, given in (("--data", config.data.data), ("--corpus", config.retrieval.corpus)):
            if given and output.exists() and Path(given).exists() and output.samefile(given):
                raise R3LiteError(f"--output {output} is the file of {flag}", remedy)
        if output.exists() and not output.is_file():
            raise R3LiteError(f"--output {output} is a {'folder' if output.is_dir() else 'device'}", remedy)
        check_writable(output.parent)
        if output.exists():
            open(output, "ab").close()
        before = recorded(output, is_trajectory)
        if config.collect.source == "teacher":
            recorded(rejections_of(output), is_rejection)
    except OSError as error:
        raise R3LiteError(f"--output {output} cannot be written: {error}", "Name another file.") from error
    if config.collect.source == "gold" and any(r["source"] == "teacher" for r in before):
        raise R3LiteError(f"{output} holds a teacher's trajectories", "Name another --output, or remove the file.")


def gold(
    config: CollectConfig, questions: list[Question], protocol: Protocol, retrieve: Retrieve, output: Path
) -> Tally:
    """Writes a trajectory for every question with a decomposition; documents come from the retriever."""
    from r3lite.datasets.gold import obstacle, queries, steps, with_gold
    from r3lite.datasets.trajectories import Trajectory, check_steps

    tally, usable = Tally(len(questions)), []
    for question in questions:
        reason = obstacle(question, config.collect.max_hops)
        reason = reason or check_steps(steps(question, [()] * len(question.hops)), protocol)
        if reason:
            tally.rejected[reason] += 1
        else:
            usable.append(question)
    documents_of: list[list[list[Document]]] = [[] for _ in usable]  # by question and hop
    found = [0] * len(usable)
    for hop in range(max((len(q.hops) for q in usable), default=0)):
        # One batch for the first queries of all questions, then one for the second queries, ...
        asking = [i for i, q in enumerate(usable) if hop < len(q.hops)]
        answers = retrieve([(usable[i], queries(usable[i])[hop]) for i in asking])
        for i, documents in zip(asking, answers, strict=True):
            seed = f"{config.common.seed}/{usable[i].id}/{hop}"
            documents, was_there = with_gold(usable[i], hop, documents, config.retrieval.top_k, seed)
            documents_of[i].append(documents)
            found[i] += was_there
    share = config.collect.hurried_share
    draws = [random.Random(f"{config.common.seed}/{q.id}/hurried").random() for q in usable]
    hurried = [draw < share and len(q.hops) > 1 for q, draw in zip(usable, draws, strict=True)]
    written = [
        Trajectory(q.id, q.text, q.answers, steps(q, documents, h), "gold")
        for q, documents, h in zip(usable, documents_of, hurried, strict=True)
    ]
    for trajectory, documents, n in zip(written, documents_of, found, strict=True):
        tally.keep(len(trajectory.steps), len(documents), n)
    write_jsonl(output, (t.to_json() for t in written))
    return tally


@dataclass
class Try:
    """One attempt of the teacher at a question: its steps so far, and how it failed if it did."""

    question: Question
    steps: list[Step] = field(default_factory=list)
    failure: str | None = None  # what is wrong with the teacher's reply
    missing: str | None = None  # why there is no reply; another run asks again

    @property
    def goes_on(self) -> bool:
        answered = bool(self.steps) and self.steps[-1].answer is not None
        return not (answered or self.failure or self.missing)


class Teacher:
    """Samples trajectories step by step, many questions at a time."""

    def __init__(self, config: CollectConfig, protocol: Protocol, retrieve: Retrieve, output: Path):
        from r3lite.llm.gemini import GeminiClient

        self.settings, self.seed, self.retrieve = config.collect, config.common.seed, retrieve
        self.protocol = protocol
        self.client = GeminiClient(config.judge, Path(config.judge.judge_cache or f"{output}.cache"))

    def attempt(self, questions: list[Question], number: int) -> list[Try]:
        """The results of attempt `number` (from 0) at each question; every round of requests asks for one step each."""
        from r3lite.llm.replies import Request

        sampling = {"temperature": 0.9, "nonce": f"{self.seed}/{number}"} if number else {}
        tries = [Try(q) for q in questions]
        while live := [t for t in tries if t.goes_on]:
            requests = [Request(self.prompt(t), self.protocol.system, **sampling) for t in live]
            for this, reply in zip(live, self.client.generate_all(requests), strict=True):
                self.add_step(this, reply)
            searching = [t for t in live if t.goes_on]
            found = self.retrieve([(t.question, t.steps[-1].query) for t in searching]) if searching else []
            for this, documents in zip(searching, found, strict=True):
                this.steps[-1] = this.steps[-1].with_documents(documents)
        return tries

    def prompt(self, this: Try) -> str:
        """The episode so far, and the request for the next step."""
        parts = [self.protocol.opening(this.question.text)]
        for number, step in enumerate(this.steps, 1):
            parts += [self.protocol.render(step, number), self.protocol.observation(step.documents, number + 1)]
        if len(this.steps) == self.settings.max_hops:
            parts.append(self.protocol.answer_request)
        return "\n\n".join([*parts, self.protocol.step_request(len(this.steps) + 1)])

    def add_step(self, this: Try, reply) -> None:
        """Adds the step of a reply, or records why the attempt fails."""
        if reply.failure in FINAL:
            this.failure = f"reply {reply.failure}"
            return
        if reply.failure:
            this.missing = f"{reply.failure}: {reply.detail}"
            return
        step = self.protocol.parse(self.protocol.first_turn(reply.text), this.steps)
        if step.faults:
            this.failure = f"malformed step ({step.faults[0]})"
        elif step.query is not None and len(this.steps) == self.settings.max_hops:
            this.failure = f"no answer after {self.settings.max_hops} queries"
        else:
            this.steps.append(step)
            if step.answer is not None and not self.is_right(this.question, step.answer):
                this.failure = "wrong answer"

    def is_right(self, question: Question, answer: str) -> bool:
        from r3lite.answer_match import exact_match, f1, rule_of

        right = exact_match(answer, question.answers) == 1
        return right or f1(answer, question.answers, rule_of(question)) >= self.settings.min_f1


def teacher(
    config: CollectConfig, questions: list[Question], protocol: Protocol, retrieve: Retrieve, output: Path
) -> Tally:
    """Adds to the file the teacher's right answers in well-formed steps, a block of questions at a time.

    Continues an earlier run: questions that are in the file, and those whose replies were rejected (named in
    `<output>.rejected.jsonl`), are not asked again. Questions that got no reply are.
    """
    from tqdm import tqdm

    from r3lite.datasets.trajectories import Trajectory

    rejected = rejections_of(output)
    kept_before = {str(r.get("id")) for r in recorded(output, is_trajectory)}
    rejected_before = {str(r["id"]) for r in recorded(rejected, is_rejection)}
    waiting = [q for q in questions if q.id not in kept_before | rejected_before]
    tally = Tally(len(questions))
    if len(waiting) < len(questions):
        tally.extra["kept by earlier runs"] = sum(q.id in kept_before for q in questions)
        tally.extra["rejected by earlier runs"] = sum(q.id in rejected_before for q in questions)
    master, size = Teacher(config, protocol, retrieve, output), 4 * config.judge.judge_concurrency
    bar = tqdm(total=len(waiting), desc="teacher", unit="question", disable=None)
    for start in range(0, len(waiting), size):
        block = waiting[start : start + size]
        last = {q.id: Try(q, failure="not tried") for q in block}
        for number in range(config.collect.attempts):
            failed = [t.question for t in last.values() if t.failure]
            last |= {t.question.id: t for t in master.attempt(failed, number)}
        right = [t for t in last.values() if not (t.failure or t.missing)]
        wrong = [t for t in last.values() if t.failure]
        made = [
            Trajectory(t.question.id, t.question.text, t.question.answers, tuple(t.steps), "teacher") for t in right
        ]
        append(output, [t.to_json() for t in made])
        append(rejected, [{"id": t.question.id, "reason": t.failure} for t in wrong])
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
    counts = master.client.counts()
    tally.extra |= {"requests": counts["calls"], "replies from the cache": counts["cache_hits"]}
    tally.extra["US dollars"] = f"{counts['cost']:.4f}"
    return tally


def rejections_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.rejected.jsonl")


def is_trajectory(record: dict) -> bool:
    return "steps" in record and record.get("source") in ("gold", "teacher")


def is_rejection(record: dict) -> bool:
    return record.keys() == {"id", "reason"}


def recorded(path: Path, is_ours: Callable[[dict], bool]) -> list[dict]:
    """The records of a file that an earlier run wrote line by line; an unfinished last line is removed.

    A file with any other content is refused and left as it is.
    """
    if not path.exists():
        return []
    # Bytes, since an unfinished line may end inside a character.
    *lines, last = path.read_bytes().split(b"\n")
    torn = _parsed(last) is None and last[:7] == b'{"id": '[: len(last)]  # how every line of such a file begins
    records = []
    for number, line in enumerate(lines if torn else [*lines, last], 1):
        record = _parsed(line)
        if line.strip() and (record is None or not is_ours(record)):
            cause = f"{path} is there, and its line {number} is none that collect wrote"
            raise R3LiteError(cause, "Name another --output, or move the file away.")
        records += [] if record is None else [record]
    if last:
        if torn:
            print(f"{path}: the last line is torn and was removed", file=sys.stderr)
        write_jsonl(path, records)
    return records


def _parsed(line: bytes) -> dict | None:
    try:
        record = json.loads(line)
    except ValueError:  # neither JSON nor UTF-8
        return None
    return record if isinstance(record, dict) else None


def append(path: Path, records: list[dict]) -> None:
    """Adds whole lines and waits until they are on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8", newline="\n") as file:
        file.write("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
        file.flush()
        os.fsync(file.fileno())


def main(argv: list[str] | None = None) -> int:
    return command.run("collect", CollectConfig(), write_trajectories, argv)


if __name__ == "__main__":
    sys.exit(main())
