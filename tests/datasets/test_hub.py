"""Data sets of the hub: which files a split has, without a network and with a fake one."""

import hashlib
import os
import subprocess
import sys
import types

import pytest

from r3lite.core.errors import R3LiteError
from r3lite.datasets import hub
from r3lite.datasets.qa import read_questions
from r3lite.settings.data import DATA_SETS, names_data_set
from tests.errors import raises, shows
from tests.question_rows import HOTPOT, write


@pytest.mark.parametrize(
    ("files", "subset", "split", "picked"),
    [
        (["distractor/train-00000-of-00002.parquet", "distractor/train-00001-of-00002.parquet",
          "fullwiki/train-00000-of-00001.parquet"], "distractor", "train",
         ["distractor/train-00000-of-00002.parquet", "distractor/train-00001-of-00002.parquet"]),
        (["hotpotqa/dev.jsonl", "hotpotqa/train.jsonl", "nq/dev.jsonl"], "hotpotqa", "dev", ["hotpotqa/dev.jsonl"]),
        (["musique_ans_v1.0_train.jsonl", "musique_full_v1.0_train.jsonl"], "musique_ans", "train",
         ["musique_ans_v1.0_train.jsonl"]),
        (["data/train-0.parquet", "data/train.json"], "", "train", ["data/train.json"]),
        (["x/validation/0000.parquet", "x/train/0000.parquet"], "", "train", ["x/train/0000.parquet"]),
    ],
)  # fmt: skip
def test_files_of_a_hub_split(files, subset, split, picked):
    assert hub.pick(files, "name", subset, split) == picked


def test_a_split_in_several_subsets_or_in_none_is_refused():
    with raises(R3LiteError, "subset-ambiguous", "a, b"):
        hub.pick(["a/train.json", "b/train.json"], "name", "", "train")
    with raises(R3LiteError, "subset-absent", "a/train.json"):
        hub.pick(["a/train.json"], "name", "a", "test")
    with raises(R3LiteError, "subset-absent", "loading script"):
        hub.pick([], "name", "a", "test")


CARD = {
    "configs": [
        {"config_name": "one", "data_files": [{"split": "train", "path": ["a/*.json", "b.jsonl"]},
                                              {"split": "dev", "path": "dev-*.json"}]},
        {"config_name": "two", "data_files": "two.json"},
        {"config_name": "default", "data_files": ["c.json", "d.json"]},
    ],
}  # fmt: skip
FILES = ["a/1.json", "a/2.json", "b.jsonl", "c.json", "d.json", "dev-0.json", "two.json"]


@pytest.mark.parametrize(
    ("subset", "split", "named"),
    [
        ("one", "train", ["a/1.json", "a/2.json", "b.jsonl"]),
        ("one", "dev", ["dev-0.json"]),
        ("one", "test", []),
        ("two", "train", ["two.json"]),
        ("two", "dev", []),
        ("", "train", ["c.json", "d.json"]),
        ("three", "train", []),
    ],
)
def test_files_that_a_card_names(subset, split, named):
    assert hub.on_card(CARD, FILES, subset, split) == named


@pytest.mark.parametrize(
    ("patterns", "named"),
    [
        (["data/*.json"], ["data/1.json"]),  # a folder within the folder was read, too
        (["data/**/*.json"], ["data/1.json", "data/old/1.json"]),
        (["**/1.json"], ["1.json", "data/1.json", "data/old/1.json"]),
        (["data/**"], ["data/1.json", "data/old/1.json"]),
        (["1.json", "?.json", "*.json"], ["1.json", "2.json"]),  # rows of a file with two patterns were read twice
        (["[!2].json"], ["1.json"]),
        (["1+json"], []),
    ],
)
def test_a_wildcard_stays_within_a_folder_and_a_file_is_named_once(patterns, named):
    files = ["1.json", "2.json", "data/1.json", "data/old/1.json"]
    assert hub.on_card({"configs": [{"data_files": patterns}]}, files, "", "train") == named


def test_a_card_with_one_subset_is_meant_when_none_is_named():
    assert hub.on_card({"configs": CARD["configs"][:1]}, FILES, "", "dev") == ["dev-0.json"]
    assert hub.on_card({"configs": CARD["configs"][:2]}, FILES, "", "dev") == []


