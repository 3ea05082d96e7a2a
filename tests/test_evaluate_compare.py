"""`evaluate --compare`: which evaluations are compared, in which scores, and how answers are paired."""

import json
from pathlib import Path

import pytest

from r3lite import evaluate
from r3lite.core.files import write_jsonl
from tests.errors import shows
from tests.evaluating import SCORES, answer


@pytest.fixture
def two(toy, says, tmp_path):
    """Two evaluations of the same questions: one finds nothing, the other answers two of three."""
    for name, prediction in (("first", "somewhere"), ("second", "Adatown")):
        says({"Ada": [answer(1, prediction)], "Bob": [answer(1, prediction)], "Cy": [answer(1, prediction)]})
        assert evaluate.main([*toy]) == 0
        (tmp_path / "out").rename(tmp_path / name)
    return str(tmp_path / "first"), str(tmp_path / "second")


def test_two_evaluations_are_compared(two, tmp_path, capsys):
    first, second = two
    assert evaluate.main(["--compare", first, f"{second}/predictions.jsonl", "--output", str(tmp_path / "c")]) == 0
    comparison = json.loads((tmp_path / "c" / "comparison.json").read_text(encoding="utf-8"))
    assert (comparison["n"], comparison["a"], comparison["b"]) == (3, first, f"{second}/predictions.jsonl")
    assert comparison["metrics"].keys() >= {*SCORES, "sp_f1", "joint_f1", "rouge_l", "bleu", "reasoning_tokens"}
    em = comparison["metrics"]["em"]
    assert (em["a"], em["b"], em["difference"]) == pytest.approx((0, 1 / 3, 1 / 3)) and em["low"] == 0.0
    # 8 of 27 resamples leave Ada out: twice that is p.
    assert em["p"] == pytest.approx(16 / 27, abs=0.02)
    stdout = capsys.readouterr().out
    assert "exact match          0.000   0.333   +0.333    +0.000   +1.000" in stdout
    assert evaluate.main(["--compare", first, second, "--output", str(tmp_path / "c")]) == 1
    assert shows(capsys.readouterr().err, "output-not-empty")
    assert evaluate.main(["--compare", first, second, "--dry-run", "--output", str(tmp_path / "new")]) == 0
    assert not (tmp_path / "new").exists()
    assert evaluate.main(["--compare", first, second, "--dry-run", "--output", str(tmp_path / "c")]) == 1
    assert shows(capsys.readouterr().err, "output-not-empty")


def lines_of(folder):
    return [json.loads(line) for line in (Path(folder) / "predictions.jsonl").read_text(encoding="utf-8").splitlines()]


def test_predictions_of_an_earlier_version_are_compared_in_what_they_have(two, tmp_path, capsys):
    lines = lines_of(two[0])
    fields = ("id", "question", "answers", "prediction", "steps", "finish", "em", "f1", "recall", "hops")
    write_jsonl(tmp_path / "old.jsonl", [{k: line[k] for k in fields} for line in lines])
    assert evaluate.main(["--compare", str(tmp_path / "old.jsonl"), two[1], "--output", str(tmp_path / "c")]) == 0
    comparison = json.loads((tmp_path / "c" / "comparison.json").read_text(encoding="utf-8"))
    assert comparison["metrics"].keys() == set(SCORES)


def test_answers_are_paired_by_id_and_not_by_line(two, tmp_path):
    write_jsonl(tmp_path / "turned.jsonl", reversed(lines_of(two[1])))
    assert evaluate.main(["--compare", str(tmp_path / "turned.jsonl"), two[1], "--output", str(tmp_path / "c")]) == 0
    em = json.loads((tmp_path / "c" / "comparison.json").read_text(encoding="utf-8"))["metrics"]["em"]
    assert em["a"] == pytest.approx(1 / 3) and (em["low"], em["high"], em["p"]) == (0.0, 0.0, 1.0)


def test_evaluations_of_other_questions_are_not_compared(two, tmp_path, capsys):
    lines = lines_of(two[0])
    cases = {
        "fewer": lines[:2],
        "other-text": [lines[0] | {"question": "Who?"}, *lines[1:]],
        "twice": [*lines, lines[0]],
        "no-scores": [{k: v for k, v in line.items() if k != "em"} for line in lines],
        "empty": [],
    }
    messages = {}
    for name, rows in cases.items():
        write_jsonl(tmp_path / name, rows)
        assert evaluate.main(["--compare", two[0], str(tmp_path / name)]) == 1
        messages[name] = capsys.readouterr().err
        assert evaluate.main(["--compare", two[0], str(tmp_path / name), "--dry-run"]) == 1
        assert capsys.readouterr().err == messages[name]  # a dry run checked nothing
    assert f"the evaluations have different questions: 1 only in {two[0]}, such as Cy" in messages["fewer"]
    assert "Evaluate both on the same --data" in messages["fewer"]
    assert "1 ids, such as Ada, belong to different questions" in messages["other-text"]
    assert "line 4: duplicate id 'Ada'" in messages["twice"]
    assert "line 1: em is missing" in messages["no-scores"]
    assert "has no predictions" in messages["empty"]
    assert evaluate.main(["--compare", two[0], str(tmp_path / "gone")]) == 1
    assert "gone" in capsys.readouterr().err
    assert evaluate.main(["--compare", two[0], two[1], "--data", "x"]) == 2
    assert shows(capsys.readouterr().err, "setting-unused", "--data", "x", "a run without --compare")


