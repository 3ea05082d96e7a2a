"""The index folder: built, kept whole, read back, and refused when anything does not match."""

import json
import os
from pathlib import Path

import faiss
import numpy as np
import pytest

from r3lite.core.episode import Document
from r3lite.core.errors import R3LiteError
from r3lite.retrieval import building, index
from r3lite.retrieval.encoder import HashingEncoder, make_encoder
from tests import built_index
from tests.built_index import encoder_settings
from tests.errors import raises

DOCUMENTS = [
    Document("a", "Blue Harbor", "Blue Harbor is a film directed by Ann Lee."),
    Document("b", "Ann Lee", "Ann Lee was born in Oslo."),
    Document("c", "Oslo", "Oslo is the capital of Norway."),
]


def index_of(documents=DOCUMENTS, encoder="hashing", style="auto"):
    return index.build_index(make_encoder(encoder_settings(encoder, style), documents), documents)


def save(folder, documents=DOCUMENTS, **options):
    built_index.save(folder, documents, **options)


def titles(results):
    return [[d.title for d in row] for row in results]


def test_search_gives_the_nearest_first_and_never_more_than_there_are():
    results = index_of().search(["Where was Ann Lee born?", "capital of Norway"], k=10)
    assert [row[0] for row in titles(results)] == ["Ann Lee", "Oslo"]
    assert all(sorted(row) == sorted(d.title for d in DOCUMENTS) for row in titles(results))
    assert index_of().search([], 5) == []


def test_built_in_blocks_it_is_the_same(monkeypatch):
    one_block = index_of()
    monkeypatch.setattr(index, "BLOCK", 2)
    blocks, encode = [], HashingEncoder.encode_passages
    counted = lambda self, documents, advance: blocks.append(len(documents)) or encode(self, documents, advance)  # noqa: E731
    monkeypatch.setattr(HashingEncoder, "encode_passages", counted)
    assert np.array_equal(index_of().vectors.base.reconstruct_n(0, 3), one_block.vectors.base.reconstruct_n(0, 3))
    assert blocks == [2, 1]


def test_float64_vectors_are_taken(monkeypatch):
    """faiss once raised TypeError at float64; it converts them now."""
    encoder = HashingEncoder.fit(d.text for d in DOCUMENTS)
    make = encoder.encode_queries
    monkeypatch.setattr(encoder, "encode_queries", lambda texts: np.asfortranarray(make(texts).astype(np.float64)))
    assert titles(index.build_index(encoder, DOCUMENTS).search(["capital of Norway"], 1)) == [["Oslo"]]


