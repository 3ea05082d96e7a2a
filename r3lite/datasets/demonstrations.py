"""Gold trajectories of a set of questions, without a teacher: by sub-questions (gold.py), or by evidence. Trajectories
by evidence write down what a retriever found:

    step 1      analysis names what the question names                       query: the question itself
    step k      analysis the facts that are newly found                      query: the name that is missing
    last step   analysis the same                                            answer

A fact is "{sub-question} {answer}." where the data set has sub-questions (2WikiMultiHopQA, MuSiQue), else "{title}:
{supporting sentences}" (HotpotQA). Every fact is written once, and stands in a document that was retrieved: nothing is
inserted. The last analysis of a comparison ends with what its facts come to (gold.py). A query uses only what was found
before it; of several possible queries, the first that finds something new is asked. A question that cannot be answered
in this way is rejected, with the reason.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from r3lite.core.answer_match import VERDICTS, normalize, stands_in
from r3lite.core.episode import Document, Failure, Question, Retrieve, Search, Step, folded, retrieve_all
from r3lite.core.files import write_jsonl
from r3lite.datasets import gold
from r3lite.datasets.collected import Tally, rejections_of
from r3lite.datasets.gold import compared, queries, used
from r3lite.datasets.hops import name_of
from r3lite.datasets.teacher import WITHOUT_SEARCH
from r3lite.datasets.trajectories import Trajectory, check_steps
from r3lite.protocols.base import Protocol, one_line, same_query
from r3lite.settings import CollectConfig, LengthSettings

MISSED = "a query that does not find its gold paragraph"
CHARACTERS = 4  # characters of English text per token, about: the limit of a document's length is in tokens
QUOTED = 600  # most characters that a step quotes: a step must fit into a turn of the model
RETRIEVER_FAILED = "the retriever failed"


def write_gold(
    config: CollectConfig, questions: list[Question], protocol: Protocol, retrieve: Retrieve, output: Path
) -> Tally:
    """Writes a trajectory for every question with a decomposition whose hops the retriever finds.

    Before that, writes the other questions' ids and the reasons to `<output>.rejected.jsonl`.
    """
    tally = Tally(len(questions))
    uses_evidence = config.collect.demonstrations == "evidence" and protocol.can_search and not protocol.plans
    usable = []
    for question in questions:
        reason = gold.obstacle(question, config.lengths.max_hops, searches=protocol.can_search)
        if not reason and not uses_evidence:
            reason = _problem_of_sub_questions(config, question, protocol)
        if reason:
            tally.reject(question, reason)
        else:
            usable.append(question)
    if uses_evidence:
        trajectories = by_evidence(usable, protocol, retrieve, lengths=config.lengths, tally=tally)
    else:
        trajectories = by_sub_questions(config, usable, protocol, retrieve=retrieve, tally=tally)
    if tally.rejections:
        write_jsonl(rejections_of(output), tally.rejections)
    else:
        rejections_of(output).unlink(missing_ok=True)  # of a run that was killed before it wrote the trajectories
    write_jsonl(output, (trajectory.to_json() for trajectory in trajectories))
    return tally


def _problem_of_sub_questions(config: CollectConfig, question: Question, protocol: Protocol) -> str | None:
    """Returns why a question cannot be demonstrated by its sub-questions, whatever is retrieved; None if it can."""
    steps = gold.demonstration(question, [[hop.document] for hop in question.hops], protocol)
    if config.collect.without_search == "drop" and not any(step.searches for step in steps):
        return WITHOUT_SEARCH
    return check_steps(steps, protocol)


def by_evidence(
    questions: list[Question],
    protocol: Protocol,
    retrieve: Retrieve,
    lengths: LengthSettings,
    tally: Tally,
) -> list[Trajectory]:
    """Returns trajectories that write down the evidence found by their queries; counts them and the rejected ones."""
    trajectories = []
    for demonstration in demonstrate(questions, retrieve, lengths):
        question = demonstration.question
        steps = gold.verified(question, demonstration.steps, protocol)
        reason = demonstration.rejected or check_steps(steps, protocol)
        if reason:
            tally.reject(question, reason)
            continue
        trajectories.append(Trajectory.of(question, steps, "gold"))
        tally.keep_retrieved(question, steps)
    return trajectories


def by_sub_questions(
    config: CollectConfig, questions: list[Question], protocol: Protocol, retrieve: Retrieve, tally: Tally
) -> list[Trajectory]:
    """Returns trajectories whose queries are the sub-questions of the decompositions; for a protocol without search
    nothing is retrieved.

    A question is rejected if one of its gold paragraphs is not found, unless --insert-gold inserts the paragraph.
    """
    documents_of: list[list[list[Document]]] = [[] for _ in questions]  # by question and hop
    retrieved_gold = [0] * len(questions)
    rejected: dict[int, str] = {}  # why, by the question's number
    hops = 0
    if protocol.can_search:
        hops = max((len(question.hops) for question in questions), default=0)
    for hop in range(hops):
        # One batch for the first queries of all questions, then one for the second queries, ...
        numbers = [i for i, question in enumerate(questions) if hop < len(question.hops)]
        batch = []
        for i in numbers:
            searches = _searches_of(questions[i], protocol)
            batch.append((questions[i], searches[hop]))
        outcomes = retrieve_all(retrieve, batch)
        for i, outcome in zip(numbers, outcomes, strict=True):
            if isinstance(outcome, Failure):
                rejected[i] = RETRIEVER_FAILED
                outcome = []
            documents, has_gold = gold.with_gold(
                questions[i],
                hop,
                outcome,
                top_k=config.retrieval.top_k,
                seed=f"{config.common.seed}/{questions[i].id}/{hop}",
            )
            documents_of[i].append(documents)
            if has_gold:
                retrieved_gold[i] += 1
            elif not config.collect.insert_gold:
                rejected.setdefault(i, MISSED)
    trajectories = []
    for i, (question, documents) in enumerate(zip(questions, documents_of, strict=True)):
        if i in rejected:
            tally.reject(question, rejected[i])
            continue
        answered = question
        draw = random.Random(f"{config.common.seed}/{question.id}/hurried").random()
        if draw < config.collect.hurried_share and len(question.hops) > 1:
            answered = gold.hasty(question)
        steps = gold.demonstration(answered, documents, protocol)
        trajectories.append(Trajectory.of(question, steps, "gold"))
        tally.keep(steps=len(steps), gold=len(documents), retrieved_gold=retrieved_gold[i])
    return trajectories


def _searches_of(question: Question, protocol: Protocol) -> list[Search]:
    """Returns the searches of a question's hops, with the answers of earlier ones filled in."""
    if protocol.plans:
        return gold.planned_searches(question)
    return list(map(Search, queries(question)))


