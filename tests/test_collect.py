"""`collect`: gold trajectories by the real retriever, and what is refused before anything is written."""

import errno
import os
import re
from unittest.mock import Mock

import pytest

from r3lite import collect
from r3lite.assembly import collecting
from r3lite.core.episode import Failure
from r3lite.core.files import shipped, sole_writer
from r3lite.datasets.collected import rejected_ids
from r3lite.datasets.qa import read_questions
from tests.collecting import lines, read_rows, row, run, write

SUB_QUESTIONS = ("--demonstrations", "sub-questions", "--insert-gold")


def test_gold_trajectories_have_real_documents_with_the_gold_paragraph_among_them(tmp_path, capsys):
    data = shipped("data", "world", "train.jsonl")
    output = tmp_path / "new" / "out.jsonl"
    assert run(data, output, "--limit", "30", "--top-k", "3", *SUB_QUESTIONS) == 0
    questions = {q.id: q for q in read_questions(data, limit=30)}
    rows = read_rows(output)  # refuses what is not well-formed
    assert [r.id for r in rows] == list(questions)
    assert {r["source"] for r in lines(output)} == {"gold"}
    for trajectory in rows:
        question = questions[trajectory.id]
        assert len(trajectory.steps) == len(question.hops) + 1
        for step, hop in zip(trajectory.steps[:-1], question.hops, strict=True):
            gold_indices = [question.gold_index(d) for d in step.documents]
            assert question.gold_index(hop.document) in gold_indices and len(gold_indices) == 3
    table = capsys.readouterr().out
    assert re.search(r"questions +30\n.*kept +30\n", table) and "mean steps" in table
    second_output = tmp_path / "again.jsonl"
    assert run(data, second_output, "--limit", "30", "--top-k", "3", *SUB_QUESTIONS) == 0
    assert second_output.read_bytes() == output.read_bytes()


@pytest.mark.parametrize("data", ["musique/train_100.jsonl", "hotpotqa/train_100.json"])
def test_a_hundred_real_questions_become_a_hundred_trajectories(shared, tmp_path, data):
    assert run(shared / "data" / data, tmp_path / "out.jsonl", *SUB_QUESTIONS) == 0
    assert len(read_rows(tmp_path / "out.jsonl")) == 100


def test_gold_trajectories_of_the_other_formats(tmp_path, monkeypatch):
    """Tags have the same steps as R3; without search a demonstration is one step, and no retriever is asked."""
    data, output = shipped("data", "world", "train.jsonl"), tmp_path / "out.jsonl"
    assert run(data, output, "--limit", "10", "--format", "tags", *SUB_QUESTIONS) == 0
    assert read_rows(output, "tags") == read_rows(output)
    retrieve = lambda pairs: pytest.fail(f"asked {pairs}")  # noqa: E731
    monkeypatch.setattr(collecting, "build_retriever", lambda *_, **__: retrieve)
    output = tmp_path / "solution.jsonl"
    assert run(data, output, "--limit", "10", "--preset", "solution") == 0
    for trajectory, question in zip(read_rows(output, "solution"), read_questions(data, limit=10), strict=True):
        (step,) = trajectory.steps
        assert step.answer == question.answers[0] and all(hop.answer in step.analysis for hop in question.hops)


def test_gold_trajectories_without_search_are_dropped_if_asked_for(tmp_path, capsys):
    data, drop = shipped("data", "world", "train.jsonl"), ["--limit", "10", "--without-search", "drop"]
    assert run(data, tmp_path / "out.jsonl", *drop, *SUB_QUESTIONS) == 0 and len(lines(tmp_path / "out.jsonl")) == 10
    assert run(data, tmp_path / "solution.jsonl", *drop, "--preset", "solution") == 1
    assert re.search("rejected: answered without a search +10", capsys.readouterr().out)