def test_kept_and_read_back_it_finds_the_same(tmp_path):
    built = index_of()
    save(tmp_path / "i")
    reloaded = index.load(tmp_path / "i", encoder_settings())
    assert list(reloaded.documents) == DOCUMENTS
    queries = ["Where was Ann Lee born?", "capital of Norway", "film"]
    assert reloaded.search(queries, 2) == built.search(queries, 2)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_an_index_of_the_same_corpus_is_replaced_and_nothing_else_is(tmp_path):
    save(tmp_path / "i")
    inode_before = (tmp_path / "i").stat().st_ino
    save(tmp_path / "i")
    assert (tmp_path / "i").stat().st_ino != inode_before
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1").write_text("years of work")
    with raises(R3LiteError, "not-an-index"):
        save(tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter1").read_text() == "years of work"


def test_an_index_of_another_corpus_or_encoder_is_not_replaced(tmp_path, minilm):
    """It was, without a word: hours of encoding were gone."""
    save(tmp_path / "i")
    changes = (({"documents": DOCUMENTS[:2]}, "of another corpus"), ({"encoder": str(minilm)}, "with encoder hash"))
    for change, reason in changes:
        with pytest.raises(R3LiteError, match=reason) as error:
            save(tmp_path / "i", **change)
        assert "Pass another --output, or delete" in error.value.remedy
    save(tmp_path / "e5", encoder=str(minilm), style="e5")
    with raises(R3LiteError, "index-setting-differs", "style", "e5", "plain"):
        save(tmp_path / "e5", encoder=str(minilm), style="plain")
    assert len(index.load(tmp_path / "i", encoder_settings()).documents) == 3


def test_a_crash_while_writing_leaves_the_old_index(tmp_path, monkeypatch):
    save(tmp_path / "i")
    inode_before = (tmp_path / "i").stat().st_ino
    monkeypatch.setattr(building, "write_json", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path / "i")
    assert len(index.load(tmp_path / "i", encoder_settings()).documents) == 3
    assert [(p.name, p.stat().st_ino) for p in tmp_path.iterdir()] == [("i", inode_before)]


@pytest.mark.parametrize("stop", [OSError("busy"), KeyboardInterrupt()])
def test_a_stop_between_the_two_renames_puts_the_old_index_back(tmp_path, monkeypatch, stop):
    """The old index, moved aside, was deleted together with the new one: nothing was left."""
    save(tmp_path / "i")
    inode_before = (tmp_path / "i").stat().st_ino
    move = building.move
    monkeypatch.setattr(
        building, "move", lambda p, to: (_ for _ in ()).throw(stop) if ".build" in p.name else move(p, to)
    )
    with pytest.raises(type(stop)):
        save(tmp_path / "i")
    assert (tmp_path / "i").stat().st_ino == inode_before and not (tmp_path / ".i.old").exists()
    assert len(index.load(tmp_path / "i", encoder_settings()).documents) == 3


def beside_an_index(folder):
    save(folder)
    (folder / "notes.txt").write_text("x")


def a_web_app(folder):
    folder.mkdir()
    (folder / "manifest.json").write_text('{"name": "app"}')


def a_checkpoint(folder):
    folder.mkdir()
    (folder / "manifest.json").write_text('{"version": 1, "files": {}}')
    (folder / "model.safetensors").write_text("x")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (beside_an_index, "holds notes.txt"),
        (a_web_app, "is not an index"),
        (a_checkpoint, "holds model.safetensors"),
        (lambda path: path.write_text("x"), "cannot be written"),
        (lambda path: Path.mkdir(path / "sub", parents=True), "holds sub"),
    ],
)
def test_only_an_index_and_nothing_else_is_replaced(tmp_path, make, reason):
    """Any folder with a manifest.json was taken for an index and deleted: a web app's, and a training checkpoint."""
    make(tmp_path / "i")
    files_before = sorted(tmp_path.rglob("*"))
    with pytest.raises(R3LiteError, match=reason) as error:
        save(tmp_path / "i")
    assert "--output" in error.value.remedy
    assert sorted(tmp_path.rglob("*")) == files_before


def test_the_folder_one_is_in_is_refused_and_one_in_it_is_not(tmp_path, monkeypatch):
    """`Path(".").name` is empty: the index was to be written to `.part`, and that failed after the encoding."""
    monkeypatch.chdir(tmp_path)
    with raises(R3LiteError, "folder-not-replaced"):
        save(".")
    Path("i").mkdir()
    save("i/../i")
    assert len(index.load(Path("i"), encoder_settings()).documents) == 3


def test_a_place_that_cannot_be_written_is_refused_before_the_encoding(tmp_path):
    """Hours of encoding were lost: the folder above the output was made when all was done."""
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file" / "i", "/proc/i"):
        with raises(R3LiteError, "index-unwritable"):
            building.check_output(folder)


def manifest_change(**changes):
    def change(folder):
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def without_digest(folder):
    """An index as it was written before its manifest held a digest of the vectors."""
    path = folder / "manifest.json"
    later = ("files", "probed", "kind")
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in later}))
    (folder / "ends.bin").unlink()
    (folder / "probes.bin").unlink()


def vectors(make, keep_digest=False):
    """Replaces the vectors, an array [3, 2048], by what `make` gives for them."""

    def change(folder):
        path = str(folder / "index.faiss")
        replacement = make(faiss.read_index(path).reconstruct_n(0, 3))
        if isinstance(replacement, np.ndarray):
            array, replacement = replacement, faiss.IndexFlatIP(replacement.shape[1])
            replacement.add(np.ascontiguousarray(array, dtype=np.float32))
        faiss.write_index(replacement, path)
        if not keep_digest:
            without_digest(folder)

    return change


def of_another_metric(array):
    l2_index = faiss.IndexFlatL2(array.shape[1])
    l2_index.add(array)
    return l2_index


def with_nan(array):
    array[1, 7] = np.nan
    return array


def edited_passages(folder):
    path = folder / "passages.jsonl"
    path.write_text(path.read_text().replace("Oslo", "Rome"))


