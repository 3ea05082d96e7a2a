"""Measures a server under 64 concurrent clients, and across a restart: latencies, memory, lost requests.

    python -m bench.stress.load retrieve -- --corpus corpus.jsonl --encoder hashing
    python -m bench.stress.load serve -- --model tiny --retriever none --max-new-tokens 32

Starts `python -m r3lite.retrieve --serve` or `python -m r3lite.serve` with the flags after `--`, ends it with SIGTERM
after half of the time and starts it again. Each client sends a question, waits for its answer and sends the next; a
request without an answer is sent again until it has one. Linux only: memory is read from /proc.
"""

import argparse
import asyncio
import itertools
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx2 as httpx  # google-genai brings it

from bench.options import RESULTS
from bench.records import provenance
from bench.serving import resident
from r3lite.core.files import write_json
from r3lite.devices.precision import Precision, resolve_device, resolve_dtype

CLIENTS = 64
SECONDS = 300  # of the load
MEMORY_INTERVAL = 5.0  # seconds between two readings of the memory
RETRY_DELAY = 0.2  # seconds before a request without an answer is sent again
WARM_UP = 0.2  # share of the time after a start that is left out when growth of the memory is computed
EXIT_STATUSES = (0, 143)  # of a server after SIGTERM; 143 is 128 + 15, the number of that signal


@dataclass
class Load:
    """The requests to the server, their replies, and its memory. Times are those of time.perf_counter, in seconds."""

    sent: int = 0
    answered: int = 0
    resent: int = 0  # how often a request was sent again because the server was away
    wrong: list[str] = field(default_factory=list)  # replies that are no answers: status and beginning of the text
    latencies: list[tuple[float, float]] = field(default_factory=list)  # (time of sending, seconds until the answer)
    memory: list[tuple[float, float]] = field(default_factory=list)  # (time, MiB of the server)


def body_of(kind: str, question: str) -> tuple[str, dict]:
    """Returns the path and the body of a request to a kind of server."""
    if kind == "retrieve":
        return "/retrieve", {"queries": [question], "topk": 3}
    return "/generate", {"query": question, "mode": "chat"}


def is_answer(kind: str, reply: dict) -> bool:
    """Returns whether a reply has passages (retrieve) or an answer, which may be empty (serve)."""
    if kind == "retrieve":
        return bool(reply.get("result"))
    return isinstance(reply.get("final_answer"), str)


async def reply_to(http: httpx.AsyncClient, path: str, body: dict) -> httpx.Response | None:
    """Sends a request; returns the reply, or None if the server is away."""
    try:
        reply = await http.post(path, json=body)
    except httpx.TransportError:
        return None
    return None if reply.status_code in (502, 503) else reply  # bad gateway, service unavailable


async def client(http: httpx.AsyncClient, kind: str, questions: list[str], load: Load, end: float) -> None:
    """Sends one question after another until the time `end`, and waits for the answer to the last one."""
    for question in itertools.cycle(questions):
        sent_at = time.perf_counter()
        if sent_at >= end:
            return
        path, body = body_of(kind, question)
        load.sent += 1
        reply = await reply_to(http, path, body)
        while reply is None:
            load.resent += 1
            await asyncio.sleep(RETRY_DELAY)
            reply = await reply_to(http, path, body)
        load.answered += 1
        load.latencies.append((sent_at, time.perf_counter() - sent_at))
        if reply.status_code != 200 or not is_answer(kind, reply.json()):
            load.wrong.append(f"{reply.status_code} {reply.text[:200]}")


