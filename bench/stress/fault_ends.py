"""Faults that are not a moment of a case: a real full disk, two writers, cut files, NaN, a server that is killed."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.torch

from bench.stress.fault_bench import Bench
from bench.stress.fault_cases import NAMED, TINY, WORLD, Case, encoder
from bench.stress.fault_runs import ROOT, Fault, run, start
from bench.stress.folder_content import content, differences
from r3lite.core.files import shipped

FULL = ("sft", "ppo, exgrpo", "collect, teacher", "index, build", "index, add", "tune_prompt", "export, folder")
FULL += ("export, gguf", "prepare", "evaluate, judge and query cache", "report", "sft, nf4 cache")
WRITERS = (
    "sft",
    "ppo, grpo",
    "collect, self",
    "index, build",
    "index, add",
    "tune_prompt",
    "export, folder",
    "prepare",
)


def ends(bench: Bench, only: tuple[str, ...] = ("",)) -> None:
    """All of them, or those of cases and kinds (cut files, not numbers, serve) whose names begin so."""
    for name in WRITERS:
        if name.startswith(only):
            two_writers(bench, NAMED[name])
    for kind, work in (("not numbers", not_numbers), ("cut files", cut_files), ("serve", server_killed)):
        if kind.startswith(only):
            work(bench)
    for name in FULL:
        if name in NAMED and name.startswith(only):
            full_disk(bench, NAMED[name])


def full_disk(bench: Bench, case: Case) -> None:
    """A file system of its own that is too small; then it grows, and the command goes on. Needs root."""
    whole, _, _ = bench.whole(case)
    case.begin(bench.fixtures, bench.place)
    assert bench.once(case, case.arguments(bench.fixtures, bench.place, bench.server.url)).status == 0
    size = sum(1 + (path.stat().st_size >> 12) for path in bench.place.rglob("*"))
    for share in (0.3, 0.8):
        shutil.rmtree(bench.place)
        bench.place.mkdir()
        pages = max(1, int(size * share))
        mount = ["mount", "-t", "tmpfs", "-o", f"size={pages << 12}", "none", str(bench.place)]
        if os.getuid() or subprocess.run(mount, capture_output=True).returncode:
            print("no tmpfs can be mounted here: only the full disk that is put in place was tried")
            return
        faults: list[str] = []
        try:
            try:
                case.before(bench.fixtures, bench.place)
            except (OSError, shutil.Error):
                continue
            arguments = case.arguments(bench.fixtures, bench.place, bench.server.url)
            broken = bench.once(case, arguments)
            if broken.status != 0 and not broken.clear:
                faults.append(f"ends with status {broken.status}: {broken.said[-500:].strip()}")
            subprocess.run(["mount", "-o", "remount,size=1g", str(bench.place)], check=True)
            faults += bench.faults(case, bench.once(case, [*arguments, *case.again]), whole)
            bench.note(case.name, "tmpfs", f"{pages} of {size} pages", faults, status=broken.status)
        finally:
            subprocess.run(["umount", "--lazy", str(bench.place)], check=True)


def two_writers(bench: Bench, case: Case) -> None:
    """A second process with the same output while the first is in its middle: refused, and the first is as alone."""
    whole, ended, _ = bench.whole(case)
    at = len(ended.moments) // 2
    arguments = bench.begin(case)
    go = bench.folder / "go"
    go.unlink(missing_ok=True)
    first = start(case.command, arguments, bench.place, bench.folder / "first.log", Fault("pause", at, go=go))
    moments = bench.folder / "first.moments"
    while len(moments.read_text().splitlines()) <= at:
        time.sleep(0.01)
    second = run(case.command, [*arguments, *case.again], bench.place, bench.folder / "second.log")
    go.write_text("")
    faults = bench.faults(case, first.wait(), whole)
    if not second.clear or "another process" not in second.said:
        faults.append(f"the second ends with status {second.status}: {second.said[-300:].strip()}")
    bench.note(case.name, "writers", at, faults)


def refused(
    bench: Bench, name: str, fault: str, command: str, arguments: list[str], must: tuple[str, ...] = ()
) -> None:
    """A command that has to end with one message, which names one of `must`, and no traceback."""
    ended = run(command, arguments, bench.place, bench.folder / "run.log")
    faults = []
    if not ended.clear:
        faults.append(f"ends with status {ended.status}: {ended.said[-500:].strip()}")
    elif must and not any(word in ended.said for word in must):
        faults.append(f"does not name {' or '.join(must)}: {ended.said[-300:].strip()}")
    left = [path for path in bench.place.rglob("*") if path.name.startswith(".") or path.name.endswith(".part")]
    faults += [f"left {path.name}" for path in left]
    bench.note(name, fault, command, faults)


def changed(bench: Bench, source: Path, file: str, change: Callable[[Path], None]) -> Path:
    """A copy of a folder in the place, with one of its files changed."""
    bench.place.mkdir(exist_ok=True)
    copy = bench.place.parent / "copy"
    for folder in (copy, bench.place):
        if folder.exists():
            shutil.rmtree(folder)
    bench.place.mkdir()
    shutil.copytree(source, copy)
    change(copy / file)
    return copy


def cut(share: float) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        size = path.stat().st_size
        os.truncate(path, max(0, min(int(size * share), size - 2)))  # more than the last line's end

    return change


def _uses(bench: Bench, kind: str, folder: Path) -> list[tuple[str, list[str]]]:
    """Commands that read a folder of a kind, with their arguments."""
    output, adapter = ["--output", str(bench.place / "out")], ["--adapter", str(bench.fixtures / "sft")]
    data = ["--data", str(bench.fixtures / "rows.jsonl"), "--limit", "12", "--max-steps", "2"]
    asked = [*TINY, "--data", str(WORLD / "dev.jsonl"), "--limit", "2", "--max-new-tokens", "16"]
    if kind == "model":
        sft = [*TINY, *data, "--model", str(folder), "--batch-size", "4", *output]
        evaluate = [*asked, "--retriever", "none", "--model", str(folder), *output]
        return [("sft", sft), ("evaluate", evaluate), ("export", ["--model", str(folder), "--prompts", "1", *output])]
    if kind == "adapter":
        evaluate = [*asked, "--retriever", "none", "--adapter", str(folder), *output]
        rl = NAMED["ppo, grpo"].arguments(bench.fixtures, bench.place, bench.server.url)
        rl[rl.index("--adapter") + 1] = str(folder)
        merged = ["--model", "tiny", "--adapter", str(folder), "--prompts", "1", *output]
        return [("evaluate", evaluate), ("ppo", rl), ("export", merged)]
    if kind == "index":
        find = ["--query", "Who is it?", "--encoder", "hashing", "--index", str(folder)]
        more = ["--encoder", "hashing", "--add", str(bench.fixtures / "more.jsonl"), "--output", str(folder)]
        return [("retrieve", find), ("index", more), ("evaluate", [*asked, *adapter, "--index", str(folder), *output])]
    if kind == "encoder":
        return [("retrieve", ["--data", str(WORLD / "dev.jsonl"), "--limit", "2", "--encoder", str(folder), *output])]
    raise AssertionError(kind)


def cut_files(bench: Bench) -> None:
    """Files as a download that broke off leaves them."""
    tiny, bert = shipped("checkpoints", "tiny"), encoder()
    sources = [(tiny, "model", name) for name in ("model.safetensors", "config.json", "tokenizer.json")]
    sources += [
        (bench.fixtures / "sft", "adapter", f"adapter/{name}")
        for name in ("adapter_model.safetensors", "adapter_config.json")
    ]
    sources += [
        (bench.fixtures / "edited", "index", path.name) for path in sorted((bench.fixtures / "edited").iterdir())
    ]
    if bert:
        sources += [(Path(bert), "encoder", name) for name in ("model.safetensors", "tokenizer.json", "config.json")]
    for source, kind, name in sources:
        if not (source / name).is_file():
            continue
        for share in (0.0, 0.6, 0.999):
            copy = changed(bench, source, name, cut(share))
            for command, arguments in _uses(bench, kind, copy):
                refused(bench, f"{kind}: {Path(name).name}", f"cut {share}", command, arguments)


def not_numbers(bench: Bench) -> None:
    """NaN and infinity in weights, vectors, rewards and data."""

    def spoil(value: float, which: str = "") -> Callable[[Path], None]:
        def change(path: Path) -> None:
            tensors = safetensors.torch.load_file(path)
            name = next(n for n in sorted(tensors) if which in n and tensors[n].is_floating_point())
            tensors[name] = tensors[name].clone()
            tensors[name].view(-1)[3] = value
            safetensors.torch.save_file(tensors, path, {"format": "pt"})

        return change

    def spoil_vectors(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[-400:-396] = np.float32("nan").tobytes()
        path.write_bytes(raw)

    tiny = shipped("checkpoints", "tiny")
    for value in (float("nan"), float("inf")):
        for which in ("embed", "layers.1.self_attn.q_proj.weight", "norm.weight"):
            copy = changed(bench, tiny, "model.safetensors", spoil(value, which))
            for command, arguments in _uses(bench, "model", copy):
                refused(bench, f"model: {which}", str(value), command, arguments)
        copy = changed(bench, bench.fixtures / "sft", "adapter/adapter_model.safetensors", spoil(value, "lora_B"))
        for command, arguments in _uses(bench, "adapter", copy):
            refused(bench, "adapter: lora_B", str(value), command, arguments)
    copy = (
        changed(bench, bench.fixtures / "edited", "vectors.faiss", spoil_vectors)
        if (bench.fixtures / "edited" / "vectors.faiss").exists()
        else None
    )
    if copy:
        for command, arguments in _uses(bench, "index", copy):
            refused(bench, "index: vectors.faiss", "nan", command, arguments)
    checkpoint_spoiled(bench)
    reward_of_nan(bench)


def checkpoint_spoiled(bench: Bench) -> None:
    """A run whose newest checkpoint was changed goes on from the one before, and ends as if nothing had been."""
    for name in ("sft", "ppo, grpo"):
        case = NAMED[name]
        whole, _, _ = bench.whole(case)
        for file in (
            "weights.safetensors",
            "optimizer.safetensors",
            "random.safetensors",
            "state.json",
            "manifest.json",
        ):
            arguments = bench.begin(case)
            assert bench.once(case, arguments).status == 0
            newest = max(bench.place.glob("run/checkpoint-*"), key=lambda p: int(p.name.partition("-")[2]))
            path = newest / file
            raw = bytearray(path.read_bytes())
            raw[len(raw) // 2] ^= 0x10
            path.write_bytes(raw)
            faults = bench.faults(case, bench.once(case, [*arguments, *case.again]), whole)
            bench.note(case.name, "bit flip", f"{newest.name}/{file}", faults)


def reward_of_nan(bench: Bench) -> None:
    """A reward of the user's own that is not a number, in the second round: refused, and the first round stays."""
    module = ROOT / "fault_reward.py"
    module.write_text(
        "import math\ncalls = []\n\n\ndef spoiled(episode):\n    calls.append(1)\n"
        "    return math.nan if len(calls) > 6 else 0.1 * len(calls)\n"
    )
    try:
        case = NAMED["ppo, reinforce++"]
        arguments = [*bench.begin(case), "--rewards", "fault_reward:spoiled=1"]
        refused(bench, "reward of the user's own", "nan", "ppo", arguments, ("nan", "finite", "number"))
        kept = sorted(path.name for path in (bench.place / "run").glob("checkpoint-*"))
        bench.note("reward of the user's own", "kept", "checkpoint-1", [] if kept == ["checkpoint-1"] else [str(kept)])
    finally:
        module.unlink()


