"""What 64 clients at once get from a server for some minutes, and across its restart: latencies, memory, lost requests.

    python -m bench.stress.load retrieve -- --corpus corpus.jsonl --encoder hashing
    python -m bench.stress.load serve -- --model tiny --retriever none --max-new-tokens 32

Starts `python -m r3lite.retrieve --serve` or `python -m r3lite.serve` with what follows `--`, ends it with SIGTERM in
the middle of the time and starts it again. A client sends a question, waits for its answer and sends the next; a
request that got no answer is sent again until it has one. Linux only: memory is read from /proc.
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

CLIENTS, SECONDS, READ_EVERY = 64, 300, 5.0
PAUSE = 0.2  # seconds before a request without an answer is sent again
SETTLED = 0.2  # share of the time after which memory is compared with its end


@dataclass
class Load:
    """What was sent and what came back."""

    sent: int = 0
    answered: int = 0
    again: int = 0  # times that a request was sent again, as the server was away
    wrong: list[str] = field(default_factory=list)  # answers that are not what was asked for
    seconds: list[tuple[float, float]] = field(default_factory=list)  # (when it was sent, until its answer)
    memory: list[tuple[float, float]] = field(default_factory=list)  # (when, MiB of the server)


def body_of(kind: str, question: str) -> tuple[str, dict]:
    """The path and the body of a request."""
    if kind == "retrieve":
        return "/retrieve", {"queries": [question], "topk": 3}
    return "/generate", {"query": question, "mode": "chat"}


def is_answer(kind: str, reply: dict) -> bool:
    found = reply.get("result") if kind == "retrieve" else reply.get("final_answer")
    return bool(found) if kind == "retrieve" else isinstance(found, str)


async def answered(http: httpx.AsyncClient, path: str, body: dict) -> httpx.Response | None:
    """The reply to a request; None if the server is away."""
    try:
        reply = await http.post(path, json=body)
    except httpx.TransportError:
        return None
    return None if reply.status_code in (502, 503) else reply


async def client(http: httpx.AsyncClient, kind: str, questions: list[str], load: Load, end: float) -> None:
    """Asks one question after another until `end`; the last is answered, too."""
    for question in itertools.cycle(questions):
        if (began := time.perf_counter()) >= end:
            return
        path, body = body_of(kind, question)
        load.sent += 1
        while (reply := await answered(http, path, body)) is None:
            load.again += 1
            await asyncio.sleep(PAUSE)
        load.answered += 1
        load.seconds.append((began, time.perf_counter() - began))
        if reply.status_code != 200 or not is_answer(kind, reply.json()):
            load.wrong.append(f"{reply.status_code} {reply.text[:200]}")


class Served:
    """A server that can be started again at its port."""

    def __init__(self, kind: str, flags: list[str]):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port = taken.getsockname()[1]
        serve = ["r3lite.retrieve", "--serve"] if kind == "retrieve" else ["r3lite.serve"]
        limits = [] if kind == "retrieve" else ["--requests-per-minute", "1000000"]
        self.command = [sys.executable, "-m", *serve, "--port", str(self.port), *limits, *flags]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen | None = None

    async def start(self) -> None:
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
        """Its exit status after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


async def run(kind: str, flags: list[str], questions: list[str], clients: int, seconds: float) -> dict:
    """The figures of a load; the server is away for some seconds in the middle."""
    served, load = Served(kind, flags), Load()
    await served.start()
    began = time.perf_counter()
    end = began + seconds

    async def read_memory() -> None:
        while time.perf_counter() < end:
            if served.process.poll() is None:
                load.memory.append((time.perf_counter(), resident(served.process.pid)))
            await asyncio.sleep(READ_EVERY)

    async def restart() -> tuple[float, float, int]:
        await asyncio.sleep(seconds / 2)
        stopped = time.perf_counter()
        status = await asyncio.to_thread(served.stop)
        await served.start()
        return stopped, time.perf_counter(), status

    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=served.url, timeout=600, limits=limits) as http:
        shifted = [questions[i % len(questions) :] + questions[: i % len(questions)] for i in range(clients)]
        tasks = [client(http, kind, own, load, end) for own in shifted]
        *_, _, (stopped, back, status) = await asyncio.gather(*tasks, read_memory(), restart())
    assert served.stop() in (0, 143)
    return report(load, began, stopped, back, end) | {"exit_status": status}


def report(load: Load, began: float, stopped: float, back: float, end: float) -> dict:
    """Figures of the times before and after the restart; the requests that it delayed apart."""
    delayed = [s for at, s in load.seconds if at + s > stopped and at < back]
    usual = sorted(s for at, s in load.seconds if at + s <= stopped or at >= back)
    percentiles = statistics.quantiles(usual, n=100)

    def growth(first: float, last: float) -> float:
        """Of the memory, after the first share of a time."""
        found = [mib for at, mib in load.memory if first + SETTLED * (last - first) <= at <= last]
        return found[-1] / found[0] - 1

    return {
        "sent": load.sent,
        "answered": load.answered,
        "wrong": load.wrong[:10],
        "sent_again": load.again,
        "requests_per_second": round(len(usual) / (stopped - began + end - back), 1),
        "p50_ms": round(percentiles[49] * 1000, 1),
        "p99_ms": round(percentiles[98] * 1000, 1),
        "away_seconds": round(back - stopped, 1),
        "delayed_by_restart": len(delayed),
        "longest_delay_seconds": round(max(delayed, default=0.0), 1),
        "memory_mib": round(load.memory[-1][1], 1),
        "memory_growth": [round(growth(began, stopped), 4), round(growth(back, end), 4)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["retrieve", "serve"])
    parser.add_argument("--questions", default="data/world/test.jsonl", help="JSON lines with `question`")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = [*sys.argv[1:], "--"]
    ours, flags = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 : -1]
    given = parser.parse_args(ours)
    lines = Path(given.questions).read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    device = resolve_device("cpu")
    conditions = provenance(Precision(resolve_dtype("auto", device), device))
    found = asyncio.run(run(given.kind, flags, questions, given.clients, given.seconds))
    found = {"clients": given.clients, "seconds": given.seconds, "flags": " ".join(flags)} | found
    print(json.dumps(found, indent=1))
    file = given.results / "load.json"
    runs = json.loads(file.read_text(encoding="utf-8"))["runs"] if file.exists() else []
    write_json(file, {"runs": [*runs, {"server": given.kind, **conditions, **found}]})


if __name__ == "__main__":
    main()
