"""Vectors of queries on the disk: found again to the bit, bounded, shared, and never those of another encoder."""

import sqlite3
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from r3lite import retrieve
from r3lite.core.config import UsageError
from r3lite.core.episode import Question
from r3lite.core.errors import R3LiteError
from r3lite.core.files import write_jsonl
from r3lite.core.invocation import resolve
from r3lite.core.needs import check_used
from r3lite.retrieval.encoder import BertEncoder
from r3lite.retrieval.query_cache import CachedEncoder, QueryCache
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.settings import RetrievalSettings
from tests.errors import raises

QUERIES = ["Who is Ada?", "Where does Bob, the friend of Ada, live today?", "When?"]


class Counted:
    """An encoder whose vectors follow from the text and a salt; `encoded` has what it was asked for."""

    dimension = 64

    def __init__(self, salt=0, **settings):
        self.salt, self.settings, self.encoded = salt, {"encoder": "counted"} | settings, []

    def encode_queries(self, queries):
        self.encoded.append(list(queries))
        vectors = [np.random.default_rng([self.salt, *q.encode()]).normal(size=64) for q in queries]
        return np.stack(vectors).astype(np.float32)


def test_a_query_is_encoded_once_whoever_asks(tmp_path):
    cache = QueryCache(tmp_path / "q", 1)
    encoder = Counted()
    first = CachedEncoder(encoder, cache)
    del encoder.encoded[:]
    vectors = first.encode_queries(QUERIES)
    assert encoder.encoded == [[q] for q in QUERIES]  # each alone
    assert np.array_equal(first.encode_queries(QUERIES[::-1]), vectors[::-1]) and len(encoder.encoded) == 3
    assert cache.metrics() == {"queries/cached_ratio": 0.5} and cache.metrics() == {}
    second_encoder = Counted()
    second = CachedEncoder(second_encoder, QueryCache(tmp_path / "q", 1))  # as another process does
    assert np.array_equal(second.encode_queries([*QUERIES, "new"])[:3], vectors)
    assert (
        second_encoder.encoded[1:] == [["new"]]
        and second.cache.line() == f"75% of 4 queries were cached in {tmp_path / 'q'}"
    )
    assert vectors.dtype == np.float32 and first.encode_queries([]).shape == (0, 64)


@pytest.mark.parametrize("variant", [Counted(salt=1), Counted(style="e5")])
def test_another_encoder_finds_nothing(tmp_path, variant):
    cache = QueryCache(tmp_path / "q", 1)
    ours = CachedEncoder(Counted(), cache).encode_queries(QUERIES)
    cache.metrics()
    theirs = CachedEncoder(variant, cache).encode_queries(QUERIES)
    assert cache.metrics() == {"queries/cached_ratio": 0.0} and (variant.salt == 0) == np.array_equal(ours, theirs)


def test_the_file_stays_within_its_bound_and_the_oldest_go(tmp_path):
    path = tmp_path / "q"
    cached = CachedEncoder(Counted(), QueryCache(path, 1))
    for start in range(0, 6000, 100):
        cached.encode_queries([f"query {i}" for i in range(start, start + 100)])
    assert path.stat().st_size < 1.2 * (1 << 20)
    cached.cache.metrics()
    cached.encode_queries([f"query {i}" for i in range(5900, 6000)])
    assert cached.cache.metrics() == {"queries/cached_ratio": 1.0}
    cached.encode_queries([f"query {i}" for i in range(100)])
    assert cached.cache.metrics() == {"queries/cached_ratio": 0.0}


def test_two_processes_write_at_once(tmp_path):
    code = "import sys; from tests.retrieval.test_query_cache import *\n"
    code += "cached = CachedEncoder(Counted(), QueryCache(sys.argv[1], 8))\n"
    code += "for i in range(300): cached.encode_queries([f'{sys.argv[2]} {i}', f'both {i}'])\n"
    both = [subprocess.Popen([sys.executable, "-c", code, tmp_path / "q", name], stderr=-1) for name in "ab"]
    assert [(p.communicate()[1], p.returncode) for p in both] == [(b"", 0)] * 2
    cached = CachedEncoder(Counted(), QueryCache(tmp_path / "q", 8))
    cached.encode_queries([f"{name} {i}" for i in range(300) for name in ("a", "b", "both")])
    assert cached.cache.metrics() == {"queries/cached_ratio": 1.0}


