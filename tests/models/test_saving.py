"""Merged checkpoints: the source's files, the published names, and nothing of a merge that fails."""

import json

import pytest
import torch
from safetensors import safe_open

from r3lite.core.errors import R3LiteError
from r3lite.models import tensor_files
from r3lite.models.lora import add_adapter
from r3lite.models.saving import save_merged, write_weights
from r3lite.models.tensor_files import read_tensors
from r3lite.models.weights import load_model
from tests.errors import raises


@pytest.mark.parametrize("tied", [True, False])
def test_a_merged_checkpoint_has_the_sources_files_and_the_published_names(small_model, write_folder, tmp_path, tied):
    source = write_folder(small_model(tie_word_embeddings=tied), tmp_path / "source", extra_key=[1])
    (source / "tokenizer.json").write_text('{"a":   1}')
    model = load_model(source, torch.float32, "cpu")
    add_adapter(model, "policy", 4, 8)
    save_merged(model, source, tmp_path / "out")
    out = tmp_path / "out"
    for name in ("config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert ("lm_head.weight" in file.keys()) != tied  # noqa: SIM118 (not a dictionary)
        assert "model.embed_tokens.weight" in file.keys()  # noqa: SIM118
    reloaded = load_model(out, torch.float32, "cpu")
    assert torch.equal(reloaded(torch.arange(9)[None]), model(torch.arange(9)[None]))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]
    with raises(R3LiteError, "output-exists"):
        save_merged(model, source, out)


def test_a_merge_that_fails_leaves_nothing(small_model, write_folder, tmp_path, monkeypatch):
    source = write_folder(small_model(), tmp_path / "source")
    model = load_model(source, torch.float32, "cpu")

    def full(*arguments, **options):
        raise OSError("no space left")

    monkeypatch.setattr(tensor_files, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        save_merged(model, source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_a_tensor_is_in_one_file_and_files_keep_their_limit(tmp_path):
    """A tensor that is larger has a file by itself."""
    tensors = {name: torch.zeros(size, dtype=torch.uint8) for name, size in zip("abcde", (3, 2, 9, 1, 4), strict=True)}
    write_weights(tmp_path, tensors, 5)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    shards = [read_tensors(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    assert index["metadata"]["total_size"] == 19 and set(index["weight_map"]) == set("abcde")
    assert sorted(name for file in shards for name in file) == list("abcde")
    assert all(sum(t.nbytes for t in file.values()) <= 5 or list(file) == ["c"] for file in shards)
