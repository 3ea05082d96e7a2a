"""The encoder of an index: the one that it was built with, of any precision and wherever it is."""

import json
import shutil

import pytest

from r3lite.core.errors import R3LiteError
from r3lite.retrieval import index
from tests.built_index import encoder_settings
from tests.errors import raises
from tests.retrieval.test_index import save


def test_another_encoder_or_style_is_refused(tmp_path, minilm):
    save(tmp_path / "hashed")
    with raises(R3LiteError, "index-setting-differs", "encoder hashing, not") as error:
        index.load(tmp_path / "hashed", encoder_settings(str(minilm)))
    assert "--encoder hashing, or build" in error.value.remedy
    save(tmp_path / "e5", encoder=str(minilm), style="e5")
    with raises(R3LiteError, "index-setting-differs", "not hashing"):
        index.load(tmp_path / "e5", encoder_settings())
    with raises(R3LiteError, "index-setting-differs", "style e5, not plain"):
        index.load(tmp_path / "e5", encoder_settings(str(minilm), "plain"))
    # Left to itself, the style is the one that is kept with the index, whatever the encoder's name says.
    assert index.load(tmp_path / "e5", encoder_settings(str(minilm))).encoder.settings["style"] == "e5"


def test_a_hashing_index_of_texts_in_another_form_is_refused(tmp_path):
    """Its words with accents may be others than those of a query."""
    save(tmp_path / "i")
    manifest = tmp_path / "i" / "manifest.json"
    values = json.loads(manifest.read_text())
    assert values.pop("text_form") == "NFKC"
    manifest.write_text(json.dumps(values))  # as indexes of before have it
    with raises(R3LiteError, "index-setting-differs", "text_form None, not NFKC"):
        index.load(tmp_path / "i", encoder_settings())


def test_what_cannot_be_rebuilt_in_its_folder_is_built_in_another(tmp_path, minilm):
    """The errors said to build it in the same folder, which is refused."""
    save(tmp_path / "hashed")
    save(tmp_path / "broken")
    (tmp_path / "broken" / "manifest.json").write_text("[]")
    for name, refused in (("hashed", "with encoder hashing, not"), ("broken", "already exists: .* is not an index")):
        with pytest.raises(R3LiteError) as error:
            index.load(tmp_path / name, encoder_settings(str(minilm)))
        assert "FOLDER" in error.value.remedy and str(tmp_path / name) not in error.value.remedy
        with pytest.raises(R3LiteError, match=refused):
            save(tmp_path / name, encoder=str(minilm))


def test_an_index_of_one_precision_is_searched_with_the_other(tmp_path, minilm):
    for stored, searched in (("fp32", "bf16"), ("bf16", "fp32")):
        save(tmp_path / stored, encoder=str(minilm), style="plain", dtype=stored)
        manifest = json.loads((tmp_path / stored / "manifest.json").read_text())
        assert manifest.get("dtype") == (None if stored == "fp32" else "bf16")
        opened = index.load(tmp_path / stored, encoder_settings(str(minilm), dtype=searched))
        assert opened.search(["capital of Norway"], 1)[0][0].id == "c"


def test_an_older_index_whose_manifest_has_no_style_is_plain(tmp_path, minilm):
    save(tmp_path / "i", encoder=str(minilm))
    path = tmp_path / "i" / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    assert manifest.pop("style") == "plain"
    path.write_text(json.dumps(manifest), encoding="utf-8")
    opened = index.load(tmp_path / "i", encoder_settings(str(minilm)))
    assert opened.search(["capital of Norway"], 1)[0][0].id == "c"


def test_a_moved_encoder_is_taken_and_a_changed_one_is_not(tmp_path, minilm):
    from safetensors.torch import load_file, save_file

    save(tmp_path / "i", encoder=str(minilm))
    shutil.copytree(minilm, tmp_path / "moved")
    opened = index.load(tmp_path / "i", encoder_settings(str(tmp_path / "moved")))
    assert opened.search(["capital of Norway"], 1)[0][0].id == "c"
    weights = load_file(tmp_path / "moved" / "model.safetensors")
    weights = {k: v * 1.2 if k.endswith("query.weight") else v.clone() for k, v in weights.items()}
    save_file(weights, tmp_path / "moved" / "model.safetensors")
    with raises(R3LiteError, "index-setting-differs", "the vectors differ"):
        index.load(tmp_path / "i", encoder_settings(str(tmp_path / "moved")))
