"""Answers a question set with retrieval and scores it, in scores.json and predictions.jsonl; or compares two such."""

import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from r3lite.assembly.answering import build_engine, plan_memory
from r3lite.core import command
from r3lite.core.config import UsageError, flag, flat
from r3lite.core.errors import R3LiteError
from r3lite.core.invocation import load_toml, to_toml
from r3lite.settings import (
    Common,
    DataSettings,
    EvaluateSettings,
    JudgeSettings,
    LengthSettings,
    MemorySettings,
    ModelSettings,
    ProcedureSettings,
    ProtocolSettings,
    RetrievalSettings,
    SamplingSettings,
    TruncationSettings,
)
from r3lite.settings.commands import with_baseline

if TYPE_CHECKING:  # torch is loaded after the arguments are read, so that --help answers at once
    from r3lite.core.episode import Episode
    from r3lite.evaluation.scores import Marks
    from r3lite.retrieval.bert_encoder import BertEncoder
    from r3lite.rewards.verdict import Verdict

CONFIG, PREDICTIONS, SCORES, COMPARISON = "config.toml", "predictions.jsonl", "scores.json", "comparison.json"
UNFINISHED = {CONFIG, PREDICTIONS, "judge-cache"}  # what is there before SCORES, which is written last
MANY = 1000  # questions of a dry run without --limit, which does not count them


@dataclass(frozen=True)
class EvaluateConfig:
    """Answers questions step by step with a retriever, greedily by default, and scores the answers.

    Writes scores.json (exact match, F1, format adherence, retrieval recall, combined score, mean searches and more,
    each with a 95 % bootstrap interval, also by number of hops and type of question) and predictions.jsonl (every
    answer with its steps, documents and scores) to --output. The search that a --baseline makes for the model counts as
    a well-formed step. --compare A B answers nothing: it compares two evaluations. docs/evaluation.md has the formulas.
    """

    common: Common = Common()
    evaluate: EvaluateSettings = EvaluateSettings()
    model: ModelSettings = ModelSettings()
    memory: MemorySettings = MemorySettings()
    data: DataSettings = DataSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    procedures: ProcedureSettings = ProcedureSettings()
    protocol: ProtocolSettings = ProtocolSettings()
    lengths: LengthSettings = LengthSettings()
    sampling: SamplingSettings = SamplingSettings(temperature=0.0)
    truncation: TruncationSettings = TruncationSettings()
    judge: JudgeSettings = JudgeSettings()


def evaluate(config: EvaluateConfig) -> None:
    from r3lite.core.files import sole_writer

    if config.evaluate.compare:
        compare_predictions(config)
        return
    if not config.data.data:
        raise UsageError("--data is missing: a question file of any supported format, or name,subset,split")
    check_baseline(config)
    output = Path(config.common.output or time.strftime("runs/evaluate-%Y%m%d-%H%M%S"))
    with sole_writer(output):
        check_output(config, output)
        answer_and_score(config, output)


def check_baseline(config: EvaluateConfig) -> None:
    """Refuses what a baseline lacks, and what was given that it does not use."""
    from r3lite.protocols.registry import build_protocol
    from r3lite.protocols.transcript import OPENINGS

    baseline = config.evaluate.baseline
    opening = OPENINGS[baseline]
    protocol = build_protocol(config.protocol, opening)
    if opening.plain:
        sections = (config.protocol, config.procedures)
        unused = {name for section in sections for name in vars(section)} - {"system_prompt"}
        unused |= {"max_hops", "end_at_idle_query"} | ({"retriever"} if baseline != "rag" else set())
        now, usual = flat(config), flat(command.usual("evaluate", config))
        if given := [name for name in now if name in unused and now[name] != usual[name]]:
            told = f"--baseline {baseline} has no use for {flag(given[0])} {now[given[0]]}"
            raise UsageError(f"{told}: it asks in a plain chat, once; leave it out")
    config.retrieval.check_sources(protocol.plans)
    if opening.searches and config.retrieval.retriever == "none":
        raise R3LiteError(f"--baseline {baseline} retrieves, and --retriever is none", "Choose a retriever.")
    if opening.searches and not protocol.searches:
        raise R3LiteError(
            f"--baseline {baseline} searches, and --format {config.protocol.format} has no search",
            "Choose another baseline or format.",
        )


