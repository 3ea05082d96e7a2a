"""The data that all rooms share: questions, documents, steps and episodes, with their JSON forms.

Knows no text format, no tokens and no model.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from r3lite.core.records import Record

# The values of Episode.finish.
ANSWERED = "answered"
CUT_OFF = "cut_off"
MALFORMED = "malformed"
SEARCHING = "searching"  # a query in a turn that may not search: of --learn answer alone


@dataclass(frozen=True)
class Document:
    """A passage of a corpus or a paragraph that came with a question.

    `score` and `source` are added by a retriever and belong to its answer, not to the passage: they are not written to
    files, and equality ignores them. `metadata` are further fields of the corpus, by which searches can be filtered.
    """

    id: str
    title: str
    text: str
    score: float | None = field(default=None, compare=False)  # higher is better; comparable within one search only
    source: str | None = field(default=None, compare=False)  # the retriever's name
    metadata: tuple[tuple[str, str | float | bool], ...] = ()

    def to_json(self) -> dict:
        record = {"id": self.id, "title": self.title, "text": self.text}
        return record | ({"metadata": dict(self.metadata)} if self.metadata else {})

    @staticmethod
    def from_json(record: Record) -> "Document":
        title, text = record.text("title", blank=True), record.text("text", blank=True)
        return Document(record.identifier("id"), title, text, metadata=metadata_of(record))


def metadata_of(record: Record) -> tuple[tuple[str, str | float | bool], ...]:
    """The strings, numbers and booleans of a record's `metadata`, sorted by name; other values are left out."""
    fields = record.values.get("metadata")
    if not isinstance(fields, dict):
        return ()
    return tuple((key, fields[key]) for key in sorted(fields) if isinstance(fields[key], (str, int, float)))


@dataclass(frozen=True)
class Hop:
    """One step of a gold decomposition."""

    question: str  # or a name to look up; `#1` stands for the answer of the first hop, `#2` for that of the second
    answer: str
    document: Document | None = None
    evidence: tuple[str, ...] = ()  # sentences of the document that state the answer, if they are known


def folded(text: str) -> str:
    """The text without differences of case and white space."""
    return " ".join(text.split()).casefold()


@dataclass(frozen=True)
class Question:
    """A question with what its data set has about it."""

    id: str
    text: str
    answers: tuple[str, ...]  # accepted ones
    documents: tuple[Document, ...] = ()  # the paragraphs that come with the question
    gold: tuple[Document, ...] = ()  # the supporting paragraphs
    # How a passage of any corpus is recognized as gold: by title in HotpotQA and 2Wiki, whose titles are unique; by
    # title and text in MuSiQue, where several paragraphs have the same title.
    gold_by: Literal["title", "text"] = "text"
    hops: tuple[Hop, ...] = ()  # the gold decomposition, if the data set has one
    type: str = ""  # by the data set, such as bridge or comparison
    earlier: tuple[dict[str, str], ...] = ()  # messages (`role`, `content`) of the conversation before the question
    source: str = ""  # name of the [[sources]] entry or of the server's mode, which chooses the layout
    procedure: str = ""  # instructions before the question: how to answer questions of its kind

    @property
    def hop_count(self) -> int:
        """Length of the decomposition, else the number of gold paragraphs, else 1."""
        return len(self.hops) or len(self.gold) or 1

    def gold_index(self, document: Document) -> int | None:
        """The index of the gold paragraph that `document` is, whole or a part of it; None if it is none."""
        for i, gold in enumerate(self.gold):
            if folded(gold.title) == folded(document.title):
                shorter, longer = sorted((folded(gold.text), folded(document.text)), key=len)
                is_part = shorter in longer if shorter else not longer
                if self.gold_by == "title" or is_part:
                    return i
        return None

    def paragraph(self, document: Document) -> Hashable:
        """A key that is equal for documents of the same paragraph: the index of a gold paragraph, however it was cut,
        else the title or the id, as `gold_by` says."""
        gold = self.gold_index(document)
        name = document.title.casefold() if self.gold_by == "title" else document.id
        return name if gold is None else gold

    def gold_found(self, documents) -> set[int]:
        """Indices of the gold paragraphs among `documents`."""
        return {i for i in map(self.gold_index, documents) if i is not None}


