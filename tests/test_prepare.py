"""Preparing a data set: who gets which question, that it can be repeated, and that nothing is written over."""

import datetime
import hashlib
import json
import math
from itertools import chain

import pytest

from r3lite import prepare
from r3lite.core.answer_match import normalize
from r3lite.core.files import read_jsonl
from r3lite.datasets import splits
from r3lite.datasets.qa import read_questions
from tests.errors import shows

BOOKS = [f"Who wrote book {i}?" for i in range(50)]


@pytest.fixture
def questions(tmp_path):
    """Sixty questions, the last ten of which repeat earlier ones; odd ones have ids."""
    rows = [
        {"question": BOOKS[i % 50], "answer": f"author {i}"} | ({"id": f"q{i}"} if i % 2 else {}) for i in range(60)
    ]
    return write(tmp_path / "questions.jsonl", rows)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(data, output, *flags):
    return prepare.main(["--data", str(data), "--output", str(output), "--dev-size", "5", "--test-size", "7", *flags])


def parts(folder):
    return {name: [row.values for row in read_jsonl(folder / f"{name}.jsonl", "")] for name in ("train", "dev", "test")}


def test_no_question_is_in_two_parts_and_none_is_lost(questions, tmp_path):
    assert run(questions, tmp_path / "out") == 0
    rows_by_part = parts(tmp_path / "out")
    assert {name: len(rows) for name, rows in rows_by_part.items()} == {"train": 38, "dev": 5, "test": 7}
    places = {name: [BOOKS.index(row["question"]) for row in rows] for name, rows in rows_by_part.items()}
    assert sorted(chain(*places.values())) == list(range(50))
    assert all(indices == sorted(indices) for indices in places.values())  # in the order of the source


def questions_of(folder, name):
    return [row.values["question"] for row in read_jsonl(folder / f"{name}.jsonl", "")]


def test_questions_for_rl_are_in_no_other_part_and_change_none(questions, tmp_path, capsys):
    """RL was given what no demonstration could be made of, or what the adapter had memorized."""
    sizes = ["--train-size", "20"]
    assert run(questions, tmp_path / "without", *sizes) == 0
    assert run(questions, tmp_path / "with", *sizes, "--rl-size", "8") == 0
    assert parts(tmp_path / "without") == parts(tmp_path / "with") and not (tmp_path / "without/rl.jsonl").exists()
    assert "20 questions in train.jsonl, 5 questions in dev.jsonl, 7 questions in test.jsonl, 8 questions in rl.js" in (
        capsys.readouterr().out
    )
    other_questions = {row["question"] for rows in parts(tmp_path / "with").values() for row in rows}
    rl = questions_of(tmp_path / "with", "rl")
    assert len(set(rl) - other_questions) == 8 and rl == sorted(rl, key=BOOKS.index)


def test_all_questions_are_for_training_but_those_for_rl(questions, tmp_path):
    assert run(questions, tmp_path / "out", "--rl-size", "8") == 0
    train, rl = questions_of(tmp_path / "out", "train"), questions_of(tmp_path / "out", "rl")
    assert len(train) == 30 and len(set(train) | set(rl)) == 38


def test_rows_keep_their_fields_and_ids(questions, tmp_path):
    run(questions, tmp_path / "out")
    originals = {q.text: q for q in read_questions(questions)[:50]}
    for name in ("train", "dev", "test"):
        for question in read_questions(tmp_path / "out" / f"{name}.jsonl"):
            assert question.id == originals[question.text].id and question.answers == originals[question.text].answers


def test_a_seed_draws_the_same_and_another_seed_others(questions, tmp_path):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        run(questions, tmp_path / name, "--seed", seed, "--train-size", "9")
    a, b, c = (parts(tmp_path / name) for name in "abc")
    assert a == b != c and len(a["train"]) == 9


def test_held_out_questions_come_from_their_own_file_and_are_not_trained_on(questions, tmp_path, capsys):
    names = [f"Who wrote book {i}?" for i in range(45, 60)]
    held_out_file = write(tmp_path / "other.jsonl", [{"question": name, "answer": "x"} for name in names])
    assert run(questions, tmp_path / "out", "--held-out", str(held_out_file)) == 0
    questions_by_part = {name: {row["question"] for row in rows} for name, rows in parts(tmp_path / "out").items()}
    held_out = questions_by_part["dev"] | questions_by_part["test"]
    assert len(held_out) == 12 and held_out <= set(names)
    assert questions_by_part["train"] == set(BOOKS) - held_out
    assert f"{len(held_out & set(BOOKS))} questions of --data are held out" in capsys.readouterr().err


def test_ids_that_are_made_differ_between_files_of_the_same_name(tmp_path):
    """`collect --exclude dev.jsonl` left out the questions to train on that had the same places."""
    paths = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        rows = [{"question": f"Who is {folder}{i}?", "answer": "x"} for i in range(20)]
        paths.append(write(tmp_path / folder / "data.jsonl", rows))
    output = tmp_path / "out"
    assert run(paths[0], output, "--held-out", str(paths[1])) == 0
    held_out = [str(output / "dev.jsonl"), str(output / "test.jsonl")]
    assert len(splits.without(read_questions(output / "train.jsonl"), held_out)) == 20


