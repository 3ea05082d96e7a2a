"""The golden retriever: a question's own supporting paragraphs, whatever is asked, with others beside them on demand.

It bounds what retrieval can achieve, and with noise it shows how a model bears paragraphs that do not help.
"""

import random
from dataclasses import replace

from r3lite.core.episode import Document, Question, Retrieve
from r3lite.core.errors import R3LiteError
from r3lite.retrieval.corpus import noise
from r3lite.retrieval.setup import Setup


def build(setup: Setup, top_k: int) -> Retrieve:
    """`top_k` counts nothing here: how many paragraphs support an answer is the question's affair."""
    if without := [q for q in setup.questions if not q.gold]:
        cause = f"--retriever golden (or --baseline gold) needs gold paragraphs; question {without[0].id} has none"
        raise R3LiteError(cause, "Use HotpotQA, 2WikiMultiHopQA or MuSiQue, or another --retriever.")
    return lambda pairs: [paragraphs(question, setup.settings.noise_rate, setup.seed) for question, _ in pairs]


def paragraphs(question: Question, noise_rate: float | None, seed: int) -> list[Document]:
    """The gold paragraphs in their order; mixed with so great a share of the question's others, if it is above 0.

    A question gets the same ones in the same order each time. Others are drawn at random, and all are shuffled, so
    that the order does not reveal which are gold.
    """
    documents = list(question.gold)
    if noise_rate:
        draw = random.Random(f"{seed}/{question.id}/noise")
        documents += noise(question, noise_rate, draw)
        draw.shuffle(documents)
    return [replace(d, source="golden") for d in documents]