def test_questions_that_give_no_trajectory_are_counted_by_reason(tmp_path, capsys):
    repeated_hops = [("Who directed it?", "A", 0), ("who directed it", "B", 1)]
    plain = {"id": "p", "question": "Q?", "answer": "a"}
    data = write(
        tmp_path / "data.jsonl",
        [row(1), plain, row(2, hops=repeated_hops), row(3, hops=[("Q?", "a", None)]), plain | {"id": "p2"}],
    )
    assert run(data, tmp_path / "out.jsonl", "--retriever", "none", *SUB_QUESTIONS) == 0
    assert [r["id"] for r in lines(tmp_path / "out.jsonl")] == ["q1"]
    table = capsys.readouterr().out
    assert re.search(r"rejected: no decomposition +2\n", table)
    assert re.search(r"rejected: step 2 repeats an earlier query +1\n", table)
    assert re.search(r"rejected: a hop without a gold paragraph +1\n", table)
    reasons = {"p": "no decomposition", "q2": "step 2 repeats an earlier query", "q3": "a hop without a gold paragraph"}
    rejections = {record["id"]: record["reason"] for record in lines(tmp_path / "out.jsonl.rejected.jsonl")}
    assert rejections == reasons | {"p2": "no decomposition"}
    assert rejected_ids(tmp_path / "out.jsonl") == {"p", "q2", "q3", "p2"}


def test_each_hop_of_all_questions_is_one_batch(tmp_path, monkeypatch):
    batches = []

    def retrieve(pairs):
        batches.append([query for _, query in pairs])
        return [[] for _ in pairs]

    monkeypatch.setattr(collecting, "build_retriever", lambda *_, **__: retrieve)
    data = write(tmp_path / "data.jsonl", [row(1), row(2, hops=[("Who?", "Oslo", 0)]), row(3)])
    assert run(data, tmp_path / "out.jsonl", *SUB_QUESTIONS) == 0
    assert batches == [
        ["Who directed Film 1?", "Who?", "Who directed Film 3?"],
        ["Where was Person 1 born?", "Where was Person 3 born?"],
    ]


def test_a_question_whose_query_the_retriever_failed_at_gives_no_trajectory(tmp_path, monkeypatch, capsys):
    def retrieve(pairs):
        return [Failure("no room") if query == "Where was Person 2 born?" else [] for _, query in pairs]

    monkeypatch.setattr(collecting, "build_retriever", lambda *_, **__: retrieve)
    data = write(tmp_path / "data.jsonl", [row(1), row(2), row(3)])
    assert run(data, tmp_path / "out.jsonl", *SUB_QUESTIONS) == 0
    assert [r["id"] for r in lines(tmp_path / "out.jsonl")] == ["q1", "q3"]
    assert re.search(r"rejected: the retriever failed +1\n", capsys.readouterr().out)


def test_nothing_is_inserted_unless_asked_for(tmp_path, capsys):
    """A gold paragraph that the retriever had missed was put among the documents, and taught to make facts up."""
    data = write(tmp_path / "data.jsonl", [row(1)])
    assert run(data, tmp_path / "out.jsonl", "--retriever", "none", *SUB_QUESTIONS[:2]) == 1
    assert run(data, tmp_path / "evidence.jsonl", "--retriever", "none") == 1
    out = capsys.readouterr().out
    assert len(re.findall("rejected: a query that does not find its gold paragraph +1", out)) == 2


def test_facts_are_of_documents_that_were_retrieved(tmp_path, capsys):
    data = shipped("data", "world", "train.jsonl")
    output = tmp_path / "out.jsonl"
    assert run(data, output, "--limit", "40", "--top-k", "3") == 0
    rows = read_rows(output)
    questions = {q.id: q for q in read_questions(data, limit=40)}
    assert len(rows) >= 20
    for trajectory in rows:
        read = ""
        question = questions[trajectory.id]
        assert trajectory.steps[0].queries == (question.text,)
        for step in trajectory.steps[1:]:
            assert question.text not in (*step.queries, step.analysis)
        for previous, step in zip(trajectory.steps, trajectory.steps[1:]):
            read += " ".join(f"{d.title}: {d.text}" for d in previous.documents)
            facts = [hop.answer for hop in question.hops if f"? {hop.answer}." in step.analysis]
            assert all(answer in read for answer in facts) and (facts or "Nothing" in step.analysis)
        assert question.gold_indices([d for step in trajectory.steps for d in step.documents]) == set(
            range(len(question.gold))
        )
    assert re.search(r"gold paragraphs found +1\.000", capsys.readouterr().out)


