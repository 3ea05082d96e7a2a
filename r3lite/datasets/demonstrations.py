"""Gold trajectories of a set of questions, without a teacher: by sub-questions (gold.py), or by evidence. Trajectories
by evidence write down what a retriever found:

    step 1      analysis: what the question names              query: the question itself
    step k      analysis: the facts that are newly found       query: the name of a missing paragraph, or a sub-question
    last step   analysis: the facts that are newly found       answer

A fact is "{sub-question} {answer}." where the data set has sub-questions (2WikiMultiHopQA, MuSiQue), else "{title}:
{supporting sentences}" (HotpotQA). Every fact is written once, and stands in a document that was retrieved: nothing is
inserted. The last analysis of a comparison ends with the result, if `gold.compared` can state it. A query uses only
what was found before it; of several possible queries, the first that finds something new is kept. A question that
cannot be answered in this way is rejected, with the reason.
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
from r3lite.datasets.gold import compared, queries, referenced_hops
from r3lite.datasets.hops import name_of
from r3lite.datasets.teacher import WITHOUT_SEARCH
from r3lite.datasets.trajectories import Trajectory, check_steps
from r3lite.protocols.base import Protocol, one_line, same_query
from r3lite.settings import CollectConfig, LengthSettings

MISSED = "a query that does not find its gold paragraph"
CHARACTERS_PER_TOKEN = 4  # about, in English; the limit of a document's length is in tokens
MAX_QUOTED = 600  # characters of the facts that a step quotes: a step must fit into a turn of the model
RETRIEVER_FAILED = "the retriever failed"


def write_gold(
    config: CollectConfig, questions: list[Question], protocol: Protocol, retrieve: Retrieve, output: Path
) -> Tally:
    """Writes a trajectory for every question that can be demonstrated; returns the counts.

    Before that, writes the ids of the other questions, with the reasons, to `<output>.rejected.jsonl`.
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
        # There may be rejections of a run that was killed before it wrote the trajectories.
        rejections_of(output).unlink(missing_ok=True)
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
    """Returns trajectories that write down the evidence that their queries find.

    Counts the trajectories and the rejected questions in `tally`.
    """
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
    Counts the trajectories and the rejected questions in `tally`.
    """
    documents_of: list[list[list[Document]]] = [[] for _ in questions]  # documents_of[question][hop]
    retrieved_gold = [0] * len(questions)
    rejected: dict[int, str] = {}  # the reasons, by the index of the question
    max_hops = 0
    if protocol.can_search:
        max_hops = max((len(question.hops) for question in questions), default=0)
    for hop in range(max_hops):
        # One batch has the first queries of all questions, the next one the second queries, ...
        indices = [i for i, question in enumerate(questions) if hop < len(question.hops)]
        batch = []
        for i in indices:
            searches = _searches_of(questions[i], protocol)
            batch.append((questions[i], searches[hop]))
        outcomes = retrieve_all(retrieve, batch)
        for i, outcome in zip(indices, outcomes, strict=True):
            retrieved = outcome
            if isinstance(outcome, Failure):
                rejected[i] = RETRIEVER_FAILED
                retrieved = []
            documents, has_gold = gold.with_gold(
                questions[i],
                hop,
                retrieved,
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
        demonstrated = question
        draw = random.Random(f"{config.common.seed}/{question.id}/hurried").random()
        if draw < config.collect.hurried_share and len(question.hops) > 1:
            demonstrated = gold.hasty(question)
        steps = gold.demonstration(demonstrated, documents, protocol)
        trajectories.append(Trajectory.of(question, steps, "gold"))
        tally.keep(steps=len(steps), gold=len(documents), retrieved_gold=retrieved_gold[i])
    return trajectories


def _searches_of(question: Question, protocol: Protocol) -> list[Search]:
    """Returns the searches of a question's hops, with the answers of earlier hops filled in."""
    if protocol.plans:
        return gold.planned_searches(question)
    return list(map(Search, queries(question)))


