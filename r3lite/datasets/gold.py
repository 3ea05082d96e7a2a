"""Demonstrations from gold decompositions, without a teacher: their queries, analyses and answers.

Texts for n hops with questions q_k and answers a_k:

    step 1      analysis "I need to find out: {q_1}"                            query "{q_1}"
    step k      analysis "{q_k-1} {a_k-1}. Next I need to find out: {q_k}"      query "{q_k}"
    step n + 1  analysis "{q_n} {a_n}. This gives the answer."                  answer "{final answer}"

A small model must write a fact down before it can use it: without the closing analysis it answers far worse.

For a protocol without search they are one step: analysis "{q_1} {a_1}. ... {q_n} {a_n}. This gives the answer."
"""

import random
import re
from collections.abc import Sequence

from r3lite.episode import Document, Question, Step


def obstacle(question: Question, max_hops: int, searches: bool = True) -> str | None:
    """Why no demonstration can be made of a question, or None; one that does not search needs no paragraphs."""
    if not question.hops:
        return "no decomposition"
    if len(question.hops) > max_hops:
        return f"more than {max_hops} hops"
    if searches and any(hop.document is None for hop in question.hops):
        return "a hop without a gold paragraph"
    return None


def queries(question: Question) -> list[str]:
    """The questions of the hops, with the answers of earlier ones filled in for `#1`, `#2`, ..."""

    filled: list[str] = []

    def fill(match: re.Match) -> str:
        before, earlier = match[1] or "", int(match[2])
        if not 1 <= earlier <= len(filled):
            return match[0]  # part of a name, such as Mambo #5
        answer = question.hops[earlier - 1].answer
        # MuSiQue has answers such as `in New Delhi`, which must not become `in in New Delhi`.
        return answer if before and answer.lower().startswith(before.lower()) else before + answer

    for hop in question.hops:
        filled.append(re.sub(r"(\b\w+ )?#(\d+)", fill, hop.question))
    return filled


def with_gold(
    question: Question, hop: int, documents: Sequence[Document], top_k: int, seed: str
) -> tuple[list[Document], bool]:
    """The documents of a hop with its gold paragraph among them, and whether the retriever found that itself.

    A missing paragraph replaces the last document and is put at a random place: a model would learn a fixed one.
    """
    gold = question.hops[hop].document
    if any(question.gold_index(d) == question.gold_index(gold) for d in documents):
        return list(documents), True
    kept = list(documents[: top_k - 1])
    kept.insert(random.Random(seed).randint(0, len(kept)), gold)
    return kept, False


def steps(question: Question, documents: Sequence[Sequence[Document]], hurried: bool = False) -> tuple[Step, ...]:
    """The steps of a demonstration; `documents[k]` are those of hop k.

    A `hurried` one leaves out the last hop and gives the answer before it as the final one: well-formed but wrong.
    """
    hops = question.hops[: len(question.hops) - hurried]
    asked, found = queries(question), ""
    written = []
    for query, hop, brought in zip(asked, hops, documents):
        opening = f"{found} Next I need to find out:" if found else "I need to find out:"
        written.append(Step.asking(f"{opening} {query}", query, brought))
        found = f"{query} {_sentence(hop.answer)}"
    answer = hops[-1].answer if hurried else question.answers[0]
    return *written, Step(f"{found} This gives the answer.", answer=answer)


def without_search(question: Question, hurried: bool = False) -> tuple[Step, ...]:
    """The only step of a demonstration that does not search: the facts of all hops, then the answer.

    A `hurried` one ends a hop too early, as in `steps`.
    """
    hops = question.hops[: len(question.hops) - hurried]
    facts = [f"{query} {_sentence(hop.answer)}" for query, hop in zip(queries(question), hops)]
    answer = hops[-1].answer if hurried else question.answers[0]
    return (Step(" ".join([*facts, "This gives the answer."]), answer=answer),)


def _sentence(text: str) -> str:
    return text if text.rstrip("\"'").endswith((".", "!", "?")) else f"{text}."
