"""Rounds of RL sampled by two workers, one of which is killed at times, over links that are slow or break.

These are the `workers` of `bench.stress.soak`.

Each trouble waits until both workers have answered again, since a run ends when it has no server left. A first run of a
tenth of the rounds has no trouble: the same rounds of the troubled run must have the same episodes, to the letter.
"""

import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path

from bench.serving import resident
from bench.stress import watching
from r3lite.core import run_files
from r3lite.core.files import read_jsonl

QUESTIONS = 2  # of a round
EPISODES = 4  # of a question
SIZES = ["--max-new-tokens", "16", "--max-hops", "1"]  # that trainer and workers must have in common
# In fp32, oneDNN keeps half a MiB of compiled code for each shape of a product, and new shapes still come after 200
# rounds. That growth would hide a leak, so the trainer does without oneDNN.
TRAIN = """
import sys
import torch
torch.backends.mkldnn.enabled = False
from r3lite import ppo
sys.exit(ppo.main(sys.argv[1:]))
"""
QUIET_ROUNDS = 2  # between two troubles
PIECE = 1 << 16  # bytes that a link passes on at a time
MIB = 1 << 20


class WorkerProcess:
    """A rollout worker that can be killed and started again at its port."""

    def __init__(self, folder: Path):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        flags = [*watching.TINY, *SIZES, "--index", str(folder / "index"), "--port", str(self.port)]
        self._command = [sys.executable, "-m", "r3lite.rollout_worker", *flags]
        self.start()

    def start(self) -> None:
        """Returns as soon as it answers."""
        environment = os.environ | {"PYTHONPATH": str(watching.ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(self._command, cwd=watching.ROOT, env=environment, stdout=subprocess.DEVNULL)
        while True:
            assert self.process.poll() is None, "a worker has ended; its message is above"
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health"):
                return
            time.sleep(0.1)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class SlowLink:
    """A port that passes everything on to another one, at most so many bytes a second, and that can be cut."""

    def __init__(self, port: int):
        self.port = port
        self.bytes_per_second = float("inf")
        self._open: set[socket.socket] = set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> bool:
        """Ends all connections in the middle; returns whether there was one."""
        connections = list(self._open)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        return bool(connections)

    def _accept(self) -> None:
        while True:
            client, _ = self._listening.accept()
            try:
                server = socket.create_connection(("127.0.0.1", self.port))
            except OSError:  # the worker was killed
                client.close()
                continue
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        self._open.add(source)
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE):
                target.sendall(data)
                time.sleep(len(data) / self.bytes_per_second)
        for connection in (source, target):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._open.discard(source)
        source.close()


class Trouble(threading.Thread):
    """Kills the first worker, cuts links and slows them down while a run goes on; notes the memory of the second."""

    def __init__(self, workers: list[WorkerProcess], links: list[SlowLink], output: Path):
        super().__init__(daemon=True)
        self.workers = workers
        self.links = links
        self.rounds = watching.logged(output)
        self.counts: Counter[str] = Counter()
        self.memory: list[tuple[int, float]] = []  # (round, MiB)
        self.is_over = threading.Event()
        self._rng = random.Random(0)

    def run(self) -> None:
        next_round = QUIET_ROUNDS
        while not self.is_over.wait(0.1):
            number, _ = self.rounds()
            self.memory.append((number, resident(self.workers[1].process.pid)))
            if number >= next_round:
                time.sleep(self._rng.random())  # so that it comes anywhere in a round
                self._make()
                next_round = self.rounds()[0] + QUIET_ROUNDS

    def _make(self) -> None:
        kind = self._rng.choice(("kill", "cut", "slow"))
        link = self._rng.choice(self.links)
        for each in self.links:
            each.bytes_per_second = float("inf")
        if kind == "kill":
            self.workers[0].kill()
            self.workers[0].start()
        elif kind == "slow":
            link.bytes_per_second = self._rng.uniform(0.2, 2.0) * MIB
        elif not link.cut():
            kind = "nothing to cut"
        self.counts[kind] += 1


def run(folder: Path, total: int) -> dict:
    """The figures of `total` rounds, and what does not hold."""
    workers = [WorkerProcess(folder) for _ in range(2)]
    links = [SlowLink(worker.port) for worker in workers]
    command = trainer(folder, total, [link.url for link in links])
    quiet = folder / "quiet"
    output = folder / "workers"
    compared = total // 10
    trouble = Trouble(workers, links, output)
    try:
        watch(command, quiet, total, "--stop-after", str(compared))
        trouble.start()
        looks = watch(command, output, total)
    finally:
        trouble.is_over.set()
        if trouble.ident is not None:  # it was started
            trouble.join()  # it may be starting a worker
        for worker in workers:
            worker.kill()
    rounds = rounds_of(output)
    wrong = [number for number in range(1, total + 1) if not is_complete(rounds.get(number, []))]
    differ = [number for number, episodes in rounds_of(quiet).items() if episodes != rounds.get(number)]
    figures = {
        "done": len(rounds),
        "total": total,
        "troubles": dict(trouble.counts),
        "rounds_wrong": len(wrong),
        "rounds_compared": compared,
        "rounds_differ": len(differ),
        "worker_mib": tenths(trouble.memory, total),
        "trainer": watching.verdict(looks, total),
    }
    why = flaws(figures)
    return figures | {"held": not why, "why": why}


def flaws(figures: dict) -> list[str]:
    """Says what does not hold of the figures of `run`."""
    # Requests that are sent again cost time, and a connection may be open at one look and closed at the next.
    harmless = ("it became slower", "descriptors grew")
    why = [reason for reason in figures["trainer"]["why"] if reason not in harmless]
    early, late = figures["trainer"].get("descriptors", (0, 0))
    if late > early + 2:
        why.append("descriptors grew")
    early, late = figures["worker_mib"]
    if late > watching.MOST_GROWTH * early:
        why.append("the memory of a worker grew")
    if figures["rounds_wrong"]:
        why.append("episodes are lost or doubled")
    if figures["rounds_differ"]:
        why.append("episodes are others than without trouble")
    if not figures["troubles"].get("kill"):
        why.append("no worker was killed")
    return why


def trainer(folder: Path, total: int, servers: list[str]) -> list[str]:
    """The command of the run, without its output."""
    data = ["--data", str(watching.WORLD / "train.jsonl"), "--limit", "20", "--index", str(folder / "index")]
    sizes = f"--batch-size {QUESTIONS} --num-generations {EPISODES} --mini-batch-size 8 --update-epochs 1"
    sizes += f" --learning-rate 1e-8 --max-steps {total} --save-every 5 --algorithm grpo --kl-beta 0.01"
    start = ["--adapter", str(folder / "start"), "--rollout-server", ",".join(servers)]
    return [sys.executable, "-c", TRAIN, *watching.TINY, *data, *SIZES, *sizes.split(), *start]


def watch(command: list[str], output: Path, total: int, *flags: str) -> list[watching.Look]:
    looks, status = watching.watched([*command, *flags, "--output", str(output)], output, total)
    assert status == 0, output.with_suffix(".log").read_text()[-2000:]
    return looks


def rounds_of(output: Path) -> dict[int, list[str]]:
    """The episodes of each round as they were written."""
    rounds: dict[int, list[str]] = {}
    for row in read_jsonl(output / run_files.EPISODES):
        rounds.setdefault(row.values["step"], []).append(json.dumps(row.values))
    return rounds


def is_complete(episodes: list[str]) -> bool:
    """Returns whether a round has each of its questions as often as it should."""
    counts = Counter(json.loads(text)["id"] for text in episodes)
    return len(counts) == QUESTIONS and set(counts.values()) == {EPISODES}


def tenths(memory: list[tuple[int, float]], total: int) -> list[float]:
    """The medians of the memory in the second and in the last tenth of the rounds."""
    tenth = total // 10
    early = [mib for number, mib in memory if tenth <= number <= 2 * tenth]
    late = [mib for number, mib in memory if total - tenth <= number]
    return [statistics.median(early), statistics.median(late)]
