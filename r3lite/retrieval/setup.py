"""The parts of a retriever: the settings, the questions, and the corpus or index that these choose.

Only those passages of a corpus or index are searched whose metadata, id and title fit the conditions of --filter.
"""

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

SHOWN = 20  # most fields that an error names
ORDERS = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
VECTOR_RETRIEVERS = ("semantic", "hybrid")  # of --retriever


@dataclass(frozen=True)
class Setup:
    """The parts that retrievers share, each read or built when it is first asked for."""

    settings: RetrievalSettings
    questions: list[Question]  # their paragraphs are the corpus if no other is named
    seed: int = 0  # of the paragraphs that --noise-rate draws
    skip_bad_rows: bool = False  # leaves out bad lines of --corpus
    kind: str = SOURCES[0]  # the kind of sources that a web service is asked for
    gives_up: bool = True  # True if a retriever that fails at query after query ends the run
    # The setup of the default retriever, if this one is for a kind of sources of its own: both share the reranker, the
    # encoder and the query cache. None if this is the default.
    default: "Setup | None" = None

    @property
    def searches_vectors(self) -> bool:
        """True if the retriever searches the vectors of `index`: its encoder is then that of the index."""
        return self.settings.retriever in VECTOR_RETRIEVERS

    @cached_property
    def documents(self) -> Sequence[Document]:
        """Returns the passages of --index or --corpus, or the paragraphs that come with the questions."""
        settings = self.settings
        if settings.index:
            return self._filtered(self._checked(index.read_documents(Path(settings.index))))
        if settings.corpus:
            return self._filtered(corpus.read_corpus(settings.corpus, self.skip_bad_rows))
        if settings.context == "question":
            for question in self.questions:
                if not question.documents:
                    cause = f"--context question needs paragraphs, but question {question.id} has none"
                    raise R3LiteError(
                        cause, "Pass a --corpus instead of --context question.", code="context-without-paragraphs"
                    )
        findable = (replace(question, documents=self._findable(question)) for question in self.questions)
        documents = corpus.from_questions(findable)
        if not documents:
            raise nothing_to_search()
        return self._filtered(documents)

    def check(self) -> None:
        """Raises R3LiteError if --index is no index, or if there is nothing to search. Builds and loads nothing."""
        settings = self.settings
        if settings.index and Path(settings.index).exists():
            index.read_manifest(Path(settings.index))
        if settings.retriever in ("golden", "none") or not settings.from_questions:
            return
        if not any(question.documents for question in self.questions):
            raise nothing_to_search()

    @cached_property
    def index(self) -> index.PassageIndex:
        """Returns the index of --index; without one, builds it."""
        settings = self.settings
        if not settings.index:
            encoder = make_encoder(settings, self.documents)
            return index.build_index(self._cached(encoder), self.documents)
        loaded_encoder = None
        if self.default and self.default.searches_vectors:
            loaded_encoder = self.default.index.encoder
        opened = index.load(Path(settings.index), settings, loaded_encoder=loaded_encoder)
        self._checked(opened.documents)
        if settings.filter:
            opened = opened.only(filter_mask(settings.filter, opened.documents))
        return replace(opened, encoder=self._cached(opened.encoder))

    @cached_property
    def encoder(self) -> Encoder | None:
        """Returns the encoder for texts outside a corpus or index; None for hashing, which is made for one corpus."""
        if self.settings.encoder == HASHING:
            return None
        if self.searches_vectors:
            return self.index.encoder
        if self.default:
            return self.default.encoder
        return self._cached(make_encoder(self.settings, []))

    @cached_property
    def query_cache(self) -> QueryCache | None:
        """Returns the cache of --query-cache, or None."""
        settings = self.settings
        if self.default:
            return self.default.query_cache
        if not settings.query_cache:
            return None
        return QueryCache(settings.query_cache, settings.query_cache_mib)

    def _filtered(self, documents: Sequence[Document]) -> Sequence[Document]:
        """Returns the passages that fit --filter."""
        if not self.settings.filter:
            return documents
        mask = filter_mask(self.settings.filter, documents)
        if isinstance(documents, corpus.Passages):
            return documents.only(mask)
        return list(compress(documents, mask))

    def _cached(self, encoder: Encoder) -> Encoder:
        """Returns the encoder, with its queries going through --query-cache if there is one."""
        if self.query_cache is None or isinstance(encoder, CachedEncoder):
            return encoder
        return CachedEncoder(encoder, self.query_cache)

    @cached_property
    def reranker(self) -> Reranker:
        """Returns the cross-encoder of --rerank, here or on a server."""
        if self.default:
            return self.default.reranker
        name = self.settings.rerank
        if "://" in name:
            from r3lite.retrieval.remote import RemoteReranker

            return RemoteReranker(name)
        return CrossEncoder(name, self.settings.encoder_dtype)

    def _checked(self, documents: Sequence[Document]) -> Sequence[Document]:
        """Returns `documents`, the passages of the index. Raises R3LiteError if --corpus names other passages."""
        path = self.settings.corpus
        if not path:
            return documents
        named = corpus.stream_corpora([path], self.skip_bad_rows)
        if corpus.fingerprint(named) != corpus.fingerprint(documents):
            cause = f"the index {self.settings.index} was not built from the corpus {path}"
            raise R3LiteError(cause, "Pass only one of them.", code="index-corpus-differs")
        return documents

    def findable_places(self, questions: list[Question]) -> list[tuple[int, ...]] | None:
        """Returns for each question the places in `documents` of those of its own paragraphs that may be found.

        Returns None if searches are not confined to these.
        """
        if self.settings.context == "corpus":
            return None
        return [self._own_places(question) for question in questions]

    def _own_places(self, question: Question) -> tuple[int, ...]:
        paragraphs = self._findable(question)
        places = {self._places[document.title, document.text] for document in paragraphs}
        return tuple(sorted(places))

    def _findable(self, question: Question) -> tuple[Document, ...]:
        """Returns the paragraphs of a question that may be found: all of them, or those that --noise-rate leaves."""
        rate = self.settings.noise_rate
        if rate is None:
            return question.documents
        if not question.gold:
            remedy = "Remove it, or use HotpotQA, 2WikiMultiHopQA or MuSiQue."
            raise R3LiteError(
                f"--noise-rate needs gold paragraphs, but question {question.id} has none",
                remedy,
                code="noise-without-paragraphs",
            )
        noise = corpus.noise(question, rate, random.Random(f"{self.seed}/{question.id}/noise"))
        findable = []
        for document in question.documents:
            if document in noise or question.gold_index(document) is not None:
                findable.append(document)
        return tuple(findable)

    @cached_property
    def _places(self) -> dict[tuple[str, str], int]:
        """The place of each passage, by its title and text."""
        return {(document.title, document.text): place for place, document in enumerate(self.documents)}


