"""Malformed messages between trainer and rollout servers: replies to a trainer, and requests to a rollout worker."""

import contextlib
import hashlib
import http.client
import io
import json
import struct
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from bench.stress.generated import (
    ANSWERED,
    ERROR_LIMIT,
    REFUSED,
    Example,
    Outcome,
    changed_bytes,
    changed_json,
    refusal,
)
from bench.stress.watching import TINY
from r3lite.assembly.rollout_service import build_service
from r3lite.core.episode import ANSWERED as HAS_ANSWER
from r3lite.core.episode import Document, Question, Step
from r3lite.core.errors import R3LiteError
from r3lite.core.http_server import Server
from r3lite.core.invocation import resolve
from r3lite.core.records import Record, Source, parse
from r3lite.llm.http_client import Link
from r3lite.models import lora
from r3lite.models.weights import fingerprint, load_model, resolve_folder
from r3lite.protocols.layout import Layout
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.rollout.remote import RolloutWorker
from r3lite.rollout.sequence import Sequence
from r3lite.rollout.uniforms import Uniforms
from r3lite.rollout.vllm import VllmServer
from r3lite.rollout.wire import (
    AdapterFiles,
    EpisodeLimits,
    Ticket,
    identity_of,
    sequence_from_json,
    sequence_to_json,
    tickets_to_json,
)
from r3lite.settings import LengthSettings, PpoConfig, ProtocolSettings, RolloutWorkerConfig

LENGTHS = LengthSettings(max_hops=2, max_new_tokens=64, max_length=1200)
QUESTION = Question("q1", "Who wrote the book, and when?", ())
PASSAGE = Document("d1", "The book", "Ann wrote it in 1901.", metadata=(("year", 1901),))
STEPS = (Step.asking("I look it up.", "author of the book", [PASSAGE]), Step("Ann wrote it.", answer="Ann, 1901"))
FACTS = {"--model": "tiny", "--temperature": "1.0"}
ADAPTER = AdapterFiles(b"{}\0weights")
# The sound replies that do not depend on the request, by path.
SOUND_REPLIES = {
    "/version": {"adapter": ADAPTER.version, "dtype": "fp32", "facts": FACTS},
    "/v1/models": {"object": "list", "data": [{"id": "tiny", "root": "tiny", "max_model_len": 4096}]},
    "/v1/load_lora_adapter": "loaded",
}
# Additional headers of replies. Most replies have none: otherwise hardly any body would be read.
HEADERS = (
    {}, {}, {}, {}, {}, {}, {}, {}, {"content-type": "application/json; charset=zlib"},
    {"content-type": "application/json; charset=hex"}, {"content-type": "text/plain; charset=utf-16"},
    {"content-encoding": "gzip"}, {"retry-after": "9" * 400}, {"x-long": "x" * 60_000}, {"content-length": "7"},
)  # fmt: skip
STATUSES = (200, 200, 200, 200, 200, 200, 200, 200, 200, 204, 302, 404, 500, 503, 999)


def sound_sequence(layout: Layout) -> Sequence:
    """Returns an episode with a search and an answer, as a model could have sampled it."""
    transcript = layout.lay_out(QUESTION, STEPS, document_tokens=64)
    return Sequence(
        QUESTION,
        tokens=transcript.tokens,
        action_mask=transcript.action_mask,
        steps=transcript.steps,
        step_ends=transcript.step_ends,
        finish=HAS_ANSWER,
        stream=Uniforms(0),
        logprobs=[-0.5] * sum(transcript.action_mask),
        values=[0.0] * sum(transcript.action_mask),
    )


def flaws_of(sequence: Sequence, layout: Layout) -> str:
    """Returns why no model can have sampled an episode that a trainer has accepted; "" if one can."""
    prompt = layout.prompt(QUESTION.text)
    actions = sum(sequence.action_mask)
    has_answer = [step.answer is not None for step in sequence.steps]
    checks = {  # what is wrong if the value is False
        "another prompt": sequence.tokens[: len(prompt)] == prompt and not any(sequence.action_mask[: len(prompt)]),
        "ids beyond the vocabulary": all(0 <= token < layout.tokenizer.size for token in sequence.tokens),
        "too long": len(sequence.tokens) <= layout.lengths.max_length,
        "without a sampled token": actions > 0,
        "log-probabilities": len(sequence.logprobs) == actions and all(-1e39 < p < 0.01 for p in sequence.logprobs),
        "step ends": sequence.step_ends == sorted(set(sequence.step_ends))
        and len(sequence.step_ends) == len(has_answer),
        "an end that was not sampled": all(sequence.action_mask[end] for end in sequence.step_ends),
        "no end": sequence.step_ends[-1:] == [len(sequence.tokens) - 1],
        "answers and finish": has_answer == [False] * (len(has_answer) - 1) + [sequence.finish == HAS_ANSWER],
    }
    flaws = [name for name, holds in checks.items() if not holds]
    try:
        parse(json.dumps(sequence.episode().to_json(), ensure_ascii=False))
    except R3LiteError as error:
        flaws.append(f"its line in episodes.jsonl cannot be read: {error}")
    return ", ".join(flaws)


