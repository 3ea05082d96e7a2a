"""Writes SFT trajectories: from gold decompositions without a teacher, or sampled from a teacher or from the model
itself and filtered.

Both are given the student's prompts and the documents that their own queries brought, never the answer.
"""

import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from r3lite.core import command
from r3lite.core.config import UsageError
from r3lite.core.episode import Document, Episode, Failure, Question, Retrieve, Search, retrieve_all
from r3lite.core.errors import R3LiteError
from r3lite.core.files import append_jsonl, check_writable, sole_writer, write_jsonl, write_text
from r3lite.core.invocation import to_toml
from r3lite.datasets.collected import Earlier, Tally, config_of, ids, read_earlier, rejections_of
from r3lite.protocols.base import Protocol
from r3lite.settings import (
    CollectSettings,
    Common,
    JudgeSettings,
    LengthSettings,
    MemorySettings,
    ModelSettings,
    ProtocolSettings,
    QuestionSettings,
    RetrievalSettings,
    SamplingSettings,
    TeacherCacheSettings,
    TruncationSettings,
)

if TYPE_CHECKING:  # torch is loaded after the arguments are read, so that --help answers at once
    from r3lite.datasets.trajectories import Trajectory
    from r3lite.retrieval.setup import Setup

MANY = 1000  # questions of a dry run without --limit, which does not count them


