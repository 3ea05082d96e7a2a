"""Evaluation end to end on a toy model: the files' keys, scores by hand with a scripted model, baselines, the judge."""

import errno
import json
import os

import pytest

from r3lite import evaluate
from r3lite.assembly import evaluating
from r3lite.core.errors import R3LiteError
from r3lite.core.files import sole_writer, write_jsonl
from r3lite.protocols.layout import Layout
from r3lite.retrieval.index import PassageIndex
from r3lite.rewards.verdict import StepVerdict, Verdict
from r3lite.rollout.engine import Engine
from tests.errors import shows
from tests.evaluating import SCORES, answer, ask, read_results


def test_scores_by_hand(toy, says, tmp_path, capsys):
    says(
        {
            "Ada": [ask(1, "Ada lives in Adatown"), ask(2, "Bob lives in Bobtown"), answer(3, "The Adatown.")],
            "Bob": [answer(1, "Bobtown village")],
            "Cy": ["I do not know."],
        }
    )
    assert evaluate.main([*toy, "--top-k", "1"]) == 0
    scores, predictions = read_results(tmp_path / "out")
    values = {name: scores[name]["value"] for name in SCORES}
    expected = {"em": 1 / 3, "f1": (1 + 2 / 3) / 3, "format_adherence": 4 / 5, "retrieval_recall": 1 / 3}
    expected |= {"combined": (0.8 * 0.9 + 0.2 + 0.8 * 0.3 * 2 / 3) / 3, "mean_searches": 2 / 3}
    assert values == pytest.approx(expected)
    assert scores["n"] == 3 and scores["finish"] == {"answered": 2, "malformed": 1}
    assert scores["faults"] == {"no_step_heading": 1, "no_analysis": 1, "no_query_or_answer": 1}
    assert {h: s["n"] for h, s in scores["by_hops"].items()} == {"2": 2, "3": 1}
    assert [(p["id"], p["prediction"], p["finish"], p["em"], p["recall"]) for p in predictions] == [
        ("Ada", "The Adatown.", "answered", 1.0, 1.0),
        ("Bob", "Bobtown village", "answered", 0.0, 0.0),
        ("Cy", "", "malformed", 0.0, 0.0),
    ]
    assert predictions[1]["f1"] == pytest.approx(2 / 3)
    assert predictions[0]["steps"][0]["documents"][0]["text"] == "Ada lives in Adatown."
    stdout = capsys.readouterr().out
    assert "exact match          0.333" in stdout and "2 answered, 1 malformed" in stdout
    assert scores["em_full_recall"] == {"value": 1.0, "low": 1.0, "high": 1.0, "n": 1}  # Ada alone found both
    assert "EM, full recall      1.000     1.000   1.000   n = 1" in stdout
    assert "faults of steps: 1 no step heading, 1 no analysis, 1 no query or answer" in stdout
    # Ada found both gold paragraphs and no other, and answered right; Bob searched nothing; Cy answered nothing.
    support_scores = {
        name: scores[name]["value"] for name in ("sp_em", "sp_f1", "sp_precision", "sp_recall", "joint_em", "joint_f1")
    }
    assert support_scores == pytest.approx(dict.fromkeys(support_scores, 1 / 3))
    # Byte by byte, with the token that ends each of the five turns.
    turns = [ask(1, "Ada lives in Adatown"), ask(2, "Bob lives in Bobtown"), answer(3, "The Adatown.")]
    assert predictions[0]["reasoning_tokens"] == sum(map(len, turns)) + 3
    assert predictions[1]["reasoning_tokens"] == len(answer(1, "Bobtown village")) + 1
    assert scores["rouge_l"]["value"] == pytest.approx((2 / 3 + 2 / 3) / 3)  # ROUGE keeps articles
    assert scores["by_type"] == {} and scores["corpus_bleu"] == 0.0  # no answer has three words


