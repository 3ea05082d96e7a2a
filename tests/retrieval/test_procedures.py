"""Procedures: which one fits a question, by hand, and files that are not what they should be."""

import json
import time

import numpy as np
import pytest

from r3lite.core.episode import Question
from r3lite.core.errors import R3LiteError
from r3lite.retrieval.procedures import Finder, open_finder, read_procedures, to_json
from r3lite.settings import ProcedureSettings
from tests.errors import raises


def row(name, trigger="", priority=0, description="how", **extra):
    steps = [{"action": "Search", "condition": "it is long"}, {"action": "Answer"}]
    return {"name": name, "description": description, "trigger": trigger, "priority": priority, "steps": steps} | extra


@pytest.fixture
def read(tmp_path):
    def procedures_of(*rows):
        (tmp_path / "p.json").write_text(json.dumps(rows))
        return read_procedures(tmp_path / "p.json")

    return procedures_of


VECTORS = {"near one": (1, 0), "near two": (0.6, 0.8), "far": (-1, 0), "One how": (1, 0), "Two how": (0, 1)}


class Turned:
    """An encoder of two dimensions: the vector of a text is what VECTORS say."""

    def __init__(self):
        self.settings = {}

    def encode_queries(self, queries):
        return np.array([VECTORS[q] for q in queries], np.float32)

    def encode_passages(self, documents, advance):
        return self.encode_queries([f"{d.title} {d.text}" for d in documents])


def test_triggers_count_ten_and_priority_a_half(read):
    a, b, c = read(row("A", "lease, Rent of  Land", 1), row("B", "lease", 40), row("C", "", 100))
    for text, scores in (
        ("Who signed the lease?", (10.5, 30, 0)),
        ("a LEASE is a rent\nof land", (20.5, 30, 0)),
        ("Who released it, or leases?", (0, 0, 0)),  # whole words only
        ("priority alone", (0, 0, 0)),
    ):
        assert [p.score(text) for p in (a, b, c)] == list(scores)


def test_many_triggers_take_a_moment(read):
    """A pattern was made of each for each question: 100,000 took ten seconds."""
    listed = read(row("A", ", ".join(f"phrase {i}" for i in range(20_000))), row("B", "lease of land"))
    finder = Finder(listed, None, 0.5)
    finder.find("the first one")
    start = time.process_time()
    assert finder.find("Who signed the lease of land, and where is phrase 19999?").name == "A"
    assert finder.find("Who signed the lease of landscapes?") is None
    assert time.process_time() - start < 0.5


def test_hidden_files_of_a_folder_are_no_procedures(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(row("A")))
    (tmp_path / "._a.json").write_bytes(b"\x00\x05\x16\x07")  # AppleDouble, which macOS writes
    assert [p.name for p in read_procedures(tmp_path)] == ["A"]
    (tmp_path / "a.json").unlink()
    with raises(R3LiteError, "no-procedure-files"):
        read_procedures(tmp_path)


def test_a_trigger_may_begin_or_end_with_a_sign(read):
    (procedure,) = read(row("A", "c++, .net, what?"))
    assert (
        procedure.score("Is C++ fast?") == 10
        and procedure.score("in .NET: what?") == 20
        and procedure.score("dotnet, c") == 0
    )


def test_the_best_trigger_then_the_nearest_description_then_nothing(read):
    listed = read(row("One", "alpha"), row("Two", "alpha, beta"))
    finder = Finder(listed, Turned(), 0.7)
    assert finder.find("alpha").name == "One"  # of equal ones the first
    assert finder.find("alpha beta").name == "Two"
    assert finder.find("near one").name == "One" and finder.find("near two").name == "Two"
    assert finder.find("far") is None
    assert Finder(listed, Turned(), 0.9).find("near two") is None
    assert Finder(listed, None, 0.7).find("near one") is None
    assert Finder([], None, 0.7).find("alpha") is None and Finder([], Turned(), 0.7).find("alpha") is None


def test_it_stands_before_the_question_and_nothing_else_changes(read):
    finder = Finder(read(row("One", "alpha")), None, 1.0)
    question = Question("q", "Is alpha first?", ("yes",))
    expected = "Procedure: One. how\n1. Search (condition: it is long)\n2. Answer"
    assert finder.with_procedure(question) == Question("q", "Is alpha first?", ("yes",), procedure=expected)
    unmatched = Question("r", "Is beta?", ())
    assert finder.with_procedure(unmatched) is unmatched


def test_the_encoder_is_loaded_only_where_it_is_used(read, tmp_path):
    read(row("One", description="about ships"), row("Two", description="about trains"))

    def loads():
        raise AssertionError

    path = str(tmp_path / "p.json")
    assert open_finder(ProcedureSettings(), loads) is None
    finder = open_finder(ProcedureSettings(procedures=path, procedures_by="triggers"), loads)
    assert finder.find("ships") is None
    hashed = open_finder(ProcedureSettings(procedures=path, procedures_floor=0.3), lambda: None)
    assert hashed.find("where are ships").name == "One" and hashed.find("unknown words") is None


def test_what_is_written_is_read_again(read, tmp_path):
    listed = read(row("One", "a", 2.5, category="c"), row("Zw\u00f6lf"))
    (tmp_path / "again.json").write_text(to_json(listed), encoding="utf-8")
    assert read_procedures(tmp_path / "again.json") == listed
    (tmp_path / "single.json").write_text(json.dumps(row("One", "a", 2.5, category="c")))
    assert read_procedures(tmp_path / "single.json") == listed[:1]


@pytest.mark.parametrize(
    "rows, words",
    [
        ([row("")], r"procedures\[0\]\.name is blank"),
        ([row("A"), row(" a ")], "two procedures are named"),
        ([row("A", steps=[])], r"procedures\[0\]\.steps is empty"),
        ([row("A", steps=[{"condition": "x"}])], r"steps\[0\]\.action is missing"),
        ([row("A", priority=-1)], "priority is -1, not a finite number"),
        ([row("A", trigger=["a"])], r"trigger is \['a'\], not text"),
        (["A"], r"procedures\[0\] is 'A', not a JSON object"),
        ("A", "procedures is 'A', not a list"),
    ],
)
def test_a_file_that_is_not_valid(tmp_path, rows, words):
    (tmp_path / "p.json").write_text(json.dumps(rows))
    with pytest.raises(R3LiteError, match=words):
        read_procedures(tmp_path / "p.json")
