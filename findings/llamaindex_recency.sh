#!/usr/bin/env bash
# llama-index-core 0.14.25, Python 3.11: EmbeddingRecencyPostprocessor compares with the embeddings of other nodes
#
# Valid input: three passages with dates, as a retriever returns them, best first: a price, the same price two years
# older, and opening hours. The embeddings are exact: 1 between passages of one topic, 0 between others.
#
# Expected: EmbeddingRecencyPostprocessor goes from the newest passage to the oldest and drops older ones that are
# similar, here the old price, in whatever order the retriever has found them. TimeWeightedPostprocessor adds to the
# score of a passage a number for its age; if the ages are equal, the scores decide.
#
# Seen: the passages are sorted by date, but their embeddings stay in the order of the retriever. A passage is judged by
# the embedding of the one that was found at its place. Here the opening hours are dropped and the outdated price stays.
# TimeWeightedPostprocessor takes a score of 0 for no score at all, which counts as 1: the worst passage comes first.
# BM25 gives 0 to passages without a word of the question, and relative_score in QueryFusionRetriever to the last one.
#
# Why it matters: nothing is raised, and the number of passages looks right. The model is given the version that was to
# be removed, and a passage about something else is lost. It works as long as the retriever finds the newest first.
#
# Output:
#   found in the order                     dropped by recency
#   price 2024, hours 2023, price 2022     price 2022
#   price 2024, price 2022, hours 2023     hours 2023
#   hours 2023, price 2024, price 2022     hours 2023, price 2022
#   scores, of equal age                   order by TimeWeightedPostprocessor
#   a 0.90, b 0.50, c 0.01                 a b c
#   a 0.90, b 0.50, c 0.00                 c a b
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet llama-index-core==0.14.25 numpy==2.4.6 pandas==3.1.1 || exit 2
"$work/venv/bin/python" -W ignore - <<'PY'
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.postprocessor import EmbeddingRecencyPostprocessor, TimeWeightedPostprocessor
from llama_index.core.schema import NodeWithScore, TextNode


class Topics(BaseEmbedding):
    """Embeds a text by the topic it names."""

    def _get_text_embedding(self, text):
        return [float("price" in text), float("hours" in text)]

    def _get_query_embedding(self, query):
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query):
        return self._get_text_embedding(query)


def dropped(found):
    nodes = [
        NodeWithScore(node=TextNode(text=name, metadata={"date": f"{name[-4:]}-01-01"}), score=0.9) for name in found
    ]
    recency = EmbeddingRecencyPostprocessor(embed_model=Topics(), similarity_cutoff=0.7)
    kept = {node.node.text for node in recency.postprocess_nodes(nodes, query_str="What does it cost?")}
    return [name for name in found if name not in kept]


def weighted(scores):
    """Returns the names in the order of a weighting by age, where no passage was used before."""
    nodes = [NodeWithScore(node=TextNode(text=name), score=score) for name, score in scores.items()]
    return [node.node.text for node in TimeWeightedPostprocessor(top_k=len(nodes)).postprocess_nodes(nodes)]


print(f"{'found in the order':37}  dropped by recency")
for found, seen in (
    (["price 2024", "hours 2023", "price 2022"], ["price 2022"]),
    (["price 2024", "price 2022", "hours 2023"], ["hours 2023"]),
    (["hours 2023", "price 2024", "price 2022"], ["hours 2023", "price 2022"]),
):
    names = dropped(found)
    print(f"{', '.join(found):37}  {', '.join(names)}")
    assert names == seen

print(f"{'scores, of equal age':37}  order by TimeWeightedPostprocessor")
for last, seen in ((0.01, "abc"), (0.0, "cab")):
    scores = {"a": 0.9, "b": 0.5, "c": last}
    order = weighted(scores)
    print(f"{', '.join(f'{name} {score:.2f}' for name, score in scores.items()):37}  {' '.join(order)}")
    assert order == list(seen)
PY
