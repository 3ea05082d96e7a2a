"""`collect`: gold trajectories by the real retriever, and what is refused before anything is written."""

import re

import pytest

from r3lite import collect
from r3lite.config import shipped
from r3lite.datasets.qa import read_questions
from tests.collecting import lines, read_rows, row, run, write


def test_gold_trajectories_have_real_documents_with_the_gold_paragraph_among_them(tmp_path, capsys):
    data, output = shipped("data", "world", "train.jsonl"), tmp_path / "new" / "out.jsonl"
    assert run(data, output, "--limit", "30", "--top-k", "3") == 0
    questions = {q.id: q for q in read_questions(data, limit=30)}
    rows = read_rows(output)  # refuses what is not well-formed
    assert [r.id for r in rows] == list(questions)
    assert {r["source"] for r in lines(output)} == {"gold"}
    for trajectory in rows:
        question = questions[trajectory.id]
        assert len(trajectory.steps) == len(question.hops) + 1
        for step, hop in zip(trajectory.steps[:-1], question.hops, strict=True):
            found = [question.gold_index(d) for d in step.documents]
            assert question.gold_index(hop.document) in found and len(found) == 3
    table = capsys.readouterr().out
    assert re.search(r"questions +30\n.*kept +30\n", table) and "mean steps" in table
    again = tmp_path / "again.jsonl"
    assert run(data, again, "--limit", "30", "--top-k", "3") == 0
    assert again.read_bytes() == output.read_bytes()


@pytest.mark.parametrize("data", ["musique/train_100.jsonl", "hotpotqa/train_100.json"])
def test_a_hundred_real_questions_become_a_hundred_trajectories(shared, tmp_path, data):
    assert run(shared / "data" / data, tmp_path / "out.jsonl") == 0
    assert len(read_rows(tmp_path / "out.jsonl")) == 100


def test_gold_trajectories_of_the_other_formats(tmp_path, monkeypatch):
    """Tags have the same steps as R3; without search a demonstration is one step, and no retriever is asked."""
    data, output = shipped("data", "world", "train.jsonl"), tmp_path / "out.jsonl"
    assert run(data, output, "--limit", "10", "--format", "tags") == 0
    assert read_rows(output, "tags") == read_rows(output)
    retrieve = lambda pairs: pytest.fail(f"asked {pairs}")  # noqa: E731
    monkeypatch.setattr("r3lite.retrieval.retriever.build_retriever", lambda *_, **__: retrieve)
    assert run(data, output, "--limit", "10", "--preset", "solution") == 0
    for trajectory, question in zip(read_rows(output, "solution"), read_questions(data, limit=10), strict=True):
        (step,) = trajectory.steps
        assert step.answer == question.answers[0] and all(hop.answer in step.analysis for hop in question.hops)


def test_questions_that_give_no_trajectory_are_counted_by_reason(tmp_path, capsys):
    twice = [("Who directed it?", "A", 0), ("who directed it", "B", 1)]
    plain = {"id": "p", "question": "Q?", "answer": "a"}
    data = write(
        tmp_path / "data.jsonl",
        [row(1), plain, row(2, hops=twice), row(3, hops=[("Q?", "a", None)]), plain | {"id": "p2"}],
    )
    assert run(data, tmp_path / "out.jsonl", "--retriever", "golden") == 0
    assert [r["id"] for r in lines(tmp_path / "out.jsonl")] == ["q1"]
    table = capsys.readouterr().out
    assert re.search(r"rejected: no decomposition +2\n", table)
    assert re.search(r"rejected: step 2 asks again what an earlier step asked +1\n", table)
    assert re.search(r"rejected: a hop without a gold paragraph +1\n", table)


def test_each_hop_of_all_questions_is_one_batch(tmp_path, monkeypatch):
    batches = []

    def retrieve(pairs):
        batches.append([query for _, query in pairs])
        return [[] for _ in pairs]

    monkeypatch.setattr("r3lite.retrieval.retriever.build_retriever", lambda *_, **__: retrieve)
    data = write(tmp_path / "data.jsonl", [row(1), row(2, hops=[("Who?", "Oslo", 0)]), row(3)])
    assert run(data, tmp_path / "out.jsonl") == 0
    assert batches == [
        ["Who directed Film 1?", "Who?", "Who directed Film 3?"],
        ["Where was Person 1 born?", "Where was Person 3 born?"],
    ]


def test_nothing_kept_is_a_failure_that_says_why(tmp_path, capsys):
    data = write(tmp_path / "data.jsonl", [{"question": "Q?", "answer": "a"}])
    assert run(data, tmp_path / "out.jsonl", "--retriever", "none") == 1
    printed = capsys.readouterr()
    assert "no decomposition" in printed.out and "no trajectory was kept" in printed.err


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--source", "gold"], 2, "--data is missing"),
        (["--source", "golden", "--data", "x"], 2, "did you mean gold?"),
        (["--data", "missing.json"], 1, "there is no such file"),
        (["--data", "x", "--output", "."], 1, "is a folder"),
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
        assert_refused(capsys, files, run(data, output, "--corpus", str(corpus)), f"is the file of {flag}")


@pytest.mark.parametrize("source", ["gold", "teacher"])
@pytest.mark.parametrize(
    "content",
    [
        b"first line\nlast line",
        b"hello",
        b"\x89PNG\r\n\xff\xfe\x00",
        b'{"id": "7", "title": "T", "text": "x"}\n',
        b'{"id": "7", "title": "T", "text": "x"}',
        b'{"id": "q1", "steps": [], "source": "gold"}\n{"id": "q2"}\n{"id": "q3", "st',
        b"[]",
    ],
)
def test_a_file_of_other_things_is_refused_and_left_as_it_is(tmp_path, capsys, source, content):
    """Gold overwrote any file; a text lost its last line as a torn one, and a picture gave a UnicodeDecodeError."""
    output = tmp_path / "out.jsonl"
    output.write_bytes(content)
    data = write(tmp_path / "data.jsonl", [row(1)])
    assert_refused(capsys, {output: content}, run(data, output, "--source", source), "was not written by collect")


def test_rejections_that_are_none_are_refused(tmp_path, capsys):
    rejected = tmp_path / "out.jsonl.rejected.jsonl"
    rejected.write_text("hello")
    data = write(tmp_path / "data.jsonl", [row(1)])
    status = run(data, tmp_path / "out.jsonl", "--source", "teacher")
    assert_refused(capsys, {rejected: b"hello"}, status, "was not written by collect")


def test_gold_replaces_what_gold_wrote(tmp_path):
    data, output = write(tmp_path / "data.jsonl", [row(1), row(2)]), tmp_path / "out.jsonl"
    assert run(data, output) == 0
    whole = output.read_bytes()
    output.write_bytes(whole[:-20])
    assert run(data, output) == 0
    assert output.read_bytes() == whole


@pytest.mark.parametrize("output", ["file/out.jsonl", "/proc/out.jsonl", "/dev/null"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path, monkeypatch, capsys, output):
    """It was a traceback, after the retriever had been built."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    status = run(write(tmp_path / "data.jsonl", ["no row"]), output)
    assert_refused(capsys, {}, status, f"--output {output} ")
