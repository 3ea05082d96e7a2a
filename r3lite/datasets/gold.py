"""Demonstrations that follow a gold decomposition, without a teacher: their queries, analyses and answers.

Protocols that plan and protocols without search always have these demonstrations; the others have them with
`--demonstrations sub-questions`. The texts for n hops with questions q_k and answers a_k are:

    step 1      analysis "I need to find out: {q_1}"                            query "{q_1}"
    step k      analysis "{q_k-1} {a_k-1}. Next I need to find out: {q_k}"      query "{q_k}"
    step n + 1  analysis "{q_n} {a_n}. This gives the answer."                  answer "{final answer}"

A small model must write a fact down before it can use it: without the closing analysis it answers far worse.

For a protocol that plans, the analysis of step 1 is the plan, whose nodes are the hops and whose edges lead from a hop
to those that use its answer. The analysis of each further step has the answers of the nodes that the step before
searched, and the last step also has the final answer.

For a protocol without search there is one step: analysis "{q_1} {a_1}. ... {q_n} {a_n}. This gives the answer."

`compared` states the result of a comparison by rule: a small model that has both dates right may still name the wrong
film. demonstrations.py uses it.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from r3lite.core.answer_match import normalize
from r3lite.core.episode import Document, Hop, Question, Search, Step
from r3lite.datasets.hops import name_of
from r3lite.protocols.base import Protocol, one_line
from r3lite.protocols.plan import Node, SearchPlan

MONTHS = "january|february|march|april|may|june|july|august|september|october|november|december"
# June 9, 1956; 9 June 1956; June 1956; 1956
DATE = re.compile(
    rf"(?:(?P<month>{MONTHS}) (?P<day>\d{{1,2}}),? |(?:(?P<day_first>\d{{1,2}}) )?(?P<month_last>{MONTHS}),? )?"
    r"(?P<year>\d{3,4})",
    re.IGNORECASE,
)


def obstacle(question: Question, max_hops: int, searches: bool = True) -> str | None:
    """Returns why a question cannot be demonstrated; None if it can.

    Without `searches`, the hops need no gold paragraphs.
    """
    if not question.hops:
        return "no decomposition"
    if len(question.hops) > max_hops:
        return f"more than {max_hops} hops"
    if searches and any(hop.document is None for hop in question.hops):
        return "a hop without a gold paragraph"
    return None


def queries(question: Question) -> list[str]:
    """Returns the questions of the hops, with the answers of earlier hops filled in for `#1`, `#2`, ..."""
    return [_filled(hop.question, question.hops[:i]) for i, hop in enumerate(question.hops)]


def _filled(sub_question: str, earlier_hops: Sequence[Hop]) -> str:
    """Returns the question of a hop with the answers of earlier hops in place of `#1`, `#2`, ..."""

    def answer_of(reference: re.Match) -> str:
        preposition = reference[1] or ""
        number = int(reference[2])
        if not 1 <= number <= len(earlier_hops):
            return reference[0]  # part of a name, such as Mambo #5
        answer = earlier_hops[number - 1].answer
        # MuSiQue has answers such as `in New Delhi`, which must not become `in in New Delhi`.
        if preposition and answer.lower().startswith(preposition.lower()):
            return answer
        return preposition + answer

    return re.sub(r"(\b\w+ )?#(\d{1,9})(?!\d)", answer_of, sub_question)


def search_plan_of(question: Question) -> SearchPlan:
    """Returns the hops as nodes A, B, ...

    In later sub-questions `{A}` replaces `#1`. It also replaces the answer of hop 1 itself, unless this answer
    stands in the question. An edge leads from a node to each node whose query refers to it.
    """
    nodes = []
    edges = []
    for i, hop in enumerate(question.hops):
        name = _node_name(i)
        query = one_line(re.sub(r"[{}]", "", hop.question))
        for j, earlier_hop in enumerate(question.hops[:i]):
            earlier_name = _node_name(j)
            reference = f"{{{earlier_name}}}"
            query = re.sub(rf"#{j + 1}(?!\d)", reference, query)
            answer = re.escape(one_line(earlier_hop.answer))
            # Not behind a brace: an answer may be the letter of a node, such as vitamin B.
            literal = re.compile(rf"(?<![\w{{]){answer}(?!\w)", re.IGNORECASE)
            if not literal.search(question.text):
                query = literal.sub(reference, query)
            if reference in query:
                edges.append((earlier_name, name))
        nodes.append(Node(name, query))
    return SearchPlan(tuple(nodes), tuple(edges))


def _node_name(number: int) -> str:
    return chr(ord("A") + number)


def planned_searches(question: Question) -> list[Search]:
    """Returns the searches of the plan's nodes, with the gold answers of the nodes that they refer to filled in."""
    plan = search_plan_of(question)
    answers = _answers(question)
    return [Search(node.filled(answers), kind=node.kind) for node in plan.nodes]