@pytest.mark.parametrize("card", [None, {}, {"configs": "x"}, {"configs": [1, {}]}, {"configs": [{"data_files": [3]}]}])
def test_a_card_that_names_nothing_is_no_error(card):
    assert hub.on_card(card, FILES, "", "train") == []


@pytest.mark.parametrize(
    ("data", "meant"),
    [
        ("hotpotqa", ("hotpotqa/hotpot_qa", "distractor", "train")),
        ("hotpotqa,validation", ("hotpotqa/hotpot_qa", "distractor", "validation")),
        ("2wiki, validation", ("xanhho/2WikiMultihopQA", "", "dev")),
        ("musique,dev", ("dgslibisey/MuSiQue", "musique_ans", "dev")),
        ("musique,,dev", ("musique", "", "dev")),
        ("owner/set,sub,train", ("owner/set", "sub", "train")),
        ("owner/set,train", None),
        ("owner/set", None),
    ],
)
def test_names_of_data_sets(data, meant):
    assert hub.hub_string(data) == meant


def test_a_split_without_answers_is_refused():
    with raises(R3LiteError, "split-absent", "test"):
        hub.files_of("2wiki,test")


def test_a_file_may_be_called_like_a_data_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hotpotqa").touch()
    assert [str(path) for path in hub.files_of("hotpotqa")] == ["hotpotqa"]


@pytest.fixture
def fake_hub(tmp_path, monkeypatch):
    """A hub with one readable file of one question, perhaps on the branch of converted files; what it was asked for."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    write(tmp_path / "train.jsonl", [HOTPOT])
    fake = types.SimpleNamespace(
        downloads=[], branch=None, sha256=hashlib.sha256((tmp_path / "train.jsonl").read_bytes()).hexdigest()
    )

    def dataset_info(self, repo_id, revision=None, timeout=None, files_metadata=False):
        assert files_metadata
        names = ["README.md", "evil.pkl", "load.py"]
        names += ["sub/train.jsonl", "sub/test.jsonl"] if revision == fake.branch else []
        lfs = types.SimpleNamespace(sha256=fake.sha256)
        files = [types.SimpleNamespace(rfilename=name, lfs=lfs) for name in names]
        return types.SimpleNamespace(siblings=files, card_data=None, sha=f"commit of {revision}")

    def download(repo_id, filename, repo_type, revision, etag_timeout):
        fake.downloads.append((repo_id, filename, repo_type, revision))
        return str(tmp_path / "train.jsonl")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return fake


@pytest.mark.parametrize("branch", [None, hub.CONVERTED])
def test_a_hub_string_downloads_and_reads(fake_hub, branch):
    fake_hub.branch = branch
    assert [q.id for q in read_questions("owner/set,sub,train")] == ["h1"]
    assert fake_hub.downloads == [("owner/set", "sub/train.jsonl", "dataset", f"commit of {branch}")]


def test_a_damaged_download_is_refused(fake_hub):
    fake_hub.sha256 = "0" * 64
    with raises(R3LiteError, "download-damaged") as error:
        read_questions("owner/set,sub,train")
    assert "Delete" in str(error.value)


def test_a_hub_string_without_a_network_says_what_to_put_where():
    """A server that is not there stands for a machine without a network; the variable is read at import."""
    code = "from r3lite.datasets.qa import read_questions; read_questions('hotpotqa/hotpot_qa,distractor,train')"
    for setting in ({"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}):
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | setting, capture_output=True, text=True, timeout=60
        )
        assert shows(done.stderr, "download-failed", "'hotpotqa/hotpot_qa'")
        assert "hotpot_train_v1.1.json" in done.stderr and "--data" in done.stderr


def test_the_settings_name_the_data_sets_that_have_short_names():
    assert tuple(hub.NAMED) == DATA_SETS
    assert [name for name in ("hotpotqa", "musique,train", "a/b,c,train") if not names_data_set(name)] == []
    assert [name for name in ("train.jsonl", "a,b", "hotpotqa.json") if names_data_set(name)] == []
