"""Faults that do not happen at a counted moment: a really full disk, two writers, cut files, NaN, a killed server."""

import json
import math
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
from bench.stress.fault_cases import CASES_BY_NAME, TINY, WORLD, Case, encoder_folder
from bench.stress.fault_runs import ROOT, Fault, moments_file, run, start
from bench.stress.folder_content import content, differences
from r3lite.core.files import shipped

FULL_DISK_CASES = (
    "sft",
    "ppo, exgrpo",
    "collect, teacher",
    "index, build",
    "index, add",
    "tune_prompt",
    "export, folder",
    "export, gguf",
    "prepare",
    "evaluate, judge and query cache",
    "report",
    "sft, nf4 cache",
)
TWO_WRITERS_CASES = (
    "sft",
    "ppo, grpo",
    "collect, self",
    "index, build",
    "index, add",
    "tune_prompt",
    "export, folder",
    "prepare",
)
CHECKPOINT_FILES = (
    "weights.safetensors",
    "optimizer.safetensors",
    "random.safetensors",
    "state.json",
    "manifest.json",
)
DISK_SHARES = (0.3, 0.8)  # sizes of the disk that is too small, as shares of what the case writes
CUT_SHARES = (0.0, 0.6, 0.999)  # lengths of cut files, as shares of the whole file
SERVER_STARTS = 5  # how often the server is started and killed
SIGTERM_STATUS = 143  # exit status of a process that SIGTERM has ended, as shells report it: 128 + 15
PAGE_BITS = 12  # tmpfs allocates pages of 4096 bytes
# A reward for r3lite.ppo. Its first 6 calls are the first round; then it returns NaN.
NAN_REWARD = (
    "import math\ncalls = []\n\n\ndef spoiled(episode):\n    calls.append(1)\n"
    "    return math.nan if len(calls) > 6 else 0.1 * len(calls)\n"
)


def run_ends(bench: Bench, only: tuple[str, ...] = ("",)) -> None:
    """Injects the faults of this file: all, or those of the cases and kinds whose names begin with one of `only`.

    The kinds with names of their own are "not numbers", "cut files" and "serve".
    """
    for name in TWO_WRITERS_CASES:
        if name.startswith(only):
            two_writers(bench, CASES_BY_NAME[name])
    for kind, inject in (("not numbers", not_numbers), ("cut files", cut_files), ("serve", server_killed)):
        if kind.startswith(only):
            inject(bench)
    for name in FULL_DISK_CASES:
        if name in CASES_BY_NAME and name.startswith(only):
            full_disk(bench, CASES_BY_NAME[name])


def full_disk(bench: Bench, case: Case) -> None:
    """Runs a case on a file system that is too small, enlarges it, and resumes the case. Mounting it needs root."""
    reference = bench.reference(case)
    case.reset(bench.fixtures, bench.output)
    arguments = case.arguments(bench.fixtures, bench.output, bench.server.url)
    assert bench.run_once(case, arguments).status == 0
    pages_needed = sum(1 + (path.stat().st_size >> PAGE_BITS) for path in bench.output.rglob("*"))
    for share in DISK_SHARES:
        shutil.rmtree(bench.output)
        bench.output.mkdir()
        pages = max(1, int(pages_needed * share))
        mount = ["mount", "-t", "tmpfs", "-o", f"size={pages << PAGE_BITS}", "none", str(bench.output)]
        if os.getuid() or subprocess.run(mount, capture_output=True).returncode:
            print("no tmpfs can be mounted here: only the full disk that is put in place was tried")
            return
        problems: list[str] = []
        try:
            try:
                case.fill_output(bench.fixtures, bench.output)
            except (OSError, shutil.Error):
                continue  # the disk is too small even for the files that the case starts from
            arguments = case.arguments(bench.fixtures, bench.output, bench.server.url)
            failed_run = bench.run_once(case, arguments)
            if failed_run.status != 0 and not failed_run.is_clear_error:
                problems.append(f"ends with status {failed_run.status}: {failed_run.output[-500:].strip()}")
            subprocess.run(["mount", "-o", "remount,size=1g", str(bench.output)], check=True)
            resumed_run = bench.run_once(case, [*arguments, *case.resume_flags])
            problems += bench.problems_after_resuming(case, resumed_run, reference.content)
            position = f"{pages} of {pages_needed} pages"
            bench.record(case.name, "tmpfs", position=position, problems=problems, status=failed_run.status)
        finally:
            subprocess.run(["umount", "--lazy", str(bench.output)], check=True)