def demonstrate(questions: Sequence[Question], retrieve: Retrieve, lengths: LengthSettings) -> list["Demonstration"]:
    """Returns a demonstration of each question, answered or rejected.

    The queries of all unfinished demonstrations are retrieved in one batch. Only about the first --max-document-tokens
    of a document count as read.
    """
    document_length = CHARACTERS_PER_TOKEN * lengths.max_document_tokens
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
    """The steps of a question, which grow query by query until it is answered or `rejected`.

    In its methods, a `hop` or the `number` of a hop is its index in `question.hops`.
    """

    question: Question
    max_hops: int
    document_length: int  # characters of a document that can be read
    steps: list[Step] = field(default_factory=list)
    rejected: str | None = None  # the reason
    _covered: set[int] = field(default_factory=set)  # hops whose evidence is written down
    _queries: list[str] = field(init=False)  # the query of each hop, with the answers of earlier hops filled in
    _untried: list[str] = field(default_factory=list)  # queries that may replace the last step's query

    def __post_init__(self):
        self._queries = queries(self.question)
        first_query = one_line(self.question.text)
        self.steps.append(Step.asking(_first_analysis(self.question), first_query))

    @property
    def is_over(self) -> bool:
        return bool(self.rejected) or self.steps[-1].answer is not None

    def add(self, documents: Sequence[Document]) -> None:
        """Adds documents to the last step, which asked for them; then adds the next step, replaces the last step's
        query, or rejects the question."""
        self.steps[-1] = self.steps[-1].with_documents([documents])
        new_hops = []
        for hop in self._missing:
            # A sub-question that refers to earlier answers waits for them: until then nothing tells that it matters.
            is_ready = not self._sub_question(hop) or referenced_hops(self.question, hop) <= self._covered
            if is_ready and self._is_read(hop):
                new_hops.append(hop)
                self._covered.add(hop)
        if not new_hops and len(self.steps) > 1:
            self._replace_query()
            return
        facts = dict.fromkeys(self._fact(hop) for hop in new_hops)  # each once
        analysis = " ".join(facts)
        if not analysis:
            analysis = "Nothing of use was found."
        if len(analysis) > MAX_QUOTED:
            self.rejected = f"more than {MAX_QUOTED} characters to quote in a step"
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
        """Replaces the query of the last step, which found nothing new, by the next untried query.

        Rejects the question if there is none.
        """
        if self._untried:
            query = self._untried.pop(0)
            self.steps[-1] = Step.asking(self.steps[-1].analysis, query)
        else:
            self.rejected = MISSED

    @property
    def _missing(self) -> list[int]:
        """The hops whose evidence is not written down yet."""
        return [hop for hop in range(len(self.question.hops)) if hop not in self._covered]

    def _texts_of(self, paragraph: Document) -> list[str]:
        """Returns the texts, as far as they are read, of the retrieved documents that are a gold paragraph or a part of
        it."""
        index = self.question.gold_index(paragraph)
        texts = []
        for step in self.steps:
            for document in step.documents:
                if self.question.gold_index(document) == index:
                    texts.append(document.text[: self.document_length])
        return texts

    def _is_read(self, number: int) -> bool:
        """Returns whether the fact of a hop stands in what has been retrieved of its gold paragraph."""
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
        """Adds a step that looks up the first of the missing hops, or a later one if there is no query for the first.

        Rejects the question if there is no new query at all, or if it has too many queries.
        """
        analyses = [step.analysis for step in self.steps]
        stated_text = " ".join([self.question.text, *analyses, analysis])
        earlier_queries = [query for step in self.steps for query in step.queries]
        candidates = []
        for hop in missing:
            candidates += [one_line(query) for query in self._candidates(hop, stated_text)]
        new_queries = []
        for query in dict.fromkeys(candidates):
            if not any(same_query(query, earlier_query) for earlier_query in earlier_queries):
                new_queries.append(query)
        if not new_queries:
            self.rejected = "no query known for a missing paragraph"
        elif len(self.steps) == self.max_hops:
            self.rejected = f"more than {self.max_hops} queries"
        else:
            first, *self._untried = new_queries
            self.steps.append(Step.asking(analysis, first))

    def _candidates(self, number: int, stated_text: str) -> list[str]:
        """Returns the queries that may look up a hop, as far as `stated_text` states what they use.

        `stated_text` is the question and all analyses. If it has the name of the hop's paragraph, this name is the
        first query, because retrievers find the paragraph more often by it. If it has the answers that the sub-question
        of the hop uses, the sub-question is a query, too.
        """
        hops = self.question.hops
        candidates = []
        name = name_of(hops[number].document.title)
        if stands_in(name, stated_text):
            candidates.append(name)
        if all(self._is_stated(hop, stated_text) for hop in referenced_hops(self.question, number)):
            candidates.append(self._queries[number])
        return candidates

    def _is_stated(self, number: int, stated_text: str) -> bool:
        """Returns whether the evidence of a hop is written down, and its answer stands in the text."""
        if number not in self._covered:
            return False
        return stands_in(self.question.hops[number].answer, stated_text)

    def _answer_stands_in_documents(self) -> bool:
        """Returns whether a retrieved document has the answer; an answer such as yes or no needs none."""
        answer = self.question.answers[0]
        if normalize(answer) in VERDICTS:
            return True
        for step in self.steps:
            for document in step.documents:
                if stands_in(answer, f"{document.title} {document.text[: self.document_length]}"):
                    return True
        return False


def _first_analysis(question: Question) -> str:
    """Returns a sentence that lists the names of gold paragraphs that stand in the question."""
    names = dict.fromkeys(name_of(paragraph.title) for paragraph in question.gold)
    in_question = [name for name in names if stands_in(name, question.text)]
    if not in_question:
        return "The question names nothing."
    text = question.text.casefold()
    in_question.sort(key=lambda name: (text.find(name.casefold()), name))
    return f"The question names {' and '.join(in_question)}."
