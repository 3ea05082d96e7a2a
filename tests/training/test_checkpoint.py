"""Checkpoints: whole or not there at all, whatever happens to the process or to the disk."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from r3lite.core.errors import R3LiteError
from r3lite.core.files import sweep
from r3lite.core.inherited import CHECKPOINT
from r3lite.training import checkpoint
from r3lite.training.checkpoint import Checkpoint
from tests.errors import raises


def state(step: int) -> dict:
    """What state.json of every run holds."""
    precision = {"dtype": "torch.float32", "device": "cpu", "skipped": 0, "skipped_in_a_row": 0, "scaler": None}
    run = {"step": step, "command": "sft", "settings": {"seed": 0}, "precision": precision, "data": "é"}
    return run | {"kept": {"memory": {}}, "num_tokens": 7, "seconds": 0.5}


def example(step: int) -> Checkpoint:
    weights = {"a": torch.full((3, 2), step / 7), "b": torch.tensor(float("nan"))}
    moments = {"a.step": torch.tensor(float(step)), "a.exp_avg": torch.randn(3, 2)}
    random = {"cpu": torch.get_rng_state()}
    return Checkpoint(step, {"weights": weights, "optimizer": moments, "random": random}, state(step))


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"r": 8}')


def write_checkpoints(output: Path, *steps: int) -> list[Path]:
    return [checkpoint.write(output, example(step), adapter) for step in steps]


def test_what_is_written_is_read_back_to_the_bit(tmp_path):
    saved = example(3)
    folder = checkpoint.write(tmp_path, saved, adapter)
    loaded = checkpoint.read(folder)
    assert folder.name == "checkpoint-3"
    assert (loaded.step, loaded.state) == (3, saved.state)
    for group, tensors in saved.tensors.items():
        for name, tensor in tensors.items():
            assert loaded.tensors[group][name].numpy().tobytes() == tensor.numpy().tobytes()
    assert (folder / "adapter" / "adapter_config.json").exists()


def test_a_checkpoint_is_safetensors_and_json_only(tmp_path):
    (folder,) = write_checkpoints(tmp_path, 1)
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    tensors = {f"{group}.safetensors" for group in checkpoint.GROUPS}
    assert files == {*tensors, "state.json", "manifest.json", "adapter/adapter_config.json"}
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]


def test_a_part_with_tensors_has_a_file_that_is_checked_like_the_others(tmp_path):
    saved = example(2)
    saved.tensors["replay"] = {"0.0.tokens": torch.arange(5, dtype=torch.int32), "0.0.mask": torch.tensor([True])}
    folder = checkpoint.write(tmp_path, saved, adapter)
    loaded = checkpoint.read(folder)
    assert loaded.tensors.keys() == {*checkpoint.GROUPS, "replay"} and checkpoint.fault(folder) is None
    for name, tensor in saved.tensors["replay"].items():
        assert (
            torch.equal(loaded.tensors["replay"][name], tensor) and loaded.tensors["replay"][name].dtype == tensor.dtype
        )
    flip(folder / "replay.safetensors")
    assert checkpoint.fault(folder) == "replay.safetensors has changed since it was written"
    (folder / "replay.safetensors").unlink()
    assert checkpoint.fault(folder) == "replay.safetensors is missing"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def described(folder: Path, name: str, entry: dict | None) -> None:
    """Puts another entry for a file into the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = entry
    (folder / "manifest.json").write_text(json.dumps(manifest))


def restated(folder: Path, **changed) -> None:
    """Changes the state as an editor does who mends the manifest too."""
    path = folder / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    described(folder, "state.json", {"bytes": path.stat().st_size, "crc32": checkpoint.crc(path)})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: flip(f / "weights.safetensors"), "weights.safetensors has changed since it was written"),
        (lambda f: (f / "state.json").write_text("{"), "state.json has changed since it was written"),
        (lambda f: flip(f / "adapter" / "adapter_config.json"), "adapter/adapter_config.json has changed"),
        (lambda f: (f / "optimizer.safetensors").unlink(), "optimizer.safetensors is missing"),
        (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda f: (f / "manifest.json").write_text("[]"), "manifest.json: not a JSON object"),
        (lambda f: (f / "manifest.json").write_text("not json"), "manifest.json: not JSON"),
        (lambda f: (f / "manifest.json").write_text("[" * 100_000), "nested more than 100 deep"),
        (lambda f: (f / "manifest.json").write_text('{"format": 1, "files": []}'), "files is [], not a JSON object"),
        (lambda f: described(f, "weights.safetensors", None), "weights.safetensors is missing"),
        (lambda f: described(f, "state.json", {"bytes": True, "crc32": 0}), "state.json.bytes is True"),
        (lambda f: described(f, "/dev/zero", {"bytes": 0, "crc32": 0}), "/dev/zero is a pipe or device"),
        (lambda f: restated(f, step=7), "step is 7"),
        (lambda f: restated(f, step="10"), "step is '10', not a whole number"),
        (lambda f: restated(f, command=None), "command is missing"),
        (lambda f: restated(f, settings=None), "settings is missing"),
        (lambda f: restated(f, settings=[1]), "settings is [1], not a JSON object"),
        (lambda f: restated(f, precision=3), "precision is 3, not a JSON object"),
        (lambda f: restated(f, kept={"memory": []}), "kept.memory is [], not a JSON object"),
        (lambda f: restated(f, data=None), "data is missing"),
        (lambda f: restated(f, base=3), "base is 3, not text"),
        (lambda f: restated(f, seconds=float("nan")), "NaN is not a JSON number"),
        (lambda f: restated(f, num_tokens=-1), "num_tokens is -1"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path, capsys, damage, message):
    older, newer = write_checkpoints(tmp_path, 2, 10)
    damage(newer)
    assert checkpoint.newest_valid(tmp_path) == older
    assert message in (stderr := capsys.readouterr().err)
    assert str(newer) in stderr
    with raises(R3LiteError, "checkpoint-invalid"):
        checkpoint.read(newer)