def planned(question: Question, documents: Sequence[Sequence[Document]]) -> tuple[Step, ...]:
    """Returns the steps of a demonstration that plans; `documents[k]` are those of hop k."""
    plan = search_plan_of(question)
    answers = _answers(question)
    documents_of_node = {node.name: documents[hop] for hop, node in enumerate(plan.nodes)}
    analysis = plan.text()
    search_steps = []
    for level in plan.levels:
        searches = []
        for node in level:
            query = node.filled(answers)
            searches.append(Search(query, tuple(documents_of_node[node.name]), node.kind))
        search_steps.append(Step(analysis, tuple(searches)))
        analysis = "\n".join(f"{node.name}: {answers[node.name]}" for node in level)  # of the next step
    return *search_steps, Step(analysis, answer=question.answers[0])


def _answers(question: Question) -> dict[str, str]:
    """Returns the answers of the hops by the names of their nodes in the plan."""
    return {_node_name(i): one_line(hop.answer) for i, hop in enumerate(question.hops)}


def with_gold(
    question: Question,
    hop: int,
    retrieved: Sequence[Document],
    top_k: int,
    seed: str,
) -> tuple[list[Document], bool]:
    """Returns the documents of a hop with its gold paragraph among them, and whether the retriever found the paragraph.

    If it did not, the paragraph replaces the last of `top_k` documents. It is put at a random place, because a model
    would learn a fixed place.
    """
    gold = question.hops[hop].document
    gold_index = question.gold_index(gold)
    if gold_index is not None and any(question.gold_index(document) == gold_index for document in retrieved):
        return list(retrieved), True
    documents = list(retrieved[: top_k - 1])
    documents.insert(random.Random(seed).randint(0, len(documents)), gold)
    return documents, False


def hasty(question: Question) -> Question:
    """Returns the question without its last hop; its answer is the answer of the hop before.

    A demonstration of the returned question is well-formed, but gives a wrong answer.
    """
    answer = question.hops[-2].answer
    return replace(question, hops=question.hops[:-1], answers=(answer,))


def demonstration(question: Question, documents: Sequence[Sequence[Document]], protocol: Protocol) -> tuple[Step, ...]:
    """Returns the steps that demonstrate a question in a protocol; `documents[k]` are those of hop k."""
    if protocol.plans:
        return planned(question, documents)
    if not protocol.can_search:
        return without_search(question)
    return verified(question, with_searches(question, documents, protocol.most_queries), protocol)


def verified(question: Question, steps: Sequence[Step], protocol: Protocol) -> tuple[Step, ...]:
    """Returns the steps; in a protocol that verifies, the last one has a verification.

    The verification cites, as [n], the documents that show the facts; n counts the documents of a step.
    """
    if not protocol.verifies:
        return tuple(steps)
    # By the index of a gold paragraph: `[2] Silent Harbour shows`, if `gold_index` takes document 2 for it, and none
    # before.
    citations: dict[int, str] = {}
    for step in steps:
        for number, document in enumerate(step.documents, 1):
            index = question.gold_index(document)
            if index is not None:
                citations.setdefault(index, f"[{number}] {one_line(document.title)} shows")
    facts = []
    for hop in question.hops:
        index = question.gold_index(hop.document)
        if index in citations:
            facts.append(f"{citations[index]} {one_line(hop.answer)}")
    verification = ""
    if facts:
        verification = _sentence(", ".join(facts))
    return *steps[:-1], replace(steps[-1], verification=verification)


def with_searches(
    question: Question,
    documents: Sequence[Sequence[Document]],
    most_queries: int = 1,
) -> tuple[Step, ...]:
    """Returns the steps of a demonstration that searches; `documents[k]` are those of hop k.

    A step looks up at most `most_queries` hops, none of which uses the answer of another hop of the step.
    """
    sub_questions = queries(question)
    hops_of_step: list[list[int]] = [[]]
    for i in range(len(question.hops)):
        is_full = len(hops_of_step[-1]) == most_queries
        waits = referenced_hops(question, i) & set(hops_of_step[-1])
        if is_full or waits:
            hops_of_step.append([])
        hops_of_step[-1].append(i)
    lead_in = "I need to find out:"
    facts = ""  # of the latest step
    search_steps = []
    for hops in hops_of_step:
        step_queries = [sub_questions[i] for i in hops]
        searches = tuple(Search(sub_questions[i], tuple(documents[i])) for i in hops)
        search_steps.append(Step(f"{lead_in} {' '.join(step_queries)}", searches))
        answers = [_sentence(question.hops[i].answer) for i in hops]
        facts = " ".join(f"{query} {answer}" for query, answer in zip(step_queries, answers))
        lead_in = f"{facts} Next I need to find out:"
    return *search_steps, Step(f"{facts} This gives the answer.", answer=question.answers[0])