def test_an_answer_out_of_the_worked_example_is_a_fault_and_is_reported(toy, says, tmp_path, capsys):
    """Base models answered with the town of the prompt's example, and nothing said so."""
    says(
        {
            "Ada": [ask(1, "Where is Ljungby?"), answer(2, "The river Lagan.")],
            "Bob": [answer(1, "Marta Lindqvist")],
            "Cy": [answer(1, "Cytown")],
        }
    )
    assert evaluate.main([*toy]) == 0
    scores, predictions = read_results(tmp_path / "out")
    assert scores["faults"] == {"copied_example": 2} and scores["format_adherence"]["value"] == 2 / 4
    assert [p["finish"] for p in predictions] == ["answered"] * 3
    assert "2 of 3 answers repeat the prompt's worked example" in capsys.readouterr().out
    toy[toy.index("--output") + 1] = str(tmp_path / "out" / "again")
    assert evaluate.main([*toy, "--no-worked-example"]) == 0
    assert "repeat the prompt" not in capsys.readouterr().out
    # What was retrieved, or is asked, may be answered.
    toy[toy.index("--output") + 1] = str(tmp_path / "out" / "third")
    corpus = [{"id": "1", "title": "Ljungby", "text": "The river Lagan flows through it, says Marta Lindqvist."}]
    write_jsonl(tmp_path / "corpus.jsonl", corpus)
    says({name: [ask(1, "river"), answer(2, "Lagan")] for name in ("Ada", "Bob", "Cy")})
    assert evaluate.main([*toy, "--corpus", str(tmp_path / "corpus.jsonl")]) == 0
    assert "repeat the prompt" not in capsys.readouterr().out


def test_a_corpus_without_any_gold_paragraph_is_told(toy, says, tmp_path, capsys):
    """With the index of other questions every answer was wrong, and nothing said why."""
    question = "is this the index or corpus of these questions?"
    says({name: [ask(1, "river"), answer(2, "Lagan")] for name in ("Ada", "Bob", "Cy")})
    write_jsonl(tmp_path / "corpus.jsonl", [{"id": "1", "title": "Ljungby", "text": "The river Lagan flows there."}])
    assert evaluate.main([*toy, "--corpus", str(tmp_path / "corpus.jsonl")]) == 0
    assert question in capsys.readouterr().out
    # Without a search, recall says nothing of the corpus; with one gold paragraph it is the right one.
    for number, texts in enumerate(([answer(1, "Lagan")], [ask(1, "Ada lives in Adatown"), answer(2, "Lagan")])):
        toy[toy.index("--output") + 1] = str(tmp_path / f"other-{number}")
        says({"Ada": texts, "Bob": [answer(1, "Lagan")], "Cy": [answer(1, "Lagan")]})
        assert evaluate.main([*toy]) == 0
        assert question not in capsys.readouterr().out


def test_procedures_stand_before_the_questions_that_they_fit(toy, tmp_path, capsys, monkeypatch):
    prompts = {}
    opened = Layout.open

    def opening(layout, transcript):
        opened(layout, transcript)
        prompts[transcript.question.id] = layout.tokenizer.decode(transcript.tokens)

    monkeypatch.setattr(Layout, "open", opening)
    row = {"name": "Bobs", "description": "d", "trigger": "bob", "steps": [{"action": "Think"}]}
    (tmp_path / "p.json").write_text(json.dumps(row))
    argv = ["--procedures", str(tmp_path / "p.json"), "--procedures-by", "triggers", "--max-length", "3072"]
    assert evaluate.main([*toy, *argv]) == 0
    assert "1 of 3 questions have a matching procedure" in capsys.readouterr().out
    assert ["Procedure: Bobs" in prompts[name] for name in ("Ada", "Bob", "Cy")] == [False, True, False]
    _, predictions = read_results(tmp_path / "out")
    assert [row.get("procedure", "").partition(".")[0] for row in predictions] == ["", "Procedure: Bobs", ""]
    assert "procedures = " in (tmp_path / "out" / "config.toml").read_text()


def test_tags_and_solution_are_scored_as_r3_is(toy, says, tmp_path):
    think, working_out = "<think> Look. </think>", "<start_working_out> Look. <end_working_out>"
    says(
        {
            name: [f"{think}<search> {name} </search>", f"{think}<answer> Adatown </answer>"]
            for name in ("Ada", "Bob", "Cy")
        }
    )
    assert evaluate.main([*toy, "--format", "tags"]) == 0
    scores, predictions = read_results(tmp_path / "out")
    values = [scores[name]["value"] for name in ("em", "format_adherence", "mean_searches")]
    assert values == pytest.approx([1 / 3, 1, 1]) and all(p["steps"][0]["documents"] for p in predictions)
    (tmp_path / "out").rename(tmp_path / "tags")
    says({name: [f"{working_out}<SOLUTION> Adatown </SOLUTION>"] for name in ("Ada", "Bob", "Cy")})
    assert evaluate.main([*toy, "--format", "solution"]) == 0
    values = [read_results(tmp_path / "out")[0][name]["value"] for name in ("em", "format_adherence", "mean_searches")]
    assert values == pytest.approx([1 / 3, 1, 0])


