"""Data sets of the hub: which files a split has, without a network and with a fake one."""

import os
import subprocess
import sys
import types

import pytest

from r3lite.datasets import hub
from r3lite.datasets.qa import read_questions
from r3lite.errors import R3LiteError
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
    with pytest.raises(R3LiteError, match="several subsets: a, b"):
        hub.pick(["a/train.json", "b/train.json"], "name", "", "train")
    with pytest.raises(R3LiteError, match="there is a/train"):
        hub.pick(["a/train.json"], "name", "a", "test")
    with pytest.raises(R3LiteError, match="a loading script is never run"):
        hub.pick([], "name", "a", "test")


@pytest.mark.parametrize("revision", [None, hub.CONVERTED])
def test_a_hub_string_downloads_and_reads(tmp_path, monkeypatch, revision):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    write(tmp_path / "train.jsonl", [HOTPOT])
    asked = []

    def dataset_info(self, repo_id, revision=None, timeout=None):
        names = ["README.md", "evil.pkl", "load.py"]
        names += ["sub/train.jsonl", "sub/test.jsonl"] if revision == wanted else []
        return types.SimpleNamespace(siblings=[types.SimpleNamespace(rfilename=n) for n in names])

    def download(repo_id, filename, repo_type, revision, etag_timeout):
        asked.append((repo_id, filename, repo_type, revision))
        return str(tmp_path / "train.jsonl")

    wanted = revision
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert [q.id for q in read_questions("owner/set,sub,train")] == ["h1"]
    assert asked == [("owner/set", "sub/train.jsonl", "dataset", revision)]


def test_a_hub_string_without_a_network_says_what_to_put_where():
    """A server that is not there stands for a machine without a network; the variable is read at import."""
    code = "from r3lite.datasets.qa import read_questions; read_questions('hotpotqa/hotpot_qa,distractor,train')"
    for setting in ({"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}):
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | setting, capture_output=True, text=True, timeout=60
        )
        assert "R3LiteError: the data set 'hotpotqa/hotpot_qa' cannot be fetched" in done.stderr
        assert "hotpot_train_v1.1.json" in done.stderr and "--data" in done.stderr
