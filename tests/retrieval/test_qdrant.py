"""A Qdrant collection, by the client's embedded server: filled, searched, and every way in which it is refused."""

import sys

import pytest

from r3lite import index as recipe
from r3lite.core.config import UsageError
from r3lite.core.episode import Document, Failure, Question
from r3lite.core.errors import R3LiteError
from r3lite.core.files import write_jsonl
from r3lite.retrieval import index, qdrant
from r3lite.retrieval.encoder import BertEncoder
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.settings import RetrievalSettings
from tests.errors import raises, shows

ADDRESS = "qdrant://127.0.0.1:6333/towns"
PASSAGES = [Document(f"p{i}", f"Town {i}", f"Town {i} lies by the river {'abc'[i % 3] * 4}.") for i in range(30)]
QUERIES = ["Where is Town 7?", "the river cccc", "Town 21"]


@pytest.fixture(scope="module")
def encoder(minilm):
    return BertEncoder(str(minilm), "plain")


@pytest.fixture
def server(monkeypatch):
    """An embedded server, which every address leads to."""
    package = pytest.importorskip("qdrant_client")
    client = package.QdrantClient(":memory:")
    monkeypatch.setattr(package, "QdrantClient", lambda **arguments: client)
    return client


@pytest.fixture
def settings(minilm):
    return RetrievalSettings(retriever=ADDRESS, encoder=str(minilm), encoder_style="plain", top_k=4)


def ask(settings, queries=QUERIES):
    retrieve = build_retriever(Setup(settings, []))
    return retrieve([(Question("q", "x", ("x",)), query) for query in queries])


def test_what_it_finds_is_what_an_exact_index_finds(server, encoder, settings):
    qdrant.fill(ADDRESS, PASSAGES, encoder)
    expected = index.build_index(encoder, PASSAGES).search(QUERIES, 4)
    for ours, theirs in zip(ask(settings), expected, strict=True):
        assert [(d.id, d.title, d.text) for d in ours] == [(d.id, d.title, d.text) for d in theirs]
        assert [d.score for d in ours] == pytest.approx([d.score for d in theirs], abs=1e-5)
        assert {d.source for d in ours} == {ADDRESS}


def test_vectors_for_dot_products_are_not_compared_by_cosine(server, encoder, monkeypatch):
    monkeypatch.setattr(encoder, "settings", encoder.settings | {"similarity": "dot"})
    qdrant.fill(ADDRESS, PASSAGES, encoder)
    assert server.get_collection("towns").config.params.vectors.distance == "Dot"
    server.delete_collection("towns")
    from qdrant_client import models

    vectors = models.VectorParams(size=encoder.dimension, distance=models.Distance.COSINE)
    server.create_collection("towns", vectors)
    with raises(R3LiteError, "qdrant-vectors-differ", "with Cosine distance", "384 with Dot"):
        qdrant.Collection(ADDRESS, encoder).check()


def test_many_queries_are_several_requests(server, encoder, settings, monkeypatch):
    qdrant.fill(ADDRESS, PASSAGES, encoder)
    together = ask(settings)
    requests, query = [], server.query_batch_points
    monkeypatch.setattr(qdrant, "QUERIES", 2)
    monkeypatch.setattr(
        server, "query_batch_points", lambda name, batch: requests.append(len(batch)) or query(name, batch)
    )
    assert ask(settings) == together
    assert requests == [2, 1]


def test_filling_again_encodes_what_is_new_or_changed(server, encoder, monkeypatch):
    monkeypatch.setattr(qdrant, "PASSAGES", 7)
    assert qdrant.fill(ADDRESS, PASSAGES[:20], encoder) == (20, 20)
    changed = Document("p3", "Town 3", "It has moved.")
    assert qdrant.fill(ADDRESS, [*PASSAGES[:3], changed, *PASSAGES[4:]], encoder) == (11, 30)
    assert qdrant.fill(ADDRESS, PASSAGES[4:], encoder) == (0, 30)
    points, _ = server.scroll("towns", limit=50)
    assert [p.payload["text"] for p in points if p.payload["id"] == "p3"] == ["It has moved."]


def test_the_command_fills_a_collection(server, minilm, tmp_path, settings, capsys):
    write_jsonl(tmp_path / "c.jsonl", (d.to_json() for d in PASSAGES))
    options = ["--corpus", str(tmp_path / "c.jsonl"), "--output", ADDRESS]
    assert recipe.main([*options, "--encoder", str(minilm), "--device", "cpu"]) == 0
    assert "written     30 passages" in capsys.readouterr().out
    assert [row[0].id for row in ask(settings)][::2] == ["p7", "p21"]
    assert recipe.main([*options, "--encoder", "hashing"]) == 2
    assert "pass a BERT" in capsys.readouterr().err
    assert recipe.main([*options, "--encoder", str(minilm), "--index-type", "hnsw"]) == 2
    assert shows(capsys.readouterr().err, "setting-unused", "--index-type", "hnsw")