def test_a_file_that_is_no_cache_is_told_and_left_alone(tmp_path):
    (tmp_path / "q").write_text("my thesis, " * 200)
    with raises(R3LiteError, "query-cache-unusable", "q", "file is not a database"):
        QueryCache(tmp_path / "q", 1)
    assert (tmp_path / "q").read_text() == "my thesis, " * 200
    with raises(R3LiteError, "not-a-file", "folder"):
        QueryCache(tmp_path, 1)
    # Deleting queries went on for ever in a database of others above the limit.
    foreign_db = sqlite3.connect(tmp_path / "others")
    foreign_db.execute("CREATE TABLE notes (content BLOB)")
    with raises(R3LiteError, "query-cache-unusable", "another program"):
        QueryCache(tmp_path / "others", 1)
    assert foreign_db.execute("SELECT name FROM sqlite_master").fetchall() == [("notes",)]


def test_a_file_that_fails_later_is_told_once_and_the_run_goes_on(tmp_path, capsys):
    cached = CachedEncoder(Counted(), QueryCache(tmp_path / "q", 1))
    with sqlite3.connect(tmp_path / "q") as connection:
        connection.execute("DROP TABLE queries")
    expected = Counted().encode_queries(QUERIES)
    for _ in range(2):
        assert np.array_equal(cached.encode_queries(QUERIES), expected)
    assert capsys.readouterr().err.count("continuing without --query-cache") == 1


def test_searches_with_a_cache_full_or_empty_give_the_same_to_the_bit(tmp_path, minilm):
    texts = ("Ada lives in Rome.", "Bob is a friend of Ada.", "It was in 1994.")
    write_jsonl(tmp_path / "c.jsonl", [{"id": str(i), "title": "", "text": text} for i, text in enumerate(texts)])
    settings = RetrievalSettings(corpus=str(tmp_path / "c.jsonl"), encoder=str(minilm), query_cache=str(tmp_path / "q"))

    def searched(batches):
        setup = Setup(settings, [])
        search = build_retriever(setup)
        rows = [row for batch in batches for row in search([(Question("q", q, ()), q) for q in batch])]
        return [[(d.id, d.score) for d in row] for row in rows], setup.query_cache.metrics()["queries/cached_ratio"]

    empty, none = searched([QUERIES])
    full, all_ = searched([[q] for q in QUERIES])
    assert empty == full and (none, all_) == (0.0, 1.0)
    alone = np.concatenate([BertEncoder(str(minilm), "auto").encode_queries([q]) for q in QUERIES])
    cached = Setup(settings, []).index.encoder.encode_queries(QUERIES)
    assert np.array_equal(cached, alone)
    assert cached.shape == (3, 384)


@pytest.mark.parametrize("flags", [["--retriever", "lexical"], ["--encoder", "hashing"], ["--retriever", "http://a/b"]])
def test_it_is_for_encoders(flags):
    config = resolve("retrieve", retrieve.RetrieveConfig(), ["--query-cache", "q", *flags])
    with raises(UsageError, "setting-unused", "--query-cache", "q", "a retriever that uses an --encoder"):
        check_used("retrieve", config)


def test_sources_without_an_encoder_are_no_reason_to_refuse_it_and_all_others_share_it(tmp_path):
    settings = RetrievalSettings(query_cache="q", source_index=("News=http://host/retrieve", "Academic=i"))
    settings.check()
    setup = Setup(replace(settings, query_cache=str(tmp_path / "q")), [])
    theirs = replace(setup, settings=settings.by_kind["Academic"], default=setup)
    assert theirs.query_cache is setup.query_cache is not None


def test_the_share_is_told_by_retrieve(tmp_path, minilm, capsys):
    rows = [
        {"id": n, "question": f"Where is {n}?", "answer": n, "answer_aliases": [], "answerable": True,
         "paragraphs": [{"idx": 0, "title": n, "paragraph_text": f"{n} is here.", "is_supporting": True}],
         "question_decomposition": [{"question": "q", "answer": n, "paragraph_support_idx": 0}]}
        for n in ("Ada", "Bob")
    ]  # fmt: skip
    write_jsonl(tmp_path / "d.jsonl", rows)
    argv = ["--data", str(tmp_path / "d.jsonl"), "--encoder", str(minilm), "--query-cache", str(tmp_path / "q")]
    for number, share in enumerate(("0%", "100%")):
        assert retrieve.main([*argv, "--output", str(tmp_path / f"out{number}")]) == 0
        assert f"{share} of 2 queries were cached in {tmp_path / 'q'}" in capsys.readouterr().out
