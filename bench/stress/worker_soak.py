"""Rounds of RL that two workers sample, while one worker is killed at times and connections are slow or break.

This is the kind `workers` of `bench.stress.soak`.

The next trouble comes only after rounds that both workers have answered, since a run ends when it has no server left. A
quiet run of a tenth of the rounds comes first: the same rounds of the run with troubles must have equal episodes.
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

QUESTIONS = 2  # in a round
EPISODES = 4  # for each question
SIZES = ["--max-new-tokens", "16", "--max-hops", "1"]  # trainer and workers must agree in these flags
# In fp32, oneDNN keeps half a MiB of compiled code for each shape of a product, and new shapes still come after 200
# rounds. That growth would hide a leak, so the trainer runs without oneDNN.
TRAIN_SCRIPT = """
import sys
import torch
torch.backends.mkldnn.enabled = False
from r3lite import ppo
sys.exit(ppo.main(sys.argv[1:]))
"""
QUIET_ROUNDS = 2  # rounds without trouble between two troubles
CHUNK_SIZE = 1 << 16  # bytes that a link forwards at a time
MIB = 1 << 20
MAX_MORE_DESCRIPTORS = 2  # of the trainer, late in the run: a connection may be open at one time and closed at another


class WorkerProcess:
    """A rollout worker that can be killed and started again at its port."""

    def __init__(self, folder: Path):
        with socket.create_server(("127.0.0.1", 0)) as free_socket:
            self.port = free_socket.getsockname()[1]
        flags = [*watching.TINY, *SIZES, "--index", str(folder / "index"), "--port", str(self.port)]
        self._command = [sys.executable, "-m", "r3lite.rollout_worker", *flags]
        self.start()

    def start(self) -> None:
        """Starts the worker, and returns as soon as it answers."""
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
    """A port that forwards connections to another port, at `bytes_per_second` at most, and that can be cut."""

    def __init__(self, port: int):
        self.port = port
        self.bytes_per_second = float("inf")
        self._connections: set[socket.socket] = set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> bool:
        """Closes all connections, whatever they are forwarding; returns whether there was one."""
        connections = list(self._connections)
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
                threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        """Forwards what one side sends until either side closes the connection."""
        self._connections.add(source)
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK_SIZE):
                target.sendall(data)
                time.sleep(len(data) / self.bytes_per_second)
        for connection in (source, target):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._connections.discard(source)
        source.close()


class Trouble(threading.Thread):
    """Kills the first worker, cuts links and slows them down during a run; records the memory of the second worker."""

    def __init__(self, workers: list[WorkerProcess], links: list[SlowLink], output: Path):
        super().__init__(daemon=True)
        self.workers = workers
        self.links = links
        self.read_progress = watching.progress_reader(output)
        self.counts: Counter[str] = Counter()  # troubles by kind
        self.memory: list[tuple[int, float]] = []  # (round, MiB)
        self.is_over = threading.Event()
        self._rng = random.Random(0)

    def run(self) -> None:
        next_round = QUIET_ROUNDS
        while not self.is_over.wait(0.1):
            current_round, _ = self.read_progress()
            self.memory.append((current_round, resident(self.workers[1].process.pid)))
            if current_round >= next_round:
                time.sleep(self._rng.random())  # so that the trouble comes anywhere in a round
                self._make_trouble()
                current_round, _ = self.read_progress()
                next_round = current_round + QUIET_ROUNDS

    def _make_trouble(self) -> None:
        """Makes one trouble of a random kind, and ends the slowness of all links."""
        kind = self._rng.choice(("kill", "cut", "slow"))
        link = self._rng.choice(self.links)
        for fast_link in self.links:
            fast_link.bytes_per_second = float("inf")
        if kind == "kill":
            self.workers[0].kill()
            self.workers[0].start()
        elif kind == "slow":
            link.bytes_per_second = self._rng.uniform(0.2, 2.0) * MIB
        elif not link.cut():
            kind = "nothing to cut"
        self.counts[kind] += 1


def run(folder: Path, total: int) -> dict:
    """Trains for `total` rounds with troubles; returns figures, whether the run held, and why not."""
    workers = [WorkerProcess(folder) for _ in range(2)]
    links = [SlowLink(worker.port) for worker in workers]
    command = trainer_command(folder, total, [link.url for link in links])
    quiet_output = folder / "quiet"
    output = folder / "workers"
    compared_rounds = total // 10
    trouble = Trouble(workers, links, output)
    try:
        watch(command, quiet_output, "--stop-after", str(compared_rounds))
        trouble.start()
        snapshots = watch(command, output)
    finally:
        trouble.is_over.set()
        if trouble.ident is not None:  # it was started
            trouble.join()  # it may be starting a worker, which must be killed, too
        for worker in workers:
            worker.kill()
    rounds = rounds_of(output)
    wrong_rounds = [number for number in range(1, total + 1) if not is_complete(rounds.get(number, []))]
    quiet_rounds = rounds_of(quiet_output)
    different_rounds = [number for number, episodes in quiet_rounds.items() if episodes != rounds.get(number)]
    figures = {
        "done": len(rounds),
        "total": total,
        "troubles": dict(trouble.counts),
        "rounds_wrong": len(wrong_rounds),
        "rounds_compared": compared_rounds,
        "rounds_differ": len(different_rounds),
        "worker_mib": early_and_late_memory(trouble.memory, total),
        "trainer": watching.verdict(snapshots, total),
    }
    why = flaws(figures)
    return figures | {"held": not why, "why": why}


def flaws(figures: dict) -> list[str]:
    """Returns the reasons why the figures of `run` are wrong; [] if the run held."""
    # Requests that are sent again cost time. Descriptors are compared below, with a tolerance.
    harmless = ("it became slower", "descriptors grew")
    why = [reason for reason in figures["trainer"]["why"] if reason not in harmless]
    early, late = figures["trainer"].get("descriptors", (0, 0))
    if late > early + MAX_MORE_DESCRIPTORS:
        why.append("descriptors grew")
    early, late = figures["worker_mib"]
    if late > watching.MAX_GROWTH * early:
        why.append("the memory of a worker grew")
    if figures["rounds_wrong"]:
        why.append("episodes are lost or doubled")
    if figures["rounds_differ"]:
        why.append("episodes are others than without trouble")
    if not figures["troubles"].get("kill"):
        why.append("no worker was killed")
    return why


def trainer_command(folder: Path, total: int, servers: list[str]) -> list[str]:
    """Returns the command of the trainer, without the flag --output."""
    data = ["--data", str(watching.WORLD / "train.jsonl"), "--limit", "20", "--index", str(folder / "index")]
    sizes = f"--batch-size {QUESTIONS} --num-generations {EPISODES} --mini-batch-size 8 --update-epochs 1"
    sizes += f" --learning-rate 1e-8 --max-steps {total} --save-every 5 --algorithm grpo --kl-beta 0.01"
    start = ["--adapter", str(folder / "start"), "--rollout-server", ",".join(servers)]
    return [sys.executable, "-c", TRAIN_SCRIPT, *watching.TINY, *data, *SIZES, *sizes.split(), *start]


def watch(command: list[str], output: Path, *flags: str) -> list[watching.Snapshot]:
    """Runs the trainer, which must succeed; returns snapshots of it."""
    snapshots, status = watching.watch_command([*command, *flags, "--output", str(output)], output)
    assert status == 0, output.with_suffix(".log").read_text()[-2000:]
    return snapshots


def rounds_of(output: Path) -> dict[int, list[str]]:
    """Returns the episodes of each round, as JSON."""
    rounds: dict[int, list[str]] = {}
    for row in read_jsonl(output / run_files.EPISODES):
        rounds.setdefault(row.values["step"], []).append(json.dumps(row.values))
    return rounds


def is_complete(episodes: list[str]) -> bool:
    """Returns whether a round has QUESTIONS questions with EPISODES episodes each."""
    counts = Counter(json.loads(text)["id"] for text in episodes)
    return len(counts) == QUESTIONS and set(counts.values()) == {EPISODES}


def early_and_late_memory(memory: list[tuple[int, float]], total: int) -> list[float]:
    """Returns the medians of the memory (MiB) in the second and in the last tenth of the rounds."""
    tenth = total // 10
    early = [mib for number, mib in memory if tenth <= number <= 2 * tenth]
    late = [mib for number, mib in memory if total - tenth <= number]
    return [statistics.median(early), statistics.median(late)]
