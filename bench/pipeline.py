"""Milliseconds of a query through the whole of retrieval: encoding, hybrid search, reranking 15 passages to 5.

    python -m bench.pipeline --corpus A.jsonl,B.jsonl --data QUESTIONS --encoder FOLDER --passages 100000

The passages are made of four sentences each, drawn from the corpora's, so that words are as frequent as there. Vectors
are random and of the encoder's size, and the cross-encoder's weights are random, in the shape of ms-marco-MiniLM-L-6-v2
unless --rerank names one: neither changes any time. Queries come one at a time. Wall-clock time, so that several
threads count as one wait: nothing else should run.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import faiss
import numpy as np
import torch

from bench.records import ROOT, commit, processor, read
from r3lite.core.episode import Document, Question
from r3lite.core.files import write_json
from r3lite.datasets.qa import read_questions
from r3lite.retrieval.corpus import read_corpus
from r3lite.retrieval.documents.chunks import sentences
from r3lite.retrieval.encoder import BertEncoder
from r3lite.retrieval.hybrid import HybridRetriever, reciprocal_ranks
from r3lite.retrieval.index import PassageIndex
from r3lite.retrieval.lexical import Lexical
from r3lite.retrieval.reranker import CANDIDATES, CrossEncoder, Reranked
from r3lite.retrieval.search import RankingRetriever
from r3lite.retrieval.vectors import Vectors

RESULTS = ROOT / "bench" / "results" / "pipeline.json"
TOP_K, TOGETHER, LONGEST = 5, 4, 64  # documents of a query, sentences of a passage, tokens of a sentence
SHAPE = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}


def passages(paths: list[str], count: int) -> list[Document]:
    """Made of the sentences of corpora, the same each time."""
    all_sentences = [s for path in paths for document in read_corpus(path) for s in sentences(document.text, LONGEST)]
    rows = np.random.default_rng(0).integers(len(all_sentences), size=(count, TOGETHER))
    return [Document(str(i), "", " ".join(all_sentences[j] for j in row)) for i, row in enumerate(rows)]


def cross_encoder(encoder: Path, folder: Path, dtype: str) -> CrossEncoder:
    """One of random weights, with the encoder's tokenizer."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    words = json.loads((encoder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    BertForSequenceClassification(BertConfig(vocab_size=words, num_labels=1, **SHAPE)).save_pretrained(folder)
    shutil.copy(encoder / "tokenizer.json", folder)
    return CrossEncoder(str(folder), dtype)


def milliseconds(work, queries: list[str]) -> float:
    """The median over queries, one at a time, after one that is not counted."""
    taken = []
    for query in [queries[0], *queries]:
        began = time.perf_counter()
        work(query)
        taken.append(1000 * (time.perf_counter() - began))
    return statistics.median(taken[1:])


def measure(documents: list[Document], queries: list[str], encoder: BertEncoder, reranker: CrossEncoder) -> dict:
    vectors = np.random.default_rng(0).standard_normal((len(documents), encoder.dimension), dtype=np.float32)
    flat = faiss.IndexFlatIP(encoder.dimension)
    flat.add(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    semantic = RankingRetriever(PassageIndex(encoder, documents, Vectors(flat)), 100, lambda questions: None)
    lexical = RankingRetriever(Lexical(documents), 100, lambda questions: None)
    hybrid = HybridRetriever(semantic, lexical, CANDIDATES * TOP_K, reciprocal_ranks, (1.0, 1.0))
    stages = {"semantic": semantic, "lexical": lexical, "hybrid": hybrid, "all": Reranked(hybrid, reranker, TOP_K)}
    row = {"encode_ms": milliseconds(lambda q: encoder.encode_queries([q]), queries)}
    for name, retrieve in stages.items():
        row[f"{name}_ms"] = milliseconds(lambda q, retrieve=retrieve: retrieve([(Question("q", q, ()), q)]), queries)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, help="files of passages, with commas between")
    parser.add_argument("--data", required=True, help="file of questions, which are the queries")
    parser.add_argument("--encoder", required=True, help="folder of a BERT")
    parser.add_argument("--rerank", help="folder or hub id of a cross-encoder")
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--queries", type=int, default=50)
    given = parser.parse_args()
    queries = [question.text for question in read_questions(given.data, given.queries)]
    documents = passages(given.corpus.split(","), given.passages)
    encoder = BertEncoder(given.encoder, "auto", dtype=given.dtype)
    with tempfile.TemporaryDirectory() as name:
        reranker = (
            CrossEncoder(given.rerank, given.dtype)
            if given.rerank
            else cross_encoder(Path(given.encoder), Path(name), given.dtype)
        )
    row = {"passages": len(documents), "queries": len(queries), **measure(documents, queries, encoder, reranker)}
    row |= {
        "threads": torch.get_num_threads(),
        "dtype": given.dtype,
        "processor": processor("cpu"),
        "cores": os.cpu_count(),
    }
    row |= {"date": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()), "commit": commit(ROOT)}
    print(json.dumps(row))
    write_json(RESULTS, {"runs": [*read(RESULTS), row]})


if __name__ == "__main__":
    main()
