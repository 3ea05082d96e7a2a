"""The data that all layers share: questions, documents, steps and episodes, with their JSON forms.

Knows no text format, no tokens and no model.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from r3lite.core.records import Record

# The values of Episode.finish.
ANSWERED = "answered"
CUT_OFF = "cut_off"
MALFORMED = "malformed"
# The last turn searched although it had to answer. Occurs only with --learn answer, which samples the last turn of an
# episode several times (`Sequence.reopened`).
SEARCHING = "searching"


@dataclass(frozen=True)
class Document:
    """Holds a passage of a corpus or a paragraph that came with a question.

    A retriever sets `score`, and `source` to its own name. Neither is part of the passage: they are not written to
    files, and equality ignores them. `metadata` are further fields of the corpus; searches can be filtered by them.
    """

    id: str
    title: str
    text: str
    score: float | None = field(default=None, compare=False)  # higher is better; comparable within one search only
    source: str | None = field(default=None, compare=False)
    metadata: tuple[tuple[str, str | float | bool], ...] = ()

    def to_json(self) -> dict:
        record = {"id": self.id, "title": self.title, "text": self.text}
        if self.metadata:
            record["metadata"] = dict(self.metadata)
        return record

    @staticmethod
    def from_json(record: Record) -> "Document":
        title = record.text("title", blank=True)
        text = record.text("text", blank=True)
        return Document(record.identifier("id"), title, text, metadata=metadata_of(record))


def metadata_of(record: Record) -> tuple[tuple[str, str | float | bool], ...]:
    """Returns pairs (name, value) of a record's `metadata`, sorted by name. Leaves out lists, objects and nulls."""
    fields = record.values.get("metadata")
    if not isinstance(fields, dict):
        return ()
    allowed = (str, int, float)  # a bool is an int
    return tuple((key, value) for key, value in sorted(fields.items()) if isinstance(value, allowed))


@dataclass(frozen=True)
class Hop:
    """Holds one sub-question of a gold decomposition, which splits a multi-hop question into single-hop ones."""

    # In some data sets this is no question, but the name of something to look up. "#1" in it stands for the answer of
    # the first hop, "#2" for the answer of the second.
    question: str
    answer: str
    document: Document | None = None
    evidence: tuple[str, ...] = ()  # sentences of the document that state the answer; empty: the data set names none


def folded(text: str) -> str:
    """Returns the text case-folded, with one space for each run of white space."""
    return " ".join(text.split()).casefold()


@dataclass(frozen=True)
class Question:
    """Holds a question, and what its data set says about it.

    `source` chooses the layout of the episode. In training it is the name of the question's data set in [[sources]], in
    the server the name of a layout (`answering_live.layouts_of`). It has nothing to do with `Document.source`.
    """

    id: str
    text: str
    answers: tuple[str, ...]  # accepted answers
    documents: tuple[Document, ...] = ()  # the paragraphs that come with the question
    gold: tuple[Document, ...] = ()  # the supporting paragraphs
    # How a retrieved passage is recognized as a gold paragraph. "title": the titles are equal (HotpotQA and 2Wiki,
    # whose titles are unique). "text": titles and texts match (MuSiQue, where several paragraphs have the same title).
    gold_by: Literal["title", "text"] = "text"
    hops: tuple[Hop, ...] = ()  # the gold decomposition, if the data set has one
    type: str = ""  # the data set's type of question, such as bridge or comparison
    earlier: tuple[dict[str, str], ...] = ()  # messages (`role`, `content`) of the conversation before the question
    source: str = ""  # empty: the default layout
    procedure: str = ""  # instructions that stand before the question: how to answer such questions

    @property
    def hop_count(self) -> int:
        """Returns the number of hops of the decomposition; without one, of gold paragraphs; without these, 1."""
        return len(self.hops) or len(self.gold) or 1

    def gold_index(self, document: Document) -> int | None:
        """Returns the index in `gold` of the paragraph that `document` shows; None if it is no gold paragraph.

        If `gold_by` is "title", it is the first paragraph with the same title. Else the title must be the same, and one
        text a part of the other, because passages may be cut. Of several such paragraphs, the one with exactly the same
        text counts, else the first.
        """
        index = None
        for i, gold in enumerate(self.gold):
            if folded(gold.title) != folded(document.title):
                continue
            if self.gold_by == "title" or gold.text == document.text:
                return i
            if index is None and _is_part(gold.text, document.text):
                index = i
        return index

    def paragraph_key(self, document: Document) -> Hashable:
        """Returns a key that is equal for documents of the same paragraph.

        For a gold paragraph or a part of one, the key is the paragraph's index in `gold`. For other documents it is the
        title if `gold_by` is "title", else the id.
        """
        gold_index = self.gold_index(document)
        if gold_index is not None:
            return gold_index
        return folded(document.title) if self.gold_by == "title" else document.id

    def gold_indices(self, documents: Iterable[Document]) -> set[int]:
        """Returns the indices of the gold paragraphs among `documents`."""
        return set(map(self.gold_index, documents)) - {None}


