"""The data that all rooms share: questions, documents, steps and episodes, with their JSON forms.

Knows no text format, no tokens and no model.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from r3lite.core.records import Record

ANSWERED, CUT_OFF, MALFORMED = "answered", "cut_off", "malformed"  # the values of Episode.finish


@dataclass(frozen=True)
class Document:
    """A passage of a corpus or a paragraph that came with a question.

    A retriever adds the score that it gave the passage and its own name. They are no part of the passage: files leave
    them out, and two documents that differ in nothing else are equal. `metadata` are its corpus' own fields, by which
    searches can be confined.
    """

    id: str
    title: str
    text: str
    score: float | None = field(default=None, compare=False)  # higher is better; comparable within one answer only
    source: str | None = field(default=None, compare=False)
    metadata: tuple[tuple[str, str | float | bool], ...] = ()

    def to_json(self) -> dict:
        record = {"id": self.id, "title": self.title, "text": self.text}
        return record | ({"metadata": dict(self.metadata)} if self.metadata else {})

    @staticmethod
    def from_json(record: Record) -> "Document":
        title, text = record.text("title", blank=True), record.text("text", blank=True)
        return Document(record.identifier("id"), title, text, metadata=metadata_of(record))


def metadata_of(record: Record) -> tuple[tuple[str, str | float | bool], ...]:
    """The texts, numbers, true and false of a record's `metadata`, by name; what else is in it is left out."""
    fields = record.values.get("metadata")
    if not isinstance(fields, dict):
        return ()
    return tuple((key, fields[key]) for key in sorted(fields) if isinstance(fields[key], (str, int, float)))


@dataclass(frozen=True)
class Hop:
    """One gold sub-question, or the name to look up. `#1` in it stands for the answer of the first hop, `#2` for the
    second's. `evidence` are the sentences of the document that state the answer, if they are known.
    """

    question: str
    answer: str
    document: Document | None = None
    evidence: tuple[str, ...] = ()


def folded(text: str) -> str:
    return " ".join(text.split()).casefold()


@dataclass(frozen=True)
class Question:
    """A question with what its data set knows about it.

    `documents` are the paragraphs that come with it, `gold` those that the answer needs, `hops` the decomposition
    if the data set has one. `gold_by` says how a passage of some corpus is recognised as a gold one: by title in
    HotpotQA and 2Wiki, whose titles are unique; by title and text in MuSiQue, where one title has many paragraphs.
    `type` is the data set's own word for the kind of question, such as bridge or comparison; empty if it has none.
    `earlier` are the messages (`role` and `content`) of the conversation that it is asked in, if it is in one.
    `source` tells questions apart that are laid out differently: a source of several, or a mode of the server.
    `procedure` is what stands before it: how to go about a question of its kind.
    """

    id: str
    text: str
    answers: tuple[str, ...]
    documents: tuple[Document, ...] = ()
    gold: tuple[Document, ...] = ()
    gold_by: Literal["title", "text"] = "text"
    hops: tuple[Hop, ...] = ()
    type: str = ""
    earlier: tuple[dict[str, str], ...] = ()
    source: str = ""
    procedure: str = ""

    @property
    def hop_count(self) -> int:
        """Length of the decomposition, else the number of gold paragraphs, else 1."""
        return len(self.hops) or len(self.gold) or 1

    def gold_index(self, document: Document) -> int | None:
        """Which gold paragraph `document` is (perhaps cut at its end, or a window of it), or None."""
        for i, gold in enumerate(self.gold):
            if folded(gold.title) == folded(document.title):
                shorter, longer = sorted((folded(gold.text), folded(document.text)), key=len)
                is_part = shorter in longer if shorter else not longer
                if self.gold_by == "title" or is_part:
                    return i
        return None

    def paragraph(self, document: Document) -> Hashable:
        """What tells a passage from others: of a gold paragraph, however it was cut, its number; else the title if the
        data set's gold paragraphs go by title, or the id."""
        gold = self.gold_index(document)
        name = document.title.casefold() if self.gold_by == "title" else document.id
        return name if gold is None else gold

    def gold_found(self, documents) -> set[int]:
        """Indices of the gold paragraphs among `documents`."""
        return {i for i in map(self.gold_index, documents) if i is not None}


@dataclass(frozen=True)
class Search:
    """A query with the documents retrieved for it; `source` is the kind of source that it is meant for, if any."""

    query: str
    documents: tuple[Document, ...] = ()
    source: str = ""

    def to_json(self) -> dict:
        record = {"query": self.query, "documents": [d.to_json() for d in self.documents]}
        return record | ({"source": self.source} if self.source else {})

    @staticmethod
    def from_json(record: Record) -> "Search":
        documents = tuple(map(Document.from_json, record.records("documents", ())))
        return Search(record.text("query", blank=True), documents, record.text("source", "", blank=True))