class ServerUnderLoad:
    """A server process that can be stopped, and started again at the same port."""

    def __init__(self, kind: str, flags: list[str]):
        with socket.create_server(("127.0.0.1", 0)) as free_socket:
            self.port = free_socket.getsockname()[1]
        serve = ["r3lite.retrieve", "--serve"] if kind == "retrieve" else ["r3lite.serve"]
        limits = [] if kind == "retrieve" else ["--requests-per-minute", "1000000"]
        self.command = [sys.executable, "-m", *serve, "--port", str(self.port), *limits, *flags]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen | None = None

    async def start(self) -> None:
        """Starts the server, and returns as soon as it answers."""
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL)
        async with httpx.AsyncClient(base_url=self.url) as http:
            while True:
                assert self.process.poll() is None, "the server has ended; its message is above"
                try:
                    await http.get("/health")
                    return
                except httpx.TransportError:
                    await asyncio.sleep(0.1)

    def stop(self) -> int:
        """Ends the server with SIGTERM, and returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


async def run(kind: str, flags: list[str], questions: list[str], clients: int, seconds: float) -> dict:
    """Puts a server under load, with a restart after half of the time; returns the figures."""
    server = ServerUnderLoad(kind, flags)
    load = Load()
    await server.start()
    start = time.perf_counter()
    end = start + seconds

    async def read_memory() -> None:
        while time.perf_counter() < end:
            if server.process.poll() is None:
                load.memory.append((time.perf_counter(), resident(server.process.pid)))
            await asyncio.sleep(MEMORY_INTERVAL)

    async def restart() -> tuple[float, float, int]:
        """Returns when the server was stopped, when it answered again, and its exit status."""
        await asyncio.sleep(seconds / 2)
        stopped = time.perf_counter()
        status = await asyncio.to_thread(server.stop)
        await server.start()
        return stopped, time.perf_counter(), status

    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as http:
        tasks = []
        for number in range(clients):
            first = number % len(questions)  # each client begins with another question
            tasks.append(client(http, kind, questions=questions[first:] + questions[:first], load=load, end=end))
        *_, (stopped, restarted, status) = await asyncio.gather(*tasks, read_memory(), restart())
    assert server.stop() in EXIT_STATUSES
    figures = report(load, start=start, stopped=stopped, restarted=restarted, end=end)
    return figures | {"exit_status": status}


def report(load: Load, start: float, stopped: float, restarted: float, end: float) -> dict:
    """Returns the figures of a load; latencies that the restart lengthened are reported separately.

    `stopped` is when the server was ended, `restarted` when it answered again.
    """
    delayed = []
    undelayed = []
    for sent_at, latency in load.latencies:
        if sent_at + latency > stopped and sent_at < restarted:
            delayed.append(latency)
        else:
            undelayed.append(latency)
    percentiles = statistics.quantiles(undelayed, n=100)

    def growth(first: float, last: float) -> float:
        """Returns by which share the memory grew between two times, without the warm-up."""
        warm = first + WARM_UP * (last - first)
        sizes = [mib for read_at, mib in load.memory if warm <= read_at <= last]
        return sizes[-1] / sizes[0] - 1

    return {
        "sent": load.sent,
        "answered": load.answered,
        "wrong": load.wrong[:10],
        "sent_again": load.resent,
        "requests_per_second": round(len(undelayed) / (stopped - start + end - restarted), 1),
        "p50_ms": round(percentiles[49] * 1000, 1),
        "p99_ms": round(percentiles[98] * 1000, 1),
        "away_seconds": round(restarted - stopped, 1),
        "delayed_by_restart": len(delayed),
        "longest_delay_seconds": round(max(delayed, default=0.0), 1),
        "memory_mib": round(load.memory[-1][1], 1),
        "memory_growth": [round(growth(start, stopped), 4), round(growth(restarted, end), 4)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["retrieve", "serve"])
    parser.add_argument("--questions", default="data/world/test.jsonl", help="JSON lines with `question`")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = [*sys.argv[1:], "--"]  # so that there is one in any case
    separator = arguments.index("--")
    server_flags = arguments[separator + 1 : -1]  # the last one is the "--" that was added above
    flags = parser.parse_args(arguments[:separator])
    lines = Path(flags.questions).read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    device = resolve_device("cpu")
    conditions = provenance(Precision(resolve_dtype("auto", device), device))
    load = {"clients": flags.clients, "seconds": flags.seconds, "flags": " ".join(server_flags)}
    figures = load | asyncio.run(
        run(flags.kind, server_flags, questions=questions, clients=flags.clients, seconds=flags.seconds)
    )
    print(json.dumps(figures, indent=1))
    file = flags.results / "load.json"
    runs = json.loads(file.read_text(encoding="utf-8"))["runs"] if file.exists() else []
    write_json(file, {"runs": [*runs, {"server": flags.kind, **conditions, **figures}]})


if __name__ == "__main__":
    main()