def test_files_have_their_keys_and_a_second_run_writes_the_same(toy, tmp_path):
    """Random weights, nothing scripted: only noise is said, and all of it is reported."""
    limits = ["--max-new-tokens", "8", "--limit", "2"]
    assert evaluate.main([*toy, *limits]) == 0
    scores, predictions = read_results(tmp_path / "out")
    assert {"n", *SCORES} <= scores.keys()
    assert all(set(scores[name]) == {"value", "low", "high"} for name in SCORES)
    keys = {"id", "question", "answers", "prediction", "steps", "finish", "em", "f1", "recall"}
    assert len(predictions) == 2 and all(keys <= p.keys() for p in predictions)
    assert scores["format_adherence"]["value"] == 0.0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.toml", "predictions.jsonl", "scores.json"]
    (tmp_path / "out").rename(tmp_path / "first")
    assert evaluate.main(["--config", str(tmp_path / "first" / "config.toml")]) == 0
    assert read_results(tmp_path / "out") == (scores, predictions)


def test_batches_change_no_token(toy, tmp_path, monkeypatch):
    """The predictions of noise are empty: they are the same, whatever was sampled."""
    sample = Engine.run
    tokens = []
    evaluations = []

    def recorded(self, *arguments, **options):
        sequences = sample(self, *arguments, **options)
        tokens[-1] += [sequence.tokens for sequence in sequences]
        return sequences

    monkeypatch.setattr(Engine, "run", recorded)
    for size in ("1", "3"):
        tokens.append([])
        assert evaluate.main([*toy, "--max-new-tokens", "6", "--rollout-batch-size", size, "--temperature", "1"]) == 0
        evaluations.append(read_results(tmp_path / "out"))
        (tmp_path / "out").rename(tmp_path / size)
    assert evaluations[0] == evaluations[1]
    assert tokens[0] == tokens[1] and len({tuple(row[-6:]) for row in tokens[0]}) == 3


def test_questions_at_which_the_retriever_failed_are_left_out_of_the_scores(toy, says, tmp_path, monkeypatch, capsys):
    """As wrong answers they would lower the scores of a model that was given nothing to read."""
    says(
        {
            "Ada": [ask(1, "Ada lives in Adatown"), answer(2, "Adatown")],
            "Bob": [ask(1, "bad"), answer(2, "somewhere")],
            "Cy": [answer(1, "Cytown")],
        }
    )
    search = PassageIndex.search

    def sometimes(self, queries, k, own_places=None):
        if any(query in bad for query in queries):
            raise RuntimeError("can't allocate memory")
        return search(self, queries, k, own_places)

    bad = ["bad"]
    monkeypatch.setattr(PassageIndex, "search", sometimes)
    assert evaluate.main(toy) == 0
    scores, predictions = read_results(tmp_path / "out")
    assert scores["n"] == 2 and scores["em"]["value"] == 1.0 and scores["retrieval_failures"] == 1
    assert [p.get("failure") for p in predictions] == [None, "RuntimeError: can't allocate memory", None]
    assert "the retriever failed on 1 questions; they are left out of the scores" in capsys.readouterr().out
    bad += [f"Where does {name} live?" for name in ("Ada", "Bob", "Cy")]
    says({name: [answer(1, "x"), answer(2, "x")] for name in ("Ada", "Bob", "Cy")})
    baseline_flags = [*toy, "--output", str(tmp_path / "again"), "--baseline", "single-retrieval"]
    assert evaluate.main(baseline_flags) == 1
    assert "the retriever failed on every question" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["lexical"], ["hybrid", "--context", "question"], ["golden", "--noise-rate", "1"]])
def test_other_retrievers_bring_documents(toy, says, tmp_path, flags):
    says({name: [ask(1, f"Where does {name} live?"), answer(2, f"{name}town")] for name in ("Ada", "Bob", "Cy")})
    assert evaluate.main([*toy, "--retriever", *flags]) == 0
    scores, predictions = read_results(tmp_path / "out")
    assert scores["n"] == 3 and all(p["steps"][0]["documents"] for p in predictions)


@pytest.mark.parametrize(("baseline", "searches"), [("no-retrieval", 0), ("single-retrieval", 1)])
def test_baselines(toy, says, tmp_path, baseline, searches):
    # The opening of the answer is given, so the model says no more than the answer, in the first or the second step.
    says({name: [f" {name}town"] * 2 for name in ("Ada", "Bob", "Cy")})
    assert evaluate.main([*toy, "--baseline", baseline]) == 0
    scores, predictions = read_results(tmp_path / "out")
    assert scores["em"]["value"] == 1.0 and scores["mean_searches"]["value"] == searches
    assert [len(p["steps"]) for p in predictions] == [1 + searches] * 3
    if searches:
        assert [p["steps"][0]["query"] for p in predictions] == [p["question"] for p in predictions]
        assert scores["retrieval_recall"]["value"] > 0