def test_parquet_with_values_that_json_lacks_is_prepared(tmp_path):
    """NaN made files that could not be read, dates and bytes a traceback."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {
        "question": BOOKS[:20],
        "answer": [datetime.date(1987, 1, 31)] * 20,
        "score": [math.nan] * 20,
        "nested": [{"number": [1.5, math.inf]}] * 20,
        "image": [b"\xff"] * 20,
        "text": [b"plain"] * 20,
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    assert run(tmp_path / "a.parquet", tmp_path / "out") == 0
    values = {"answer": "1987-01-31", "score": None, "nested": {"number": [1.5, None]}, "image": None, "text": "plain"}
    rows = parts(tmp_path / "out")["train"]
    assert len(rows) == 8 and all(row.items() >= values.items() for row in rows)
    assert read_questions(tmp_path / "out/train.jsonl")[0].answers == ("1987-01-31",)


def test_the_manifest_says_what_was_drawn_and_from_what(questions, tmp_path):
    run(questions, tmp_path / "out", "--seed", "3")
    assert "seed = 3" in (tmp_path / "out/config.toml").read_text(encoding="utf-8")
    manifest = json.loads((tmp_path / "out/manifest.json").read_text(encoding="utf-8"))
    assert manifest["rows"] == {"train": 38, "dev": 5, "test": 7}
    assert manifest["files"] == {str(questions): hashlib.sha256(questions.read_bytes()).hexdigest()}


def test_a_folder_that_holds_something_else_is_left_as_it_is(questions, tmp_path, capsys):
    """A train.jsonl of the user's own was once written over."""
    path = write(tmp_path / "train.jsonl", [{"question": "Mine?", "answer": "yes"}])
    assert run(questions, tmp_path) == 1
    assert shows(capsys.readouterr().err, "output-not-empty")
    assert "Mine?" in path.read_text(encoding="utf-8")


def test_what_was_killed_goes_on_with_its_own_settings_only(questions, tmp_path, capsys, monkeypatch):
    """Between the parts and what said that they were whole, other sizes once took the place of some of them."""
    uninterrupted = tmp_path / "whole"
    output = tmp_path / "out"
    assert run(questions, uninterrupted) == 0
    with monkeypatch.context() as patched:
        patched.setattr(prepare, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(questions, output) == 130
    (output / ".dev.jsonl.17.part").touch()
    assert run(questions, output, "--train-size", "3") == 1
    assert "train_size (was None, is 3)" in capsys.readouterr().err
    assert run(questions, output) == 0
    assert {p.name for p in output.iterdir()} == {p.name for p in uninterrupted.iterdir()}
    assert parts(output) == parts(uninterrupted)


def test_once_is_enough_and_other_sizes_are_refused(questions, tmp_path, capsys):
    run(questions, tmp_path / "out")
    rows_before = parts(tmp_path / "out")
    questions.write_text("not read again")
    assert run(questions, tmp_path / "out") == 0
    assert "is prepared already" in capsys.readouterr().out
    assert run(questions, tmp_path / "out", "--train-size", "3") == 1
    assert "train_size (was None, is 3)" in capsys.readouterr().err
    assert parts(tmp_path / "out") == rows_before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--test-size", "46"], "--dev-size and --test-size together are 51, but there are only 50 questions"),
        (["--test-size", "45"], "no question is left for train.jsonl"),
        (["--rl-size", "38"], "no question is left for train.jsonl"),
        (["--train-size", "30", "--rl-size", "9"], "--rl-size is 9, but there are only 8 questions"),
        (["--train-size", "39"], "--train-size is 39, but there are only 38 questions"),
    ],
)
def test_more_than_there_is_is_refused_and_nothing_written(questions, tmp_path, capsys, flags, message):
    assert run(questions, tmp_path / "out", *flags) == 1
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.jsonl"))


def test_a_data_set_known_by_name_has_held_out_questions_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert splits.held_out("hotpotqa", None) == "hotpotqa,validation"
    assert splits.held_out("musique,train", None) == "musique,validation"
    assert splits.held_out("2wiki,validation", None) is None
    assert splits.held_out("mine.jsonl", None) is None
    assert splits.held_out("mine.jsonl", "mine.jsonl") is None
    assert splits.held_out("hotpotqa", "mine.jsonl") == "mine.jsonl"
    (tmp_path / "hotpotqa").touch()
    assert splits.held_out("hotpotqa", None) is None


def test_questions_that_differ_in_case_and_punctuation_only_are_in_one_part(tmp_path):
    """They were told apart by every character, so that a test question could be trained on."""
    rows = [
        {"question": text, "answer": "x"} for i in range(20) for text in (f"Who wrote book {i}?", f"who wrote book {i}")
    ]
    assert run(write(tmp_path / "q.jsonl", rows), tmp_path / "out") == 0
    normalized_questions = [normalize(row["question"]) for rows in parts(tmp_path / "out").values() for row in rows]
    assert len(normalized_questions) == len(set(normalized_questions)) == 20