def two_writers(bench: Bench, case: Case) -> None:
    """Starts a second run with the same output while the first is paused at its middle moment.

    The second must be refused, and the first must end as if it had been alone.
    """
    reference = bench.reference(case)
    middle = len(reference.result.moments) // 2
    arguments = bench.prepare(case)
    resume_file = bench.folder / "go"
    resume_file.unlink(missing_ok=True)
    log = bench.folder / "first.log"
    pause = Fault("pause", middle, resume_file=resume_file)
    first_run = start(case.command, arguments, folder=bench.output, log=log, fault=pause)
    while len(moments_file(log).read_text().splitlines()) <= middle:
        if first_run.has_ended:
            output = first_run.wait().output
            problems = [f"the first ended before its middle moment: {output[-300:].strip()}"]
            bench.record(case.name, "writers", position=middle, problems=problems)
            return
        time.sleep(0.01)
    second_arguments = [*arguments, *case.resume_flags]
    second_result = run(case.command, second_arguments, folder=bench.output, log=bench.folder / "second.log")
    resume_file.write_text("")
    problems = bench.problems_after_resuming(case, first_run.wait(), reference.content)
    if not second_result.is_clear_error or "another process" not in second_result.output:
        problems.append(f"the second ends with status {second_result.status}: {second_result.output[-300:].strip()}")
    bench.record(case.name, "writers", position=middle, problems=problems)


def must_refuse(
    bench: Bench, name: str, fault: str, command: str, arguments: list[str], expected_words: tuple[str, ...] = ()
) -> None:
    """Runs a command on faulty input: it must end with one message, no traceback and no temporary files.

    If there are expected words, the message must contain at least one of them.
    """
    result = run(command, arguments, folder=bench.output, log=bench.folder / "run.log")
    problems = []
    if not result.is_clear_error:
        problems.append(f"ends with status {result.status}: {result.output[-500:].strip()}")
    elif expected_words and not any(word in result.output for word in expected_words):
        problems.append(f"does not name {' or '.join(expected_words)}: {result.output[-300:].strip()}")
    for path in bench.output.rglob("*"):
        if path.name.startswith(".") or path.name.endswith(".part"):
            problems.append(f"left {path.name}")
    bench.record(name, fault, position=command, problems=problems)


def copy_with_change(bench: Bench, source: Path, file: str, change: Callable[[Path], None]) -> Path:
    """Copies a folder, changes one file of the copy, and returns the copy; empties the output folder."""
    copy = bench.output.parent / "copy"
    for folder in (copy, bench.output):
        if folder.exists():
            shutil.rmtree(folder)
    bench.output.mkdir()
    shutil.copytree(source, copy)
    change(copy / file)
    return copy


def cut(share: float) -> Callable[[Path], None]:
    """Returns a function that shortens a file to a share of its size, by at least 2 bytes.

    One byte would be too little: a text file that lacks only its last line end is still complete.
    """

    def change(path: Path) -> None:
        size = path.stat().st_size
        os.truncate(path, max(0, min(int(size * share), size - 2)))

    return change


def _commands_that_read(bench: Bench, kind: str, folder: Path) -> list[tuple[str, list[str]]]:
    """Returns commands that read a folder of a kind (model, adapter, index or encoder), with their arguments."""
    output = ["--output", str(bench.output / "out")]
    adapter = ["--adapter", str(bench.fixtures / "sft")]
    training_data = ["--data", str(bench.fixtures / "rows.jsonl"), "--limit", "12", "--max-steps", "2"]
    questions = ["--data", str(WORLD / "dev.jsonl"), "--limit", "2"]
    evaluation = [*TINY, *questions, "--max-new-tokens", "16"]
    if kind == "model":
        sft = [*TINY, *training_data, "--model", str(folder), "--batch-size", "4", *output]
        evaluate = [*evaluation, "--retriever", "none", "--model", str(folder), *output]
        export = ["--model", str(folder), "--prompts", "1", *output]
        return [("sft", sft), ("evaluate", evaluate), ("export", export)]
    if kind == "adapter":
        evaluate = [*evaluation, "--retriever", "none", "--adapter", str(folder), *output]
        ppo = CASES_BY_NAME["ppo, grpo"].arguments(bench.fixtures, bench.output, bench.server.url)
        ppo[ppo.index("--adapter") + 1] = str(folder)
        export = ["--model", "tiny", "--adapter", str(folder), "--prompts", "1", *output]
        return [("evaluate", evaluate), ("ppo", ppo), ("export", export)]
    if kind == "index":
        retrieve = ["--query", "Who is it?", "--encoder", "hashing", "--index", str(folder)]
        add = ["--encoder", "hashing", "--add", str(bench.fixtures / "more.jsonl"), "--output", str(folder)]
        evaluate = [*evaluation, *adapter, "--index", str(folder), *output]
        return [("retrieve", retrieve), ("index", add), ("evaluate", evaluate)]
    if kind == "encoder":
        return [("retrieve", [*questions, "--encoder", str(folder), *output])]
    raise AssertionError(kind)