def server_killed(bench: Bench) -> None:
    """SIGKILL while conversations are answered and query vectors are written; then it starts at the same port, and
    answers as before."""
    if encoder() is None:
        return
    shutil.rmtree(bench.place, ignore_errors=True)
    bench.place.mkdir()
    corpus = bench.folder / "corpus.jsonl"
    corpus.write_text("".join((WORLD / "corpus.jsonl").read_text(encoding="utf-8").splitlines(True)[:60]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = ["--dtype", "fp32", "--max-new-tokens", "24", "--max-hops", "2", "--memory-modes", "chat,search"]
    adapters = ["--adapters", f"base,sft={bench.fixtures / 'sft'}", "--chat-adapter", "base"]
    search = [
        "--encoder",
        str(encoder()),
        "--corpus",
        str(corpus),
        "--query-cache",
        str(bench.place / "queries.sqlite"),
    ]
    words = [sys.executable, "-m", "r3lite.serve", *TINY, *sizes, *adapters, *search, "--port", str(port)]
    url, environment = f"http://127.0.0.1:{port}/generate", os.environ | {"PYTHONPATH": str(ROOT)}
    questions = [json.loads(x)["question"] for x in (WORLD / "dev.jsonl").read_text(encoding="utf-8").splitlines()[:6]]

    def ask(question: str, **more: str) -> dict | None:
        body = json.dumps({"query": question, "mode": "search"} | more).encode()
        asked = urllib.request.Request(url, body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=60) as reply:
                return json.load(reply)
        except OSError:
            return None

    def begun(log: Path) -> subprocess.Popen:
        with open(log, "w") as file:
            process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=file, stderr=file)
        while process.poll() is None and "http://" not in log.read_text():
            time.sleep(0.05)
        return process

    faults: list[str] = []
    answers: list[list] = []
    for number in range(5):
        process = begun(bench.folder / "serve.log")
        if process.poll() is not None:
            faults.append((bench.folder / "serve.log").read_text()[-500:])
            break
        replies = [ask(q, conversation=f"c{i % 2}") for i, q in enumerate(questions)]
        answers.append([{k: v for k, v in (r or {}).items() if "second" not in k and "time" not in k} for r in replies])
        threads = [threading.Thread(target=ask, args=(f"{q} {number}",)) for q in questions]
        for thread in threads:
            thread.start()
        time.sleep(bench.rng.uniform(0.0, 0.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        for thread in threads:
            thread.join()
        found = content(bench.place)
        strays = [name for name in found if name not in ("queries.sqlite", "queries.sqlite-journal")]
        faults += [f"left {name}" for name in strays]
        bench.note("serve", "timed", number, list(faults), kills=1)
    same = all(found == answers[0] for found in answers) and all(answers[0])
    bench.note("serve", "answers", len(answers), [] if same else ["a restarted server answers otherwise"])
    process = begun(bench.folder / "serve.log")
    process.terminate()
    status = process.wait(60)
    left = differences({"queries.sqlite": None}, dict.fromkeys(content(bench.place)))
    bench.note("serve", "ended", status, left + ([] if status == 143 else [f"status {status}"]))
