"""Answers the questions of an evaluation, scores the answers and has them judged; used by evaluate."""

from dataclasses import replace
from pathlib import Path

from r3lite.assembly.answering import build_engine
from r3lite.assembly.local_client import client_maker
from r3lite.assembly.policy import remedy_of_format
from r3lite.core import run_files
from r3lite.core.episode import Episode
from r3lite.core.files import sweep, write_json, write_jsonl, write_text
from r3lite.core.invocation import to_toml
from r3lite.datasets.qa import read_questions
from r3lite.evaluation.scores import Marks, summary
from r3lite.evaluation.tables import scores_table
from r3lite.evaluation.text_overlap import bert_score
from r3lite.retrieval.encoder import BertEncoder
from r3lite.retrieval.procedures import open_finder
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.rewards.judge import build_judge
from r3lite.rewards.judged import coherence, query_rationality
from r3lite.rewards.verdict import Verdict
from r3lite.settings import EvaluateConfig


def answer_and_score(config: EvaluateConfig, output: Path) -> None:
    """Writes config.toml, predictions.jsonl and then scores.json, and prints the scores."""
    setup = read_setup(config)
    questions = setup.questions
    # The judge is made before the long part, so that a missing key shows at once.
    judge = build_judge(
        config.judge,
        output=output,
        reward=None,
        make_client=client_maker(config.model, config.memory),
    )
    encoder = None
    if config.evaluate.bert_score:
        encoder = BertEncoder(config.evaluate.bert_score, "plain")
    engine = build_engine(
        config,
        questions=len(questions),
        baseline=config.evaluate.baseline,
        judge=config.judge,
    )
    retrieve = build_retriever(setup)
    finder = open_finder(config.procedures, lambda: setup.encoder)
    if finder:
        questions = [finder.with_procedure(question) for question in questions]
        matched = sum(bool(question.procedure) for question in questions)
        print(f"{matched} of {len(questions)} questions have a matching procedure")
    # From here on the folder is this evaluation's: after a kill, only the same evaluation may start there again.
    sweep(output)  # removes files that a killed process left half-written
    write_text(output / run_files.CONFIG, to_toml(config, "evaluate"))
    seeds = [f"{config.common.seed}/{i}" for i in range(len(questions))]
    sequences = engine.run(questions, seeds, retrieve, progress="evaluate")
    episodes = [sequence.episode() for sequence in sequences]
    if setup.query_cache:
        print(setup.query_cache.line())
    bert_f1s = bert_scores(encoder, episodes) if encoder else [None] * len(episodes)
    marks = [Marks.of(episode, bert_score=score) for episode, score in zip(episodes, bert_f1s)]
    write_predictions(output, episodes, marks)  # before the judge is asked: its calls may fail or be capped
    verdicts: list[Verdict | None] = []
    if judge:
        verdicts = judge.verdicts(episodes, progress="judge")
        marks = [
            with_verdict(mark, episode, verdict)
            for mark, episode, verdict in zip(marks, episodes, verdicts, strict=True)
        ]
        write_predictions(output, episodes, marks)
    record = summary(episodes, marks, config.common.seed)
    if judge:
        record["judge"] = judge.counts() | {"judge/missing": verdicts.count(None)}
    write_json(output / run_files.SCORES, record)
    print(scores_table(record, remedy_of_format(config.model)))
    print(f"written to {output / run_files.SCORES}; answers: {output / run_files.PREDICTIONS}")


def read_setup(config: EvaluateConfig) -> Setup:
    """Returns what the retriever is built from, with the questions.

    Raises R3LiteError if there is nothing to search, unless --retriever is golden or none.
    """
    setup = Setup(
        config.retrieval,
        questions=read_questions(config.data.data, config.data.limit, config.data.skip_bad_rows),
        seed=config.common.seed,
        skip_bad_rows=config.data.skip_bad_rows,
    )
    setup.check()
    return setup


def write_predictions(output: Path, episodes: list[Episode], marks: list[Marks]) -> None:
    """Writes predictions.jsonl: a line for each episode, with its marks."""
    records = [episode.to_json() | mark.to_json() for episode, mark in zip(episodes, marks)]
    write_jsonl(output / run_files.PREDICTIONS, records)


def with_verdict(marks: Marks, episode: Episode, verdict: Verdict | None) -> Marks:
    """Returns the marks of an episode with a judge's verdict on its answer, its analyses and its queries.

    Without a verdict, the marks stay as they are.
    """
    if not verdict:
        return marks
    means = {}
    if episode.steps:
        means["reasoning_accuracy"] = coherence(episode, verdict)
    if episode.search_count:
        means["query_rationality"] = query_rationality(episode, verdict)
    return replace(marks, judged=verdict.correct, means=marks.means | means)


def bert_scores(encoder: BertEncoder, episodes: list[Episode]) -> list[float]:
    """Returns BERTScore F1 of each answer against the gold answer that it is most like."""
    texts: dict[str, None] = {}  # each once, in order
    for episode in episodes:
        texts |= dict.fromkeys((episode.prediction, *episode.question.answers))
    vectors = dict(zip(texts, encoder.encode_tokens(list(texts)), strict=True))

    def best_f1(episode: Episode) -> float:
        prediction = vectors[episode.prediction]
        return max(bert_score(prediction, vectors[answer]).f1 for answer in episode.question.answers)

    return [best_f1(episode) for episode in episodes]
