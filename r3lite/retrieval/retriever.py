"""The retrievers by name: each is a function from pairs of a question and a query about it to documents.

Owns the choice of corpus and retriever from the settings. Knows no rollout.
"""

from pathlib import Path

from r3lite.episode import Document, Question, Retrieve
from r3lite.errors import R3LiteError
from r3lite.retrieval import corpus, index
from r3lite.retrieval.encoder import make_encoder
from r3lite.settings import RetrievalSettings


def build_retriever(
    settings: RetrievalSettings, questions: list[Question], progress: bool = True, skip_bad_rows: bool = False
) -> Retrieve:
    """The retriever of the settings: a function from pairs (question, query) to the documents of each, best first.

    It works on the CPU. `questions` are the corpus if no other is named. `skip_bad_rows` leaves out bad lines of
    --corpus; `progress` shows a bar while an index is built.
    """
    return RETRIEVERS[settings.retriever](settings, questions, progress, skip_bad_rows)


def _none(settings: RetrievalSettings, questions: list[Question], progress: bool, skip_bad_rows: bool) -> Retrieve:
    return lambda pairs: [[] for _ in pairs]


def _golden(settings: RetrievalSettings, questions: list[Question], progress: bool, skip_bad_rows: bool) -> Retrieve:
    if not any(q.gold for q in questions):
        raise R3LiteError(
            "--retriever golden needs gold paragraphs, and no question in --data has any",
            "Use HotpotQA, 2WikiMultiHopQA or MuSiQue, or another retriever.",
        )
    return lambda pairs: [list(question.gold) for question, _ in pairs]


def _semantic(settings: RetrievalSettings, questions: list[Question], progress: bool, skip_bad_rows: bool) -> Retrieve:
    return Semantic(open_index(settings, questions, progress, skip_bad_rows), settings.top_k)


# By the values of --retriever.
RETRIEVERS = {"semantic": _semantic, "golden": _golden, "none": _none}


class Semantic:
    """Nearest passages by embedding. All pairs of a call are one batch; equal queries are encoded once."""

    def __init__(self, passages: index.PassageIndex, top_k: int):
        self.passages, self.top_k = passages, top_k

    def __call__(self, pairs: list[tuple[Question, str]]) -> list[list[Document]]:
        queries = list(dict.fromkeys(query for _, query in pairs))
        found = dict(zip(queries, self.passages.search(queries, self.top_k), strict=True))
        return [list(found[query]) for _, query in pairs]


def open_index(
    settings: RetrievalSettings, questions: list[Question], progress: bool = True, skip_bad_rows: bool = False
) -> index.PassageIndex:
    """The index of --index; else one built now of --corpus, or of the paragraphs that come with the questions."""
    if settings.index:
        opened = index.load(settings.index, settings.encoder, settings.encoder_style)
        if settings.corpus:
            _check_corpus(settings, opened, skip_bad_rows)
        return opened
    if settings.corpus:
        documents = corpus.read_corpus(settings.corpus, skip_bad_rows)
    else:
        documents = corpus.from_questions(questions)
    if not documents:
        raise R3LiteError(
            "there is nothing to retrieve from: the questions in --data come without paragraphs",
            "Pass --corpus FILE.jsonl (id, title, text), --index FOLDER, or --retriever none.",
        )
    return index.build(make_encoder(settings.encoder, settings.encoder_style, documents), documents, progress)


def _check_corpus(settings: RetrievalSettings, opened: index.PassageIndex, skip_bad_rows: bool) -> None:
    """An index that was built of another corpus than the one named beside it is refused."""
    documents = corpus.read_corpus(settings.corpus, skip_bad_rows)
    if corpus.fingerprint(documents) != corpus.fingerprint(opened.documents):
        raise R3LiteError(
            f"the index {settings.index} was not built of the corpus {settings.corpus}",
            f"Pass one of them only, or build it again: python -m r3lite.index --corpus {Path(settings.corpus)} "
            f"--encoder {settings.encoder} --output {settings.index}",
        )
