"""Indexes built on the disk: killed and resumed, the same to the byte; refused if begun with something else."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from r3lite import index as recipe
from r3lite.core.episode import Document
from r3lite.core.errors import R3LiteError
from r3lite.retrieval import building, index
from r3lite.retrieval.encoder import HashingEncoder, make_encoder
from r3lite.retrieval.vectors import estimate
from tests.built_index import encoder_settings
from tests.errors import raises, shows

DOCUMENTS = [Document(str(i), f"Town {i}", f"Town {i} lies by the river {i * 7 % 31}.") for i in range(23)]


class Counted:
    """The hashing encoder, which notes what it encodes and stops when it has encoded `limit` passages."""

    def __init__(self, limit=10**9):
        self.inner, self.limit, self.done = HashingEncoder.fit(d.text for d in DOCUMENTS), limit, []
        self.dimension, self.settings = self.inner.dimension, self.inner.settings
        self.encode_queries, self.save = self.inner.encode_queries, self.inner.save

    def encode_passages(self, documents, advance):
        if len(self.done) >= self.limit:
            raise KeyboardInterrupt
        self.done += [d.id for d in documents]
        return self.inner.encode_passages(documents, advance)


@pytest.fixture
def small_blocks(monkeypatch):
    for module in (building, index):
        monkeypatch.setattr(module, "BLOCK", 4)


def build(folder, encoder, documents=DOCUMENTS, kind="flat"):
    with building.open_build(folder, iter(documents)) as index_build:
        reused = building.encode(index_build, encoder, kind)
        building.write_index(index_build, encoder, estimate(kind, len(documents), encoder.dimension))
    return reused


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_build_that_was_stopped_goes_on_where_it_was(tmp_path, small_blocks):
    build(tmp_path / "whole", Counted())
    for stopped in (4, 8, 20):
        first, second = Counted(stopped), Counted()
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path / "i", first)
        vectors = tmp_path / ".i.build" / "vectors.bin"
        with open(vectors, "ab") as file:
            file.write(b"torn")  # what a kill leaves of a block
        assert build(tmp_path / "i", second) == stopped
        # One more, the last of those that were there, by which the encoder is known again.
        assert second.done == [str(stopped - 1), *(str(i) for i in range(stopped, 23))]
        assert content(tmp_path / "i") == content(tmp_path / "whole")
        for path in (tmp_path / "i").iterdir():
            path.unlink()


def test_a_build_that_was_begun_with_something_else_is_not_thrown_away(tmp_path, small_blocks, minilm):
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "i", Counted(8))
    work = tmp_path / ".i.build"
    coarse = Counted()
    coarse.settings = coarse.settings | {"dtype": "bf16"}
    for encoder, documents, kind, difference in (
        (Counted(), DOCUMENTS[:-1], "flat", "corpus"),
        (Counted(), DOCUMENTS, "sq8", "--index-type"),
        (make_encoder(encoder_settings(str(minilm), "plain"), DOCUMENTS), DOCUMENTS, "flat", "encoder"),
        (coarse, DOCUMENTS, "flat", "dtype"),
    ):
        with raises(R3LiteError, "unfinished-build-differs", difference) as error:
            build(tmp_path / "i", encoder, documents, kind)
        assert f"delete {work}" in error.value.remedy
    other_encoder = Counted()
    other_encoder.inner.idf = other_encoder.inner.idf[::-1].copy() * np.arange(1, len(other_encoder.inner.idf) + 1)
    with raises(R3LiteError, "build-encoder-differs"):
        build(tmp_path / "i", other_encoder)
    assert build(tmp_path / "i", Counted()) == 8


def test_another_encoder_is_noticed_when_all_vectors_are_there(tmp_path, small_blocks):
    """The index was made of the vectors of one encoder with the probes of the other, and refused by every search."""
    with building.open_build(tmp_path / "i", iter(DOCUMENTS)) as index_build:
        assert building.encode(index_build, Counted(), "flat") == 0
    other_encoder = Counted()
    other_encoder.inner.idf = other_encoder.inner.idf[::-1].copy() * np.arange(1, len(other_encoder.inner.idf) + 1)
    with raises(R3LiteError, "build-encoder-differs"):
        build(tmp_path / "i", other_encoder)
    assert build(tmp_path / "i", Counted()) == len(DOCUMENTS)


def test_an_error_before_the_first_vector_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "i", Counted(0))
    assert not list(tmp_path.iterdir())


def test_after_a_kill_between_the_two_renames_the_old_index_is_there(tmp_path):
    build(tmp_path / "i", Counted())
    (tmp_path / "i").rename(tmp_path / ".i.old")
    building.check_output(tmp_path / "i")
    assert len(index.read_documents(tmp_path / "i")) == 23


def test_killed_at_random_moments_the_bytes_are_the_same(tmp_path):
    """Real processes and SIGKILL, at moments drawn at random, of a kind that is trained."""
    corpus, rng = tmp_path / "corpus.jsonl", random.Random(0)
    with open(corpus, "w") as file:
        for i in range(1500):
            file.write(json.dumps({"id": str(i), "title": f"T{i}", "text": f"word{i % 97} word{i % 89} {i}"}) + "\n")
    program = (
        "import sys, time; from r3lite import index; from r3lite.retrieval import building, encoder, index as indexes\n"
        "building.BLOCK = indexes.BLOCK = 64\n"
        "make = encoder.HashingEncoder.encode_passages\n"
        "def slow(self, documents, advance): time.sleep(0.05); return make(self, documents, advance)\n"
        "encoder.HashingEncoder.encode_passages = slow\n"
        "print('ready', flush=True); sys.exit(index.main(sys.argv[1:]))"
    )
    options = ["--corpus", str(corpus), "--encoder", "hashing", "--index-type", "ivf-sq8", "--output"]

    def start(folder):
        process = subprocess.Popen(
            [sys.executable, "-c", program, *options, str(folder)], stdout=subprocess.PIPE, text=True
        )
        process.stdout.readline()
        return process

    assert start(tmp_path / "whole").wait() == 0
    kills, vectors = 0, tmp_path / ".i.build" / "vectors.bin"
    while kills < 3:
        process = start(tmp_path / "i")
        while (
            not vectors.exists() and process.poll() is None
        ):  # a kill before the first vector leaves nothing to resume
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.5))
        if process.poll() is not None:
            break
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
    process = start(tmp_path / "i")
    assert process.wait() == 0 and kills > 0
    assert content(tmp_path / "i") == content(tmp_path / "whole")


def test_several_corpora_are_one_index_and_no_id_comes_twice(tmp_path, capsys):
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for number, file in enumerate(files):
        file.write_text(json.dumps({"id": str(number), "title": "T", "text": f"text {number}"}) + "\n")
    options = ["--encoder", "hashing", "--output", str(tmp_path / "i")]
    assert recipe.main(["--corpus", ",".join(map(str, files)), *options]) == 0
    assert [d.id for d in index.read_documents(tmp_path / "i")] == ["0", "1"]
    assert recipe.main(["--corpus", f"{files[0]},{files[0]}", *options]) == 1
    assert "duplicate id '0'" in capsys.readouterr().err


def test_settings_of_cutting_are_refused_beside_a_corpus(tmp_path, capsys):
    """They were ignored without a word."""
    for option in (["--chunk-tokens", "64"], ["--chunk-overlap", "3", "--dry-run"]):
        assert recipe.main(["--corpus", "x.jsonl", "--output", str(tmp_path / "i"), *option]) == 2
        assert shows(capsys.readouterr().err, "setting-unused", option[0], option[1], "--documents")


def test_a_dry_run_tells_what_the_index_takes(tmp_path, capsys):
    corpus = tmp_path / "c.jsonl"
    corpus.write_text(json.dumps({"id": "1", "title": "T", "text": "x"}) + "\n")
    assert recipe.main(["--corpus", str(corpus), "--encoder", "hashing", "--dry-run"]) == 0
    assert "flat, 1 x 2048: 0.0 MiB to search" in capsys.readouterr().out
    assert recipe.main(["--corpus", str(corpus), "--encoder", "hashing", "--memory-budget", "4", "--dry-run"]) == 2
    assert shows(capsys.readouterr().err, "bad-memory-size", "--memory-budget", "4")
    absent = str(tmp_path / "no" / "encoder")
    assert recipe.main(["--corpus", str(corpus), "--encoder", absent, "--dry-run"]) == 0
    assert "the encoder is not on this machine" in capsys.readouterr().out
    assert recipe.main(["--corpus", str(corpus), "--output", "qdrant://here/towns", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "1 x 768: qdrant://here/towns keeps them" in out and "to search" not in out
    corpus.write_text("\n")
    assert recipe.main(["--corpus", str(corpus), "--encoder", "hashing", "--dry-run"]) == 1
    assert shows(capsys.readouterr().err, "corpus-empty", str(corpus))