def nothing_to_search() -> R3LiteError:
    """Returns the error for a search among the paragraphs of the questions if no question has any."""
    remedy = "Pass --corpus FILE.jsonl (id, title, text), --index FOLDER, or --retriever none."
    cause = "there is nothing to search: the questions in --data have no paragraphs"
    return R3LiteError(cause, remedy, code="nothing-to-search")


@dataclass(frozen=True)
class Condition:
    """A condition on a field: `key`, a sign (=, !=, or one of ORDERS) and the value that it is compared with."""

    key: str
    sign: str
    wanted: str

    def value(self, document: Document) -> str | float | bool | None:
        """Returns the value of the field in a passage; None if it has none."""
        fields = dict(document.metadata) | {"id": document.id, "title": document.title}
        return fields.get(self.key)

    def fits(self, value: str | float | bool) -> bool:
        """Returns True if a value fits.

        Numbers are compared as such, and texts in any letter case; `*` in `=` and `!=` stands for any text. Raises
        R3LiteError if the value is a number and `wanted` is none.
        """
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return self._fits_number(value)
        text = folded(str(value))
        wanted = folded(self.wanted)
        if self.sign in ORDERS:
            return ORDERS[self.sign](text, wanted)
        is_equal = _pattern(wanted).fullmatch(text) is not None
        return is_equal == (self.sign == "=")

    def _fits_number(self, value: float) -> bool:
        try:
            wanted = float(self.wanted)
        except ValueError:
            raise R3LiteError(
                f"--filter: {self.key} is a number", f"Compare it with one, not {self.wanted}.", code="filter-number"
            ) from None
        if self.sign in ORDERS:
            return ORDERS[self.sign](value, wanted)
        return (value == wanted) == (self.sign == "=")


@cache
def _pattern(wanted: str) -> re.Pattern:
    """Returns a pattern for a text in which each `*` stands for any text."""
    return re.compile(".*".join(map(re.escape, wanted.split("*"))))


def filter_mask(conditions: Sequence[str], documents: Sequence[Document]) -> np.ndarray:
    """Returns bool [N]: True for each passage that has the field of every condition with a value that fits.

    Raises R3LiteError if no passage has the field of a condition, which is probably misspelled, or if none fits.
    """
    parsed = [Condition(*CONDITION.fullmatch(text.strip()).groups()) for text in conditions]
    mask = np.zeros(len(documents), bool)
    fields = {"id", "title"}
    for place, document in enumerate(tqdm(documents, "filtering passages", unit="", **BRIEF)):
        fields.update(key for key, _ in document.metadata)
        mask[place] = all(_fits(condition, document) for condition in parsed)
    for text, condition in zip(conditions, parsed, strict=True):
        if condition.key not in fields:
            cause = f"--filter {text}: no passage has the field {condition.key!r}{nearest(condition.key, fields)}"
            raise R3LiteError(cause, f"Known fields: {', '.join(sorted(fields)[:SHOWN])}.", code="filter-field-unknown")
    if not mask.any():
        raise R3LiteError(
            f"no passage matches --filter {', '.join(conditions)}",
            "Remove or relax a condition.",
            code="filter-matches-nothing",
        )
    return mask


def _fits(condition: Condition, document: Document) -> bool:
    value = condition.value(document)
    return value is not None and condition.fits(value)