def cut_files(bench: Bench) -> None:
    """Cuts files as a broken download leaves them: every command that reads one must refuse it."""
    tiny = shipped("checkpoints", "tiny")
    adapter = bench.fixtures / "sft"
    index = bench.fixtures / "edited"
    encoder = encoder_folder()
    files = [(tiny, "model", name) for name in ("model.safetensors", "config.json", "tokenizer.json")]
    files += [(adapter, "adapter", f"adapter/{name}") for name in ("adapter_model.safetensors", "adapter_config.json")]
    files += [(index, "index", path.name) for path in sorted(index.iterdir())]
    if encoder:
        files += [(Path(encoder), "encoder", name) for name in ("model.safetensors", "tokenizer.json", "config.json")]
    for source, kind, name in files:
        if not (source / name).is_file():
            continue
        for share in CUT_SHARES:
            copy = copy_with_change(bench, source, file=name, change=cut(share))
            for command, arguments in _commands_that_read(bench, kind, copy):
                must_refuse(
                    bench, f"{kind}: {Path(name).name}", fault=f"cut {share}", command=command, arguments=arguments
                )


def not_numbers(bench: Bench) -> None:
    """Puts NaN and infinity into weights, index vectors and rewards, and flips a bit of checkpoints."""
    tiny = shipped("checkpoints", "tiny")
    for value in (math.nan, math.inf):
        for tensor in ("embed", "layers.1.self_attn.q_proj.weight", "norm.weight"):
            copy = copy_with_change(bench, tiny, file="model.safetensors", change=spoil_tensor(value, tensor))
            for command, arguments in _commands_that_read(bench, "model", copy):
                must_refuse(bench, f"model: {tensor}", fault=str(value), command=command, arguments=arguments)
        file = "adapter/adapter_model.safetensors"
        copy = copy_with_change(bench, bench.fixtures / "sft", file=file, change=spoil_tensor(value, "lora_B"))
        for command, arguments in _commands_that_read(bench, "adapter", copy):
            must_refuse(bench, "adapter: lora_B", fault=str(value), command=command, arguments=arguments)
    index = bench.fixtures / "edited"
    if (index / "vectors.faiss").exists():
        copy = copy_with_change(bench, index, file="vectors.faiss", change=spoil_vectors)
        for command, arguments in _commands_that_read(bench, "index", copy):
            must_refuse(bench, "index: vectors.faiss", fault="nan", command=command, arguments=arguments)
    spoil_checkpoints(bench)
    nan_reward(bench)


def spoil_tensor(value: float, name_part: str) -> Callable[[Path], None]:
    """Returns a function that puts `value` into a file of tensors.

    It replaces one number of the first tensor of floats whose name contains `name_part`.
    """

    def change(path: Path) -> None:
        tensors = safetensors.torch.load_file(path)
        name = next(name for name in sorted(tensors) if name_part in name and tensors[name].is_floating_point())
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[3] = value
        safetensors.torch.save_file(tensors, path, {"format": "pt"})

    return change


def spoil_vectors(path: Path) -> None:
    """Sets one number near the end of a file of vectors to NaN."""
    raw = bytearray(path.read_bytes())
    raw[-400:-396] = np.float32("nan").tobytes()
    path.write_bytes(raw)