class ScriptedServer(ThreadingHTTPServer):
    """A server that sends the replies in `by_path`: for each path a status, headers and a body."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ReplyHandler)
        self.by_path: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: a client may close the connection in the middle of a reply that it refuses."""


class ReplyHandler(BaseHTTPRequestHandler):
    """Sends the reply of a path, to GET and POST alike."""

    server: ScriptedServer

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        path = "/adapter" if self.path.startswith("/adapter") else self.path  # without the version of the adapter
        status, headers, body = self.server.by_path.get(path, (200, {}, b"{}"))
        self.send_response(status)
        for name, value in ({"content-length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *arguments: Any) -> None:
        """Nothing is logged."""


class ToTrainer:
    """The attack with replies to a trainer, as from a rollout worker or a vLLM server."""

    def __init__(self, folder: Path):
        tokenizer = Tokenizer.load(resolve_folder("tiny"))
        self.folder = folder
        self.layout = Layout(tokenizer, build_protocol(ProtocolSettings()), LENGTHS)
        self.server = ScriptedServer()
        self.sound_bodies = {path: json.dumps(reply).encode() for path, reply in SOUND_REPLIES.items()}
        self.episodes = {"episodes": [sequence_to_json(sound_sequence(self.layout)) | {"adapter": ADAPTER.version}]}
        ids = tokenizer.encode("Step 1:\nThe problem analysis: known\nThe final answer: Ann")
        ids.append(tokenizer.stop_id)
        choice = {"index": 0, "token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}}
        self.completion = {"model": f"r3lite-{ADAPTER.version[:16]}", "choices": [choice]}

    @property
    def strategy(self) -> st.SearchStrategy[Example]:
        sound = {
            "/sample": self.episodes,
            "/v1/completions": self.completion,
            "/version": SOUND_REPLIES["/version"],
            "/v1/models": SOUND_REPLIES["/v1/models"],
        }

        @st.composite
        def reply(draw: st.DrawFn) -> Example:
            path = draw(st.sampled_from(("/sample", "/sample", "/sample", "/v1/completions", *sound)))
            name, body = draw(changed_json(sound[path]))
            status = draw(st.sampled_from(STATUSES))
            headers = draw(st.sampled_from(HEADERS))
            suffix = f" with status {status} and {list(headers.items())}"[:100]
            return Example(f"{path}: {name}{suffix}", (path, status, headers, body))

        return reply()

    def judge(self, example: Example) -> Outcome:
        """Lets a trainer ask for the reply: it must refuse the reply, or accept episodes without flaws."""
        path, status, headers, body = example.content
        self.server.by_path = {sound_path: (200, {}, text) for sound_path, text in self.sound_bodies.items()}
        self.server.by_path[path] = (status, headers, body)
        link = Link(self.server.url, "Check that it runs.", seconds=5, max_bytes=1 << 24)
        try:
            sequences = self.ask(path, link)
        except R3LiteError as error:
            return refusal(str(error), self.server.url)
        flaws = [flaws_of(sequence, self.layout) for sequence in sequences]
        return Outcome(ANSWERED, "; ".join(filter(None, flaws)))

    def ask(self, path: str, link: Link) -> list[Sequence]:
        """Sends a trainer's request to a path; returns the episodes, or [] if the path only tells about the server."""
        ticket = Ticket(QUESTION, "0", 0)
        if path.startswith("/v1/"):
            config = PpoConfig()
            config = replace(config, model=replace(config.model, model="tiny"), lengths=LENGTHS)
            vllm_server = VllmServer(link, config, lambda sequence: self.layout, self.folder)
            if path == "/v1/models":
                self.server.by_path["/version"] = (200, {}, b'{"version": "0.33.0"}')
                vllm_server.check()
                return []
            return vllm_server.sample([ticket], ADAPTER, lambda pairs: [[PASSAGE] for _ in pairs])
        worker = RolloutWorker(link, FACTS, lambda sequence: self.layout)
        if path == "/version":
            worker.check()
            return []
        worker.adapter_version = ADAPTER.version
        return worker.sample([ticket], ADAPTER, lambda pairs: [])

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class ToWorker:
    """The attack with requests to a rollout worker, as from a trainer: episodes to sample, and adapters."""

    def __init__(self, folder: Path):
        sizes = "--retriever none --max-new-tokens 16 --max-hops 2 --max-length 1200"
        flags = [*TINY, *sizes.split()]
        config = resolve("rollout_worker", RolloutWorkerConfig(), flags, "ppo")
        self.service = build_service(config)
        self.layout = self.service.engine.layout
        self.server = Server(self.service, "127.0.0.1", 0)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.adapter = adapter_of(folder)
        self.adapter_path = f"/adapter/{self.adapter.version}"
        self.log = io.StringIO()
        assert self.post(self.adapter_path, self.adapter.body)[0] == 200
        earlier = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"})
        question_with_history = replace(
            QUESTION, id="q2", documents=(PASSAGE,), gold=(PASSAGE,), earlier=earlier, procedure="Be brief."
        )
        tickets = [
            Ticket(QUESTION, "1", 0),
            Ticket(question_with_history, "2", 1),
            Ticket(QUESTION, "3", 2, start=(sound_sequence(self.layout), 1)),
        ]
        head = {"identity": identity_of(self.service.facts), "adapter": self.adapter.version}
        self.sound_request = tickets_to_json(tickets) | head
        self.expected_reply = self.ask_sound_request()
        self.count = 0  # of the requests that were judged

    @property
    def strategy(self) -> st.SearchStrategy[Example]:
        config, _, weights = self.adapter.body.partition(b"\0")

        @st.composite
        def request(draw: st.DrawFn) -> Example:
            part = draw(st.sampled_from(("sample", "sample", "sample", "config", "header", "adapter")))
            if part == "sample":
                name, body = draw(changed_json(self.sound_request))
                return Example(f"/sample: {name}", ("/sample", body))
            if part == "config":
                name, changed = draw(changed_json(json.loads(config)))
                body = changed + b"\0" + weights
            elif part == "header":
                size = struct.unpack("<Q", weights[:8])[0]  # of the header of a safetensors file
                name, changed = draw(changed_json(json.loads(weights[8 : 8 + size])))
                body = config + b"\0" + struct.pack("<Q", len(changed)) + changed + weights[8 + size :]
            else:
                name, body = draw(changed_bytes(self.adapter.body))
            version = AdapterFiles(body).version
            if draw(st.integers(0, 9)) == 0:
                version = draw(st.sampled_from(("", "..", self.adapter.version, "%00", "x" * 3000)))
            return Example(f"/adapter, {part}: {name}, {version[:8]}", (f"/adapter/{version}", body))

        return request()

    def judge(self, example: Example) -> Outcome:
        """Sends a request: it must be refused with an error, or be answered correctly, and change nothing else."""
        path, body = example.content
        self.log = io.StringIO()
        with contextlib.redirect_stderr(self.log):
            status, reply = self.post(path, body)
        problem = ""
        if "Traceback" in self.log.getvalue():
            problem = f"a traceback: {self.log.getvalue()[-300:]}"
        elif status == 200:
            problem = self.flaw_of(path, body, reply)
        elif status not in (400, 413, 422) or not reply.get("error"):
            problem = f"status {status}: {str(reply)[:300]}"
        elif len(reply["error"]) > ERROR_LIMIT:
            problem = f"an error of {len(reply['error']):,} characters"
        if not problem:
            problem = self.flaw_afterwards(path)
        return Outcome(ANSWERED if status == 200 else REFUSED, problem)

    def flaw_of(self, path: str, body: bytes, reply: dict) -> str:
        """Returns what is wrong with a reply of status 200; "" if nothing is."""
        if path != "/sample":
            version = hashlib.sha256(body).hexdigest()[:32]
            return "" if reply == {"adapter": version} else f"another adapter: {reply}"
        if reply == {"differs": True}:
            return ""
        expected_count = len(json.loads(body)["episodes"] or [])
        episodes = Record(reply, Source("")).records("episodes")
        for episode in episodes:
            sequence_from_json(episode, QUESTION, EpisodeLimits.of(self.layout))
        return "" if len(episodes) == expected_count else f"{len(episodes)} episodes of {expected_count}"

    def flaw_afterwards(self, path: str) -> str:
        """Sends the sound request; returns what is wrong with the reply, "" if nothing is.

        After a request for episodes this is done only one time in ten, because such requests take long. After any other
        request the sound adapter is sent first, since the worker may have taken the adapter of the request.
        """
        self.count += 1
        if path != "/sample":
            self.post(self.adapter_path, self.adapter.body)
        if path == "/sample" and self.count % 10:
            return ""
        return "" if self.ask_sound_request() == self.expected_reply else "then a sound request has another reply"

    def ask_sound_request(self) -> dict:
        """Returns the reply to the sound request."""
        status, reply = self.post("/sample", json.dumps(self.sound_request).encode())
        assert status == 200 and len(reply["episodes"]) == 3, reply
        return reply

    def post(self, path: str, body: bytes) -> tuple[int, dict]:
        """Returns the status and the JSON of the reply to a POST request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=60)
        with contextlib.closing(connection):
            connection.request("POST", path, body)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def adapter_of(folder: Path) -> AdapterFiles:
    """Returns a newly initialized adapter of the tiny model; writes its files into the folder."""
    source = resolve_folder("tiny")
    model = load_model(source, torch.float32, torch.device("cpu"))
    lora.add_adapter(model, "policy", r=2, alpha=4)
    lora.save_adapter(model, "policy", folder / "adapter", "tiny", fingerprint(source))
    return AdapterFiles.read(folder / "adapter")