def test_an_immediate_answer_needs_nothing_to_search(toy, says, tmp_path):
    says({name: [f" {name}town"] for name in ("Ada", "Bob", "Cy")})
    questions = [{"id": name, "question": f"Where does {name} live?", "answer": name} for name in ("Ada", "Bob")]
    write_jsonl(tmp_path / "bare.jsonl", questions)
    assert evaluate.main([*toy, "--baseline", "no-retrieval", "--data", str(tmp_path / "bare.jsonl")]) == 0
    assert read_results(tmp_path / "out")[0]["n"] == 2


class FakeJudge:
    """Calls the first answer right, and fails at the second."""

    def verdicts(self, episodes, progress=None):
        opinions = [tuple(StepVerdict(0.0, 0.75, 0.5) for _ in e.steps) for e in episodes]
        return [Verdict(True, opinions[0]), None, Verdict(False, opinions[2])]

    def counts(self):
        return {"judge/calls": 3}


def test_judged_accuracy_leaves_failed_verdicts_out(toy, says, tmp_path, monkeypatch, capsys):
    says({name: [answer(1, "somewhere")] for name in ("Ada", "Bob", "Cy")})
    monkeypatch.setattr(evaluating, "build_judge", lambda *_, **__: FakeJudge())
    assert evaluate.main([*toy, "--judge", "gemini"]) == 0
    scores, predictions = read_results(tmp_path / "out")
    assert scores["judge_accuracy"]["value"] == 0.5 and scores["em"]["value"] == 0.0
    assert scores["judge"] == {"judge/calls": 3, "judge/missing": 1}
    assert [p.get("judged") for p in predictions] == [True, None, False]
    assert [p.get("reasoning_accuracy") for p in predictions] == [0.75, None, 0.75]
    assert scores["reasoning_accuracy"]["value"] == 0.75 and "query_rationality" not in scores  # nothing was asked
    assert "1 verdicts of the judge are missing" in capsys.readouterr().out


def test_what_was_said_is_kept_when_the_judge_gives_up(toy, says, tmp_path, monkeypatch, capsys):
    class Broken(FakeJudge):
        def verdicts(self, episodes, progress=None):
            raise R3LiteError("most calls failed", code="broken")

    says({name: [answer(1, "somewhere")] for name in ("Ada", "Bob", "Cy")})
    monkeypatch.setattr(evaluating, "build_judge", lambda *_, **__: Broken())
    assert evaluate.main([*toy, "--judge", "gemini"]) == 1
    assert (tmp_path / "out" / "predictions.jsonl").exists() and not (tmp_path / "out" / "scores.json").exists()
    # The same evaluation may be begun again in its folder, and no other one.
    monkeypatch.setattr(evaluating, "build_judge", lambda *_, **__: FakeJudge())
    assert evaluate.main([*toy, "--judge", "gemini", "--top-k", "1"]) == 1
    assert shows(capsys.readouterr().err, "other-run", "evaluate", "top_k (was 2, is 1)")
    assert evaluate.main([*toy, "--judge", "gemini", "--judge-rpm", "7"]) == 0
    assert (tmp_path / "out" / "scores.json").exists()


def test_errors_say_what_to_do(toy, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("GOOGLE_API_KEY", raising=False)
    monkeypatch.delenv("GEMINI_API_KEY", raising=False)
    assert evaluate.main(["--model", "tiny"]) == 2
    assert capsys.readouterr().err.startswith("r3lite.evaluate: --data is missing")
    assert evaluate.main([*toy, "--judge", "gemini"]) == 1
    assert "GOOGLE_API_KEY" in capsys.readouterr().err
    assert evaluate.main([*toy, "--baseline", "single-retrieval", "--retriever", "none"]) == 1
    assert shows(capsys.readouterr().err, "baseline-without-retriever", "single-retrieval")
    assert evaluate.main([*toy, "--baseline", "single-retrieval", "--format", "solution"]) == 1
    assert shows(capsys.readouterr().err, "baseline-without-searches", "solution")
    assert evaluate.main([*toy, "--baseline", "no_retrieval"]) == 2
    assert "did you mean no-retrieval?" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "holds",
    [["metrics.jsonl", "config.toml"], ["checkpoint-3"], ["index.faiss", "manifest.json"], ["predictions.jsonl"]],
)
def test_what_is_in_the_folder_is_not_written_over(toy, tmp_path, capsys, holds):
    """The config.toml that a run is resumed with was replaced by the evaluation's; an index became a mixture."""
    (tmp_path / "out").mkdir()
    for name in holds:
        (tmp_path / "out" / name).write_text("[evaluate]\n")
    assert evaluate.main(toy) == 1
    stderr = capsys.readouterr().err
    assert f"is not an empty folder: it holds {holds[0]}" in stderr and "Pass another folder" in stderr
    assert {p.name: p.read_text() for p in (tmp_path / "out").iterdir()} == dict.fromkeys(holds, "[evaluate]\n")