@pytest.mark.parametrize("name", ["lexical", "hybrid", "golden"])
def test_every_retriever_serves_gold_trajectories(tmp_path, name):
    data, output = shipped("data", "world", "train.jsonl"), tmp_path / "out.jsonl"
    assert run(data, output, "--limit", "5", "--retriever", name, "--top-k", "3") == 0
    rows = read_rows(output)
    assert len(rows) == 5 and all(len(trajectory.steps) > 1 for trajectory in rows)
    for trajectory in rows:
        assert all(step.documents for step in trajectory.steps[:-1])


def test_nothing_kept_is_a_failure_that_says_why(tmp_path, capsys):
    data = write(tmp_path / "data.jsonl", [{"question": "Q?", "answer": "a"}])
    assert run(data, tmp_path / "out.jsonl", "--retriever", "none") == 1
    printed = capsys.readouterr()
    assert "no decomposition" in printed.out and "no trajectory was kept: no decomposition (1)" in printed.err
    advice = "python -m r3lite.collect --retriever none --source gold --data hotpotqa"
    assert advice in " ".join(printed.err.replace(" --encoder hashing", "").split())
    data = write(tmp_path / "missed.json", [row(1)])
    assert run(data, tmp_path / "missed.jsonl", "--retriever", "none", "--format", "tags") == 1  # retrieve has none
    assert f"python -m r3lite.retrieve --retriever none --encoder hashing --data {data}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--source", "gold"], 2, "--data is missing"),
        (["--source", "golden", "--data", "x"], 2, "did you mean gold?"),
        (["--data", "missing.json"], 1, "no such file"),
        (
            ["--data", "x", "--insert-gold"],
            2,
            "--insert-gold is True, but has no effect here: it needs --demonstrations sub-questions",
        ),
        (
            ["--data", "x", "--hurried-share", "0.5"],
            2,
            "--hurried-share is 0.5, but has no effect here: it needs --demonstrations sub",
        ),
        (["--data", __file__, "--output", "."], 1, "is a folder"),
    ],
)
def test_user_errors(capsys, arguments, status, message):
    assert collect.main(arguments) == status
    assert message in capsys.readouterr().err


def assert_refused(capsys, files, status, words):
    """Checks that a command failed with `words` and changed none of the `files` (path -> bytes before)."""
    error = capsys.readouterr().err
    assert status == 1 and words in error and "Traceback" not in error
    assert all(path.read_bytes() == content for path, content in files.items())


def test_an_output_that_is_an_input_is_refused(tmp_path, capsys):
    """`--data own.jsonl --output own.jsonl` made two trajectories of a hundred questions, and they were gone."""
    data, corpus = tmp_path / "own.jsonl", tmp_path / "corpus.jsonl"
    write(data, [row(1) | {"source": "gold", "steps": []}])
    write(corpus, [{"id": "1", "title": "T", "text": "x"}])
    (tmp_path / "link").symlink_to(data)
    files = {path: path.read_bytes() for path in (data, corpus)}
    for output, flag in ((data, "--data"), (tmp_path / "link", "--data"), (corpus, "--corpus")):
        assert_refused(capsys, files, run(data, output, "--corpus", str(corpus)), f"is also the file of {flag}")


@pytest.mark.parametrize("source", ["gold", "teacher"])
@pytest.mark.parametrize(
    "content",
    [
        b"first line\nlast line",
        b"hello",
        b"\x89PNG\r\n\xff\xfe\x00",
        b'{"id": "7", "title": "T", "text": "x"}\n',
        b'{"id": "7", "title": "T", "text": "x"}',
        b'{"id": "q1", "steps": [], "source": "teacher"}\n{"id": "q2"}\n{"id": "q3", "st',
        b'{"id": "q1", "steps": [], "source": "gold"}\n',
        b'{"id": "q3", "st',
        b"[]",
    ],
)
def test_a_file_of_other_things_is_refused_and_left_as_it_is(tmp_path, capsys, source, content):
    """Gold overwrote any file; a text lost its last line as a torn one, and a picture gave a UnicodeDecodeError. A
    torn line alone may be the beginning of a user's own JSON."""
    output = tmp_path / "out.jsonl"
    output.write_bytes(content)
    data = write(tmp_path / "data.jsonl", [row(1)])
    message = "was not written by collect" if source == "teacher" else "exists and is not empty"
    assert_refused(capsys, {output: content}, run(data, output, "--source", source), message)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.jsonl", "out.jsonl"]


