"""`collect`: gold trajectories by the real retriever; a teacher's, from a local server: filtered, resumed, capped."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from r3lite import collect
from r3lite.config import shipped
from r3lite.datasets import trajectories
from r3lite.datasets.qa import read_questions
from r3lite.protocols.registry import build_protocol
from r3lite.settings import ProtocolSettings


def row(number, hops=None, answer="Oslo"):
    film, person = f"Film {number}", f"Person {number}"
    hops = hops or [(f"Who directed {film}?", person, 0), ("Where was #1 born?", answer, 1)]
    return {
        "id": f"q{number}",
        "question": f"Where was the director of {film} born?",
        "answer": answer,
        "paragraphs": [
            {"idx": 0, "title": film, "paragraph_text": f"{film} is by {person}.", "is_supporting": True},
            {"idx": 1, "title": person, "paragraph_text": f"{person} was born in {answer}.", "is_supporting": True},
        ],
        "question_decomposition": [{"question": q, "answer": a, "paragraph_support_idx": i} for q, a, i in hops],
    }


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return str(path)


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_rows(path):
    return trajectories.read_rows(path, build_protocol(ProtocolSettings()))


def run(data, output, *arguments):
    return collect.main(["--data", str(data), "--output", str(output), "--encoder", "hashing", *arguments])


# Gold


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


def test_questions_that_give_no_trajectory_are_counted_by_reason(tmp_path, capsys):
    twice = [("Who directed it?", "A", 0), ("who directed it", "B", 1)]
    plain = {"id": "p", "question": "Q?", "answer": "a"}
    data = write(tmp_path / "data.jsonl", [row(1), plain, row(2, hops=twice), row(3, hops=[("Q?", "a", None)]), plain])
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


# Teacher


class Server:
    """Answers as Gemini does: `reply(prompt, temperature)` is the text, or a status code."""

    def __init__(self, reply):
        self.prompts, self.reply, server = [], reply, self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                prompt = body["contents"][0]["parts"][0]["text"]
                server.prompts.append(prompt)
                told = server.reply(prompt, body["generationConfig"]["temperature"])
                answer, status = {"error": {"code": told, "message": "no"}}, told
                if isinstance(told, str):
                    usage = {"promptTokenCount": 1000, "candidatesTokenCount": 100}
                    candidate = {"content": {"parts": [{"text": told}]}, "finishReason": "STOP"}
                    answer, status = {"candidates": [candidate], "usageMetadata": usage}, 200
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def teach(tmp_path, monkeypatch):
    """Runs `collect --source teacher` against a server; `teach.server.prompts` are the requests it got."""
    pytest.importorskip("google.genai")
    monkeypatch.setenv("GOOGLE_API_KEY", "key")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Server(good)

    def teach(data, *arguments):
        address = f"http://127.0.0.1:{server.http.server_port}"
        options = ["--source", "teacher", "--judge-base-url", address, "--judge-rpm", "100000", "--judge-retries", "0"]
        return run(data, tmp_path / "out.jsonl", *options, *arguments)

    teach.server, teach.output = server, tmp_path / "out.jsonl"
    teach.rejected = tmp_path / "out.jsonl.rejected.jsonl"
    yield teach
    server.http.shutdown()
    server.http.server_close()


def good(prompt, temperature, answer="Oslo"):
    """A teacher that asks for the film, then for the person, then answers."""
    number = int(re.findall(r"Write Step (\d+) now", prompt)[-1])
    film = re.search(r"director of (Film \d+)", prompt)[1]
    head = f"Step {number}:\nThe problem analysis: I look.\n"
    if number == 1:
        return f"{head}The retrieval query: Who directed {film}?\n"
    if number == 2:
        person = film.replace("Film", "Person")
        assert f"{film} is by {person}." in prompt  # what the first query brought
        return f"{head}The retrieval query: Where was {person} born?\nThe retrieval documents:\n[1] invented"
    return f"{head}The final answer: {answer}"


def test_a_teacher_s_trajectory_holds_what_it_wrote_and_what_was_retrieved(tmp_path, teach, capsys):
    assert teach(write(tmp_path / "data.jsonl", [row(1), row(2)])) == 0
    first, second = read_rows(teach.output)
    assert (first.id, first.source, second.id) == ("q1", "teacher", "q2")
    assert [s.query for s in first.steps] == ["Who directed Film 1?", "Where was Person 1 born?", None]
    assert "Person 1" in {d.title for d in first.steps[1].documents}  # not what the teacher invented
    assert first.steps[-1].answer == "Oslo"
    assert not any(
        "invented" in p or "Oslo" in p.partition("The retrieval documents:")[0] for p in teach.server.prompts
    )
    table = capsys.readouterr().out
    assert re.search(r"kept +2\n", table) and re.search(r"requests +6\n", table) and "US dollars" in table
    assert not lines(teach.rejected)


def test_wrong_and_malformed_attempts_are_tried_again_and_then_rejected(tmp_path, teach, capsys):
    def reply(prompt, temperature):
        if "director of Film 1 " in prompt:
            return good(prompt, temperature, "Oslo" if temperature else "Rome")  # right only when sampled
        if "director of Film 2 " in prompt:
            return good(prompt, temperature, "Rome")
        return "The answer is Oslo."

    teach.server.reply = reply
    data = write(tmp_path / "data.jsonl", [row(1), row(2), row(3)])
    assert teach(data, "--attempts", "2") == 0
    assert [r["id"] for r in lines(teach.output)] == ["q1"]
    assert {(r["id"], r["reason"]) for r in lines(teach.rejected)} == {
        ("q2", "wrong answer"),
        ("q3", "malformed step (no_step_heading)"),
    }
    table = capsys.readouterr().out
    assert re.search(r"rejected: wrong answer +1\n", table)
    # Attempts are samples of their own, not one reply from the cache.
    assert sum("director of Film 3" in p for p in teach.server.prompts) == 2


def test_an_answer_is_demanded_after_the_last_query(tmp_path, teach):
    def reply(prompt, temperature):
        number = int(re.findall(r"Write Step (\d+) now", prompt)[-1])
        return f"Step {number}:\nThe problem analysis: hm\nThe retrieval query: what about {number}?"

    teach.server.reply = reply
    assert teach(write(tmp_path / "data.jsonl", [row(1)]), "--max-hops", "2", "--attempts", "1") == 1
    assert lines(teach.rejected) == [{"id": "q1", "reason": "no answer after 2 queries"}]
    assert ["No further retrieval is possible" in p for p in teach.server.prompts] == [False, False, True]


def test_a_second_run_asks_only_what_is_left(tmp_path, teach, capsys):
    rows = [row(1), row(2, answer="Rome")]
    assert teach(write(tmp_path / "data.jsonl", rows), "--attempts", "1") == 0
    asked, kept = len(teach.server.prompts), teach.output.read_bytes()
    assert teach(write(tmp_path / "data.jsonl", rows), "--attempts", "1") == 0
    assert len(teach.server.prompts) == asked and teach.output.read_bytes() == kept
    table = capsys.readouterr().out
    assert re.search(r"kept by earlier runs +1\n", table) and re.search(r"rejected by earlier runs +1\n", table)
    # A crash in the middle of a line: what is torn is collected again, from the cache.
    teach.output.write_bytes(kept[:-20])
    assert teach(write(tmp_path / "data.jsonl", rows), "--attempts", "1") == 0
    assert len(teach.server.prompts) == asked and teach.output.read_bytes() == kept
    assert "torn" in capsys.readouterr().err
    # It may be torn inside a character, too.
    teach.output.write_bytes(kept + '{"id": "q2", "question": "é'.encode()[:-1])
    assert teach(write(tmp_path / "data.jsonl", rows), "--attempts", "1") == 0
    assert teach.output.read_bytes() == kept


def test_caps_stop_the_run_with_whole_lines_and_a_later_run_goes_on(tmp_path, teach, capsys):
    data = write(tmp_path / "data.jsonl", [row(n) for n in range(1, 8)])
    assert teach(data, "--judge-max-calls", "15", "--judge-concurrency", "1") == 0
    table = capsys.readouterr().out
    assert "the cap of 15 requests is reached" in table and re.search(r"questions left +3\n", table)
    assert len(teach.server.prompts) == 15 and len(read_rows(teach.output)) == 4
    assert teach(data, "--judge-concurrency", "1") == 0
    assert [r.id for r in read_rows(teach.output)] == [f"q{n}" for n in range(1, 8)]
    assert len(teach.server.prompts) == 21  # what was paid for is not paid for again


def test_a_cap_on_cost_stops_the_run(tmp_path, teach, capsys):
    data = write(tmp_path / "data.jsonl", [row(n) for n in range(1, 8)])
    assert teach(data, "--judge-max-cost", "0.012", "--judge-concurrency", "1") == 0
    assert "US dollars is reached" in capsys.readouterr().out
    assert 0 < len(read_rows(teach.output)) < 7


def test_a_server_that_fails_stops_the_run_and_rejects_nobody(tmp_path, teach, capsys):
    teach.server.reply = lambda prompt, temperature: 500
    assert teach(write(tmp_path / "data.jsonl", [row(1)])) == 1
    assert "the teacher does not reply: server" in capsys.readouterr().err
    assert lines(teach.rejected) == []


def test_without_a_key_the_teacher_is_not_asked(tmp_path, teach, monkeypatch, capsys):
    monkeypatch.delenv("GOOGLE_API_KEY")
    monkeypatch.delenv("GEMINI_API_KEY", raising=False)
    assert teach(write(tmp_path / "data.jsonl", [row(1)])) == 1
    assert "there is no key for Gemini" in capsys.readouterr().err


def test_gold_does_not_overwrite_what_a_teacher_was_paid_for(tmp_path, teach, capsys):
    data = write(tmp_path / "data.jsonl", [row(1)])
    assert teach(data) == 0
    assert run(data, teach.output) == 1
    assert "holds a teacher's trajectories" in capsys.readouterr().err