def test_a_collection_of_another_encoder_is_refused(server, encoder, settings):
    from qdrant_client import models

    vectors = models.VectorParams(size=encoder.dimension, distance=models.Distance.COSINE)
    server.create_collection("towns", vectors, metadata={"r3lite": encoder.settings | {"dtype": "bf16"}})
    assert ask(settings) == [[], [], []]  # of the same encoder in another precision
    server.delete_collection("towns")
    server.create_collection("towns", vectors, metadata={"r3lite": encoder.settings | {"style": "e5"}})
    with raises(R3LiteError, "qdrant-encoder-differs", "style e5"):
        ask(settings)
    with raises(R3LiteError, "qdrant-encoder-differs", "style e5"):
        qdrant.fill(ADDRESS, PASSAGES, encoder)


@pytest.mark.parametrize(("size", "distance"), [(7, "Cosine"), (384, "Euclid")])
def test_vectors_that_cannot_be_compared_are_refused(server, settings, size, distance):
    from qdrant_client import models

    server.create_collection("towns", models.VectorParams(size=size, distance=models.Distance(distance)))
    with raises(R3LiteError, "qdrant-vectors-differ", "vectors of", size, "dimensions with", distance, "distance"):
        ask(settings)


def test_a_collection_of_others_needs_a_text_in_its_payload(server, encoder, settings):
    from qdrant_client import models

    vectors = models.VectorParams(size=encoder.dimension, distance=models.Distance.DOT)
    server.create_collection("towns", vectors)
    point = encoder.encode_queries(["Town 7"])[0].tolist()
    server.upsert("towns", [models.PointStruct(id=5, vector=point, payload={"text": "Town 7 is here."})])
    assert [(d.id, d.title, d.text) for d in ask(settings)[0]] == [("5", "", "Town 7 is here.")]
    server.upsert("towns", [models.PointStruct(id=5, vector=point, payload={"title": "Town 7"})])
    (failed,) = ask(settings, ["Town 7"])
    assert isinstance(failed, Failure) and "point 5: text is missing" in failed.reason


def test_one_without_a_collection_or_with_several_vectors_is_refused(server, settings):
    from qdrant_client import models

    with raises(R3LiteError, "qdrant-failed", "towns", "not found"):
        ask(settings)
    server.create_collection("towns", {"a": models.VectorParams(size=384, distance=models.Distance.COSINE)})
    with raises(R3LiteError, "qdrant-named-vectors"):
        ask(settings)


def test_a_server_that_is_not_there_is_told(encoder):
    pytest.importorskip("qdrant_client")
    with pytest.raises(R3LiteError, match=r"qdrant://127\.0\.0\.1:9/towns: .*refused"):
        qdrant.Collection("qdrant://127.0.0.1:9/towns", encoder).check()


@pytest.mark.parametrize("address", ["qdrant://here:6333", "qdrant://here/a/b", "qdrant:///a"])
def test_an_address_without_a_collection_is_refused(address):
    pytest.importorskip("qdrant_client")
    with raises(R3LiteError, "qdrant-address"):
        qdrant.Collection(address, None)


@pytest.mark.parametrize("address", ["qdrant://here:port/towns", "qdrant://user:password@here/towns"])
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_wrong_address_is_refused_before_the_encoder_is_loaded(tmp_path, capsys, address, dry):
    corpus = str(tmp_path / "c.jsonl")
    write_jsonl(corpus, [passage.to_json() for passage in PASSAGES])
    assert recipe.main(["--corpus", corpus, "--encoder", "no-encoder", "--output", address, *dry]) == 2
    assert shows(capsys.readouterr().err, "bad-address", "--output")


def test_an_ipv6_address_stands_between_brackets(monkeypatch):
    package = pytest.importorskip("qdrant_client")
    arguments = {}
    monkeypatch.setattr(package, "QdrantClient", lambda **settings: arguments.update(settings))
    qdrant.Collection("qdrant://[::1]:6333/towns", None)
    assert arguments["host"] == "[::1]"


def test_a_key_goes_nowhere_without_encryption(monkeypatch):
    pytest.importorskip("qdrant_client")
    monkeypatch.setenv(qdrant.KEY, "secret")
    with raises(R3LiteError, "qdrant-unencrypted", "far.example") as error:
        qdrant.Collection("qdrant://far.example/towns", None)
    assert "secret" not in str(error.value)
    for address in ("qdrant+https://far.example/towns", "qdrant://localhost/towns"):
        assert qdrant.Collection(address, None).name == "towns"


def test_without_its_package_it_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "qdrant_client", None)
    with raises(R3LiteError, "package-missing", "qdrant_client") as error:
        qdrant.Collection(ADDRESS, None)
    assert "pip install 'r3lite[qdrant]'" in error.value.remedy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": "hashing"}, "pass a BERT"),
        ({"retriever": "qdrant://user:password@here/towns"}, "contains a user or password"),
        ({"retriever": "qdrant+http://here/towns"}, "is not an http or https address"),
    ],
)
def test_settings_that_contradict_it_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        RetrievalSettings(**{"retriever": ADDRESS} | changes).check()
