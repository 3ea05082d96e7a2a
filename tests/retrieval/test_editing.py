"""Indexes that are added to and deleted from: as good as ones built afresh, also for who reads meanwhile."""

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from r3lite import index as recipe
from r3lite.core.episode import Document
from r3lite.core.errors import R3LiteError
from r3lite.retrieval import building, index
from r3lite.retrieval.vectors import estimate
from r3lite.settings import DocumentSettings, IndexSettings
from tests.built_index import encoder_settings
from tests.errors import raises, shows

D = 32


class Drawn:
    """Gives each text a vector of its own: unit vectors drawn at random, seeded by the text."""

    dimension, settings = D, {"encoder": "drawn", "dimension": D}

    def encode_queries(self, texts):
        rows = [np.random.default_rng([*text.encode()]).standard_normal(D) for text in texts]
        return np.stack([row / np.linalg.norm(row) for row in rows]).astype(np.float32)

    def encode_passages(self, documents, advance):
        return self.encode_queries([d.text for d in documents])


def passage(number):
    return Document(str(number), "", f"text {number}")


def build(folder, documents, kind="flat"):
    with building.open_build(folder, documents) as index_build:
        building.encode(index_build, Drawn(), kind)
        building.write_index(index_build, Drawn(), estimate(kind, len(documents), D))


@pytest.fixture
def opened(monkeypatch):
    monkeypatch.setattr(index, "make_encoder", lambda *_, **__: Drawn())
    return lambda folder: index.load(folder, encoder_settings("drawn"))


def retrieved_ids(opened_index, queries, k=10):
    return [[d.id for d in row] for row in opened_index.search(queries, k)]


QUERIES = [f"question {i}" for i in range(40)]


def churn(folder, opened, edits, live, rng):
    """Adds and deletes in turns; returns the ids that are left."""
    newest = max(live)
    for _ in range(edits):
        if rng.random() < 0.5:
            fresh = range(newest + 1, newest + 1 + rng.randint(1, 4))
            newest = fresh[-1]
            assert index.add(folder, opened(folder), [passage(i) for i in fresh]) == (len(fresh), 0)
            live |= set(fresh)
        else:
            gone = set(rng.sample(sorted(live), rng.randint(1, 3)))
            assert index.delete(folder, map(str, gone)) == (len(gone), 0)
            live -= gone
    return live


@pytest.mark.parametrize(
    ("kind", "edits", "min_recall"), [("flat", 150, 1.0), ("ivf-sq8", 60, 0.9), ("hnsw", 60, 0.97)]
)
def test_many_edits_give_the_recall_of_one_built_afresh(tmp_path, opened, monkeypatch, kind, edits, min_recall):
    monkeypatch.setattr(index, "ADDED_LIMIT", 40)  # so that what was added joins the index several times
    build(tmp_path / "i", [passage(i) for i in range(400)], kind)
    live = churn(tmp_path / "i", opened, edits, set(range(400)), random.Random(1))
    edited = opened(tmp_path / "i")
    assert {int(d.id) for d in edited.documents} == live
    assert edited.vectors.base.ntotal > 400
    documents = [passage(i) for i in sorted(live)]
    truth = retrieved_ids(index.build_index(Drawn(), documents), QUERIES)
    build(tmp_path / "fresh", documents, kind)
    recalls = [
        np.mean([len(set(a) & set(b)) / 10 for a, b in zip(retrieved_ids(one, QUERIES), truth, strict=True)])
        for one in (edited, opened(tmp_path / "fresh"))
    ]
    assert recalls[0] >= max(min_recall, recalls[1] - 0.03)
    names = {path.name for path in (tmp_path / "i").iterdir()}
    assert len(names) <= 7 and not any(name.startswith(".") for name in names)  # old files are gone


def test_what_is_there_already_is_passed_over_and_another_text_of_its_id_is_refused(tmp_path, opened):
    build(tmp_path / "i", [passage(0), passage(1)])
    assert index.add(tmp_path / "i", opened(tmp_path / "i"), [passage(1), passage(2)]) == (1, 1)
    assert index.add(tmp_path / "i", opened(tmp_path / "i"), [passage(1), passage(2)]) == (0, 2)
    with raises(R3LiteError, "passage-id-taken", "1") as error:
        index.add(tmp_path / "i", opened(tmp_path / "i"), [Document("1", "", "other")])
    assert "--delete 1" in error.value.remedy
    index.delete(tmp_path / "i", ["1"])
    assert index.add(tmp_path / "i", opened(tmp_path / "i"), [Document("1", "", "other")]) == (1, 0)
    assert [d.text for d in index.read_documents(tmp_path / "i")] == ["text 0", "text 2", "other"]