@dataclass(frozen=True)
class CollectConfig:
    """Writes trajectories to fine-tune on, one JSON object a line: question, steps with documents, answer.

    --source gold needs questions with decompositions or supporting facts (MuSiQue, HotpotQA, 2WikiMultiHopQA) and no
    teacher. --source teacher samples them from --judge-model, of Gemini or with --judge openai of another server, whose
    key is read from the environment. --source self samples them from --model with --adapter, which needs no key.
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
    lengths: LengthSettings = LengthSettings()
    sampling: SamplingSettings = SamplingSettings(temperature=0.7)  # that of RFT (arXiv 2308.01825)
    truncation: TruncationSettings = TruncationSettings()


def run(config: CollectConfig) -> None:
    if config.cache.teacher_logprobs is None:
        write_trajectories(config)
        return
    from r3lite.assembly import teacher  # after the arguments are read: torch takes seconds to load

    if config.common.output:
        raise UsageError("--teacher-logprobs names what is written: leave --output out")
    teacher.write_cache(config)


def plan(config: CollectConfig) -> str:
    """The memory that a model on this device takes, for `--dry-run`."""
    length = config.lengths.max_length
    if config.cache.teacher_logprobs is None:
        if config.collect.source != "self":
            return ""
        from r3lite.assembly.answering import plan_memory

        episodes = (config.data.limit or MANY) * config.collect.num_generations
        return f"\nMemory, for episodes of {length} tokens\n{plan_memory(config, episodes).table()}"
    from r3lite.assembly import teacher

    told = f"\nMemory, for trajectories of {length} tokens\n{teacher.plan_cache(config).table()}\n\n"
    most = teacher.on_disk(1000 * length, config.cache.teacher_top)
    return f"{told}on disk: at most {most} for 1,000 trajectories, if every token has loss"


def write_trajectories(config: CollectConfig) -> None:
    if config.collect.source == "teacher" and config.judge.judge == "local":
        raise UsageError("--judge local cannot teach: pass gemini, or openai with the address of a server of your own")
    if config.collect.source == "self" and config.sampling.temperature == 0 and config.collect.num_generations > 1:
        raise UsageError("--temperature 0 samples the same episode again and again: pass --num-generations 1")
    output = Path(config.common.output or time.strftime("runs/collect-%Y%m%d-%H%M%S.jsonl"))
    check_output(output, config)
    with sole_writer(output, folder=False):
        earlier = read_earlier(output, config.collect.source, config)
        tally = collect(config, output, earlier)
    print(tally.table())
    print(f"written to {output}")
    if not (tally.kept or tally.extra.get("kept by earlier runs")):
        raise R3LiteError("no trajectory was kept", "The table above says why.")


def collect(config: CollectConfig, output: Path, earlier: Earlier) -> Tally:
    from r3lite.datasets.contamination import without
    from r3lite.datasets.qa import read_questions
    from r3lite.protocols.registry import build_protocol
    from r3lite.retrieval.retriever import build_retriever
    from r3lite.retrieval.setup import Setup

    questions = read_questions(config.data.data, config.data.limit, config.data.skip_bad_rows)
    if config.collect.exclude:
        questions = without(questions, config.collect.exclude, config.data.skip_bad_rows)
    protocol = build_protocol(config.protocol)
    config.retrieval.check_sources(protocol.plans)
    setup = Setup(config.retrieval, questions, config.common.seed, skip_bad_rows=config.data.skip_bad_rows)
    if config.collect.source == "self":
        return self_taught(config, questions, protocol, setup, output, earlier)
    retrieve = build_retriever(setup)
    if config.collect.source == "gold":
        return gold(config, questions, protocol, retrieve, output)
    return teacher(config, questions, protocol, retrieve, output, earlier)


def check_output(output: Path, config: CollectConfig) -> None:
    """Refuses, before any question is read, an output that is an input, no file, or cannot be written."""
    remedy = "Name a new file that ends in .jsonl."
    try:
        inputs = [("--data", config.data.data), ("--corpus", config.retrieval.corpus)]
        for flag, given in [*inputs, *(("--exclude", file) for file in config.collect.exclude or ())]:
            if given and output.exists() and Path(given).exists() and output.samefile(given):
                raise R3LiteError(f"--output {output} is the file of {flag}", remedy)
        if output.exists() and not output.is_file():
            raise R3LiteError(f"--output {output} is a {'folder' if output.is_dir() else 'device'}", remedy)
        check_writable(Path(os.path.realpath(output)).parent)
        if output.exists():
            open(output, "ab").close()
    except OSError as error:
        raise R3LiteError(f"--output {output} cannot be written: {error}", "Name another file.") from error


def gold(
    config: CollectConfig, questions: list[Question], protocol: Protocol, retrieve: Retrieve, output: Path
) -> Tally:
    """Writes a trajectory for every question with a decomposition whose hops the retriever finds."""
    from r3lite.datasets.evidence import demonstrate
    from r3lite.datasets.gold import obstacle, shown
    from r3lite.datasets.teacher import WITHOUT_SEARCH
    from r3lite.datasets.trajectories import Trajectory, check_steps

    tally, usable, written = Tally(len(questions)), [], []
    by_evidence = config.collect.demonstrations == "evidence" and protocol.searches and not protocol.plans
    for question in questions:
        reason = obstacle(question, config.lengths.max_hops, protocol.searches)
        if not (reason or by_evidence):
            steps = shown(question, [()] * len(question.hops), protocol)
            idle = config.collect.without_search == "drop" and not any(step.searches for step in steps)
            reason = WITHOUT_SEARCH if idle else check_steps(steps, protocol)
        if reason:
            tally.rejected[reason] += 1
        else:
            usable.append(question)
    if by_evidence:
        for made in demonstrate(usable, retrieve, config.lengths.max_hops, config.lengths.max_document_tokens):
            if reason := made.rejected or check_steps(made.steps, protocol):
                tally.rejected[reason] += 1
                continue
            written.append(Trajectory.of(made.question, made.steps, "gold"))
            tally.keep_retrieved(made.question, made.steps)
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
        written.append(Trajectory.of(q, shown(q, documents, protocol, hurried), "gold"))
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

    rejected, kept_before, rejected_before = rejections_of(output), ids(earlier.kept), ids(earlier.rejected)
    waiting = [q for q in questions if q.id not in kept_before | rejected_before]
    tally = Tally(len(questions))
    if len(waiting) < len(questions):
        tally.extra["kept by earlier runs"] = sum(q.id in kept_before for q in questions)
        tally.extra["rejected by earlier runs"] = sum(q.id in rejected_before for q in questions)
    client = Client(config.judge, Path(config.judge.judge_cache or f"{output}.cache"))
    sampler, size = (
        Teacher(config.collect, client, protocol, retrieve, config.common.seed, config.lengths.max_hops),
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
        made = [Trajectory.of(t.question, t.steps, "teacher") for t in right]
        append_jsonl(output, [t.to_json() for t in made])
        append_jsonl(rejected, [{"id": t.question.id, "reason": t.failure} for t in wrong])
        for this in right:
            tally.keep_retrieved(this.question, this.steps)
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


def self_taught(
    config: CollectConfig, questions: list[Question], protocol: Protocol, setup: "Setup", output: Path, earlier: Earlier
) -> Tally:
    """Adds to the file the model's own right episodes; questions that earlier runs have done are not sampled again."""
    from r3lite.assembly.answering import build_engine
    from r3lite.datasets.self_taught import Harvest
    from r3lite.retrieval.retriever import build_retriever

    harvest, many = Harvest.after(earlier, questions, protocol, output), config.collect.num_generations
    if harvest.waiting:
        engine, retrieve = build_engine(config, many * len(harvest.waiting)), build_retriever(setup)
        write_text(config_of(output), to_toml(config, "collect"))

        def sample(questions: list[Question], seeds: list[str]) -> list[Episode]:
            return [sequence.episode() for sequence in engine.run(questions, seeds, retrieve)]

        retrieves = protocol.searches and config.retrieval.retriever != "none"
        harvest.gather(sample, config.collect, protocol, retrieves, config.common.seed)
    return harvest.tally(many)


def main(argv: list[str] | None = None) -> int:
    return command.run("collect", CollectConfig(), run, argv, plan)


if __name__ == "__main__":
    sys.exit(main())