def test_an_earlier_evaluation_is_not_replaced(toy, tmp_path, capsys):
    limits = ["--max-new-tokens", "4", "--limit", "1"]
    assert evaluate.main([*toy, *limits]) == 0
    files_before = {p: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    assert evaluate.main([*toy, *limits]) == 1
    assert shows(capsys.readouterr().err, "evaluation-exists")
    assert {p: p.read_bytes() for p in (tmp_path / "out").iterdir()} == files_before


def test_an_output_in_which_another_process_writes_is_refused(toy, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluating, "build_engine", lambda *_, **__: pytest.fail("the long part began"))
    with sole_writer(tmp_path / "out"):
        assert evaluate.main(toy) == 1
    assert f"writes to {tmp_path / 'out'}" in capsys.readouterr().err


@pytest.mark.parametrize("full", ["config.toml", "predictions.jsonl", "scores.json"])
def test_a_full_disk_is_an_error_that_names_the_file(toy, tmp_path, monkeypatch, capsys, full):
    replace = os.replace

    def failing(source, target):
        if target.name == full:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    assert evaluate.main([*toy, "--max-new-tokens", "4", "--limit", "1"]) == 1
    stderr = capsys.readouterr().err
    assert f"{tmp_path / 'out' / full}: No space left on device\n" in stderr and "Check the disk space" in stderr


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
def test_a_link_as_output_stays_a_link(toy, tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere" / "real")  # which is not there yet
    assert evaluate.main([*toy, "--max-new-tokens", "4", "--limit", "1"]) == 0
    assert (tmp_path / "out").is_symlink() and (tmp_path / "elsewhere" / "real" / "scores.json").exists()


def test_an_output_that_cannot_be_made_shows_before_the_questions_are_answered(toy, tmp_path, monkeypatch, capsys):
    """It showed when the answers were to be written, and they were lost."""
    monkeypatch.setattr(evaluating, "build_engine", lambda *_, **__: pytest.fail("the long part began"))
    (tmp_path / "file").write_text("")
    for output, message in (("file/x", "cannot be written: Not a directory"), ("file", "is a file, not a folder")):
        assert evaluate.main([*toy, "--output", str(tmp_path / output)]) == 1
        assert f"{tmp_path / output} {message}" in capsys.readouterr().err


def test_scores_by_type_and_bert_score(toy, says, tmp_path, minilm, capsys):
    rows = [
        {
            "_id": name,
            "question": f"Where does {name} live?",
            "answer": f"{name}town",
            "type": kind,
            "supporting_facts": [[name, 0]],
            "context": [[name, [f"{name} lives in {name}town."]], ["Dee", ["Dee lives in Deetown."]]],
        }
        for name, kind in (("Ada", "bridge"), ("Bob", "comparison"), ("Cy", "bridge"))
    ]
    write_jsonl(tmp_path / "questions.jsonl", rows)
    says({"Ada": [answer(1, "Adatown")], "Bob": [answer(1, "Rome")], "Cy": ["?"]})
    assert evaluate.main([*toy, "--bert-score", str(minilm)]) == 0
    scores, predictions = read_results(tmp_path / "out")
    assert {t: (g["n"], g["em"]["value"]) for t, g in scores["by_type"].items()} == {
        "bridge": (2, 0.5),
        "comparison": (1, 0.0),
    }
    assert {p["id"]: p["type"] for p in predictions} == {"Ada": "bridge", "Bob": "comparison", "Cy": "bridge"}
    right, wrong, none = (p["bert_score"] for p in predictions)
    assert right == pytest.approx(1.0, abs=1e-6) and 0 < wrong < 0.9 and none == 0.0
    stdout = capsys.readouterr().out
    assert "\nbridge                 2    0.500 (0.000-1.000)" in stdout and "\nBERTScore " in stdout


def test_an_encoder_that_is_not_there_shows_before_the_questions_are_answered(toy, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluating, "build_engine", lambda *_, **__: pytest.fail("the long part began"))
    assert evaluate.main([*toy, "--bert-score", str(tmp_path / "gone")]) == 1
    assert "gone" in capsys.readouterr().err
