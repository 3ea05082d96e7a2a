"""Answers the questions of an evaluation, scores the answers and has them judged; used by evaluate."""

from dataclasses import replace
from pathlib import Path

from r3lite.assembly.answering import build_engine
from r3lite.assembly.local_client import client_maker
from r3lite.core.episode import Episode
from r3lite.core.files import sweep, write_json, write_jsonl, write_text
from r3lite.core.invocation import to_toml
from r3lite.datasets.qa import read_questions
from r3lite.evaluation.folder import CONFIG, PREDICTIONS, SCORES
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
    """Writes predictions.jsonl and then scores.json, and prints the scores."""
    questions = read_questions(config.data.data, config.data.limit, config.data.skip_bad_rows)
    # Before the long part, so that a missing key shows at once.
    judge = build_judge(config.judge, output, None, client_maker(config.model, config.memory))
    encoder = BertEncoder(config.evaluate.bert_score, "plain") if config.evaluate.bert_score else None
    engine = build_engine(config, len(questions), config.evaluate.baseline, config.judge)
    setup = Setup(config.retrieval, questions, config.common.seed, skip_bad_rows=config.data.skip_bad_rows)
    retrieve = build_retriever(setup)
    if finder := open_finder(config.procedures, lambda: setup.encoder):
        questions = [finder.before(question) for question in questions]
        print(f"{sum(bool(q.procedure) for q in questions)} of {len(questions)} questions have a matching procedure")
    # From here on the folder is this evaluation's: if it is killed, only the same one may be begun there again.
    sweep(output)
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
    print(f"written to {output / SCORES}; answers: {output / PREDICTIONS}")


def judged(marks: Marks, episode: Episode, verdict: Verdict) -> Marks:
    """The marks of an episode with what a judge says of its answer, its analyses and, if it asks, its queries."""
    means = {"reasoning_accuracy": coherence(episode, verdict)} if episode.steps else {}
    if episode.searches:
        means["query_rationality"] = query_rationality(episode, verdict)
    return replace(marks, judged=verdict.correct, means=marks.means | means)


def bert_scores(encoder: BertEncoder, episodes: list[Episode]) -> list[float]:
    """BERTScore F1 of each answer against the gold answer that it is most like."""
    texts = list({text: None for e in episodes for text in (e.prediction, *e.question.answers)})
    vectors = dict(zip(texts, encoder.encode_tokens(texts), strict=True))
    return [max(bert_score(vectors[e.prediction], vectors[a]).f1 for a in e.question.answers) for e in episodes]
