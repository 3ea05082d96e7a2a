"""The bench of a query through the whole of retrieval: what it makes and what it times."""

from bench import pipeline
from r3lite.core.files import write_jsonl
from r3lite.retrieval.encoder import BertEncoder


def test_every_stage_is_timed_on_passages_of_the_corpus(tmp_path, minilm, monkeypatch):
    rows = [{"id": i, "title": "", "text": f"House {i} is red. It stands in street {i % 3}."} for i in range(20)]
    write_jsonl(tmp_path / "c.jsonl", rows)
    documents = pipeline.passages([str(tmp_path / "c.jsonl")], 40)
    assert documents == pipeline.passages([str(tmp_path / "c.jsonl")], 40) and len(documents) == 40
    corpus_text = " ".join(row["text"] for row in rows)
    assert all(text.count(".") == 4 for text in (d.text for d in documents))
    assert all(f"{s.strip()}." in corpus_text for d in documents for s in d.text.split(".") if s.strip())
    monkeypatch.setattr(pipeline, "SHAPE", dict(zip(pipeline.SHAPE, (32, 1, 4, 48), strict=True)))
    reranker = pipeline.cross_encoder(minilm, tmp_path, "fp32")
    pair_counts = []
    scores = reranker.scores
    monkeypatch.setattr(reranker, "scores", lambda pairs: pair_counts.append(len(pairs)) or scores(pairs))
    row = pipeline.measure(documents, ["Which house is red?", "street"], BertEncoder(str(minilm), "plain"), reranker)
    assert pair_counts == [15, 15, 15] and all(value > 0 for value in row.values())
    assert list(row) == ["encode_ms", "semantic_ms", "lexical_ms", "hybrid_ms", "all_ms"]
