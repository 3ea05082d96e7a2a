"""Every kind of index against brute force, and the sizes that were predicted against those of files and memory."""

import faiss
import numpy as np
import pytest

from r3lite.core.errors import R3LiteError
from r3lite.retrieval.vectors import (
    CLASSES,
    VectorFile,
    Vectors,
    build_vectors,
    choose,
    estimate,
    lists_of,
    open_vectors,
    sample_of,
    write_vectors,
)
from tests.errors import raises

COUNT, D = 10_000, 16
# recall@10 of clustered vectors that each kind must reach; 2 bytes of 16 dimensions cannot tell much
LEAST = {"flat": 1.0, "sq8": 0.95, "hnsw": 0.97, "ivf-sq8": 0.9, "opq-ivf-pq": 0.2}


def clustered(count, d, seed=0):
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).standard_normal((100, d))
    points = centres[rng.integers(100, size=count)] + 0.5 * rng.standard_normal((count, d))
    return (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def vectors():
    return clustered(COUNT, D)


@pytest.fixture(scope="module")
def built(tmp_path_factory, vectors):
    """The file of an index of each kind."""
    folder = tmp_path_factory.mktemp("kinds")
    paths = {}
    for kind in CLASSES:
        file = VectorFile(folder / f"{kind}.bin", D, kind)
        file.append(vectors)
        write_vectors(build_vectors(kind, file), folder / kind)
        paths[kind] = folder / kind
    return paths


def recall(hits, queries, vectors, live):
    truth = np.argsort(-(queries @ vectors.T)[:, live], axis=1)[:, :10]
    return np.mean([len(set(p) & set(t)) / 10 for (_, p), t in zip(hits, truth, strict=True)])


@pytest.mark.parametrize("kind", CLASSES)
def test_recall_against_brute_force_also_without_deleted_ones(built, vectors, kind):
    queries, everything = clustered(100, D, seed=1), np.arange(COUNT)
    opened = Vectors(open_vectors(built[kind], kind, ""))
    assert recall(opened.search(queries, 10), queries, vectors, everything) >= LEAST[kind]
    # Deleted are the nearest of every query among others: what is found is numbered as if they had never been there.
    deleted = np.unique(np.concatenate([p[:3] for _, p in opened.search(queries, 3)] + [np.arange(0, COUNT, 5)]))
    hits = Vectors(opened.base, None, deleted).search(queries, 10)
    assert recall(hits, queries, vectors, np.delete(everything, deleted)) >= LEAST[kind] - 0.05
    assert all(len(p) == 10 and p.max() < COUNT - len(deleted) for _, p in hits)


@pytest.mark.parametrize("kind", CLASSES)
def test_added_vectors_are_found_with_the_others(built, vectors, kind):
    extra, queries = clustered(2000, D, seed=2), clustered(100, D, seed=1)
    added = faiss.IndexFlatIP(D)
    added.add(extra)
    both = Vectors(open_vectors(built[kind], kind, ""), added)
    hits = both.search(queries, 10)
    assert recall(hits, queries, np.vstack([vectors, extra]), np.arange(COUNT + 2000)) >= LEAST[kind]
    assert max(p.max() for _, p in hits) >= COUNT  # what opq-ivf-pq must recall, it recalls without any of them


def test_flat_is_what_a_bare_faiss_index_gives(built, vectors):
    bare, queries = faiss.IndexFlatIP(D), clustered(20, D, seed=1)
    bare.add(vectors)
    scores, places = bare.search(queries, 5)
    for row, (s, p) in enumerate(Vectors(open_vectors(built["flat"], "flat", "")).search(queries, 5)):
        assert np.array_equal(s, scores[row]) and np.array_equal(p, places[row])


@pytest.mark.parametrize("kind", CLASSES)
def test_the_predicted_size_is_that_of_the_file(built, kind):
    """Within 1 %, and 4 KiB of headers and lists."""
    size = built[kind].stat().st_size
    assert abs(estimate(kind, COUNT, D).file - size) <= 0.01 * size + 4096


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind != "opq-ivf-pq"])  # which trains for 20 s
def test_the_same_vectors_give_the_same_bytes(built, tmp_path, vectors, kind):
    file = VectorFile(tmp_path / "v", D, kind)
    for start in range(0, COUNT, 1000):
        file.append(vectors[start : start + 1000])
    write_vectors(build_vectors(kind, file), tmp_path / "i")
    assert (tmp_path / "i").read_bytes() == built[kind].read_bytes()


def test_a_sample_is_rows_of_the_file_each_once(tmp_path, vectors):
    file = VectorFile(tmp_path / "v", D, "flat")
    file.append(vectors)
    drawn = file.sample(500)
    places = [int(np.flatnonzero((vectors == row).all(axis=1))[0]) for row in drawn]
    assert places == sorted(set(places)) and len(places) == 500


def test_a_wrong_kind_is_refused(built):
    with raises(R3LiteError, "index-kind-differs", "IndexFlatIP", "IndexHNSWFlat"):
        open_vectors(built["flat"], "hnsw", "Build it again.")


@pytest.mark.parametrize(
    ("passages", "dimension", "gib", "kind"),
    [
        (100_000, 768, 4, "flat"),
        (1_000_000, 768, 4, "flat"),
        (1_000_000, 768, 2, "sq8"),
        (21_000_000, 768, 4, "opq-ivf-pq"),
        (21_000_000, 768, 32, "ivf-sq8"),
        (21_000_000, 384, 16, "ivf-sq8"),
    ],
)
def test_auto_is_the_most_exact_that_fits(passages, dimension, gib, kind):
    assert choose("auto", passages, dimension, gib << 30).kind == kind


def test_what_does_not_fit_is_refused_with_what_would():
    with raises(R3LiteError, "index-beyond-budget", "1.00 GiB") as error:
        choose("flat", 1_000_000, 768, 1 << 30)
    budget = error.value.remedy.split()[2].removesuffix("MiB,")
    assert choose("flat", 1_000_000, 768, int(budget) << 20).kind == "flat"
    with raises(R3LiteError, "index-beyond-budget", "150.0 MiB: sq8") as error:
        choose("auto", 100_000, 768, 150 << 20)
    assert error.value.remedy == "Pass --memory-budget 157MiB."  # opq-ivf-pq, the last kind, would take 418
    assert choose("auto", 100_000, 768, 157 << 20).kind == "sq8"
    with raises(R3LiteError, "too-few-passages", "9,984", "9,983"):
        choose("opq-ivf-pq", 9_983, 768, 1 << 40)


def test_lists_and_samples_by_hand():
    """4 sqrt(1,000,000) is 4,000, and 4,096 the power of two nearest to it; 40 vectors train a list."""
    assert lists_of(1_000_000, 768) == 4096 and sample_of("ivf-sq8", 1_000_000, 768) == 40 * 4096
    assert lists_of(100, 768) == 2 and sample_of("ivf-sq8", 100, 768) == 100
    assert 4 * 768 * sample_of("ivf-sq8", 10**9, 768) <= 512 << 20
