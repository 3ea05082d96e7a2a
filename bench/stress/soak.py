"""Long runs at the smallest scale: memory, descriptors, threads and files must not grow, nor may the speed decrease.

    python -m bench.stress.soak                          # all, into bench/results/soak.json
    python -m bench.stress.soak --only serve --scale 0.1 # a tenth of the requests

The kinds `sft` (2,000 steps), `grpo` (500 rounds of `ppo --algorithm grpo`) and `serve` (20,000 requests) run in a
process that is watched from outside: resident memory, descriptors, threads, CPU time, files in its folder. The first
tenth of a run is its warm-up; the second tenth is compared with the last one.

Speed is work per second of CPU time, not of the clock, since other programs may run. These also slow down the caches
and the memory, so the speed is compared with that of a fixed amount of work at the same time. Learning rates are so
small that the last round has as much to do as the first. Linux only.

The kinds `live-ppo` and `live-grpo` are 300 rounds of varying lengths in this process; the bytes of live tensors are
counted after each round. The kind `workers` is 200 rounds that two rollout workers sample, with kills and slow links
(worker_soak.py).
"""

import argparse
import http.client
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from unittest import mock

from bench import options, records
from bench.stress import worker_soak
from bench.stress.watching import ROOT, SNAPSHOT_INTERVAL, TINY, WORLD, Snapshot, take_snapshot, verdict, watch_command
from r3lite import ppo
from r3lite.assembly.reinforcement import RLTrainer
from r3lite.core import run_files
from r3lite.core.files import read_jsonl, write_jsonl
from r3lite.devices import machine
from r3lite.devices.live_tensors import MIB, LiveTensors
from r3lite.training import metrics

STEPS = 2000  # of sft
ROUNDS = 500  # of grpo
REQUESTS = 20_000  # to serve
CLIENTS = 8  # of serve, at once
REMOTE_ROUNDS = 200  # of workers
LIVE_ROUNDS = 300  # of live-ppo and live-grpo
WARM_UP_ROUNDS = 4  # first rounds of live-ppo and live-grpo, which are left out
MAX_DRIFT = 1.0  # MiB by which the live tensors of live-ppo and live-grpo may vary
SHOWN_SNAPSHOTS = 20  # about this many of all snapshots are saved with the results


def sft(folder: Path, total: int) -> list[Snapshot]:
    """Runs sft for `total` steps, and returns snapshots of it."""
    rows = [row.values for row in read_jsonl(folder / "rows.jsonl")]
    write_jsonl(folder / "short.jsonl", rows[:40])
    flags = ["--data", str(folder / "short.jsonl"), "--max-steps", str(total), "--save-every", "50"]
    flags += ["--batch-size", "1", "--validation-rows", "0", "--learning-rate", "1e-6", "--max-document-tokens", "16"]
    command = [sys.executable, "-m", "r3lite.sft", *TINY, *flags, "--output", str(folder / "sft")]
    snapshots, status = watch_command(command, folder / "sft")
    assert status == 0, (folder / "sft.log").read_text()[-2000:]
    return snapshots


def grpo(folder: Path, total: int) -> list[Snapshot]:
    """Runs GRPO for `total` rounds, and returns snapshots of it."""
    data = ["--data", str(WORLD / "train.jsonl"), "--limit", "20", "--index", str(folder / "index")]
    sizes = "--batch-size 1 --num-generations 3 --mini-batch-size 3 --update-epochs 1 --max-new-tokens 16 --max-hops 1"
    sizes += f" --learning-rate 1e-8 --max-steps {total} --save-every 25 --algorithm grpo --kl-beta 0.01"
    command = [sys.executable, "-m", "r3lite.ppo", *TINY, *data, *sizes.split(), "--output", str(folder / "grpo")]
    command += ["--adapter", str(folder / "start")]
    snapshots, status = watch_command(command, folder / "grpo")
    assert status == 0, (folder / "grpo.log").read_text()[-2000:]
    return snapshots


