"""What is asked of the hub, by a stand-in for its library that selects files as it does."""

import json
from pathlib import Path

import pytest
from huggingface_hub.errors import IncompleteSnapshotError
from huggingface_hub.utils import filter_repo_objects

from r3lite.core.errors import R3LiteError
from r3lite.models import hub_folder
from r3lite.models.weights import resolve_folder
from tests.errors import raises

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = json.dumps({"weight_map": dict(zip("xy", SHARDS, strict=True))})
TEXTS = {"config.json": "{}", "tokenizer.json": "{}", "chat_template.jinja": "", "merges.txt": ""}
COPIES = ["consolidated.safetensors", "onnx/model.safetensors", "onnx/config.json", "original/consolidated.00.pth"]
OTHERS = dict.fromkeys([*COPIES, "README.md", "pytorch_model.bin", "modeling.py", "tf_model.h5"], "x")
ONE = TEXTS | OTHERS | {"model.safetensors": "w"}
TWO = TEXTS | OTHERS | dict.fromkeys(SHARDS, "w") | {"model.safetensors.index.json": INDEX}
MODULES = [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1_Pooling"}]
MODULES.append({"type": "a.Dense", "path": "2_Dense"})
PARTS = {"1_Pooling/config.json": "{}", "2_Dense/config.json": "{}", "2_Dense/model.safetensors": "d"}
ENCODER = ONE | PARTS | {"modules.json": json.dumps(MODULES), "2_Dense/pytorch_model.bin": "x"}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Serves a repository; `offline`, with these files of it in the cache."""

    def serve(repository: dict[str, str], cached: list[str] | None = None) -> Path:
        place = tmp_path / "snapshots" / "a0b1c2"

        def snapshot_download(repo, allow_patterns, ignore_patterns=None, revision=None):
            assert repo == "me/model" and revision in (None, place.name)
            patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
            wanted = list(filter_repo_objects(repository, **patterns))
            missing = [name for name in wanted if not (place / name).exists()]
            if cached is not None and missing:
                raise IncompleteSnapshotError(f"{missing[0]} is missing", snapshot_path=str(place))
            write(wanted)
            return str(place)

        def write(names: list[str]) -> None:
            for name in names:
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                (place / name).write_text(repository[name], encoding="utf-8")

        write(cached or [])
        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
        return place

    return serve


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("repository", "downloaded"),
    [
        (ONE, {*TEXTS, "model.safetensors"}),
        (TWO, {*TEXTS, "model.safetensors.index.json", *SHARDS}),
        (ENCODER, {*TEXTS, "model.safetensors", "modules.json", *PARTS}),
        (TEXTS | OTHERS, {*TEXTS}),  # pickled weights alone, which are refused when they are loaded
    ],
)
def test_the_weights_that_the_index_names_are_downloaded_and_no_others(hub, repository, downloaded):
    """`consolidated.safetensors` and `onnx/` were downloaded, too: the weights two and three times."""
    place = hub(repository)
    assert resolve_folder("me/model") == place
    assert files(place) == downloaded


@pytest.mark.parametrize("repository", [ONE, TWO])
def test_offline_only_weights_must_be_there(hub, repository):
    """A cache without files that are never read, such as onnx/config.json, was refused."""
    cached = [name for name in repository if name not in OTHERS and name != "merges.txt"]
    place = hub(repository, cached=cached)
    assert resolve_folder("me/model") == place


def test_offline_a_missing_shard_is_named(hub):
    hub(TWO, cached=["config.json", "model.safetensors.index.json", SHARDS[0]])
    with raises(R3LiteError, "model-absent", SHARDS[1], "is missing") as error:
        resolve_folder("me/model")
    assert error.value.remedy == hub_folder.REMEDY


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("model.safetensors.index.json", '{"weight_map": {"x": "../x.safetensors"}}', "not the name of a safetensors"),
        ("model.safetensors.index.json", "{}", "weight_map is missing or empty"),
        ("modules.json", "{}", "modules is .*, not a list"),
    ],
)
def test_an_index_that_is_damaged_is_named(hub, name, text, words):
    hub(ONE | {name: text})
    with pytest.raises(R3LiteError, match=words):
        resolve_folder("me/model")
