#!/usr/bin/env bash
# distilabel 1.5.3, Python 3.11: `EmbeddingDedup` takes out every text that has a near-duplicate, and keeps none of them
#
# Valid input: embeddings of unit length, of 20 topics with two or more texts and 20 with one. Texts of a topic have a
# cosine of 0.94 or more, all others less than 0.5; the threshold is 0.9. The neighbours are those by hand, or are found
# by `FaissNearestNeighbour` with the inner product, as the documentation of the step has it.
#
# Expected: one text of each topic is kept, as in all deduplication, and by the `MinHashDedup` of the package: a text is
# a duplicate if one like it is there already.
#
# Seen: each text marks all neighbours above the threshold for removal, whether it was marked itself or not. To be alike
# is mutual, so two texts mark each other, and both go. Of a topic with two or more texts nothing is left. (A text
# without a neighbour in reach stays.) There is no warning. Equal vectors can hide it: `FaissNearestNeighbour` leaves
# out the first hit, which need not be the row itself, so here one of the copies is in no list and stays.
#
# Why it matters: generated questions are deduplicated to have each once in the training data. Instead just those that a
# model writes most often are gone, here half of the topics.
#
# Output (texts; topics that are left of the 20 with several texts, and of the 20 with one):
#                       texts  one by one  EmbeddingDedup  with FaissNearestNeighbour
#     1 of each topic      40     20 + 20         20 + 20                     20 + 20
#     2 of each topic      60     20 + 20          0 + 20                      0 + 20
#     3 of each topic      80     20 + 20          0 + 20                      0 + 20
#     4 of each topic     100     20 + 20          0 + 20                      0 + 20
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
# requests is imported by distilabel, but is not among its dependencies.
"$work/venv/bin/pip" install --quiet distilabel==1.5.3 datasets==5.2.0 faiss-cpu==1.15.1 numpy==2.4.6 scipy==1.17.1 \
  pandas==3.1.1 pyarrow==26.0.1 pydantic==2.14.4 requests==2.34.2 || exit 2
HOME="$work" OMP_NUM_THREADS=1 TQDM_DISABLE=1 "$work/venv/bin/python" - <<'PY'
import contextlib
import io
import logging
import warnings

import faiss
import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # By pydantic, of default values in the package.
    from distilabel.steps import EmbeddingDedup, FaissNearestNeighbour

TOPICS, SIZE, THRESHOLD, K = 20, 64, 0.9, 5
logging.disable(logging.WARNING)  # They tell that the steps are used without a pipeline.
rng = np.random.default_rng(0)


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def embeddings(alike):
    """Topics with as many texts that are alike, and then as many topics with one text; in a random order."""
    topics = np.concatenate([np.repeat(np.arange(TOPICS), alike), np.arange(TOPICS, 2 * TOPICS)])
    centres = unit(rng.normal(size=(2 * TOPICS, SIZE)))
    vectors = unit(centres[topics] + 0.2 * unit(rng.normal(size=(len(topics), SIZE))))
    order = rng.permutation(len(topics))
    return vectors[order], topics[order]


def one_by_one(similar):
    kept = []
    for number, row in enumerate(similar):
        if not kept or row[kept].max() <= THRESHOLD:
            kept.append(number)
    return kept


def with_neighbours(similar):
    similar = similar - 2 * np.eye(len(similar))  # A row is not its own neighbour.
    best = np.argsort(-similar, axis=1)[:, :K]
    scores = np.take_along_axis(similar, best, axis=1)
    return [{"nn_indices": row, "nn_scores": score} for row, score in zip(best.tolist(), scores.tolist())]


def with_faiss(vectors):
    step = FaissNearestNeighbour(k=K, metric_type=faiss.METRIC_INNER_PRODUCT)
    step.load()
    return next(step.process([{"embedding": vector} for vector in vectors.tolist()]))


def deduplicated(rows):
    step = EmbeddingDedup(threshold=THRESHOLD)
    step.load()
    with contextlib.redirect_stdout(io.StringIO()):  # A progress bar.
        rows = next(step.process(rows))
    return [number for number, row in enumerate(rows) if row["keep_row_after_embedding_filtering"]]


print(f"{'':20}texts  one by one  EmbeddingDedup  with FaissNearestNeighbour")
for alike in (1, 2, 3, 4):
    vectors, topics = embeddings(alike)
    similar = vectors @ vectors.T
    same = topics[:, None] == topics
    assert similar[same].min() > 0.94 and similar[~same].max() < 0.5
    cells = []
    for kept in (one_by_one(similar), deduplicated(with_neighbours(similar)), deduplicated(with_faiss(vectors))):
        several = len({topic for topic in topics[kept] if topic < TOPICS})
        single = len({topic for topic in topics[kept] if topic >= TOPICS})
        assert len(kept) == several + single  # No topic is left twice.
        cells.append((several, single))
    label = f"{alike} of each topic"
    shown = [f"{several} + {single}" for several, single in cells]
    print(f"  {label:18}{len(topics):5}{shown[0]:>12}{shown[1]:>16}{shown[2]:>28}")
    left = TOPICS if alike == 1 else 0
    assert cells == [(TOPICS, TOPICS), (left, TOPICS), (left, TOPICS)]
PY