def without_search(question: Question) -> tuple[Step, ...]:
    """Returns the only step of a demonstration that does not search: the facts of all hops, then the answer."""
    facts = [f"{query} {_sentence(hop.answer)}" for query, hop in zip(queries(question), question.hops)]
    analysis = " ".join([*facts, "This gives the answer."])
    return (Step(analysis, answer=question.answers[0]),)


def _sentence(text: str) -> str:
    """Returns a text that ends like a sentence."""
    if text.rstrip("\"'").endswith((".", "!", "?")):
        return text
    return f"{text}."


def compared(question: Question) -> str | None:
    """Returns a sentence that compares the two facts of a comparison; None for other questions.

    The facts are the answers of the two hops that no further hop uses. If the question asks whether they are the same,
    the sentence is `India and Italy are not the same.`, or `They are not the same.` if the facts are sentences. If they
    are two dates, one of which is earlier, and exactly one of the compared things is the answer, it is `The Prairie
    King (June 9, 1956) is before Confessions of an Opium Eater (October 26, 1993).`
    """
    hop_count = len(question.hops)
    used_hops: set[int] = set()
    for hop in range(hop_count):
        used_hops |= referenced_hops(question, hop)
    last_hops = [hop for hop in range(hop_count) if hop not in used_hops]
    if "comparison" not in question.type or len(last_hops) != 2:
        return None
    answer = normalize(question.answers[0])
    facts = [question.hops[hop].answer for hop in last_hops]
    if answer in ("yes", "no") and re.search(r"\bsame\b", question.text):
        verdict = "not the same"
        if answer == "yes":
            verdict = "the same"
        compared_facts = f"{facts[0]} and {facts[1]}"
        # The facts of HotpotQA are supporting sentences. They stand in the analysis just before the returned sentence.
        if any(hop.answer == " ".join(hop.evidence) for hop in question.hops):
            compared_facts = "They"
        return f"{compared_facts} are {verdict}."
    names = [subject(question, hop) for hop in last_hops]
    dated_facts = []
    for name, fact in zip(names, facts, strict=True):
        dated_facts.append(_DatedFact(date(fact) or (), f"{name} ({fact})"))
    earlier, later = sorted(dated_facts, key=lambda fact: fact.date)
    # Equal dates have no order, nor have dates that are equal as far as the less exact one goes: 1956 and June 9, 1956.
    is_decided = earlier.date and later.date[: len(earlier.date)] != earlier.date
    # `subject` guesses the names. If exactly one of them is the answer, the guess is taken to be right.
    if is_decided and sum(normalize(name) == answer for name in names) == 1:
        return f"{earlier.text} is before {later.text}."
    return None


class _DatedFact(NamedTuple):
    """A compared thing with its date."""

    date: tuple[int, ...]  # year, month and day, as far as the fact has them; empty if it is no date
    text: str  # the name of the thing, and the fact in brackets


def referenced_hops(question: Question, hop: int) -> set[int]:
    """Returns the indices of the earlier hops whose answers the sub-question of a hop refers to."""
    numbers = map(int, re.findall(r"#(\d{1,9})(?!\d)", question.hops[hop].question))
    return {number - 1 for number in numbers if 1 <= number <= hop}  # others are parts of names, such as Mambo #5


def subject(question: Question, hop: int) -> str:
    """Returns what a hop is about in the end: the name of the first paragraph of the chain that leads to the hop."""
    earlier_hops = referenced_hops(question, hop)
    if earlier_hops:
        return subject(question, min(earlier_hops))
    return name_of(question.hops[hop].document.title)


def date(text: str) -> tuple[int, ...] | None:
    """Returns (year,), (year, month) or (year, month, day), as far as the text has them; None if it is no date."""
    match = DATE.fullmatch(text.strip())
    if match is None:
        return None
    parts = [int(match["year"])]
    month = match["month"] or match["month_last"]
    if month:
        parts.append(1 + MONTHS.split("|").index(month.lower()))
    day = match["day"] or match["day_first"]
    if day:
        parts.append(int(day))
    return tuple(parts)
