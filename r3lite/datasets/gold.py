"""Demonstrations that follow a gold decomposition, without a teacher: their queries, analyses and answers.

They are those of protocols that plan or do not search, and of `--demonstrations sub-questions`. Texts for n hops with
questions q_k and answers a_k:

    step 1      analysis "I need to find out: {q_1}"                            query "{q_1}"
    step k      analysis "{q_k-1} {a_k-1}. Next I need to find out: {q_k}"      query "{q_k}"
    step n + 1  analysis "{q_n} {a_n}. This gives the answer."                  answer "{final answer}"

A small model must write a fact down before it can use it: without the closing analysis it answers far worse.

For a protocol that plans, step 1 is the plan, whose nodes are the hops and whose edges lead from a hop to those that
use its answer; each further step has the answers of a level of nodes, the last one the final answer as well.

For a protocol without search they are one step: analysis "{q_1} {a_1}. ... {q_n} {a_n}. This gives the answer."

What a comparison comes to is found by rule: a small model that has both dates right may still name the wrong film.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import replace

from r3lite.core.answer_match import normalize
from r3lite.core.episode import Document, Hop, Question, Search, Step
from r3lite.datasets.hops import name_of
from r3lite.protocols.base import Protocol, one_line
from r3lite.protocols.plan import Node, Plan

MONTHS = "january|february|march|april|may|june|july|august|september|october|november|december"
DATE = re.compile(
    rf"(?:(?P<month>{MONTHS}) (?P<day>\d{{1,2}}),? |(?:(?P<day_first>\d{{1,2}}) )?(?P<month_last>{MONTHS}),? )?"
    r"(?P<year>\d{3,4})",
    re.IGNORECASE,
)


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
        filled.append(re.sub(r"(\b\w+ )?#(\d{1,9})(?!\d)", fill, hop.question))
    return filled


def plan_of(question: Question) -> Plan:
    """The hops as nodes A, B, ...: `#1`, and the answer of an earlier hop that is named outright, as in HotpotQA's,
    become `{A}`, unless the question itself names it."""
    nodes, edges = [], []
    for i, hop in enumerate(question.hops):
        query = one_line(re.sub(r"[{}]", "", hop.question))
        for j, earlier in enumerate(question.hops[:i]):
            name = chr(ord("A") + j)
            query = re.sub(rf"#{j + 1}(?!\d)", f"{{{name}}}", query)
            literal = re.compile(rf"(?<!\w){re.escape(one_line(earlier.answer))}(?!\w)", re.IGNORECASE)
            if not literal.search(question.text):
                query = literal.sub(f"{{{name}}}", query)
            if f"{{{name}}}" in query:
                edges.append((name, chr(ord("A") + i)))
        nodes.append(Node(chr(ord("A") + i), query))
    return Plan(tuple(nodes), tuple(edges))


def planned_searches(question: Question) -> list[Search]:
    """The searches of the plan's nodes, with the gold answers of others filled in."""
    plan, answers = plan_of(question), _answers(question)
    return [Search(node.filled(answers), source=node.source) for node in plan.nodes]


def planned(question: Question, documents: Sequence[Sequence[Document]]) -> tuple[Step, ...]:
    """The steps of a demonstration that plans; arguments as in `steps`."""
    plan, answers = plan_of(question), _answers(question)
    found, said, written = dict(zip(answers, documents)), plan.text(), []
    for level in plan.levels:
        written.append(Step(said, tuple(Search(n.filled(answers), tuple(found[n.name]), n.source) for n in level)))
        said = "\n".join(f"{node.name}: {answers[node.name]}" for node in level)
    return *written, Step(said, answer=question.answers[0])


def _answers(question: Question) -> dict[str, str]:
    return {chr(ord("A") + i): one_line(hop.answer) for i, hop in enumerate(question.hops)}


def with_gold(
    question: Question, hop: int, found: Sequence[Document], top_k: int, seed: str
) -> tuple[list[Document], bool]:
    """The documents of a hop with its gold paragraph among them, and whether the retriever found that itself.

    A missing paragraph replaces the last document and is put at a random place: a model would learn a fixed one.
    """
    gold = question.hops[hop].document
    if any(question.gold_index(d) == question.gold_index(gold) for d in found):
        return list(found), True
    kept = list(found[: top_k - 1])
    kept.insert(random.Random(seed).randint(0, len(kept)), gold)
    return kept, False


def hasty(question: Question) -> Question:
    """A question without its last hop, whose answer is the one before that: well-formed but wrong to demonstrate."""
    return replace(question, hops=question.hops[:-1], answers=(question.hops[-2].answer,))