def _is_part(text: str, other_text: str) -> bool:
    """Tells whether one of two texts is a part of the other; a blank text is part of a blank one only."""
    shorter, longer = sorted([folded(text), folded(other_text)], key=len)
    if not shorter:
        return not longer
    return shorter in longer


@dataclass(frozen=True)
class Search:
    """Holds a query with the documents retrieved for it."""

    query: str
    documents: tuple[Document, ...] = ()
    # The kind of source to search, such as News; it chooses the retriever. Empty: the format names no kinds.
    kind: str = ""

    def to_json(self) -> dict:
        """Returns the search's JSON form. There the key of `kind` is "source"."""
        record = {"query": self.query, "documents": [document.to_json() for document in self.documents]}
        if self.kind:
            record["source"] = self.kind
        return record

    @staticmethod
    def from_json(record: Record) -> "Search":
        documents = tuple(map(Document.from_json, record.records("documents", ())))
        query = record.text("query", blank=True)
        return Search(query, documents, kind=record.text("source", "", blank=True))


@dataclass(frozen=True)
class Step:
    """Holds one step: an analysis, then either searches (usually one) or the final answer."""

    analysis: str = ""
    searches: tuple[Search, ...] = ()
    answer: str | None = None
    faults: tuple[str, ...] = ()  # keys of the protocol's `faults`; a well-formed step has none
    verification: str = ""  # the check of an answer against the documents, in formats that ask for one

    @staticmethod
    def asking(analysis: str, query: str, documents: Sequence[Document] = (), faults: tuple[str, ...] = ()) -> "Step":
        """Returns a step with one search."""
        search = Search(query, tuple(documents))
        return Step(analysis, (search,), faults=faults)

    @property
    def queries(self) -> tuple[str, ...]:
        return tuple(search.query for search in self.searches)

    @property
    def documents(self) -> tuple[Document, ...]:
        """Returns the documents of all searches, in order."""
        return tuple(document for search in self.searches for document in search.documents)

    def with_documents(self, documents_by_search: Sequence[Sequence[Document]]) -> "Step":
        """Returns the step with these documents, one list per search."""
        searches = []
        for search, documents in zip(self.searches, documents_by_search, strict=True):
            searches.append(replace(search, documents=tuple(documents)))
        return replace(self, searches=tuple(searches))

    def to_json(self) -> dict:
        """Returns the step's JSON form.

        If the step has one search, without a `kind`, its keys `query` and `documents` are keys of the step. Otherwise
        the searches are a list at the key `searches`.
        """
        record = {"analysis": self.analysis}
        if len(self.searches) == 1 and not self.searches[0].kind:
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
        if record.text("query", None, blank=True) is not None:
            searches = [record]  # the keys of the single search are keys of the step, see to_json
        else:
            searches = record.records("searches", ())
        return Step(
            analysis=record.text("analysis", "", blank=True),
            searches=tuple(map(Search.from_json, searches)),
            answer=record.text("answer", None, blank=True),
            faults=record.texts("faults", ()),
            verification=record.text("verification", "", blank=True),
        )


