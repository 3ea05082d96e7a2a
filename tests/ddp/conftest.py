"""Ranks that tests command, and a small model with rows and questions of unequal lengths for them."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from r3lite.core import run_files
from r3lite.core.files import write_jsonl
from r3lite.models.weights import resolve_folder
from r3lite.training import checkpoint, metrics

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun gives a process."""
    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    paths = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": 1}
    return os.environ | {name: str(value) for name, value in {**names, **paths}.items()}


class Processes:
    """Processes that run one command after another, as ranks of a world or, of size 1, alone."""

    def __init__(self, size: int, log: Path):
        self.size, self.log = size, log
        self.errors = [open(log / f"rank-{rank}-of-{size}.txt", "w") for rank in range(size)]  # noqa: SIM115
        self.started = [
            subprocess.Popen(
                [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                stderr=self.errors[rank], env=environment(rank, size, 0), cwd=ROOT,
            )
            for rank in range(size)
        ]  # fmt: skip

    def run(self, command: str, arguments: list[str], *changes: str, of_last: list[str] = ()) -> list[int]:
        """The exit status of each rank; the last one gets the arguments `of_last`, too."""
        port = free_port()
        self.offsets = [os.path.getsize(file.name) for file in self.errors]
        for rank, process in enumerate(self.started):
            extra_arguments = of_last if rank == self.size - 1 else []
            job = {"command": command, "arguments": [*arguments, *extra_arguments], "port": port, "changes": changes}
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        # PyTorch 2.10's Gloo prints lines of its own.
        lines = (next(line for line in process.stdout if not line.startswith("[Gloo]")) for process in self.started)
        return list(map(json.loads, lines))

    def stderr_of(self, rank: int) -> str:
        """What a rank has printed in the last run."""
        with open(self.errors[rank].name) as file:
            file.seek(self.offsets[rank])
            return file.read()

    def end(self) -> None:
        for process, error in zip(self.started, self.errors, strict=True):
            process.stdin.close()
            process.wait(30)
            error.close()


@pytest.fixture(scope="session")
def processes(tmp_path_factory):
    """`processes(2)`: two ranks, started once."""
    by_size = {}
    log = tmp_path_factory.mktemp("ranks")
    yield lambda size: by_size.setdefault(size, None) or by_size.update({size: Processes(size, log)}) or by_size[size]
    for workers in by_size.values():
        workers.end()


@pytest.fixture(scope="session")
def toy(tmp_path_factory, small_model, write_folder) -> Path:
    """A folder with a small random model, and rows and questions of unequal lengths."""
    place = tmp_path_factory.mktemp("toy")
    folder = write_folder(small_model(vocab_size=1024, num_hidden_layers=2), place / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_folder("tiny") / name, folder / name)
    talks = [
        [
            {"role": "user", "content": f"Who is {i}?"},
            {"role": "assistant", "content": "It is" + f" {i} and" * (2 + i * i % 19)},
        ]
        for i in range(20)
    ]
    write_jsonl(place / "rows.jsonl", [{"messages": talk} for talk in talks])
    texts = ["Where is " + "the one beside " * (i * 3 % 4) + f"{i}?" for i in range(9)]
    questions = [{"id": str(i), "question": text, "answer": "there"} for i, text in enumerate(texts)]
    write_jsonl(place / "questions.jsonl", questions)
    for name, text in (("init", "{question}"), ("step", "{documents}")):
        (place / f"{name}.txt").write_text(text, encoding="utf-8")
    return place


def common(toy: Path) -> list[str]:
    prompts = [x for name in ("init", "step") for x in (f"--{name}-prompt", str(toy / f"{name}.txt"))]
    return ["--model", str(toy / "model"), "--device", "cpu", "--dtype", "fp32", *prompts, "--max-steps", "3"]


def sft(toy: Path, output: Path, *extra_flags: str) -> list[str]:
    data = ["--data", str(toy / "rows.jsonl"), "--validation-rows", "4", "--output", str(output)]
    shape = "--batch-size 3 --gradient-accumulation 2 --learning-rate 5e-4 --lora-dropout 0"
    return [*common(toy), *data, *shape.split(), *extra_flags]


def rl(toy: Path, output: Path, algorithm: str, *extra_flags: str) -> list[str]:
    data = ["--data", str(toy / "questions.jsonl"), "--retriever", "none", "--output", str(output)]
    shape = "--batch-size 3 --num-generations 3 --mini-batch-size 5 --micro-batch-size 2 --learning-rate 1e-4"
    shape += " --max-new-tokens 24 --max-length 88 --kl-beta 0.05 --algorithm"
    return [*common(toy), *data, *shape.split(), algorithm, *extra_flags]


def differences(run_a: Path, run_b: Path, step: int = 3, without: tuple[str, ...] = ()) -> tuple[float, float]:
    """The largest difference of a trained weight, and of a metric (of one above 1, relative to it) not in `without`."""
    weights_a, weights_b = (checkpoint.read(run / f"checkpoint-{step}").tensors["weights"] for run in (run_a, run_b))
    assert weights_a.keys() == weights_b.keys()
    of_weights = [float((weight - weights_b[name]).abs().max()) for name, weight in weights_a.items()]
    of_metrics = []
    for record_a, record_b in zip(*(metrics.read(run / run_files.METRICS) for run in (run_a, run_b)), strict=True):
        a, b = metrics.repeatable(record_a), metrics.repeatable(record_b)
        assert a.keys() == b.keys() and all((a[name] is None) == (b[name] is None) for name in a)
        compared = [name for name in a if isinstance(a[name], int | float) and name not in without]
        of_metrics += [abs(a[name] - b[name]) / max(1.0, abs(a[name])) for name in compared]
    return largest(of_weights), largest(of_metrics)


def mean_differences(run_a: Path, run_b: Path, step: int = 3) -> tuple[float, float]:
    """Of the tensor that differs most: the mean difference of its weights, and the largest difference of Adam's means
    of its gradients, relative to the largest of these means.

    They show more than the largest difference of a weight where a few gradients are rounding alone (1e-9, where others
    of the tensor have 1e-4): Adam divides each by its own size, so these weights move by up to the learning rate. Adam
    also hides in the weights that a gradient is wrong by a factor.
    """
    tensors_a, tensors_b = (checkpoint.read(run / f"checkpoint-{step}").tensors for run in (run_a, run_b))
    of_weights, of_gradients = [], []
    for name, weight in tensors_a["weights"].items():
        of_weights.append(float((weight - tensors_b["weights"][name]).abs().mean()))
        mean_a, mean_b = (tensors["optimizer"][f"{name}.exp_avg"] for tensors in (tensors_a, tensors_b))
        of_gradients.append(float((mean_a - mean_b).abs().max() / mean_a.abs().max()))
    return largest(of_weights), largest(of_gradients)


def largest(numbers: list[float]) -> float:
    """NaN if one of them is; `max` would pass over it."""
    return float(torch.tensor(numbers, dtype=torch.float64).max())
