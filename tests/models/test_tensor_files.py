"""Safetensors files: written whole and always as the same bytes; what is not a file is refused without waiting."""

import os

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from r3lite.core.errors import R3LiteError
from r3lite.models import tensor_files
from r3lite.models.tensor_files import opened, read_tensors, write_tensors


def test_tensors_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"a": torch.ones(3, 2).t()})
    assert torch.equal(load_file(path)["a"], torch.ones(2, 3))
    if os.name == "posix":
        assert path.stat().st_mode & 0o777 == 0o644

    def crash(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError("crash")

    monkeypatch.setattr(tensor_files, "save_file", crash)
    with pytest.raises(OSError, match="crash"):
        write_tensors(path, {"a": torch.zeros(2)})
    assert torch.equal(load_file(path)["a"], torch.ones(2, 3))
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_a_full_disk_is_an_error_of_the_system_that_names_the_file(tmp_path, monkeypatch):
    """Safetensors has an error of its own for it: `export` and `collect --teacher-logprobs` ended with a traceback."""

    def crash(tensors, file, metadata):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(tensor_files, "save_file", crash)
    with pytest.raises(OSError, match="No space left on device") as error:
        write_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(2)})
    assert error.value.filename == str(tmp_path / "a.safetensors") and not os.listdir(tmp_path)


def test_the_same_tensors_and_metadata_are_the_same_bytes(tmp_path):
    """Safetensors writes metadata in random order: with three keys, 20 files of one adapter were several."""
    tensors = {"b": torch.ones(3), "a": torch.zeros(2, 2)}
    path = tmp_path / "a.safetensors"
    metadata = {"z": 'of "ü"\n', "base": "x"}
    contents = set()
    for _ in range(20):
        write_tensors(path, tensors, metadata)
        contents.add(path.read_bytes())
    assert len(contents) == 1
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", **metadata}
    assert read_tensors(path).keys() == {"a", "b"}
    write_tensors(path, tensors)
    assert path.read_bytes() == save(tensors, {"format": "pt"})  # as the library writes it


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (os.mkfifo, "is a pipe or device"),
        (os.mkdir, "is a folder, not a file"),
        (lambda path: path.write_bytes(b"\xff" * 100), "cannot be read"),
        (lambda path: path.symlink_to("/dev/zero"), "is a pipe or device"),
        (lambda path: path.symlink_to(path), "cannot be read"),
        (lambda path: None, "No such file"),
    ],
)
def test_what_is_not_a_file_of_tensors_is_refused(tmp_path, make, words):
    """A pipe hung for ever."""
    make(tmp_path / "x.safetensors")
    with pytest.raises(R3LiteError, match=words), opened(tmp_path / "x.safetensors"):
        pass
    with pytest.raises(R3LiteError, match=r"null (byte|character)"):
        read_tensors("a\0b")
