"""The golden retriever returns the gold paragraphs of a question for any query; with noise, some others beside them.

So it shows the most that retrieval can achieve; with noise, how a model copes with paragraphs that do not help.
"""

import random
from dataclasses import replace

from r3lite.core.episode import Document, Question, Retrieve
from r3lite.core.errors import R3LiteError
from r3lite.retrieval.corpus import noise
from r3lite.retrieval.setup import Setup


def golden_retriever(setup: Setup, top_k: int) -> Retrieve:
    """Returns the retriever. `top_k` has no effect: the question decides how many paragraphs support its answer.

    Raises R3LiteError if a question has none.
    """
    for question in setup.questions:
        if not question.gold:
            cause = f"--retriever golden (or --baseline gold) needs gold paragraphs; question {question.id} has none"
            raise R3LiteError(
                cause,
                "Use HotpotQA, 2WikiMultiHopQA or MuSiQue, or another --retriever.",
                code="golden-without-paragraphs",
            )
    noise_rate = setup.settings.noise_rate
    return lambda pairs: [paragraphs(question, noise_rate, setup.seed) for question, _ in pairs]


def paragraphs(question: Question, noise_rate: float | None, seed: int) -> list[Document]:
    """Returns the gold paragraphs in their order; with `noise_rate`, mixed with that share of the others.

    A question gets the same paragraphs in the same order each time. The others are drawn at random, and all are
    shuffled, so that the order does not reveal which are gold.
    """
    documents = list(question.gold)
    if noise_rate:
        draw = random.Random(f"{seed}/{question.id}/noise")
        documents += noise(question, noise_rate, draw)
        draw.shuffle(documents)
    return [replace(document, source="golden") for document in documents]