def check_output(config: EvaluateConfig, output: Path) -> None:
    """Refuses a folder that holds anything but what this very evaluation has left unfinished."""
    from r3lite.core.files import names_in

    names, remedy = names_in(output), f"Name another folder, such as {output / 'evaluation'}."
    if SCORES in names:
        raise R3LiteError(f"--output {output} holds an evaluation already", remedy)
    if names and (CONFIG not in names or not names <= UNFINISHED):
        other = min(names - UNFINISHED or names)
        raise R3LiteError(f"--output {output} is not an empty folder: it holds {other}", remedy)
    if names:
        command.refuse_another_run(output / CONFIG, "evaluate", config, output)


def answer_and_score(config: EvaluateConfig, output: Path) -> None:
    # Imported after the arguments are read: torch takes seconds to load.
    from r3lite.assembly.local_client import client_maker
    from r3lite.core.files import write_json, write_jsonl, write_text
    from r3lite.datasets.qa import read_questions
    from r3lite.evaluation.scores import Marks
    from r3lite.evaluation.tables import scores_table
    from r3lite.retrieval.bert_encoder import BertEncoder
    from r3lite.retrieval.procedures import open_finder
    from r3lite.retrieval.retriever import build_retriever
    from r3lite.retrieval.setup import Setup
    from r3lite.rewards.judge import build_judge

    questions = read_questions(config.data.data, config.data.limit, config.data.skip_bad_rows)
    # Before the long part, so that a missing key shows at once.
    judge = build_judge(config.judge, output, None, client_maker(config.model, config.memory))
    encoder = BertEncoder(config.evaluate.bert_score, "plain") if config.evaluate.bert_score else None
    engine = build_engine(config, len(questions), config.evaluate.baseline, config.judge)
    setup = Setup(config.retrieval, questions, config.common.seed, skip_bad_rows=config.data.skip_bad_rows)
    retrieve = build_retriever(setup)
    if finder := open_finder(config.procedures, lambda: setup.encoder):
        questions = [finder.before(question) for question in questions]
        print(f"{sum(bool(q.procedure) for q in questions)} of {len(questions)} questions have a procedure before them")
    # From here on the folder is this evaluation's: if it is killed, only the same one may be begun there again.
    write_text(output / CONFIG, to_toml(config, "evaluate"))
    seeds = [f"{config.common.seed}/{i}" for i in range(len(questions))]
    episodes = [s.episode() for s in engine.run(questions, seeds, retrieve, progress="evaluate")]
    if setup.query_cache:
        print(setup.query_cache.line())
    alike = bert_scores(encoder, episodes) if encoder else [None] * len(episodes)
    marks = [Marks.of(e, bert_score=b) for e, b in zip(episodes, alike)]

    def write_predictions() -> None:
        write_jsonl(output / PREDICTIONS, [e.to_json() | m.to_json() for e, m in zip(episodes, marks)])

    write_predictions()  # before the judge is asked: its calls may fail or be capped
    if judge:
        verdicts = judge.verdicts(episodes, progress="judge")
        marks = [judged(m, e, v) if v else m for m, e, v in zip(marks, episodes, verdicts, strict=True)]
        write_predictions()
    found = summary(episodes, marks, config.common.seed)
    if judge:
        found["judge"] = judge.counts() | {"judge/missing": verdicts.count(None)}
    write_json(output / SCORES, found)
    print(scores_table(found))
    print(f"written to {output / SCORES}; what it said: {output / PREDICTIONS}")


def summary(episodes: "list[Episode]", marks: "list[Marks]", seed: int) -> dict:
    """What scores.json has of episodes and their marks. Those at which the retriever failed are left out."""
    from r3lite.evaluation.scores import scores, scores_by
    from r3lite.evaluation.text_overlap import corpus_bleu

    whole = [(e, m) for e, m in zip(episodes, marks, strict=True) if not e.failure]
    if not whole:
        raise R3LiteError(f"the retriever failed at every question: {episodes[0].failure}", "Mend that, and try again.")
    marks = [m for _, m in whole]
    faults = Counter(fault for e, _ in whole for step in e.steps for fault in step.faults)
    found = scores(marks, seed) | {
        "corpus_bleu": corpus_bleu([e.prediction for e, _ in whole], [e.question.answers for e, _ in whole]),
        "by_hops": scores_by(lambda m: m.hops, marks, seed),
        "by_type": scores_by(lambda m: m.type, marks, seed),
        "faults": dict(faults.most_common()),
        "finish": {f: sum(e.finish == f for e in episodes) for f in sorted({e.finish for e in episodes})},
    }
    failed = len(episodes) - len(whole)
    return found | ({"retrieval_failures": failed} if failed else {})