def cut_vectors(folder):
    without_digest(folder)
    path = folder / "index.faiss"
    path.write_bytes(path.read_bytes()[:100])


def pipe(name):
    def change(folder):
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def counts_as_text(folder):
    path = folder / "words.json"
    path.write_text(path.read_text().replace(": 1", ': "1"'))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (manifest_change(version=99), "version 99, not 1"),
        (manifest_change(fingerprint="0"), "has changed since"),
        (manifest_change(passages=4), "has 3 passages, but 4 were indexed"),
        (manifest_change(dimension=64), "built with dimension 64, not 2048"),
        (manifest_change(hashes=1), "built with hashes 1, not 4"),
        (edited_passages, "has changed since"),
        (manifest_change(passages="3"), "passages is '3', not a whole number"),
        (manifest_change(encoder=["hashing"]), r"encoder is \['hashing'\], not text"),
        (manifest_change(style="cls"), "style is 'cls', not one of"),
        (
            manifest_change(files={"index/../../index.faiss": "0"}),
            "'index/../../index.faiss' is not a file of an index",
        ),
        (vectors(lambda array: np.ones((5, 2048))), "has 5 vectors for 3 passages"),
        (vectors(lambda array: array[:, :16]), "has 16 dimensions, not 2048"),
        (vectors(np.ones_like), "the vectors differ"),
        (vectors(lambda array: array[[2, 1, 0]]), "the vectors differ"),
        (vectors(lambda array: array[[0, 2, 1]]), "the vectors differ"),
        (vectors(lambda array: array[[0, 2, 1]], keep_digest=True), "has changed since it was written"),
        (vectors(with_nan), "has vectors that are not finite"),
        (vectors(of_another_metric), "is a IndexFlatL2, not an IndexFlatIP"),
        (cut_vectors, "cannot be read"),
        (counts_as_text, "words.json: frequencies.*is '1', not a whole number"),
        (pipe("manifest.json"), "is a pipe or device"),
        (pipe("passages.jsonl"), "is a pipe or device"),
        (pipe("index.faiss"), "is a pipe or device"),
        (pipe("words.json"), "is a pipe or device"),
        (lambda folder: (folder / "manifest.json").write_text("[" * 9999), "nested more than"),
        (lambda folder: (folder / "manifest.json").write_text('{"version": ' + "1" * 5000 + "}"), "too many digits"),
        (lambda folder: (folder / "manifest.json").unlink(), "No such file"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "is not an index"),
        (lambda folder: (folder / "passages.jsonl").unlink(), "cannot be read"),
        (lambda folder: (folder / "words.json").unlink(), "words.json"),
    ],
)
def test_what_does_not_match_is_refused(tmp_path, change, words):
    save(tmp_path / "i")
    change(tmp_path / "i")
    with pytest.raises(R3LiteError, match=words) as error:
        index.load(tmp_path / "i", encoder_settings())
    assert "uild" in error.value.remedy


def test_an_index_without_a_digest_still_opens(tmp_path):
    save(tmp_path / "i")
    without_digest(tmp_path / "i")
    assert titles(index.load(tmp_path / "i", encoder_settings()).search(["capital of Norway"], 1)) == [["Oslo"]]


def test_passages_without_words_are_no_obstacle(tmp_path):
    documents = [Document("x", "", "?!"), *DOCUMENTS]
    save(tmp_path / "i", documents)
    assert list(index.load(tmp_path / "i", encoder_settings()).documents) == documents


def test_a_query_without_any_known_word_brings_nothing():
    """Its vector is zero, as near to all passages: it brought the first ones of the corpus."""
    results = index_of().search(["zebra", "Norway", "", "?!"], 2)
    assert [len(documents) for documents in results] == [0, 2, 0, 0]
    assert results[1][0].title == "Oslo"


def test_vectors_that_are_not_finite_are_not_indexed(monkeypatch):
    encoder = HashingEncoder.fit(d.text for d in DOCUMENTS)
    make = encoder.encode_queries
    monkeypatch.setattr(encoder, "encode_queries", lambda texts: make(texts) / 0)
    with (
        np.errstate(all="ignore"),
        raises(R3LiteError, "encoder-not-finite", "hashing"),
    ):
        index.build_index(encoder, DOCUMENTS)