def demonstrate(questions: Sequence[Question], retrieve: Retrieve, lengths: LengthSettings) -> list["Demonstration"]:
    """Returns a demonstration of each question: one batch for the first queries of all, then one for the second
    ones, ...

    Only about the first --max-document-tokens of a document count as read.
    """
    document_length = CHARACTERS * lengths.max_document_tokens
    demonstrations = [Demonstration(question, lengths.max_hops, document_length) for question in questions]
    while unfinished := [demonstration for demonstration in demonstrations if not demonstration.is_over]:
        batch = []
        for demonstration in unfinished:
            query = demonstration.steps[-1].queries[0]
            batch.append((demonstration.question, Search(query)))
        outcomes = retrieve_all(retrieve, batch)
        for demonstration, outcome in zip(unfinished, outcomes, strict=True):
            if isinstance(outcome, Failure):
                demonstration.rejected = RETRIEVER_FAILED
            else:
                demonstration.add(outcome)
    return demonstrations


@dataclass
class Demonstration:
    """The steps of a question as they grow, query by query, until it is answered or `rejected` for a reason."""

    question: Question
    max_hops: int
    document_length: int  # characters of a document that can be read
    steps: list[Step] = field(default_factory=list)
    rejected: str | None = None
    _covered: set[int] = field(default_factory=set)  # hops whose evidence is written down
    _queries: list[str] = field(init=False)  # of each hop, with the answers of earlier ones
    _untried: list[str] = field(default_factory=list)  # queries that could take the place of the last step's query

    def __post_init__(self):
        self._queries = queries(self.question)
        first_query = one_line(self.question.text)
        self.steps.append(Step.asking(_opening(self.question), first_query))

    @property
    def is_over(self) -> bool:
        return bool(self.rejected) or self.steps[-1].answer is not None

    def add(self, documents: Sequence[Document]) -> None:
        """Takes the documents of the last step's query, and writes the next step."""
        self.steps[-1] = self.steps[-1].with_documents([documents])
        new_hops = []
        for hop in self._missing:
            # A sub-question that refers to others waits for them, as nothing says before that its answer matters.
            waits = self._sub_question(hop) and not used(self.question, hop) <= self._covered
            if not waits and self._is_read(hop):
                new_hops.append(hop)
                self._covered.add(hop)
        if not new_hops and len(self.steps) > 1:
            self._replace_query()
            return
        analysis = " ".join(dict.fromkeys(self._fact(hop) for hop in new_hops)) or "Nothing of use was found."
        if len(analysis) > QUOTED:
            self.rejected = f"more than {QUOTED} characters to quote in a step"
        elif self._missing:
            self._ask(analysis, self._missing)
        elif self._answer_stands_in_documents():
            comparison = compared(self.question)
            if comparison:
                analysis = f"{analysis} {comparison}"
            self.steps.append(Step(analysis, answer=self.question.answers[0]))
        else:
            self.rejected = "an answer that stands in no retrieved document"

    def _replace_query(self) -> None:
        """Replaces the query of the last step, which found nothing new, by the next untried one."""
        if self._untried:
            query = self._untried.pop(0)
            self.steps[-1] = Step.asking(self.steps[-1].analysis, query)
        else:
            self.rejected = MISSED

    @property
    def _missing(self) -> list[int]:
        return [hop for hop in range(len(self.question.hops)) if hop not in self._covered]

    def _texts_of(self, paragraph: Document) -> list[str]:
        """Returns the texts of the documents retrieved so far that show a gold paragraph, or a part of it."""
        index = self.question.gold_index(paragraph)
        texts = []
        for step in self.steps:
            for document in step.documents:
                if self.question.gold_index(document) == index:
                    texts.append(document.text[: self.document_length])
        return texts

    def _is_read(self, number: int) -> bool:
        """Returns whether the fact of a hop stands in its gold paragraph, as it was retrieved so far."""
        hop = self.question.hops[number]
        texts = self._texts_of(hop.document)
        if self._sub_question(number):
            return any(stands_in(hop.answer, text) for text in texts)
        if not hop.evidence:
            return False
        return any(all(folded(sentence) in folded(text) for sentence in hop.evidence) for text in texts)

    def _fact(self, number: int) -> str:
        """Returns the fact of a hop: its sub-question and the answer, or the title of its paragraph and the
        evidence."""
        hop = self.question.hops[number]
        sub_question = self._sub_question(number)
        if sub_question:
            return one_line(f"{sub_question} {hop.answer}.")
        return one_line(f"{name_of(hop.document.title)}: {' '.join(hop.evidence)}")

    def _sub_question(self, number: int) -> str | None:
        """Returns a hop's query if it is a sub-question; None if it is a name to look up or the question itself."""
        query = self._queries[number]
        if query.endswith("?") and not same_query(query, self.question.text):
            return query
        return None

    def _ask(self, analysis: str, missing: Sequence[int]) -> None:
        """Adds a step that looks up the first of the missing hops, or a later one if nothing finds the first."""
        analyses = [step.analysis for step in self.steps]
        context = " ".join([self.question.text, *analyses, analysis])
        earlier = [query for step in self.steps for query in step.queries]
        candidates = [one_line(query) for hop in missing for query in self._candidates(hop, context)]
        fresh = []
        for query in dict.fromkeys(candidates):
            if not any(same_query(query, earlier_query) for earlier_query in earlier):
                fresh.append(query)
        if not fresh:
            self.rejected = "no query known for a missing paragraph"
        elif len(self.steps) == self.max_hops:
            self.rejected = f"more than {self.max_hops} queries"
        else:
            first, *self._untried = fresh
            self.steps.append(Step.asking(analysis, first))

    def _candidates(self, number: int, context: str) -> list[str]:
        """Returns the queries that look up a hop: the name of its paragraph, if the `context` has that name, then its
        sub-question, if the context states the answers that the sub-question uses.

        The name comes first because retrievers find the paragraph more often by it. The context is the question and
        all that was written down.
        """
        hops = self.question.hops
        candidates = []
        name = name_of(hops[number].document.title)
        if stands_in(name, context):
            candidates.append(name)
        if all(self._is_stated(hop, context) for hop in used(self.question, number)):
            candidates.append(self._queries[number])
        return candidates

    def _is_stated(self, number: int, context: str) -> bool:
        """Returns whether the answer of a hop stands in the context, written down with its evidence."""
        if number not in self._covered:
            return False
        return stands_in(self.question.hops[number].answer, context)

    def _answer_stands_in_documents(self) -> bool:
        answer = self.question.answers[0]
        if normalize(answer) in VERDICTS:
            return True
        for step in self.steps:
            for document in step.documents:
                if stands_in(answer, f"{document.title} {document.text[: self.document_length]}"):
                    return True
        return False


def _opening(question: Question) -> str:
    """Returns a sentence with those titles of the gold paragraphs that the question names."""
    names = dict.fromkeys(name_of(paragraph.title) for paragraph in question.gold)
    in_question = [name for name in names if stands_in(name, question.text)]
    if not in_question:
        return "The question names nothing."
    in_question.sort(key=lambda name: (question.text.find(name), name))
    return f"The question names {' and '.join(in_question)}."