def test_tensors_that_are_none_are_told(tmp_path):
    (folder,) = write_checkpoints(tmp_path, 1)
    (folder / "weights.safetensors").write_bytes(b"junk")
    described(folder, "weights.safetensors", {"bytes": 4, "crc32": checkpoint.crc(folder / "weights.safetensors")})
    with raises(R3LiteError, "checkpoint-unreadable"):
        checkpoint.read(folder)


def test_a_checkpoint_of_another_format_is_not_sound(tmp_path):
    (folder,) = write_checkpoints(tmp_path, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    assert checkpoint.fault(folder) == "format 99 instead of 1"


def test_the_newest_ones_are_kept_by_number_not_by_name(tmp_path):
    write_checkpoints(tmp_path, 8, 9, 10, 100)
    (tmp_path / "checkpoint-best").mkdir()  # somebody else's
    checkpoint.prune(tmp_path, 2)
    assert list(checkpoint.folders_by_step(tmp_path)) == [10, 100]
    assert (tmp_path / "checkpoint-best").exists()


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    (folder,) = write_checkpoints(tmp_path, 1)

    def fail(new: Path) -> None:
        adapter(new)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoint.replace_folder(folder, fail)
    assert checkpoint.fault(folder) is None
    assert len(list(tmp_path.iterdir())) == 2  # with what was left half written,
    sweep(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]  # which the next start sweeps


def test_a_kill_while_a_checkpoint_is_removed_leaves_no_half_of_one(tmp_path, monkeypatch):
    """Files were removed in place once, so a kill among them left a checkpoint that was not sound."""
    write_checkpoints(tmp_path, 1, 2)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.shutil, "rmtree", lambda folder, ignore_errors: None)  # killed before the first file
        checkpoint.prune(tmp_path, 1)
    assert list(checkpoint.folders_by_step(tmp_path)) == [2]
    sweep(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-2"]


def test_a_checkpoint_that_cannot_be_removed_ends_no_run(tmp_path, monkeypatch, capsys):
    write_checkpoints(tmp_path, 1, 2)
    monkeypatch.setattr(checkpoint.os, "replace", Mock(side_effect=PermissionError("a file is in use")))
    checkpoint.prune(tmp_path, 1)
    assert "checkpoint-1 cannot be removed: a file is in use" in capsys.readouterr().err
    assert list(checkpoint.folders_by_step(tmp_path)) == [1, 2]


WRITER = """
import sys, torch
from pathlib import Path
from r3lite.devices.random_state import random_state
from r3lite.training import checkpoint
from tests.training.test_checkpoint import state
output, step = Path(sys.argv[1]), 0
while True:
    step += 1
    weights = {"w": torch.full((1 << 18,), float(step))}
    whole = {"weights": weights, "optimizer": {"w.exp_avg": weights["w"] + 1}, "random": random_state()}
    adapter = lambda folder: (folder / "x.json").write_text("{}")
    checkpoint.write(output, checkpoint.Checkpoint(step, whole, state(step)), adapter)
    checkpoint.prune(output, 2)
    print(step, flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on Windows")
def test_kill_9_at_any_moment_leaves_a_sound_checkpoint(tmp_path):
    """Among 12 kills while a 400 MB file was overwritten, torch.save left 8 files that could not be read."""
    last = 0
    for trial in range(4):
        process = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE, text=True)
        for _ in range(2 + trial):
            last = int(process.stdout.readline())
        time.sleep(0.004 * trial)  # somewhere within the next one
        process.kill()
        process.wait()
        process.stdout.close()
        assert all(checkpoint.fault(folder) is None for folder in checkpoint.folders_by_step(tmp_path).values())
        newest = checkpoint.read(checkpoint.newest_valid(tmp_path))
        assert newest.step >= last
        assert torch.equal(newest.tensors["weights"]["w"], torch.full((1 << 18,), float(newest.step)))
        sweep(tmp_path)
        assert all(CHECKPOINT.fullmatch(p.name) for p in tmp_path.iterdir())
        for folder in checkpoint.folders_by_step(tmp_path).values():
            checkpoint.remove(folder)
