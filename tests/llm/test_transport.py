"""Calls end: after a time in all, at a size, and at once if the run stops."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import zlib
from functools import partial

import pytest

from r3lite.llm.client import Client, Request
from r3lite.llm.http_client import Link, Unanswered
from r3lite.settings import JudgeSettings
from tests.errors import raises
from tests.fake_gemini import error_reply, text_reply
from tests.marks import ASK
from tests.scripted_server import Scripted


@pytest.mark.parametrize("part", ["headers", "body"])
def test_a_server_that_drips_is_given_up_after_the_time_of_a_call(gemini, client, part):
    """Each byte came within the time of a read, so that the call never ended."""
    gemini.script = [text_reply('{"mark": 1}', drip=part)]
    start = time.monotonic()
    assert client(judge_timeout=0.5, judge_retries=0).generate(ASK).failure == "timeout"
    assert time.monotonic() - start < 5
    wait_until(lambda: gemini.given_up == 1)  # the connection is closed


def test_a_body_without_end_is_given_up(gemini, client):
    gemini.script = [text_reply('{"mark": 1}', endless=True)]
    assert client().generate(ASK).failure == "too_large"
    wait_until(lambda: gemini.given_up == 1)
    assert gemini.sent < 32 << 20  # more than the 4 MiB read: sockets hold some


def test_a_compressed_body_is_not_unpacked(gemini, client):
    answer = text_reply("", headers={"content-encoding": "gzip"})
    gemini.script = [answer]
    reply = client(judge_retries=0).generate(ASK)
    assert reply.failure == "connection" and "compressed" in reply.detail
    assert {k.lower(): v for k, v in gemini.requests[0][1].items()}["accept-encoding"] == "identity"


@pytest.mark.parametrize("charset", ["zlib", "hex", "utf-16", "none"])
def test_json_is_utf_8_whatever_charset_the_server_names(running, charset):
    """Python has codecs that are none of texts: zlib unpacked a reply to any size, and hex raised an error of its own.

    It was so in each reply of a server, whether it was one of a judge, of a retriever or of a worker.
    """
    body = '{"answer": "Zoë"}'.encode()
    headers = {"content-type": f"application/json; charset={charset}"}
    link = Link(running(Scripted((200, body, 0, headers), (404, body, 0, headers))), "", 10, 1 << 20)
    assert link.ask("", None, "a server", lambda reply: reply.text("answer")) == "Zoë"
    with raises(Unanswered, "no-reply", "status 404", "Zoë"):
        link.text()


def test_a_reply_is_not_unpacked_by_its_charset(running):
    packed = zlib.compress(bytes(1 << 20))
    link = Link(running(Scripted((200, packed, 0, {"content-type": "text/plain; charset=zlib"}))), "", 10, 1 << 16)
    assert 0 < len(link.text()) <= len(packed)


def test_a_redirect_does_not_send_the_key_elsewhere(gemini, client):
    gemini.script = [text_reply("", status=307, headers={"location": "/elsewhere"})]
    assert client().generate(ASK).failure == "refused"
    assert len(gemini.requests) == 1


def test_threads_that_wait_give_up_when_the_run_stops(gemini):
    answers = {"backoff": error_reply(503, headers={"Retry-After": "100"}), "drip": text_reply("x", drip="body")}
    gemini.script = lambda body: answers.get(body["contents"][0]["parts"][0]["text"], error_reply(400))
    client = Client(JudgeSettings(judge="gemini", judge_base_url=gemini.url))

    def interrupt(reply):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.generate_all([Request("backoff"), Request("drip"), Request("quick")], on_reply=interrupt)
    wait_until(lambda: not any(t.name.startswith("ThreadPoolExecutor") for t in threading.enumerate()))


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_wait_for_a_server_that_drips(gemini, tmp_path, number, status):
    """The process waited on for its threads, each in a read that never came to an end."""
    gemini.script = [text_reply("x", drip="headers")]
    (tmp_path / "data.jsonl").write_text('{"id": "1", "question": "Who?", "answer": "Ada"}\n')
    flags = ["--source", "teacher", "--data", "data.jsonl", "--retriever", "none", "--output", "out.jsonl"]
    command = [sys.executable, "-m", "r3lite.collect", *flags, "--judge-base-url", gemini.url]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a test run in the background ignores it
    options = {"stderr": subprocess.PIPE, "text": True, "preexec_fn": heard}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, **options)
    try:
        wait_until(lambda: gemini.requests, 60)
        process.send_signal(number)
        start = time.monotonic()
        _, stderr = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == status and "Traceback" not in stderr
    assert time.monotonic() - start < 10


BLOCKED = """
import builtins, sys
real, without = builtins.__import__, sys.argv[1].split(",")
def imported(name, globals=None, *more, **named):
    if name in without and (globals or {}).get("__name__", "").startswith("r3lite"):
        raise ImportError(f"no module {name}")
    return real(name, globals, *more, **named)
builtins.__import__ = imported
import r3lite.assembly.reinforcement, r3lite.assembly.rl_setup, r3lite.retrieval.retriever
from r3lite.core.errors import R3LiteError
from r3lite.llm.client import Client, Request
from r3lite.settings import JudgeSettings
try:
    client = Client(JudgeSettings(judge="openai", judge_model="m", judge_base_url=sys.argv[2], judge_retries=0))
    print(client.generate(Request("x")).failure, sys.modules["r3lite.llm.http_client"].httpx.__name__)
except R3LiteError as error:
    print(error.remedy)
"""


@pytest.mark.parametrize(
    ("without", "message"),
    [("httpx", "malformed httpx2"), ("httpx2", "malformed httpx"), ("httpx,httpx2", "pip install httpx2")],
)
def test_either_http_client_does_and_training_imports_without_any(gemini, without, message):
    """google-genai and huggingface_hub bring one; with other versions of these, RL could not be imported."""
    if message.startswith("malformed"):
        pytest.importorskip(message.split()[1])
    gemini.script = [text_reply("", status=200)]
    gemini.script[0].body = b"no JSON"
    command = [sys.executable, "-c", BLOCKED, without, gemini.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert re.search(rf"{message}\b", done.stdout), done.stdout + done.stderr  # httpx is the beginning of httpx2


def wait_until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
