"""What a retriever is built from: the settings, the questions, and the corpus or index that these choose; and which
passages of it are searched: those whose metadata, id or title fit the conditions of --filter."""

import operator
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import compress
from pathlib import Path

import numpy as np
from tqdm import tqdm

from r3lite.core.bars import BRIEF
from r3lite.core.episode import Document, Question, folded
from r3lite.core.errors import R3LiteError, nearest
from r3lite.retrieval import corpus, index
from r3lite.retrieval.encoder import HASHING, Encoder, make_encoder
from r3lite.retrieval.query_cache import CachedEncoder, QueryCache
from r3lite.retrieval.reranker import CrossEncoder, Reranker
from r3lite.settings import RetrievalSettings
from r3lite.settings.retrieval import CONDITION, SOURCES

SHOWN = 20  # fields that an error names
ORDERS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


@dataclass(frozen=True)
class Setup:
    """The parts that retrievers share, each read or built when it is first asked for."""

    settings: RetrievalSettings
    questions: list[Question]  # their paragraphs are the corpus if no other is named
    seed: int = 0  # of what is drawn
    skip_bad_rows: bool = False  # leaves out bad lines of --corpus
    kind: str = SOURCES[0]  # of sources, that a web service is asked for
    gives_up: bool = True  # whether a retriever that fails at query after query ends the run
    like: "Setup | None" = None  # whose reranker and encoder are used again; that of an index, if it is the same one

    @cached_property
    def documents(self) -> Sequence[Document]:
        """The passages of --index or --corpus, or the paragraphs that come with the questions."""
        settings = self.settings
        if settings.index:
            return self._fitting(self._checked(index.read_documents(Path(settings.index))))
        if settings.corpus:
            return self._fitting(corpus.read_corpus(settings.corpus, self.skip_bad_rows))
        bare = [q.id for q in self.questions if not q.documents]
        if settings.context == "question" and bare:
            message = f"--context question needs paragraphs, but question {bare[0]} has none"
            raise R3LiteError(message, "Pass a --corpus instead of --context question.")
        documents = corpus.from_questions(replace(q, documents=self._kept(q)) for q in self.questions)
        if not documents:
            remedy = "Pass --corpus FILE.jsonl (id, title, text), --index FOLDER, or --retriever none."
            raise R3LiteError("there is nothing to search: the questions in --data have no paragraphs", remedy)
        return self._fitting(documents)

    @cached_property
    def index(self) -> index.PassageIndex:
        """The index of --index; else one built now."""
        settings = self.settings
        if settings.index:
            # Only a retriever with vectors has read its own by then.
            known = self.like.index.encoder if self.like and "index" in self.like.__dict__ else None
            opened = index.load(Path(settings.index), settings, known=known)
            self._checked(opened.documents)
            if settings.filter:
                opened = opened.only(fitting(settings.filter, opened.documents))
            return replace(opened, encoder=self._cached(opened.encoder))
        return index.build(self._cached(make_encoder(settings, self.documents)), self.documents)

    @cached_property
    def encoder(self) -> Encoder | None:
        """The encoder of queries to what is not indexed here; None for hashing, which is made for a corpus."""
        if self.settings.encoder == HASHING:
            return None
        if "index" in self.__dict__:
            return self.index.encoder
        if self.like:
            return self.like.encoder
        return self._cached(make_encoder(self.settings, []))

    @cached_property
    def query_cache(self) -> QueryCache | None:
        """That of --query-cache."""
        settings = self.settings
        if self.like:
            return self.like.query_cache
        return QueryCache(settings.query_cache, settings.query_cache_mib) if settings.query_cache else None

    def _fitting(self, documents: Sequence[Document]) -> Sequence[Document]:
        """The passages that fit --filter."""
        if not self.settings.filter:
            return documents
        fit = fitting(self.settings.filter, documents)
        return documents.only(fit) if isinstance(documents, corpus.Passages) else list(compress(documents, fit))

    def _cached(self, encoder: Encoder) -> Encoder:
        if self.query_cache is None or isinstance(encoder, CachedEncoder):
            return encoder
        return CachedEncoder(encoder, self.query_cache)

    @cached_property
    def reranker(self) -> Reranker:
        """The cross-encoder of --rerank, here or on a server."""
        if self.like:
            return self.like.reranker
        name = self.settings.rerank
        if "://" in name:
            from r3lite.retrieval.remote import RemoteReranker

            return RemoteReranker(name)
        return CrossEncoder(name, self.settings.encoder_dtype)

    def _checked(self, documents: Sequence[Document]) -> Sequence[Document]:
        """The passages of the index, refused if another corpus than theirs is named beside it."""
        index, named = self.settings.index, self.settings.corpus
        read = corpus.stream_corpora([named], self.skip_bad_rows)
        if named and corpus.fingerprint(read) != corpus.fingerprint(documents):
            raise R3LiteError(f"the index {index} was not built from the corpus {named}", "Pass only one of them.")
        return documents

    def own(self, questions: list[Question]) -> list[tuple[int, ...]] | None:
        """Places in `documents` of the paragraphs that come with each question, if a search is confined to them."""
        if self.settings.context == "corpus":
            return None
        return [tuple(sorted({self._places[d.title, d.text] for d in self._kept(q)})) for q in questions]

    def _kept(self, question: Question) -> tuple[Document, ...]:
        """The paragraphs of a question that may be found: all of them, or what --noise-rate leaves."""
        rate = self.settings.noise_rate
        if rate is None:
            return question.documents
        if not question.gold:
            remedy = "Remove it, or use HotpotQA, 2WikiMultiHopQA or MuSiQue."
            raise R3LiteError(f"--noise-rate needs gold paragraphs, but question {question.id} has none", remedy)
        others = corpus.noise(question, rate, random.Random(f"{self.seed}/{question.id}/noise"))
        return tuple(d for d in question.documents if d in others or question.gold_index(d) is not None)

    @cached_property
    def _places(self) -> dict[tuple[str, str], int]:
        return {(d.title, d.text): i for i, d in enumerate(self.documents)}