def test_rejections_of_a_killed_run_do_not_stay(tmp_path):
    """They are written before the trajectories, and another run into the file may reject nothing."""
    rejected = tmp_path / "out.jsonl.rejected.jsonl"
    rejection = {"id": "q1", "reason": "no decomposition"}
    write(rejected, [rejection | {"source": "gold"}])
    assert run(write(tmp_path / "data.jsonl", [row(1)]), tmp_path / "out.jsonl") == 0
    assert len(lines(tmp_path / "out.jsonl")) == 1 and not rejected.exists()
    assert rejected_ids(tmp_path / "out.jsonl") == set()


def test_a_teacher_does_not_take_what_gave_no_gold_trajectory_for_asked(tmp_path, capsys):
    data = write(tmp_path / "data.jsonl", [{"id": "p", "question": "Q?", "answer": "a"}])
    output, none = tmp_path / "out.jsonl", ("--retriever", "none")
    assert run(data, output, *none) == 1
    assert lines(tmp_path / "out.jsonl.rejected.jsonl")[0]["id"] == "p"
    capsys.readouterr()
    assert run(data, output, "--source", "teacher", *none) == 1
    assert "line 1 was not written by collect --source teacher" in capsys.readouterr().err
    assert run(data, output, *none) == 1 and "no trajectory was kept" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["gold", "teacher"])
def test_rejections_that_are_none_are_refused(tmp_path, capsys, source):
    rejected = tmp_path / "out.jsonl.rejected.jsonl"
    rejected.write_text("hello")
    data = write(tmp_path / "data.jsonl", [row(1)])
    status = run(data, tmp_path / "out.jsonl", "--source", source)
    assert_refused(capsys, {rejected: b"hello"}, status, "was not written by collect")


def test_gold_trajectories_are_not_replaced(tmp_path, capsys):
    """Four questions replaced 200 trajectories that had been edited by hand."""
    output = tmp_path / "out.jsonl"
    assert run(write(tmp_path / "data.jsonl", [row(1), row(2)]), output) == 0
    files = {output: output.read_bytes()}
    data = write(tmp_path / "fewer.jsonl", [row(3)])
    assert_refused(capsys, files, run(data, output), "exists and is not empty")
    output.write_bytes(b"")  # as tempfile leaves it
    assert run(data, output) == 0 and len(lines(output)) == 1


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_as_output_is_written_through(tmp_path, dangling):
    """A file took the link's place, and what it led to stayed as it was."""
    output, target = tmp_path / "out.jsonl", tmp_path / "elsewhere" / "real.jsonl"
    output.symlink_to(target)
    if not dangling:
        target.parent.mkdir()
        target.write_bytes(b"")
    assert run(write(tmp_path / "data.jsonl", [row(1)]), output) == 0
    assert output.is_symlink() and len(lines(target)) == 1


def test_two_at_once_in_one_file_are_refused(tmp_path, capsys):
    data, output = write(tmp_path / "data.jsonl", [row(1)]), tmp_path / "out.jsonl"
    with sole_writer(output, folder=False):
        for source in ("gold", "teacher"):
            assert_refused(capsys, {}, run(data, output, "--source", source), f"(pid {os.getpid()}) writes to {output}")
    assert run(data, output) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.jsonl", "out.jsonl"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EIO])
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, monkeypatch, capsys, number):
    output = tmp_path / "out.jsonl"
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(number, "the disk is full")))
    status = run(write(tmp_path / "data.jsonl", [row(1)]), output)
    assert_refused(capsys, {}, status, f"{output}: the disk is full\n  Check the disk space")
    assert [p.name for p in tmp_path.iterdir()] == ["data.jsonl"]


@pytest.mark.parametrize("output", ["file/out.jsonl", "/proc/out.jsonl", "/dev/null"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path, monkeypatch, capsys, output):
    """It was a traceback, after the retriever had been built."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    status = run(write(tmp_path / "data.jsonl", ["no row"]), output)
    assert_refused(capsys, {}, status, f"--output {output} ")
