"""A short cold start of the tiny model, and runs of reinforcement learning from there."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from filelock import FileLock

from r3lite import collect, index, sft
from r3lite.core.files import shipped
from r3lite.training import checkpoint, metrics

WORLD = shipped("data", "world")
SHORT = "--max-steps 2 --max-new-tokens 64 --max-hops 1 --warmup 0 --learning-rate-schedule linear"


@pytest.fixture(scope="session")
def cold(tmp_path_factory):
    """Index and a short cold start of the tiny model: knows the format more or less, and answers some questions.

    Several workers of a test run share one training, and each has a copy to write into.
    """
    folder = tmp_path_factory.mktemp("cold")
    if "PYTEST_XDIST_WORKER" not in os.environ:
        _train(folder)
        return folder
    trained = tmp_path_factory.getbasetemp().parent / "cold"
    with FileLock(f"{trained}.lock"):
        if not (trained / ".complete").exists():
            _train(trained)
            (trained / ".complete").touch()
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    return folder


def _train(folder: Path) -> None:
    tiny = ["--preset", "tiny"]
    assert index.main([*tiny, "--corpus", str(WORLD / "corpus.jsonl"), "--output", str(folder / "index")]) == 0
    search = ["--index", str(folder / "index")]
    rows = str(folder / "rows.jsonl")
    assert collect.main([*tiny, "--data", str(WORLD / "train.jsonl"), "--limit", "160", *search, "--output", rows]) == 0
    steps = ["--max-steps", "48", "--batch-size", "4", "--validation-fraction", "0"]
    assert sft.main([*tiny, "--data", rows, *steps, "--output", str(folder / "sft")]) == 0


def arguments(cold: Path, output: Path, *extra_flags: str) -> list[str]:
    small = "--batch-size 2 --num-generations 3 --mini-batch-size 6 --update-epochs 1 --micro-batch-size 2"
    small += " --max-steps 4 --save-every 1"
    data = [
        "--data",
        str(WORLD / "train.jsonl"),
        "--limit",
        "6",
        "--index",
        str(cold / "index"),
        "--adapter",
        str(cold / "sft"),
    ]
    return ["--preset", "tiny", *small.split(), *data, "--output", str(output), *extra_flags]


def kill_after(step: int, arguments: list[str], output: Path) -> None:
    """Starts a run and kills it when a step is logged; only the checkpoint of the step before is there then."""
    command = [sys.executable, "-m", "r3lite.ppo", *arguments]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])})
    log = output / "metrics.jsonl"
    while not (log.exists() and len(log.read_text().splitlines()) >= step):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(checkpoint.folders_by_step(output)) == [step - 1]  # else it had gone on, or had ended


def logged(output: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (output / name).read_text(encoding="utf-8").splitlines()]


def adapter(output: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(output / "adapter" / "adapter_model.safetensors")


def assert_same_runs(a: Path, b: Path, total: int = 4) -> None:
    """Equal to the bit: adapter, all tensors of a checkpoint, and every metric but times, speeds and memory."""
    checkpoint_a, checkpoint_b = (checkpoint.read(p / f"checkpoint-{total}") for p in (a, b))
    assert checkpoint_a.state["precision"] == checkpoint_b.state["precision"]
    assert checkpoint_a.tensors.keys() == checkpoint_b.tensors.keys()
    for group, tensors in checkpoint_a.tensors.items():
        assert tensors.keys() == checkpoint_b.tensors[group].keys()
        assert all(torch.equal(tensor, checkpoint_b.tensors[group][name]) for name, tensor in tensors.items())
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (a / "adapter" / name).read_bytes() == (b / "adapter" / name).read_bytes()
    for name in ("metrics.jsonl", "episodes.jsonl"):
        assert (a / name).exists() == (b / name).exists()  # SFT has no episodes
        if (a / name).exists():
            assert [metrics.repeatable(r) for r in logged(a, name)] == [metrics.repeatable(r) for r in logged(b, name)]