@dataclass(frozen=True)
class Condition:
    """What a field must be: `key`, a sign (=, !=, or one of ORDERS) and a value."""

    key: str
    sign: str
    wanted: str

    def value(self, document: Document) -> str | float | bool | None:
        """That of the field in a passage; None if it has none."""
        return (dict(document.metadata) | {"id": document.id, "title": document.title}).get(self.key)

    def fits(self, value: str | float | bool) -> bool:
        """Numbers are compared as such, and texts in any letter case; `*` in `=` and `!=` stands for any text."""
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        try:
            wanted, found = (float(self.wanted), value) if number else (folded(self.wanted), folded(str(value)))
        except ValueError:
            raise R3LiteError(f"--filter: {self.key} is a number", f"Compare it with one, not {self.wanted}.") from None
        if self.sign in ORDERS:
            return ORDERS[self.sign](found, wanted)
        same = found == wanted if number else _pattern(wanted).fullmatch(found) is not None
        return same == (self.sign == "=")


@cache
def _pattern(wanted: str) -> re.Pattern:
    """What matches a text in which each `*` stands for any text."""
    return re.compile(".*".join(map(re.escape, wanted.split("*"))))


def fitting(conditions: Sequence[str], documents: Sequence[Document]) -> np.ndarray:
    """Of each passage, whether it has the field of every condition and fits it: bool [N].

    Raises R3LiteError if no passage has a field, which is then misspelled, or if none fits.
    """
    parsed = [Condition(*CONDITION.fullmatch(text.strip()).groups()) for text in conditions]
    fit, known = np.zeros(len(documents), bool), {"id", "title"}
    for place, document in enumerate(tqdm(documents, "filtering passages", unit="", **BRIEF)):
        values = [condition.value(document) for condition in parsed]
        known.update(key for key, _ in document.metadata)
        fit[place] = all(v is not None and c.fits(v) for c, v in zip(parsed, values, strict=True))
    for text, condition in zip(conditions, parsed, strict=True):
        if condition.key not in known:
            cause = f"--filter {text}: no passage has the field {condition.key!r}{nearest(condition.key, known)}"
            raise R3LiteError(cause, f"Known fields: {', '.join(sorted(known)[:SHOWN])}.")
    if not fit.any():
        raise R3LiteError(f"no passage matches --filter {', '.join(conditions)}", "Remove or relax a condition.")
    return fit