def spoil_checkpoints(bench: Bench) -> None:
    """Flips a bit in each file of a run's newest checkpoint.

    The run must resume from the checkpoint before it, and end as if nothing had happened.
    """
    for name in ("sft", "ppo, grpo"):
        case = CASES_BY_NAME[name]
        reference = bench.reference(case)
        for file in CHECKPOINT_FILES:
            arguments = bench.prepare(case)
            assert bench.run_once(case, arguments).status == 0
            checkpoints = bench.output.glob("run/checkpoint-*")
            newest = max(checkpoints, key=lambda path: int(path.name.partition("-")[2]))
            path = newest / file
            raw = bytearray(path.read_bytes())
            raw[len(raw) // 2] ^= 0x10
            path.write_bytes(raw)
            resumed_run = bench.run_once(case, [*arguments, *case.resume_flags])
            problems = bench.problems_after_resuming(case, resumed_run, reference.content)
            bench.record(case.name, "bit flip", position=f"{newest.name}/{file}", problems=problems)


def nan_reward(bench: Bench) -> None:
    """Trains with a user's reward that is NaN in the second round.

    The command must refuse it, and the checkpoint of the first round must stay.
    """
    name = "reward of the user's own"
    module = ROOT / "fault_reward.py"
    module.write_text(NAN_REWARD)
    try:
        case = CASES_BY_NAME["ppo, reinforce++"]
        arguments = [*bench.prepare(case), "--rewards", "fault_reward:spoiled=1"]
        words = ("nan", "finite", "number")
        must_refuse(bench, name, fault="nan", command="ppo", arguments=arguments, expected_words=words)
        checkpoints = sorted(path.name for path in (bench.output / "run").glob("checkpoint-*"))
        problems = [] if checkpoints == ["checkpoint-1"] else [str(checkpoints)]
        bench.record(name, "kept", position="checkpoint-1", problems=problems)
    finally:
        module.unlink()


def server_killed(bench: Bench) -> None:
    """Kills r3lite.serve by SIGKILL while it answers and caches query vectors, and starts it again at the same port.

    It must then answer as before, and leave no files but the cache. In the end SIGTERM must end it cleanly.
    """
    if encoder_folder() is None:
        return
    shutil.rmtree(bench.output, ignore_errors=True)
    bench.output.mkdir()
    corpus = bench.folder / "corpus.jsonl"
    corpus.write_text("".join((WORLD / "corpus.jsonl").read_text(encoding="utf-8").splitlines(True)[:60]))
    log = bench.folder / "serve.log"
    port = _free_port()
    command = _serve_command(bench, corpus, port)
    url = f"http://127.0.0.1:{port}/generate"
    lines = (WORLD / "dev.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["question"] for line in lines[:6]]

    answers: list[list[dict]] = []  # of each start: the replies to the questions
    for number in range(SERVER_STARTS):
        process = _start_server(command, log)
        if process.poll() is not None:
            bench.record("serve", "timed", position=number, problems=[log.read_text()[-500:]])
            return
        replies = [_ask(url, question, conversation=f"c{i % 2}") for i, question in enumerate(questions)]
        answers.append([_without_times(reply or {}) for reply in replies])
        threads = [threading.Thread(target=_ask, args=(url, f"{question} {number}")) for question in questions]
        for thread in threads:
            thread.start()
        time.sleep(bench.rng.uniform(0.0, 0.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        for thread in threads:
            thread.join()
        problems = []
        for name in content(bench.output):
            if name not in ("queries.sqlite", "queries.sqlite-journal"):
                problems.append(f"left {name}")
        bench.record("serve", "timed", position=number, problems=problems, kills=1)
    is_same = all(replies == answers[0] for replies in answers) and all(answers[0])
    problems = [] if is_same else ["a restarted server answers otherwise"]
    bench.record("serve", "answers", position=len(answers), problems=problems)
    process = _start_server(command, log)
    process.terminate()
    status = process.wait(60)
    problems = differences({"queries.sqlite": None}, dict.fromkeys(content(bench.output)))
    if status != SIGTERM_STATUS:
        problems.append(f"status {status}")
    bench.record("serve", "ended", position=status, problems=problems)


def _free_port() -> int:
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        return free_socket.getsockname()[1]


def _serve_command(bench: Bench, corpus: Path, port: int) -> list[str]:
    """Returns the command of a server with two adapters, a small corpus and a cache of query vectors."""
    sizes = ["--dtype", "fp32", "--max-new-tokens", "24", "--max-hops", "2", "--memory-modes", "chat,search"]
    adapters = ["--adapters", f"base,sft={bench.fixtures / 'sft'}", "--chat-adapter", "base"]
    search = ["--encoder", str(encoder_folder()), "--corpus", str(corpus)]
    cache = ["--query-cache", str(bench.output / "queries.sqlite")]
    flags = [*TINY, *sizes, *adapters, *search, *cache, "--port", str(port)]
    return [sys.executable, "-m", "r3lite.serve", *flags]


def _start_server(command: list[str], log: Path) -> subprocess.Popen:
    """Starts a server, and returns once it listens or has ended."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with open(log, "w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
    while process.poll() is None and "http://" not in log.read_text():  # it prints its address once it listens
        time.sleep(0.05)
    return process


def _ask(url: str, question: str, **fields: str) -> dict | None:
    """Returns the reply of the server to a question; None if the server was killed meanwhile."""
    body = json.dumps({"query": question, "mode": "search"} | fields).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)
    except OSError:
        return None


def _without_times(reply: dict) -> dict:
    return {key: value for key, value in reply.items() if "second" not in key and "time" not in key}
