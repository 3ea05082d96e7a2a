"""Milliseconds that a query spends in each stage of retrieval: encoding, hybrid search, reranking 15 passages to 5.

    python -m bench.pipeline --corpus A.jsonl,B.jsonl --data QUESTIONS --encoder FOLDER --passages 100000

Each passage has four sentences that are drawn at random from the corpora, so that words are as frequent as in the
corpora. The passages' vectors are random, with the encoder's dimension. Unless --rerank names a cross-encoder, one with
random weights and the shape of ms-marco-MiniLM-L-6-v2 is used. Times depend neither on the values of vectors nor on
those of weights. Queries come one at a time. The times are wall-clock times, because that is what a user waits for. So
nothing else should run on the machine.
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
TOP_K = 5  # documents of a query
RANKING_LENGTH = 100  # documents of the semantic and of the lexical ranking
PASSAGE_SENTENCES = 4
MILLISECONDS_PER_SECOND = 1000
MAX_SENTENCE_LENGTH = 64  # tokens; longer sentences are divided
# The shape of ms-marco-MiniLM-L-6-v2.
SHAPE = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}


def passages(paths: list[str], count: int) -> list[Document]:
    """Returns `count` passages of sentences from the corpora in the files; the same passages in each call."""
    all_sentences = []
    for path in paths:
        for document in read_corpus(path):
            all_sentences += sentences(document.text, MAX_SENTENCE_LENGTH)
    choices = np.random.default_rng(0).integers(len(all_sentences), size=(count, PASSAGE_SENTENCES))
    documents = []
    for number, indices in enumerate(choices):
        text = " ".join(all_sentences[index] for index in indices)
        documents.append(Document(str(number), "", text))
    return documents


def cross_encoder(encoder: Path, folder: Path, dtype: str) -> CrossEncoder:
    """Writes a cross-encoder with random weights and the encoder's tokenizer to `folder`, and returns it."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    vocabulary_size = json.loads((encoder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    config = BertConfig(vocab_size=vocabulary_size, num_labels=1, **SHAPE)
    BertForSequenceClassification(config).save_pretrained(folder)
    shutil.copy(encoder / "tokenizer.json", folder)
    return CrossEncoder(str(folder), dtype)


def milliseconds(work, queries: list[str]) -> float:
    """Returns the median time of `work(query)` in milliseconds. A first call, to warm up, is not counted."""
    times = []
    for query in [queries[0], *queries]:
        start = time.perf_counter()
        work(query)
        times.append(MILLISECONDS_PER_SECOND * (time.perf_counter() - start))
    return statistics.median(times[1:])


def measure(documents: list[Document], queries: list[str], encoder: BertEncoder, reranker: CrossEncoder) -> dict:
    """Returns the median milliseconds of a query: of its encoding, of both searches, of their fusion, and of all.

    "semantic" includes the encoding, "hybrid" both searches, and "all" also the reranking.
    """
    vectors = np.random.default_rng(0).standard_normal((len(documents), encoder.dimension), dtype=np.float32)
    flat = faiss.IndexFlatIP(encoder.dimension)
    flat.add(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    semantic = RankingRetriever(PassageIndex(encoder, documents, Vectors(flat)), RANKING_LENGTH, lambda questions: None)
    lexical = RankingRetriever(Lexical(documents), RANKING_LENGTH, lambda questions: None)
    hybrid = HybridRetriever(
        semantic=semantic,
        lexical=lexical,
        top_k=CANDIDATES * TOP_K,
        values_of=reciprocal_ranks,
        weights=(1.0, 1.0),
    )
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
    flags = parser.parse_args()
    queries = [question.text for question in read_questions(flags.data, flags.queries)]
    documents = passages(flags.corpus.split(","), flags.passages)
    encoder = BertEncoder(flags.encoder, "auto", dtype=flags.dtype)
    with tempfile.TemporaryDirectory() as random_folder:
        reranker = (
            CrossEncoder(flags.rerank, flags.dtype)
            if flags.rerank
            else cross_encoder(Path(flags.encoder), Path(random_folder), flags.dtype)
        )
    times = measure(documents=documents, queries=queries, encoder=encoder, reranker=reranker)
    row = {"passages": len(documents), "queries": len(queries), **times}
    row |= {
        "threads": torch.get_num_threads(),
        "dtype": flags.dtype,
        "processor": processor("cpu"),
        "cores": os.cpu_count(),
    }
    row |= {"date": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()), "commit": commit(ROOT)}
    print(json.dumps(row))
    write_json(RESULTS, {"runs": [*read(RESULTS), row]})


if __name__ == "__main__":
    main()
