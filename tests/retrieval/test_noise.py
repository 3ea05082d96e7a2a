"""--noise-rate: the share of a question's other paragraphs that stays, with whichever retriever can bring them."""

import pytest

from r3lite.core.config import Origin, UsageError
from r3lite.core.episode import Document, Question
from r3lite.core.errors import R3LiteError
from r3lite.core.needs import check_used
from r3lite.retrieval.golden import paragraphs
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.settings import EvaluateConfig, RetrievalSettings
from r3lite.settings.addresses import SERVICES
from r3lite.settings.retrieval import RETRIEVERS
from tests.errors import raises

DOCUMENTS = tuple(Document(f"q/{i}", f"Title {i}", f"Text {i} of the harbor.") for i in range(12))
ONE = Question("q", "?", ("a",), DOCUMENTS, gold=(DOCUMENTS[7], DOCUMENTS[2]), gold_by="title")
BARE = Question("bare", "?", ("a",), DOCUMENTS)


def retrieved_documents(retriever: str, question=ONE, **changes) -> set[Document]:
    """All that a retriever can bring of a question's paragraphs."""
    if retriever in ("lexical", "hybrid"):
        pytest.importorskip("bm25s")
    settings = RetrievalSettings(retriever=retriever, encoder="hashing", top_k=20, **changes)
    settings.check()
    (documents,) = build_retriever(Setup(settings, [question], 3))([(question, "the harbor of text 1")])
    return set(documents)


@pytest.mark.parametrize("context", ["corpus", "question"])
@pytest.mark.parametrize("retriever", ["semantic", "lexical", "hybrid"])
def test_a_search_finds_the_paragraphs_that_golden_would_mix(retriever, context):
    """Of the 10 that are not gold, and the gold ones always; without a rate, all are searched as ever."""
    for rate, noise_count in ((0.0, 0), (0.3, 3), (1.0, 10)):
        documents = retrieved_documents(retriever, context=context, noise_rate=rate)
        assert documents == set(paragraphs(ONE, rate, 3)) and len(documents) == 2 + noise_count
    assert retrieved_documents(retriever, context=context) == set(DOCUMENTS)


def test_what_is_gold_must_be_known():
    with raises(R3LiteError, "noise-without-paragraphs", "bare"):
        build_retriever(Setup(RetrievalSettings(encoder="hashing", noise_rate=0.5), [BARE]))


ELSEWHERE = [{"retriever": name} for name in ("none", *SERVICES, "http://host:1/retrieve", "qdrant://host:6333/x")]
ELSEWHERE += [
    {"retriever": name, kind: "x"} for name in ("semantic", "lexical", "hybrid") for kind in ("corpus", "index")
]


@pytest.mark.parametrize("settings", [{"retriever": name} for name in RETRIEVERS if name != "none"] + ELSEWHERE)
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_rate_is_used_or_refused(settings, rate):
    """What is not among the paragraphs of the questions has no such share."""
    RetrievalSettings(**settings).check()
    if settings in ELSEWHERE:
        config = EvaluateConfig(
            retrieval=RetrievalSettings(**settings, noise_rate=rate), set_by_user={"noise_rate": Origin.FLAG}
        )
        with raises(UsageError, "setting-unused"):
            check_used("evaluate", config)
    else:
        assert retrieved_documents(**settings, noise_rate=rate) != retrieved_documents(**settings, noise_rate=0.9)