@dataclass(frozen=True)
class Search:
    """A query with the documents retrieved for it."""

    query: str
    documents: tuple[Document, ...] = ()
    source: str = ""  # the kind of source to search, in formats that name one

    def to_json(self) -> dict:
        record = {"query": self.query, "documents": [d.to_json() for d in self.documents]}
        return record | ({"source": self.source} if self.source else {})

    @staticmethod
    def from_json(record: Record) -> "Search":
        documents = tuple(map(Document.from_json, record.records("documents", ())))
        return Search(record.text("query", blank=True), documents, record.text("source", "", blank=True))


@dataclass(frozen=True)
class Step:
    """One step: an analysis, then either searches (usually one) or the final answer."""

    analysis: str = ""
    searches: tuple[Search, ...] = ()
    answer: str | None = None
    faults: tuple[str, ...] = ()  # keys of the protocol's `faults`; a well-formed step has none
    verification: str = ""  # the check of an answer against the documents, in formats that ask for one

    @staticmethod
    def asking(analysis: str, query: str, documents: Sequence[Document] = (), faults: tuple[str, ...] = ()) -> "Step":
        """A step with one search."""
        return Step(analysis, (Search(query, tuple(documents)),), faults=faults)

    @property
    def queries(self) -> tuple[str, ...]:
        return tuple(search.query for search in self.searches)

    @property
    def documents(self) -> tuple[Document, ...]:
        """The documents of all searches, in order."""
        return tuple(d for search in self.searches for d in search.documents)

    def with_documents(self, documents: Sequence[Sequence[Document]]) -> "Step":
        """The step with these documents, one list per search."""
        pairs = zip(self.searches, documents, strict=True)
        return replace(self, searches=tuple(replace(search, documents=tuple(found)) for search, found in pairs))

    def to_json(self) -> dict:
        """As JSON. A single search without a source has the keys `query` and `documents`; others are in `searches`."""
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
    """One attempt at a question."""

    question: Question
    steps: list[Step] = field(default_factory=list)
    finish: str = CUT_OFF  # or ANSWERED, MALFORMED, SEARCHING
    tokens_written: int | None = None  # by the model, if known
    failure: str | None = None  # why the retriever failed at a query: then the episode must not be scored

    @property
    def prediction(self) -> str:
        """The final answer; empty if there is none."""
        return next((s.answer for s in reversed(self.steps) if s.answer is not None), "")

    @property
    def documents(self) -> list[Document]:
        """The documents of all steps, in order."""
        return [d for s in self.steps for d in s.documents]

    @property
    def queries(self) -> list[str]:
        return [query for step in self.steps for query in step.queries]

    @property
    def searches(self) -> int:
        return len(self.queries)

    def new_gold(self) -> list[set[int]]:
        """For each step, the indices of the gold paragraphs that no earlier step retrieved."""
        found: set[int] = set()
        news = []
        for step in self.steps:
            news.append(self.question.gold_found(step.documents) - found)
            found |= news[-1]
        return news

    @property
    def recall(self) -> float | None:
        """Share of the gold paragraphs that the episode retrieved; None if the question has none."""
        gold = self.question.gold
        return sum(map(len, self.new_gold())) / len(gold) if gold else None

    def to_json(self) -> dict:
        """As a line of episodes.jsonl or predictions.jsonl, without rewards and scores.

        `gold_found` has the ids of the retrieved documents that are gold paragraphs, if the question has gold.
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
    """The outcome of a query at which the retriever failed, in place of its documents."""

    reason: str


# From pairs (question, query) to the documents of each query, best first, or its failure.
Retrieve = Callable[[list[tuple[Question, str]]], list[list[Document] | Failure]]


@dataclass(frozen=True)
class Routes:
    """A retriever per kind of source; called as a retriever, it is the default one."""

    default: Retrieve
    of_source: Mapping[str, Retrieve]

    def __call__(self, pairs: list[tuple[Question, str]]) -> list[list[Document] | Failure]:
        return self.default(pairs)


def retrieve_all(retrieve: Retrieve, asked: Sequence[tuple[Question, Search]]) -> list[list[Document] | Failure]:
    """The outcome of each search, in order; all searches of one retriever are one call of it."""
    routes = retrieve if isinstance(retrieve, Routes) else Routes(retrieve, {})
    sources = [search.source if search.source in routes.of_source else "" for _, search in asked]
    outcomes: dict[int, list[Document] | Failure] = {}
    for source in dict.fromkeys(sources):
        places = [i for i, own in enumerate(sources) if own == source]
        found = routes.of_source.get(source, routes.default)([(asked[i][0], asked[i][1].query) for i in places])
        assert len(found) == len(places), "one list of documents per query"
        outcomes |= zip(places, found)
    return [outcomes[i] for i in range(len(asked))]