def live(algorithm: str, folder: Path, total: int) -> dict:
    """Runs RL for `total` rounds in this process; returns the range of the memory of live tensors after a round."""
    sizes = "--batch-size 2 --num-generations 3 --mini-batch-size 6 --update-epochs 1 --max-new-tokens 64 --max-hops 2"
    sizes += f" --max-steps {total} --save-every 25 --algorithm {algorithm} --kl-beta 0.05"
    data = ["--data", str(WORLD / "train.jsonl"), "--limit", "20", "--index", str(folder / "index")]
    output = folder / f"live {algorithm}"
    counter = LiveTensors()
    live_mib = []  # after each round
    real_step = RLTrainer.step

    def counted_step(self: RLTrainer, number: int) -> tuple[dict, int]:
        result = real_step(self, number)
        live_mib.append(counter.live / MIB)
        return result

    with counter, mock.patch.object(RLTrainer, "step", counted_step):
        flags = [*TINY, *data, *sizes.split(), "--adapter", str(folder / "start"), "--output", str(output)]
        assert ppo.main(flags) == 0
    total_tokens = [0, *(record["num_tokens"] for record in metrics.read(output / run_files.METRICS))]
    round_tokens = [end - start for start, end in itertools.pairwise(total_tokens)]
    smallest = min(live_mib[WARM_UP_ROUNDS:])
    largest = max(live_mib[WARM_UP_ROUNDS:])
    drift = largest - smallest
    return {
        "done": len(live_mib),
        "total": total,
        "live_mib": [round(smallest, 3), round(largest, 3)],
        "drift_mib": round(drift, 3),
        "peak_mib": round(counter.peak_mib, 3),
        "tokens_of_a_round": [min(round_tokens), max(round_tokens)],
        "held": drift <= MAX_DRIFT,
        "why": ["live tensors drift"] if drift > MAX_DRIFT else [],
        "every": [round(size, 3) for size in live_mib[:: max(1, total // SHOWN_SNAPSHOTS)]],
    }


def serve(folder: Path, total: int) -> list[Snapshot]:
    """Sends `total` requests to a server, and returns snapshots of it.

    CLIENTS clients send chats with and without a conversation, searches, streams and bad requests, each client over one
    connection. During the warm-up there are as many additional clients, each with one long conversation. The KV cache
    keeps the size for the largest number of concurrent answers and the longest conversation so far. So both must come
    about in the warm-up, and not late by chance.
    """
    output = folder / "serve"
    output.mkdir()
    limits = "--requests-per-minute 100000000 --max-requests-per-client 1000 --max-new-tokens 6 --max-hops 1"
    flags = [*TINY, *limits.split(), "--index", str(folder / "index"), "--adapters", f"base,start={folder / 'start'}"]
    flags += ["--chat-adapter", "base", "--conversations", "50", "--port", "0"]
    command = [sys.executable, "-m", "r3lite.serve", *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    lines = [process.stdout.readline() for _ in range(2)]  # the second line begins with the address
    port = int(lines[1].split()[0].rpartition(":")[2])
    questions = [row.text("question") for row in read_jsonl(WORLD / "test.jsonl")]
    sent = 0  # requests of all clients
    lock = threading.Lock()  # of `sent`
    snapshots = []
    failed_statuses = []

    def client(number: int, last_request: int) -> None:
        """Sends requests until all clients together have sent `last_request`."""
        nonlocal sent
        rng = random.Random(number)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        while True:
            with lock:
                if sent >= last_request:
                    return connection.close()
                sent += 1
            kind = rng.random()
            body = {"query": rng.choice(questions), "mode": "chat"}
            path = "/generate"
            expected_status = 200
            if kind < 0.5:
                body["conversation"] = f"c{rng.randrange(200)}" if number < CLIENTS else f"own{number}"
            elif kind < 0.6:
                body["mode"] = "search"
            elif kind < 0.7:
                body["stream"] = True
            elif kind < 0.8:
                path = "/v1/chat/completions"
                body = {"model": "chat", "messages": [{"role": "user", "content": body["query"]}]}
            elif kind < 0.85:
                body = {"query": "", "mode": "?"}
                expected_status = None  # any status below 500
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            reply = connection.getresponse()
            reply.read()
            if (expected_status and reply.status != expected_status) or reply.status >= 500:
                failed_statuses.append(reply.status)

    threads = []
    for number in range(2 * CLIENTS):
        last_request = total if number < CLIENTS else total // 10
        threads.append(threading.Thread(target=client, args=(number, last_request), daemon=True))
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        snapshot = take_snapshot(process.pid, output, lambda: (sent, float(sent)))
        if snapshot:
            snapshots.append(snapshot)
        time.sleep(SNAPSHOT_INTERVAL)
    process.terminate()
    process.wait(60)
    assert not failed_statuses, f"{len(failed_statuses)} requests failed, such as {failed_statuses[0]}"
    return snapshots


def judge(run: Callable[[Path, int], list[Snapshot]], folder: Path, total: int) -> dict:
    """Runs a kind of work; returns the verdict and a selection of the snapshots."""
    snapshots = run(folder, total)
    interval = max(1, len(snapshots) // SHOWN_SNAPSHOTS)
    return verdict(snapshots, total) | {"every": [asdict(snapshot) for snapshot in snapshots[::interval]]}


def workers(folder: Path, total: int) -> dict:
    """Runs rounds that two workers sample, one of which is killed at times; see worker_soak.py."""
    return worker_soak.run(folder, total)


# By kind: the function that runs it in a folder and returns its results, and its number of steps, rounds or requests.
KINDS: dict[str, tuple[Callable[[Path, int], dict], int]] = {
    "sft": (partial(judge, sft), STEPS),
    "grpo": (partial(judge, grpo), ROUNDS),
    "serve": (partial(judge, serve), REQUESTS),
    "live-ppo": (partial(live, "ppo"), LIVE_ROUNDS),
    "live-grpo": (partial(live, "grpo"), LIVE_ROUNDS),
    "workers": (workers, REMOTE_ROUNDS),
}


def prepare(folder: Path) -> None:
    """Makes the files that the runs need: an index, trajectories, and an adapter after 4 steps."""
    search = ["--index", str(folder / "index")]
    data = ["--data", str(WORLD / "train.jsonl"), "--limit", "60"]
    rows = ["--data", str(folder / "rows.jsonl"), "--max-steps", "4", "--validation-rows", "0"]
    for command in (
        ["index", "--preset", "tiny", "--corpus", str(WORLD / "corpus.jsonl"), "--output", str(folder / "index")],
        ["collect", "--preset", "tiny", *data, *search, "--output", str(folder / "rows.jsonl")],
        ["sft", *TINY, *rows, "--output", str(folder / "start")],
    ):
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        python_command = [sys.executable, "-m", f"r3lite.{command[0]}", *command[1:]]
        subprocess.run(python_command, check=True, cwd=ROOT, env=environment, capture_output=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--scale", type=float, default=1.0, help="share of the steps, rounds and requests")
    parser.add_argument("--results", type=Path, default=options.RESULTS)
    flags = parser.parse_args(argv)
    all_held = True
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder)
        for name in flags.only:
            run, total = KINDS[name]
            date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            start = time.monotonic()
            result = run(folder, int(total * flags.scale))
            all_held &= result["held"]
            entry = {
                "date": date,
                "section": name,
                "commit": records.commit(ROOT),
                "processor": machine.processor(),
                "wall_seconds": round(time.monotonic() - start),
                **result,
            }
            records.add(flags.results / "soak.json", entry)
            print(json.dumps({key: value for key, value in entry.items() if key != "every"}, indent=1), flush=True)
    return int(not all_held)


if __name__ == "__main__":
    raise SystemExit(main())