@dataclass(frozen=True)
class Step:
    """One step: an analysis, then either searches (mostly one) or the final answer.

    `verification` is what an answer was checked against before it was given, in protocols that ask for that. `faults`
    are names from the protocol's `faults`; a step without any is well-formed.
    """

    analysis: str = ""
    searches: tuple[Search, ...] = ()
    answer: str | None = None
    faults: tuple[str, ...] = ()
    verification: str = ""

    @staticmethod
    def asking(analysis: str, query: str, documents: Sequence[Document] = (), faults: tuple[str, ...] = ()) -> "Step":
        """A step with one search."""
        return Step(analysis, (Search(query, tuple(documents)),), faults=faults)

    @property
    def queries(self) -> tuple[str, ...]:
        return tuple(search.query for search in self.searches)

    @property
    def documents(self) -> tuple[Document, ...]:
        """Those of all its searches, in order."""
        return tuple(d for search in self.searches for d in search.documents)

    def with_documents(self, documents: Sequence[Sequence[Document]]) -> "Step":
        """The same step with these documents of each search."""
        pairs = zip(self.searches, documents, strict=True)
        return replace(self, searches=tuple(replace(search, documents=tuple(found)) for search, found in pairs))

    def to_json(self) -> dict:
        """A single search of no particular source stands as `query` and `documents`, all others under `searches`."""
        record = {"analysis": self.analysis}
        if len(self.searches) == 1 and not self.searches[0].source:
            record |= self.searches[0].to_json()
        elif self.searches:
            record["searches"] = [search.to_json() for search in self.searches]
        if self.verification:
            record["verification"] = self.verification
        if self.answer is not None:
            record["answer"] = self.answer
        if self.faults:
            record["faults"] = list(self.faults)
        return record

    @staticmethod
    def from_json(record: Record) -> "Step":
        if "query" in record and "searches" in record:
            raise record.error("has both 'query' and 'searches'")
        has_query = record.text("query", None, blank=True) is not None
        return Step(
            analysis=record.text("analysis", "", blank=True),
            searches=tuple(map(Search.from_json, [record] if has_query else record.records("searches", ()))),
            answer=record.text("answer", None, blank=True),
            faults=record.texts("faults", ()),
            verification=record.text("verification", "", blank=True),
        )


@dataclass
class Episode:
    """One attempt at a question: its steps, how it ended, and how many tokens the model wrote, if that is known.

    `failure` says why the retriever failed on one of its queries; its steps then say nothing about the model.
    """

    question: Question
    steps: list[Step] = field(default_factory=list)
    finish: str = CUT_OFF
    tokens_written: int | None = None
    failure: str | None = None

    @property
    def prediction(self) -> str:
        """The final answer; empty if there is none."""
        return next((s.answer for s in reversed(self.steps) if s.answer is not None), "")

    @property
    def documents(self) -> list[Document]:
        """All passages that were retrieved for its queries, in order."""
        return [d for s in self.steps for d in s.documents]

    @property
    def queries(self) -> list[str]:
        return [query for step in self.steps for query in step.queries]

    @property
    def searches(self) -> int:
        return len(self.queries)

    def new_gold(self) -> list[set[int]]:
        """For each step, the indices of the gold paragraphs that were retrieved first in it."""
        found: set[int] = set()
        news = []
        for step in self.steps:
            news.append(self.question.gold_found(step.documents) - found)
            found |= news[-1]
        return news

    @property
    def recall(self) -> float | None:
        """Share of the gold paragraphs that were retrieved in the whole episode; None if the question has none."""
        gold = self.question.gold
        return sum(map(len, self.new_gold())) / len(gold) if gold else None

    def to_json(self) -> dict:
        """As a line of episodes.jsonl or predictions.jsonl, which add its rewards or scores.

        `gold_found` has the ids of the passages among its documents that are gold ones, if those are known.
        """
        record = {
            "id": self.question.id,
            "question": self.question.text,
            "answers": list(self.question.answers),
            "prediction": self.prediction,
            "steps": [s.to_json() for s in self.steps],
            "finish": self.finish,
        }
        if self.question.gold:
            found = {d.id: None for d in self.documents if self.question.gold_index(d) is not None}
            record["gold_found"] = list(found)
        if self.question.procedure:
            record["procedure"] = self.question.procedure
        return record | ({"failure": self.failure} if self.failure else {})


@dataclass(frozen=True)
class Failure:
    """Why a query has no documents: not that nothing was found, but that the retriever failed."""

    reason: str


# From pairs of a question and a query about it to the documents of each query, best first, or why it has none.
Retrieve = Callable[[list[tuple[Question, str]]], list[list[Document] | Failure]]


@dataclass(frozen=True)
class Routes:
    """Retrievers by the kind of source that a search is meant for. Called as a retriever, it is the one of all others.

    One that fails fails the searches that are meant for it alone.
    """

    default: Retrieve
    of_source: Mapping[str, Retrieve]

    def __call__(self, pairs: list[tuple[Question, str]]) -> list[list[Document] | Failure]:
        return self.default(pairs)


def retrieve_all(retrieve: Retrieve, asked: Sequence[tuple[Question, Search]]) -> list[list[Document] | Failure]:
    """What each search brings; those that the same retriever answers are one call of it, in the order of `asked`."""
    routes = retrieve if isinstance(retrieve, Routes) else Routes(retrieve, {})
    sources = [search.source if search.source in routes.of_source else "" for _, search in asked]
    outcomes: dict[int, list[Document] | Failure] = {}
    for source in dict.fromkeys(sources):
        places = [i for i, own in enumerate(sources) if own == source]
        found = routes.of_source.get(source, routes.default)([(asked[i][0], asked[i][1].query) for i in places])
        assert len(found) == len(places), "one list of documents per query"
        outcomes |= zip(places, found)
    return [outcomes[i] for i in range(len(asked))]