@dataclass
class Episode:
    """Holds one attempt at a question."""

    question: Question
    steps: list[Step] = field(default_factory=list)
    # How the episode ended: ANSWERED, CUT_OFF, MALFORMED or SEARCHING. None: it goes on. The layout decides this for
    # sampled episodes (`Transcript.finish`); the server may cut them off. A teacher's trace that is scored like an
    # episode has ANSWERED.
    finish: str | None = None
    tokens_written: int | None = None  # number of action tokens; None: not known, as for a trajectory
    failure: str | None = None  # why the retriever failed at a query; the episode must not be scored. None: no failure

    @property
    def is_void(self) -> bool:
        """Returns whether no reward can be given for the episode, whichever rewards the settings choose.

        This is so if the retriever failed at a query, or if the last turn searched although it had to answer.
        """
        return bool(self.failure) or self.finish == SEARCHING

    @property
    def prediction(self) -> str:
        """Returns the answer of the last step that has one; empty if none has."""
        answers = [step.answer for step in self.steps if step.answer is not None]
        if not answers:
            return ""
        return answers[-1]

    @property
    def documents(self) -> list[Document]:
        """Returns the documents of all steps, in order."""
        return [document for step in self.steps for document in step.documents]

    @property
    def queries(self) -> list[str]:
        return [query for step in self.steps for query in step.queries]

    @property
    def search_count(self) -> int:
        return len(self.queries)

    def new_gold(self) -> list[set[int]]:
        """Returns for each step the indices of the gold paragraphs that this step was the first to retrieve."""
        retrieved: set[int] = set()
        by_step = []
        for step in self.steps:
            new = self.question.gold_indices(step.documents) - retrieved
            retrieved |= new
            by_step.append(new)
        return by_step

    @property
    def recall(self) -> float | None:
        """Returns the share of the gold paragraphs that the episode retrieved; None if the question has none."""
        gold = self.question.gold
        if not gold:
            return None
        return sum(map(len, self.new_gold())) / len(gold)

    def to_json(self) -> dict:
        """Returns a line of episodes.jsonl or predictions.jsonl, without rewards and scores.

        If the question has gold paragraphs, `gold_found` has the ids of the retrieved documents that show one of them.
        """
        record = {
            "id": self.question.id,
            "question": self.question.text,
            "answers": list(self.question.answers),
            "prediction": self.prediction,
            "steps": [step.to_json() for step in self.steps],
            "finish": self.finish,
        }
        if self.question.gold:
            gold_ids = [document.id for document in self.documents if self.question.gold_index(document) is not None]
            record["gold_found"] = list(dict.fromkeys(gold_ids))
        if self.question.procedure:
            record["procedure"] = self.question.procedure
        if self.failure:
            record["failure"] = self.failure
        return record


@dataclass(frozen=True)
class Failure:
    """Stands in place of the documents of a query at which the retriever failed."""

    reason: str


# A retriever as a function: from pairs (question, query) to one entry per pair, in order. The entry is the documents of
# the query, best first, or the failure of the query.
Retrieve = Callable[[list[tuple[Question, str]]], list[list[Document] | Failure]]


@dataclass(frozen=True)
class Routes:
    """Holds a default retriever, and retrievers for some kinds of source. `retrieve_all` chooses one per search."""

    default: Retrieve  # for searches that name no kind, or a kind without a retriever
    by_kind: Mapping[str, Retrieve]  # by the kind of source, Search.kind

    def __call__(self, pairs: list[tuple[Question, str]]) -> list[list[Document] | Failure]:
        """Searches with the default retriever, because the pairs name no kind of source."""
        return self.default(pairs)


def retrieve_all(retrieve: Retrieve, searches: Sequence[tuple[Question, Search]]) -> list[list[Document] | Failure]:
    """Returns the documents or the failure of each search, in order.

    Each retriever is called at most once, with all searches of its kind.
    """
    routes = retrieve if isinstance(retrieve, Routes) else Routes(retrieve, {})
    indices_by_kind: dict[str, list[int]] = {}  # indices of searches; the kind "" has the default retriever
    for i, (_, search) in enumerate(searches):
        kind = search.kind if search.kind in routes.by_kind else ""
        indices_by_kind.setdefault(kind, []).append(i)
    outcomes: dict[int, list[Document] | Failure] = {}  # by the index of the search
    for kind, indices in indices_by_kind.items():
        retrieve_kind = routes.by_kind.get(kind, routes.default)
        pairs = []
        for i in indices:
            question, search = searches[i]
            pairs.append((question, search.query))
        kind_outcomes = retrieve_kind(pairs)
        assert len(kind_outcomes) == len(pairs), "one list of documents, or a failure, per query"
        outcomes.update(zip(indices, kind_outcomes))
    return [outcomes[i] for i in range(len(searches))]
