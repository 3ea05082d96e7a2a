"""GGUF files that are refused: without the package, and of a tokenizer that llama.cpp would read otherwise."""

import builtins
import json
import shutil

import pytest

from r3lite import export
from r3lite.models.weights import resolve_folder

TINY = ["--preset", "tiny", "--model", "tiny"]


def test_without_its_package_gguf_is_refused_by_the_name_of_the_extra(tmp_path, monkeypatch, capsys):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name == "gguf":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    flags = [*TINY, "--form", "gguf", "--output", str(tmp_path / "x")]
    assert export.main(flags) == 1 and "r3lite[gguf]" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_tokenizer_that_llama_cpp_would_read_otherwise_is_refused(tmp_path, capsys):
    pytest.importorskip("gguf")
    folder = tmp_path / "model"
    shutil.copytree(resolve_folder("tiny"), folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"\w+|\W+"}
    path.write_text(json.dumps(content), encoding="utf-8")
    flags = ["--preset", "tiny", "--model", str(folder), "--form", "gguf", "--prompts", "0"]
    assert export.main([*flags, "--output", str(tmp_path / "x")]) == 1
    assert "splits text in an unsupported way" in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_a_token_without_a_row_in_the_embedding_is_refused(tmp_path, capsys):
    """Python's IndexError was shown."""
    pytest.importorskip("gguf")
    folder = tmp_path / "model"
    shutil.copytree(resolve_folder("tiny"), folder)
    rows = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["added_tokens"].append(content["added_tokens"][0] | {"id": rows, "content": "<image>"})
    path.write_text(json.dumps(content), encoding="utf-8")
    flags = ["--preset", "tiny", "--model", str(folder), "--form", "gguf", "--prompts", "0"]
    assert export.main([*flags, "--output", str(tmp_path / "x")]) == 1
    assert f"ids up to {rows}, but the embedding has {rows} rows" in capsys.readouterr().err