def test_ids_that_are_not_there_and_deleting_all_are_refused(tmp_path, opened):
    build(tmp_path / "i", [passage(0), passage(1)])
    for ids, reason in ((["0", "7"], "no passage with the id '7'"), (["0", "1"], "no passage .* would be left")):
        with pytest.raises(R3LiteError, match=reason):
            index.delete(tmp_path / "i", ids)
    assert len(index.read_documents(tmp_path / "i")) == 2


def test_every_file_of_an_index_is_on_the_disk_before_the_manifest_names_it(tmp_path, opened, monkeypatch):
    """The probes and the places of deleted passages were not: a power cut could leave empty files."""
    flushed = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.add(os.fstat(descriptor).st_ino))
    folder = tmp_path / "i"
    build(folder, [passage(i) for i in range(4)])
    assert index.delete(folder, ["1"]) == (1, 0)
    assert index.add(folder, opened(folder), [passage(4)]) == (1, 0)
    files = [path for path in folder.iterdir() if path.name != ".lock"]
    assert {"probes.bin", "deleted-1.bin", "added-2.faiss"} <= {path.name for path in files}
    assert [path.name for path in files if path.stat().st_ino not in flushed] == []


def test_a_deletion_that_is_repeated_after_a_kill_is_done_already(tmp_path, opened):
    """It failed: the id was not there any more."""
    folder = tmp_path / "i"
    build(folder, [passage(i) for i in range(4)])
    assert index.delete(folder, ["1", "2"]) == (2, 0)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert index.delete(folder, ["1", "2"]) == (0, 2)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert index.delete(folder, ["1", "3"]) == (1, 1)
    with raises(R3LiteError, "passage-id-absent", "7"):
        index.delete(folder, ["1", "7"])
    index.add(folder, opened(folder), [passage(1)])
    assert index.delete(folder, ["1"]) == (1, 0)  # the one that was added since
    assert [d.id for d in index.read_documents(folder)] == ["0"]