@pytest.fixture
def seeds_and_sets(tmp_path):
    """Two seeds of two models on a set of two questions and one of one question: predictions by name, such as a1."""
    places = {"a": {"x": [0, 1], "y": [0, 0], "z": [0]}, "b": {"x": [1, 1], "y": [1, 0], "z": [1]}}
    for model, rows in places.items():
        for seed, (set_name, right) in enumerate(rows.items()):
            name = "two" if set_name in "xy" else "one"
            lines = []
            for i, em in enumerate(right):
                line = {"id": f"{name}{i}", "question": f"Who is {name} {i}?", "answers": ["x"], "steps": []}
                lines.append(line | {"em": em, "f1": em, "recall": None, "hops": 2})
            write_jsonl(tmp_path / f"{model}{seed}.jsonl", lines if seed else lines[::-1])
    return [",".join(str(tmp_path / f"{model}{seed}.jsonl") for seed in range(3)) for model in places]


def test_lists_of_evaluations_are_pooled_over_sets_and_seeds(seeds_and_sets, tmp_path, capsys):
    a, b = seeds_and_sets
    assert evaluate.main(["--compare", a, b, "--output", str(tmp_path / "c")]) == 0
    comparison = json.loads((tmp_path / "c" / "comparison.json").read_text(encoding="utf-8"))
    assert (comparison["n"], comparison["a"], comparison["b"]) == (3, a, b)
    two, one = comparison["sets"]
    assert (two["n"], two["a"], two["b"]) == (2, a.split(",")[:2], b.split(",")[:2])
    assert (one["n"], one["a"], one["b"]) == (1, a.split(",")[2:], b.split(",")[2:])
    assert comparison["metrics"].keys() == two["metrics"].keys() == {"em", "f1"}
    # Of the first set, two seeds: a 1/4 and b 3/4, whatever the order of lines; of the second 0 and 1.
    em = comparison["metrics"]["em"]
    assert (em["a"], em["b"], em["difference"]) == (1 / 8, 7 / 8, 3 / 4)
    assert (em["low"], em["high"]) == (0.5, 1.0)
    stdout = capsys.readouterr().out
    assert "set 1: 2 questions" in stdout and "set 2: 1 questions" in stdout
    assert "set 1                0.250   0.750   +0.500    +0.000   +1.000" in stdout
    assert "mean of sets         0.125   0.875   +0.750    +0.500   +1.000  <0.001" in stdout
    assert evaluate.main(["--compare", a, b, "--dry-run"]) == 0


def test_seeds_of_one_set_have_no_mean_of_sets(seeds_and_sets, tmp_path, capsys):
    a, b = (side.rpartition(",")[0] for side in seeds_and_sets)
    assert evaluate.main(["--compare", a, b]) == 0
    stdout = capsys.readouterr().out
    assert "set 1                0.250   0.750" in stdout and "mean of sets" not in stdout


def test_lists_that_do_not_match_are_refused(seeds_and_sets, tmp_path, capsys):
    a, b = seeds_and_sets
    assert evaluate.main(["--compare", a, b.rpartition(",")[0]]) == 2
    assert "--compare has lists of 3 and 2 evaluations; they are compared pair by pair" in capsys.readouterr().err
    assert evaluate.main(["--compare", a, b, "x"]) == 2
    assert evaluate.main(["--compare", ",", ","]) == 2
    assert shows(capsys.readouterr().err, "compare-empty")
    assert evaluate.main(["--compare", "a,a", "b,b"]) == 2
    assert shows(capsys.readouterr().err, "compare-pair-twice", "a", "b")
    turned = ",".join(reversed(b.split(",")))
    assert evaluate.main(["--compare", a, turned]) == 1
    assert shows(capsys.readouterr().err, "questions-differ")
    for model, side in (("c", a), ("d", b)):
        lines = (tmp_path / Path(side.split(",")[0]).name).read_text(encoding="utf-8").splitlines()
        (tmp_path / f"{model}.jsonl").write_text(lines[0] + "\n", encoding="utf-8")
    assert evaluate.main(["--compare", f"{a},{tmp_path / 'c.jsonl'}", f"{b},{tmp_path / 'd.jsonl'}"]) == 1
    stderr = capsys.readouterr().err
    assert "c.jsonl and " in stderr and shows(stderr, "seeds-differ", "1", "two1")


def test_questions_at_which_a_retriever_failed_are_left_out_and_told(two, tmp_path, capsys):
    """They counted as wrong answers, although scores.json leaves them out."""
    lines = lines_of(two[1])
    write_jsonl(tmp_path / "lost", [lines[0] | {"em": 0.0, "f1": 0.0, "failure": "status 503"}, *lines[1:]])
    assert evaluate.main(["--compare", str(tmp_path / "lost"), two[1], "--output", str(tmp_path / "c")]) == 0
    comparison = json.loads((tmp_path / "c" / "comparison.json").read_text(encoding="utf-8"))
    em = comparison["metrics"]["em"]
    assert (comparison["n"], comparison["retrieval_failures"], em["a"], em["b"], em["p"]) == (2, 1, 0.0, 0.0, 1.0)
    assert "the retriever failed on 1 other questions, in A or in B; they are left out" in capsys.readouterr().out
