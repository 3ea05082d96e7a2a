"""Reranking: a cross-encoder reads the query together with each passage, and the best of many candidates are kept.

A cross-encoder compares the two word by word, which an encoder, with one vector for each, cannot. But it reads every
candidate anew for each query.
"""

from dataclasses import replace
from typing import Protocol

import torch

from r3lite.core.episode import Document, Question, Retrieve
from r3lite.core.errors import R3LiteError
from r3lite.core.files import read_record
from r3lite.core.records import shown
from r3lite.devices.precision import DTYPES
from r3lite.models.bert import load_bert_scorer
from r3lite.retrieval.conventions import (
    CROSS_ENCODER,
    REMEDY,
    batches,
    default_prompt,
    max_tokens_of,
    model_folder,
    model_settings,
    passage_text,
    read_optional,
    text_tokenizer,
    unknown_keys,
)

MODEL = "cross-encoder/ms-marco-MiniLM-L-6-v2"  # of --rerank auto
CANDIDATES = 3  # how many candidates are reranked for each passage of the result
INCREASING = ("Identity", "Sigmoid", "Tanh")  # functions of the logit that leave passages in their order
SPECIAL = 3  # special tokens of a pair: [CLS] query [SEP] passage [SEP]
# The number of pairs read together. More would gain nothing on one core of a processor, and all are padded to the
# longest: for 15 passages with 134 tokens on average and 512 at most, 4 at a time took 1.2 s and 32 at a time 2.9 s.
BATCH = 4


class Reranker(Protocol):
    """Scores pairs of a query and a passage, higher for a better one."""

    def scores(self, pairs: list[tuple[str, str]]) -> list[float]: ...


class CrossEncoder:
    """A BERT that scores a pair of a query and a passage. It runs on the CPU beside training, as the retriever does."""

    def __init__(self, name: str, dtype: str = "fp32", batch_size: int = BATCH):
        folder = model_folder(MODEL if name == "auto" else name, "--rerank", "Or remove --rerank.")
        self.model = load_bert_scorer(folder, DTYPES[dtype])
        self.batch_size = batch_size
        settings = model_settings(folder, CROSS_ENCODER)
        self.prefix = default_prompt(settings)
        module = read_optional(folder / "sentence_bert_config.json")
        for key in unknown_keys("CrossEncoder", module):
            raise module.error(f"{key} is {shown(module.values[key])}, which r3lite does not support")
        # Version 4 of sentence-transformers has its settings in config.json.
        of_version_4 = read_record(folder / "config.json", REMEDY).record("sentence_transformers")
        for record in (settings, of_version_4):
            activation = record.text("activation_fn", INCREASING[0]).rpartition(".")[2]
            if activation not in INCREASING:
                raise record.error(f"activation_fn is {activation}, which may change the order of passages")
        config = self.model.config
        path = folder / "tokenizer.json"
        max_length = min(max_tokens_of(folder), config.max_position_embeddings)
        self.tokenizer = text_tokenizer(path, max_length, rows=config.vocab_size)
        if self.tokenizer.num_special_tokens_to_add(is_pair=True) != SPECIAL or config.type_vocab_size < 2:
            raise R3LiteError(
                f"{path} does not encode pairs of texts as a BERT cross-encoder does", REMEDY, code="tokenizer-not-bert"
            )

    @torch.inference_mode()
    def scores(self, pairs: list[tuple[str, str]]) -> list[float]:
        """Returns the logit of each pair of query and passage."""
        logits = torch.zeros(len(pairs))
        pairs = [(self.prefix + query, passage) for query, passage in pairs]
        for batch in batches(self.tokenizer.encode_batch(pairs), self.batch_size, "cpu"):
            logits[batch.rows] = self.model(batch.tokens, batch.real, batch.segments).float()
        return logits.tolist()


class Reranked:
    """A retriever of the `top_k` candidates of another retriever that the cross-encoder scores highest.

    A document's score becomes the cross-encoder's; its source stays the retriever that found it.
    """

    def __init__(self, retrieve: Retrieve, reranker: Reranker, top_k: int):
        self.retrieve = retrieve
        self.reranker = reranker
        self.top_k = top_k

    def __call__(self, pairs: list[tuple[Question, str]]) -> list[list[Document]]:
        candidates = self.retrieve(pairs)
        query_passages = []
        for (_, query), documents in zip(pairs, candidates, strict=True):
            query_passages += [(query, passage_text(document)) for document in documents]
        unique = list(dict.fromkeys(query_passages))  # episodes of one group often send the same queries
        scores = dict(zip(unique, self.reranker.scores(unique), strict=True))
        rankings = []
        for (_, query), documents in zip(pairs, candidates, strict=True):
            scored = [replace(document, score=scores[query, passage_text(document)]) for document in documents]
            ranking = sorted(scored, key=lambda document: -document.score)  # equal scores keep their order
            rankings.append(ranking[: self.top_k])
        return rankings
