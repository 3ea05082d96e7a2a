"""Long runs at the smallest scale: memory, descriptors, threads and files that do not grow, and a speed that stays.

    python -m bench.stress.soak                          # all, into bench/results/soak.json
    python -m bench.stress.soak --only serve --scale 0.1 # a tenth of the requests

2,000 steps of `sft`, 500 rounds of `ppo --algorithm grpo`, 20,000 requests to `serve`, each in a process that is
watched from outside: resident memory, descriptors, threads, seconds computed, files of its folder. The first tenth is
the warm-up. What comes after it is compared: the medians of the second and of the last tenth. Speed is work per second
computed and not by the clock, since other programs may run; and since these take cache and memory, it is held against
the seconds that work which is always the same takes at that time. Learning rates are so small that the last round has
as much to do as the first. Linux only.

`live-ppo` and `live-grpo` are 300 rounds of changing lengths in this process, after each of which the bytes of live
tensors are counted. `workers` are 200 rounds that two rollout workers sample, with kills and slow links
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
from bench.stress.watching import EVERY, ROOT, TINY, WORLD, Look, look, verdict, watched
from r3lite import ppo
from r3lite.assembly.reinforcement import RLTrainer
from r3lite.core import run_files
from r3lite.core.files import read_jsonl, write_jsonl
from r3lite.devices import machine
from r3lite.devices.live_tensors import MIB, LiveTensors
from r3lite.training import metrics

STEPS, ROUNDS, REQUESTS, PEOPLE = 2000, 500, 20_000, 8
REMOTE_ROUNDS = 200
COUNTED, WARM, MOST_DRIFT = 300, 4, 1.0  # rounds whose live tensors are counted; without the first ones; MiB


def sft(folder: Path, total: int) -> list[Look]:
    rows = [row.values for row in read_jsonl(folder / "rows.jsonl")]
    write_jsonl(folder / "short.jsonl", rows[:40])
    flags = ["--data", str(folder / "short.jsonl"), "--max-steps", str(total), "--save-every", "50"]
    flags += ["--batch-size", "1", "--validation-rows", "0", "--learning-rate", "1e-6", "--max-document-tokens", "16"]
    command = [sys.executable, "-m", "r3lite.sft", *TINY, *flags, "--output", str(folder / "sft")]
    looks, status = watched(command, folder / "sft", total)
    assert status == 0, (folder / "sft.log").read_text()[-2000:]
    return looks


def grpo(folder: Path, total: int) -> list[Look]:
    data = ["--data", str(WORLD / "train.jsonl"), "--limit", "20", "--index", str(folder / "index")]
    sizes = "--batch-size 1 --num-generations 3 --mini-batch-size 3 --update-epochs 1 --max-new-tokens 16 --max-hops 1"
    sizes += f" --learning-rate 1e-8 --max-steps {total} --save-every 25 --algorithm grpo --kl-beta 0.01"
    command = [sys.executable, "-m", "r3lite.ppo", *TINY, *data, *sizes.split(), "--output", str(folder / "grpo")]
    looks, status = watched([*command, "--adapter", str(folder / "start")], folder / "grpo", total)
    assert status == 0, (folder / "grpo.log").read_text()[-2000:]
    return looks


def live(algorithm: str, folder: Path, total: int) -> dict:
    """Bytes of live tensors at the end of each round, from the smallest to the largest after the first ones."""
    sizes = "--batch-size 2 --num-generations 3 --mini-batch-size 6 --update-epochs 1 --max-new-tokens 64 --max-hops 2"
    sizes += f" --max-steps {total} --save-every 25 --algorithm {algorithm} --kl-beta 0.05"
    data = ["--data", str(WORLD / "train.jsonl"), "--limit", "20", "--index", str(folder / "index")]
    output, counter, found, step = folder / f"live {algorithm}", LiveTensors(), [], RLTrainer.step

    def counted(self: RLTrainer, number: int) -> tuple[dict, int]:
        made = step(self, number)
        found.append(counter.live / MIB)
        return made

    with counter, mock.patch.object(RLTrainer, "step", counted):
        flags = [*TINY, *data, *sizes.split(), "--adapter", str(folder / "start"), "--output", str(output)]
        assert ppo.main(flags) == 0
    ends = [0, *(record["num_tokens"] for record in metrics.read(output / run_files.METRICS))]
    tokens = [after - before for before, after in itertools.pairwise(ends)]
    drift = max(found[WARM:]) - min(found[WARM:])
    return {
        "done": len(found), "total": total, "live_mib": [round(f(found[WARM:]), 3) for f in (min, max)],
        "drift_mib": round(drift, 3), "peak_mib": round(counter.peak_mib, 3),
        "tokens_of_a_round": [min(tokens), max(tokens)],
        "held": drift <= MOST_DRIFT, "why": ["live tensors drift"] * (drift > MOST_DRIFT),
        "every": [round(size, 3) for size in found[:: max(1, total // 20)]],
    }  # fmt: skip


def serve(folder: Path, total: int) -> list[Look]:
    """Eight people at once, each over one connection: chats in conversations, searches, streams, bad requests.

    In the warm-up there are sixteen, of whom eight only go on with their own conversation: the KV cache keeps room for
    the most answers at once and for the longest conversation, which would come about late by chance.
    """
    place = folder / "serve"
    place.mkdir()
    limits = "--requests-per-minute 100000000 --max-requests-per-client 1000 --max-new-tokens 6 --max-hops 1"
    flags = [*TINY, *limits.split(), "--index", str(folder / "index"), "--adapters", f"base,start={folder / 'start'}"]
    flags += ["--chat-adapter", "base", "--conversations", "50", "--port", "0"]
    command = [sys.executable, "-m", "r3lite.serve", *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    lines = [process.stdout.readline() for _ in range(2)]
    port = int(lines[1].split()[0].rpartition(":")[2])
    questions = [row.text("question") for row in read_jsonl(WORLD / "test.jsonl")]
    count, lock, looks, failed = [0], threading.Lock(), [], []

    def person(number: int, until: int) -> None:
        rng = random.Random(number)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        while True:
            with lock:
                if count[0] >= until:
                    return connection.close()
                count[0] += 1
            kind, body = rng.random(), {"query": rng.choice(questions), "mode": "chat"}
            path, wanted = "/generate", 200
            if kind < 0.5:
                body["conversation"] = f"c{rng.randrange(200)}" if number < PEOPLE else f"own{number}"
            elif kind < 0.6:
                body["mode"] = "search"
            elif kind < 0.7:
                body["stream"] = True
            elif kind < 0.8:
                path = "/v1/chat/completions"
                body = {"model": "chat", "messages": [{"role": "user", "content": body["query"]}]}
            elif kind < 0.85:
                body, wanted = {"query": "", "mode": "?"}, None
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            reply = connection.getresponse()
            reply.read()
            if (wanted and reply.status != wanted) or reply.status >= 500:
                failed.append(reply.status)

    leaving = {i: total // 10 for i in range(PEOPLE, 2 * PEOPLE)}
    people = [threading.Thread(target=person, args=(i, leaving.get(i, total)), daemon=True) for i in range(2 * PEOPLE)]
    for thread in people:
        thread.start()
    while any(thread.is_alive() for thread in people):
        if found := look(process.pid, place, lambda: (count[0], float(count[0]))):
            looks.append(found)
        time.sleep(EVERY)
    process.terminate()
    process.wait(60)
    assert not failed, f"{len(failed)} requests failed, such as {failed[0]}"
    return looks


def seen(run: Callable[[Path, int], list[Look]], folder: Path, total: int) -> dict:
    """The verdict on a kind of work, with some of the looks."""
    looks = run(folder, total)
    return verdict(looks, total) | {"every": [asdict(x) for x in looks[:: max(1, len(looks) // 20)]]}


KINDS = {name: (partial(seen, run), total) for name, run, total in
         (("sft", sft, STEPS), ("grpo", grpo, ROUNDS), ("serve", serve, REQUESTS))}  # fmt: skip
KINDS |= {f"live-{name}": (partial(live, name), COUNTED) for name in ("ppo", "grpo")}


def workers(folder: Path, total: int) -> dict:
    """Rounds that two workers sample, one of which is killed at times; see worker_soak.py."""
    return worker_soak.run(folder, total)


KINDS["workers"] = (workers, REMOTE_ROUNDS)


def prepare(folder: Path) -> None:
    """An index, trajectories, and an adapter that has learned little."""
    search = ["--index", str(folder / "index")]
    data = ["--data", str(WORLD / "train.jsonl"), "--limit", "60"]
    rows = ["--data", str(folder / "rows.jsonl"), "--max-steps", "4", "--validation-rows", "0"]
    for command in (
        ["index", "--preset", "tiny", "--corpus", str(WORLD / "corpus.jsonl"), "--output", str(folder / "index")],
        ["collect", "--preset", "tiny", *data, *search, "--output", str(folder / "rows.jsonl")],
        ["sft", *TINY, *rows, "--output", str(folder / "start")],
    ):
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        words = [sys.executable, "-m", f"r3lite.{command[0]}", *command[1:]]
        subprocess.run(words, check=True, cwd=ROOT, env=environment, capture_output=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--scale", type=float, default=1.0, help="share of the steps, rounds and requests")
    parser.add_argument("--results", type=Path, default=options.RESULTS)
    given = parser.parse_args(argv)
    held = True
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder)
        for name in given.only:
            run, total = KINDS[name]
            total = int(total * given.scale)
            date, start = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), time.monotonic()
            found = run(folder, total)
            held &= found["held"]
            made = {"date": date, "section": name, "commit": records.commit(ROOT), "processor": machine.processor()}
            made |= {"wall_seconds": round(time.monotonic() - start)} | found
            records.add(given.results / "soak.json", made)
            print(json.dumps({k: v for k, v in made.items() if k != "every"}, indent=1), flush=True)
    return int(not held)


if __name__ == "__main__":
    raise SystemExit(main())