def judged(marks: "Marks", episode: "Episode", verdict: "Verdict") -> "Marks":
    """The marks of an episode with what a judge says of its answer, its analyses and, if it asks, its queries."""
    from r3lite.rewards.judged import coherence, query_rationality

    means = {"reasoning_accuracy": coherence(episode, verdict)} if episode.steps else {}
    if episode.searches:
        means["query_rationality"] = query_rationality(episode, verdict)
    return replace(marks, judged=verdict.correct, means=marks.means | means)


def bert_scores(encoder: "BertEncoder", episodes: "list[Episode]") -> list[float]:
    """BERTScore F1 of each answer against the gold answer that it is most like."""
    from r3lite.evaluation.text_overlap import bert_score

    texts = list({text: None for e in episodes for text in (e.prediction, *e.question.answers)})
    vectors = dict(zip(texts, encoder.encode_tokens(texts), strict=True))
    return [max(bert_score(vectors[e.prediction], vectors[a]).f1 for a in e.question.answers) for e in episodes]


def compare_predictions(config: EvaluateConfig) -> None:
    """Compares two evaluations of the same questions; writes comparison.json if there is an --output."""
    from r3lite.core.files import names_in, sole_writer, write_json
    from r3lite.evaluation.comparisons import compare
    from r3lite.evaluation.tables import comparison_table

    if config.data.data:
        raise UsageError("--compare reads two evaluations that are there; leave --data out")
    a, b = config.evaluate.compare
    ours, theirs = read_predictions(a), read_predictions(b)
    check_same_questions(a, b, ours, theirs)
    marks = [marks for _, marks in ours.values()], [theirs[id][1] for id in ours]
    found = {"n": len(ours), "a": a, "b": b, "metrics": compare(*marks, config.common.seed)}
    print(comparison_table(found | {"a": named(a), "b": named(b)}))
    if config.common.output:
        output = Path(config.common.output)
        with sole_writer(output):
            if names_in(output):
                raise R3LiteError(f"--output {output} is not an empty folder", "Name another folder.")
            write_json(output / COMPARISON, found)
        print(f"written to {output / COMPARISON}")


def named(path: str) -> str:
    """The path of an evaluation, with its baseline if it is a folder whose settings name one."""
    kept = Path(path) / CONFIG
    return with_baseline(path, load_toml(kept).get("evaluate", {}) if kept.exists() else {})


def read_predictions(path: str) -> "dict[str, tuple[str, Marks]]":
    """Question and marks of each line of a predictions file, or of that of an evaluation's folder, by id."""
    from r3lite.core.files import read_jsonl
    from r3lite.evaluation.scores import Marks

    file = Path(path) / PREDICTIONS if Path(path).is_dir() else Path(path)
    found = {}
    for line in read_jsonl(file, "Name an evaluation's folder, or its predictions.jsonl."):
        id = line.identifier("id")
        if id in found:
            raise line.error(f"the id {id!r} is there twice")
        found[id] = line.text("question"), Marks.from_json(line)
    if not found:
        raise R3LiteError(f"{file} holds no predictions", "Name an evaluation's folder, or its predictions.jsonl.")
    return found


def check_same_questions(a: str, b: str, ours: dict, theirs: dict) -> None:
    """Raises R3LiteError unless two evaluations are of the same questions."""
    remedy = "Evaluate both on the same --data with the same --limit."
    only = [sorted(x.keys() - y.keys()) for x, y in ((ours, theirs), (theirs, ours))]
    if any(only):
        told = " and ".join(f"{len(ids)} only in {x}, such as {ids[0]}" for x, ids in zip((a, b), only) if ids)
        raise R3LiteError(f"the two are not of the same questions: {told}", remedy)
    if other := [id for id in ours if ours[id][0] != theirs[id][0]]:
        raise R3LiteError(f"{len(other)} ids, such as {other[0]}, name different questions in {a} and {b}", remedy)


def main(argv: list[str] | None = None) -> int:
    def plan(config: EvaluateConfig) -> str:
        if config.evaluate.compare:
            return ""
        check_baseline(config)
        told = plan_memory(config, config.data.limit or MANY, config.judge)
        return f"\nMemory, for episodes of {config.lengths.max_length} tokens\n{told.table()}"

    return command.run("evaluate", EvaluateConfig(), evaluate, argv, plan)


if __name__ == "__main__":
    sys.exit(main())
