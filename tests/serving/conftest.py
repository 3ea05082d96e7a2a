"""A server on a port of its own, with what answers made up: each ask gets its words back, one an iteration."""

import asyncio
import socket
import threading
import time
from dataclasses import dataclass, field

import pytest

from r3lite.core.errors import R3LiteError
from r3lite.serving.asks import ServedAnswer
from r3lite.settings import LimitSettings, ModeSettings, ServerSettings


@dataclass
class Echo:
    """Answers with the question's own words; `slow`: seconds between them, `preparing`: seconds before them."""

    learned_modes: list = field(default_factory=lambda: ["chat", "reasoning", "search"])
    notes: dict = field(default_factory=dict)
    missing: dict = field(default_factory=dict)
    about: dict = field(
        default_factory=lambda: {"model": "tiny", "adapters": ["sft", "rl"], "documents": "notes", "examples": []}
    )
    modes: dict = field(default_factory=lambda: {"chat": "sft", "reasoning": "rl", "search": "rl"})
    adapters: list = field(default_factory=lambda: ["sft", "rl"])
    slow: float = 0.002
    preparing: float = 0.0
    jobs: list = field(default_factory=list)
    asks: list = field(default_factory=list)
    restarts: int = 0

    def prepare(self, ask, tell):
        if len(ask.text) > 1000:
            raise R3LiteError("/secret/path: too long", "Raise --max-length.", code="prompt-too-long")
        if ask.text == "no disk":
            raise R3LiteError("/secret/path: the disk is gone", code="broken")
        if [message["role"] for message in ask.earlier] == ["user"]:
            raise R3LiteError("/secret/path: it refuses a chat of user, user", code="template-refuses-chat")
        time.sleep(self.preparing)
        self.asks.append(ask)
        return {"ask": ask, "tell": tell, "said": [], "left": False}

    def join(self, job):
        self.jobs.append(job)

    def leave(self, job):
        job["left"] = True

    def iterate(self):
        time.sleep(self.slow)
        over = []
        for job in list(self.jobs):
            words = job["ask"].text.split()
            if "crash" in words:
                raise RuntimeError("/secret/path is broken")
            if "stumble" in words:  # an error that is its own
                self.jobs.remove(job)
                over.append((job, None))
                continue
            if job["left"] or len(job["said"]) == len(words):
                self.jobs.remove(job)
                over.append((job, self.answer(job)))
                continue
            piece = (" " if job["said"] else "") + words[len(job["said"])]
            job["said"].append(piece)
            if job["tell"]:
                parts = {"step": 1, "analysis": "", "query": None, "answer": "".join(job["said"])}
                job["tell"]({"type": "text", "text": piece, **parts})
        return over

    def answer(self, job):
        text, count = "".join(job["said"]), len(job["said"])
        return ServedAnswer(
            text, text, [], [], [], "answered", None, False, 7, count, mode=job["ask"].mode, adapter="rl"
        )

    def restart(self):
        self.jobs.clear()
        self.restarts += 1

    def close(self):
        pass


@dataclass
class Running:
    url: str
    answering: Echo
    desk: object


@pytest.fixture
def serving():
    """Starts servers with an Echo, and stops them."""
    uvicorn = pytest.importorskip("uvicorn", reason="needs the extra serve")
    pytest.importorskip("fastapi", reason="needs the extra serve")
    from r3lite.serving.app import build_app
    from r3lite.serving.desk import Desk
    from r3lite.serving.http import Connection
    from r3lite.serving.worker import AnsweringThread

    running = []

    def start(token=None, server=None, slow=0.002, **limits):
        answering, limits = Echo(slow=slow), LimitSettings(**{"requests_per_minute": 10_000, **limits})
        desk = Desk(AnsweringThread(answering), limits, ModeSettings(), time.monotonic)
        app = build_app(desk, server or ServerSettings(), limits, token)
        listening = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(app, http=Connection, ws="none", log_level="critical", timeout_graceful_shutdown=1)
        uvicorn_server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(uvicorn_server.serve([listening])))
        thread.start()
        running.append((uvicorn_server, thread))
        return Running(f"http://127.0.0.1:{listening.getsockname()[1]}", answering, desk)

    yield start
    for uvicorn_server, thread in running:
        uvicorn_server.should_exit = True
        thread.join()