def test_a_stop_before_the_manifest_is_replaced_changes_nothing(tmp_path, opened, monkeypatch):
    build(tmp_path / "i", [passage(i) for i in range(5)])
    results_before = retrieved_ids(opened(tmp_path / "i"), QUERIES, 3)
    with monkeypatch.context() as patched:
        patched.setattr(index, "write_json", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            index.add(tmp_path / "i", opened(tmp_path / "i"), [passage(7)])
    assert retrieved_ids(opened(tmp_path / "i"), QUERIES, 3) == results_before
    assert index.add(tmp_path / "i", opened(tmp_path / "i"), [passage(8)]) == (1, 0)
    assert [d.id for d in index.read_documents(tmp_path / "i")] == ["0", "1", "2", "3", "4", "8"]


def test_what_a_kill_after_the_manifest_has_left_is_removed_by_the_next_edit(tmp_path, opened, monkeypatch):
    """Given again, the same --add has nothing to add, and the old vectors stayed for good."""
    build(tmp_path / "i", [passage(i) for i in range(5)])
    index.add(tmp_path / "i", opened(tmp_path / "i"), [passage(7)])
    monkeypatch.setattr(building, "passages_of", lambda *_: ([passage(8)], None))
    settings = IndexSettings(add="x", encoder="drawn")
    with monkeypatch.context() as patched:
        patched.setattr(index, "tidy", lambda *_: None)
        index.add(tmp_path / "i", opened(tmp_path / "i"), [passage(8)])
    assert (tmp_path / "i" / "added-1.faiss").exists()
    (tmp_path / "i" / ".manifest.json.17.part").touch()
    monkeypatch.setattr(building, "device_of", lambda _: "cpu")
    building.edit(settings, DocumentSettings(), tmp_path / "i")
    names = {path.name for path in (tmp_path / "i").iterdir()}
    assert {name for name in names if name.startswith(("added", "."))} == {"added-2.faiss"}


def test_an_index_that_is_open_stays_what_it_was(tmp_path, opened):
    build(tmp_path / "i", [passage(i) for i in range(50)])
    reader = opened(tmp_path / "i")
    results_before = retrieved_ids(reader, QUERIES)
    index.delete(tmp_path / "i", ["3", "4"])
    index.add(tmp_path / "i", opened(tmp_path / "i"), [passage(i) for i in range(50, 60)])
    assert retrieved_ids(reader, QUERIES) == results_before and len(reader.documents) == 50


def test_an_older_index_is_changed_like_any_other(tmp_path, opened):
    build(tmp_path / "i", [passage(i) for i in range(5)])
    path = tmp_path / "i" / "manifest.json"
    manifest = json.loads(path.read_text())
    older = {k: v for k, v in manifest.items() if k not in ("files", "probed", "kind")}
    path.write_text(json.dumps(older | {"vectors": manifest["files"]["index.faiss"]}))
    for name in ("ends.bin", "probes.bin"):
        (tmp_path / "i" / name).unlink()
    assert index.add(tmp_path / "i", opened(tmp_path / "i"), [passage(7)]) == (1, 0)
    index.delete(tmp_path / "i", ["2"])
    assert [d.id for d in opened(tmp_path / "i").documents] == ["0", "1", "3", "4", "7"]
    assert retrieved_ids(opened(tmp_path / "i"), ["text 7"], 1) == [["7"]]


def test_two_processes_read_while_one_adds(tmp_path):
    """Each opens the index again and again; it always has all of one state."""
    world = tmp_path / "c.jsonl"
    world.write_text("".join(json.dumps(passage(i).to_json()) + "\n" for i in range(50)))
    options = ["--encoder", "hashing", "--output", str(tmp_path / "i")]
    assert recipe.main(["--corpus", str(world), *options]) == 0
    program = (
        "import sys; from pathlib import Path; from r3lite.retrieval import index\n"
        "from r3lite.settings import RetrievalSettings\n"
        "seen, stop = [], Path(sys.argv[2])\n"
        "while not seen or not stop.exists():\n"
        "    opened = index.load(Path(sys.argv[1]), RetrievalSettings(encoder='hashing'))\n"
        "    seen.append(len(opened.documents))\n"
        "    assert opened.search(['text 7'], 1)[0][0].id == '7', seen\n"
        "    if len(seen) == 1: print('ready', flush=True)\n"
        "assert seen == sorted(seen); print(len(set(seen)))"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path / "i"), str(tmp_path / "stop")]
    readers = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert all(reader.stdout.readline() == "ready\n" for reader in readers)
    for i in range(20):
        additions = tmp_path / "more.jsonl"
        additions.write_text(json.dumps(passage(100 + i).to_json()) + "\n")
        assert recipe.main(["--add", str(additions), *options]) == 0
    (tmp_path / "stop").touch()
    assert [reader.wait() for reader in readers] == [0, 0]
    assert all(int(reader.stdout.read()) > 1 for reader in readers)


def test_the_command_adds_deletes_and_replaces(tmp_path, capsys):
    world = tmp_path / "c.jsonl"
    additions = tmp_path / "more.jsonl"
    ids = tmp_path / "ids.txt"
    world.write_text("".join(json.dumps(passage(i).to_json()) + "\n" for i in range(5)))
    additions.write_text('{"id": "1", "title": "", "text": "text 4 again"}\n')
    ids.write_text("1\n3\n")
    options = ["--encoder", "hashing", "--output", str(tmp_path / "i")]
    assert recipe.main(["--corpus", str(world), *options]) == 0
    assert recipe.main(["--delete", f"0,@{ids}", "--add", str(additions), *options]) == 0
    out = capsys.readouterr().out
    assert "deleted     3 passages" in out and "added       1 passages" in out and "passages    3 in" in out
    assert [d.text for d in index.read_documents(tmp_path / "i")] == ["text 2", "text 4", "text 4 again"]
    assert recipe.main(["--add", str(additions), "--corpus", str(world), *options]) == 2
    assert recipe.main(["--add", str(additions)]) == 2
    assert shows(capsys.readouterr().err, "output-missing")
