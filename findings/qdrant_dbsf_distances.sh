#!/usr/bin/env bash
# qdrant-client 1.20.0 (local mode), Python 3.11: DBSF fusion of Euclidean searches returns the farthest points first
#
# Valid input: five points with two named vectors each, Euclidean or Manhattan distance, a prefetch over either vector,
# and FusionQuery(fusion=Fusion.DBSF), the second of the two fusions that Qdrant has.
#
# Expected: a point that both searches put first is first after the fusion, for any distance, as it is with RRF.
#
# Seen: DBSF maps the scores of each search to its mean plus or minus three deviations, adds them, and sorts from high
# to low. Euclidean and Manhattan scores are distances, where low is near, so the order is reversed: the point that
# equals the query comes last. With cosine or dot product the order is right. Nothing is raised.
#
# Why it matters: local mode is what one tries a hybrid search with before there is a server. A change of the fusion
# from RRF to DBSF then looks as if it ruined retrieval, and a model that is trained with it learns from wrong passages.
#
# Output:
#   Cosine     one search 1 2 3 4 5   RRF 1 2 3 4 5   DBSF 1 2 3 4 5
#   Dot        one search 1 2 3 4 5   RRF 1 2 3 4 5   DBSF 1 2 3 4 5
#   Euclid     one search 1 2 3 4 5   RRF 1 2 3 4 5   DBSF 5 4 3 2 1
#   Manhattan  one search 1 2 3 4 5   RRF 1 2 3 4 5   DBSF 5 4 3 2 1
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet qdrant-client==1.20.0 numpy==2.4.6 || exit 2
"$work/venv/bin/python" - <<'PY'
from qdrant_client import QdrantClient
from qdrant_client.models import Distance, Fusion, FusionQuery, PointStruct, Prefetch, VectorParams

QUERY = [1.0, 0.0]
POINTS = {1: [1.0, 0.0], 2: [0.9, 0.2], 3: [0.5, 0.5], 4: [0.0, 1.0], 5: [-1.0, -0.5]}


def orders(distance: Distance) -> tuple[list[int], list[int], list[int]]:
    """The points as one search, RRF and DBSF order them."""
    client = QdrantClient(":memory:")
    parameters = VectorParams(size=2, distance=distance)
    client.create_collection("passages", vectors_config={"title": parameters, "text": parameters})
    points = [PointStruct(id=id, vector={"title": vector, "text": vector}) for id, vector in POINTS.items()]
    client.upsert("passages", points)
    searches = [Prefetch(query=QUERY, using=name, limit=5) for name in ("title", "text")]
    single = client.query_points("passages", query=QUERY, using="title", limit=5)
    answers = [single]
    for fusion in (Fusion.RRF, Fusion.DBSF):
        answers.append(client.query_points("passages", prefetch=searches, query=FusionQuery(fusion=fusion), limit=5))
    ids = tuple([point.id for point in answer.points] for answer in answers)
    one, rrf, dbsf = (" ".join(str(id) for id in order) for order in ids)
    print(f"{distance.value:10} one search {one}   RRF {rrf}   DBSF {dbsf}")
    return ids


near_first = [1, 2, 3, 4, 5]
far_first = [5, 4, 3, 2, 1]
assert orders(Distance.COSINE) == (near_first, near_first, near_first)
assert orders(Distance.DOT) == (near_first, near_first, near_first)
assert orders(Distance.EUCLID) == (near_first, near_first, far_first)
assert orders(Distance.MANHATTAN) == (near_first, near_first, far_first)
PY