def shown(question: Question, documents: Sequence[Sequence[Document]], protocol: Protocol) -> tuple[Step, ...]:
    """The demonstration of a question in a protocol; `documents[k]` are those of hop k."""
    if protocol.plans:
        return planned(question, documents)
    if not protocol.searches:
        return without_search(question)
    return verified(question, steps(question, documents, protocol.most_queries), protocol)


def verified(question: Question, steps: Sequence[Step], protocol: Protocol) -> tuple[Step, ...]:
    """The steps; in a protocol that verifies, the last says by their numbers which documents show what was found."""
    if not protocol.verifies:
        return tuple(steps)
    numbered = [(number, d) for step in steps for number, d in enumerate(step.documents, 1)]
    found = {question.gold_index(d): f"[{number}] {one_line(d.title)} shows" for number, d in reversed(numbered)}
    hops = [(question.gold_index(hop.document), one_line(hop.answer)) for hop in question.hops]
    evidence = ", ".join(f"{found[i]} {answer}" for i, answer in hops if i in found)
    return *steps[:-1], replace(steps[-1], verification=evidence and _sentence(evidence))


def steps(question: Question, documents: Sequence[Sequence[Document]], most: int = 1) -> tuple[Step, ...]:
    """The steps of a demonstration; `documents[k]` are those of hop k. At most `most` are looked up at once, which do
    not wait for one another."""
    asked, groups = queries(question), [[]]
    for i, hop in enumerate(question.hops):
        if len(groups[-1]) == most or used(hop) & set(groups[-1]):
            groups.append([])
        groups[-1].append(i)
    found, written = "", []
    for group in groups:
        opening = f"{found} Next I need to find out:" if found else "I need to find out:"
        searches = tuple(Search(asked[i], tuple(documents[i])) for i in group)
        written.append(Step(f"{opening} {' '.join(asked[i] for i in group)}", searches))
        found = " ".join(f"{asked[i]} {_sentence(question.hops[i].answer)}" for i in group)
    return *written, Step(f"{found} This gives the answer.", answer=question.answers[0])


def without_search(question: Question) -> tuple[Step, ...]:
    """The only step of a demonstration that does not search: the facts of all hops, then the answer."""
    facts = [f"{query} {_sentence(hop.answer)}" for query, hop in zip(queries(question), question.hops)]
    return (Step(" ".join([*facts, "This gives the answer."]), answer=question.answers[0]),)


def _sentence(text: str) -> str:
    return text if text.rstrip("\"'").endswith((".", "!", "?")) else f"{text}."


def compared(question: Question) -> str | None:
    """What the last two facts of a comparison come to; None if they are not two, or are of another kind than these.

    `The Prairie King (June 9, 1956) is before Confessions of an Opium Eater (October 26, 1993).` if two dates decide,
    of what the question asks about; `India and Italian are not the same.` if it asks whether they are.
    """
    ends = sorted(set(range(len(question.hops))).difference(*map(used, question.hops)))
    if "comparison" not in question.type or len(ends) != 2:
        return None
    answer, facts = normalize(question.answers[0]), [question.hops[i].answer for i in ends]
    if answer in ("yes", "no") and "same" in question.text.split():
        return f"{facts[0]} and {facts[1]} are {'the same' if answer == 'yes' else 'not the same'}."
    names = [subject(question, i) for i in ends]
    parts = [(date(fact), f"{name} ({fact})") for name, fact in zip(names, facts, strict=True)]
    (first, earlier), (last, later) = sorted(parts, key=lambda one: one[0] or ())
    # Of two dates that begin alike one says only the year, or they are the same.
    decided = first and last[: len(first)] != first and sum(normalize(name) == answer for name in names) == 1
    return f"{earlier} is before {later}." if decided else None


def used(hop: Hop) -> set[int]:
    """The hops whose answers the sub-question of a hop refers to."""
    return {int(number) - 1 for number in re.findall(r"#(\d{1,9})(?!\d)", hop.question)}


def subject(question: Question, hop: int) -> str:
    """What a chain of hops begins with: the name of its first paragraph."""
    before = used(question.hops[hop])
    return subject(question, min(before)) if before else name_of(question.hops[hop].document.title)


def date(text: str) -> tuple[int, ...] | None:
    """Year, month and day, as far as the text has them; None if the text is no date."""
    if not (found := DATE.fullmatch(text.strip())):
        return None
    parts = [int(found["year"])]
    if month := found["month"] or found["month_last"]:
        parts.append(1 + MONTHS.split("|").index(month.lower()))
    if day := found["day"] or found["day_first"]:
        parts.append(int(day))
    return tuple(parts)
