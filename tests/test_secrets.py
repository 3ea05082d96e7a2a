"""Keys and tokens of the environment reach the servers that they are for, and nothing else: no file, no message."""

import base64
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from r3lite import collect, doctor, evaluate, export, index, ppo, report, retrieve, sft, tune_prompt
from r3lite.core.files import shipped
from r3lite.retrieval import web

NAMES = (
    "GOOGLE_API_KEY", "OPENAI_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "EXA_API_KEY", "QDRANT_API_KEY", "R3LITE_TOKEN",
    "R3LITE_RETRIEVER_TOKEN", "AWS_SECRET_ACCESS_KEY",
)  # fmt: skip
SECRETS = {name: f"planted-{number}-{name.lower().replace('_', '-')}-0123456789" for number, name in enumerate(NAMES)}
WORLD = shipped("data", "world")
ROOT = Path(__file__).parent.parent
ANSWER = "Step 1:\nThe problem analysis: {said}\nThe final answer: {said}"


class Parrot(ThreadingHTTPServer):
    """Says to each request the headers that came with it: as an answer, or in the message of an error."""

    def __init__(self):
        self.status, self.got = 200, set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"])).decode()
                headers = json.dumps(dict(self.headers))
                outer.got |= {name for name, secret in SECRETS.items() if secret in headers}
                text = ANSWER.format(said=headers) if "json_schema" not in body else headers
                openai = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}
                gemini = {"candidates": [{"content": {"parts": [{"text": text}]}, "finishReason": "STOP"}]}
                error = {"error": {"code": outer.status, "message": f"no: {headers}", "status": headers}}
                reply = json.dumps(openai | gemini if outer.status == 200 else error).encode()
                self.send_response(outer.status)
                self.send_header("content-length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *arguments):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def parrot(monkeypatch):
    server = Parrot()
    monkeypatch.setattr(web, "EXA", f"{server.url}/search")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def planted(tmp_path, monkeypatch):
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def leaked_secrets(text: bytes) -> list[str]:
    """The secrets in a text: as they are, in base64 or escaped."""
    leaked = []
    for name, secret in SECRETS.items():
        forms = [secret, urllib.parse.quote(secret, safe=""), secret[:-3]]
        forms += [base64.b64encode((" " * i + secret).encode()).decode()[4:-4] for i in range(3)]
        leaked += [name] * any(form.encode() in text for form in forms)
    return leaked


def in_files(folder: Path) -> dict[str, list[str]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return {str(path): names for path in files if (names := leaked_secrets(path.read_bytes() + str(path).encode()))}


def test_no_command_writes_or_prints_a_key(planted, parrot, capfd):
    tiny = ["--preset", "tiny"]
    openai = ["--judge", "openai", "--judge-model", "m", "--judge-base-url", f"{parrot.url}/v1", "--judge-retries", "0"]
    gemini = ["--judge", "gemini", "--judge-base-url", parrot.url, "--judge-retries", "0"]
    train, dev = ["--data", str(WORLD / "train.jsonl")], ["--data", str(WORLD / "dev.jsonl"), "--limit", "2"]
    corpus = (WORLD / "corpus.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:60]
    (planted / "corpus.jsonl").write_text("".join(corpus), encoding="utf-8")
    search = ["--corpus", "corpus.jsonl"]
    short, less = ["--max-new-tokens", "16", "--max-hops", "1"], ["--batch-size", "1", "--validation-rows", "0"]
    assert index.main([*tiny, *search, "--output", "index"]) == 0
    assert collect.main([*tiny, *train, "--limit", "8", "--output", "rows.jsonl"]) == 0
    assert sft.main([*tiny, "--data", "rows.jsonl", "--max-steps", "1", *less, "--output", "sft"]) == 0
    small = ["--batch-size", "1", "--num-generations", "2", "--mini-batch-size", "2", "--max-steps", "1"]
    commands = {
        "collect": (collect, [*train, "--source", "teacher", *search, "--limit", "1", "--attempts", "1"]),
        "evaluate": (evaluate, [*dev, *search, *short]),
        "ppo": (ppo, [*train, "--limit", "1", "--adapter", "sft", *search, *short, *small, "--outcome-judge", "1"]),
        "tune": (tune_prompt, [*train, "--eval-data", dev[1], "--limit", "1", *search, *short, "--rounds", "1"]),
    }
    tried = [("collect", openai, 200), ("collect", gemini, 200), ("collect", openai, 500), ("collect", gemini, 401)]
    tried += [("evaluate", gemini, 400), ("ppo", openai, 200), ("tune", openai, 401)]
    statuses = []
    for number, (name, judge, status) in enumerate(tried):
        parrot.status, (command, flags) = status, commands[name]
        statuses.append(command.main([*tiny, *flags, *judge, "--output", f"{name}-{number}.jsonl"]))
    statuses.append(retrieve.main([*tiny, *dev, "--retriever", "exa", "--output", "retrieved"]))  # with status 401
    assert set(statuses) == {0, 1} and parrot.got == {"GOOGLE_API_KEY", "OPENAI_API_KEY", "EXA_API_KEY"}
    assert report.main(["sft", "--output", "report.html"]) == 0
    assert export.main([*tiny, "--adapter", "sft", "--prompts", "1", "--output", "exported"]) == 0
    assert doctor.main(["--dry-run"]) == 0
    # Keys in an address are refused, and not shown.
    for secret in list(SECRETS.values())[:2]:
        for address in (f"http://user:{secret}@127.0.0.1/v1", f"http://127.0.0.1/v1?key={secret}"):
            assert evaluate.main([*tiny, *dev, *openai[:4], "--judge-base-url", address]) == 2
            assert evaluate.main([*tiny, *dev, "--retriever", address]) == 2
            assert evaluate.main([*tiny, *dev, "--rerank", address]) == 2
    output = capfd.readouterr()
    assert "***" in output.err  # where a server repeated it
    assert leaked_secrets((output.out + output.err).encode()) == [] and in_files(planted) == {}


def test_a_server_neither_prints_nor_answers_with_its_token(planted):
    pytest.importorskip("fastapi", reason="needs the extra serve")
    arguments = ["--preset", "tiny", "--retriever", "none", "--max-new-tokens", "8", "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "r3lite.serve", *arguments]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = [process.stdout.readline() for _ in range(2)]
    url = lines[1].split()[0]
    token = SECRETS["R3LITE_TOKEN"]
    replies = []
    for bearer in (token, token[:-1], "x"):
        for path in ("/generate", "/v1/chat/completions", "/nowhere", f"/{token}"):
            body = json.dumps({"query": "who?", "mode": "chat"}).encode()
            headers = {"Authorization": f"Bearer {bearer}", "Content-Type": "application/json"}
            try:
                with urllib.request.urlopen(urllib.request.Request(url + path, body, headers)) as reply:
                    replies.append(reply.read())
            except urllib.error.HTTPError as error:
                replies.append(error.read() + str(error.headers).encode())
    process.terminate()
    remaining_output = process.communicate(timeout=30)
    assert any(b"final_answer" in each for each in replies) and any(b"invalid_api_key" in each for each in replies)
    assert leaked_secrets(b"".join(replies)) == []
    assert leaked_secrets("".join([*lines, *remaining_output]).encode()) == []


@pytest.mark.slow
def test_a_tracked_run_keeps_no_key(planted, monkeypatch, capfd):
    pytest.importorskip("wandb", reason="needs the extra track")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tiny = ["--preset", "tiny"]
    assert collect.main([*tiny, "--data", str(WORLD / "train.jsonl"), "--limit", "8", "--output", "rows.jsonl"]) == 0
    run = [*tiny, "--data", "rows.jsonl", "--max-steps", "1", "--output", "sft", "--track", "wandb"]
    assert sft.main(run) == 0
    output = capfd.readouterr()
    assert leaked_secrets((output.out + output.err).encode()) == [] and in_files(planted) == {}
