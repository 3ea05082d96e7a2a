"""Gold trajectories of a set of questions, without a teacher: by sub-questions (gold.py), or by evidence, which write
down what a retriever found:

    step 1      analysis names what the question names                       query: the question itself
    step k      analysis the facts that are newly found                      query: the name that is missing
    last step   analysis the same                                            answer

A fact is "{sub-question} {answer}." where the data set has sub-questions (2WikiMultiHopQA, MuSiQue), else "{title}:
{supporting sentences}" (HotpotQA). Every fact is written once, and stands in a document that was retrieved: nothing is
inserted. What a comparison's facts come to is the end of its last analysis (gold.py). A query uses only what was
found before it; of those that could be asked, the first that finds something new is. A question that cannot be answered
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
CHARACTERS = 4  # of English text that are a token, about: what of a document a model will be shown is in tokens
QUOTED = 600  # most characters that a step quotes: a step must fit into a turn of the model


def write_gold(
    config: CollectConfig, questions: list[Question], protocol: Protocol, retrieve: Retrieve, output: Path
) -> Tally:
    """Writes a trajectory for every question with a decomposition whose hops the retriever finds, and before that the
    ids of the other questions to `<output>.rejected.jsonl`."""
    tally, usable, written = Tally(len(questions)), [], []
    by_evidence = config.collect.demonstrations == "evidence" and protocol.searches and not protocol.plans
    for question in questions:
        reason = gold.obstacle(question, config.lengths.max_hops, protocol.searches)
        if not (reason or by_evidence):
            steps = gold.shown(question, [[hop.document] for hop in question.hops], protocol)
            idle = config.collect.without_search == "drop" and not any(step.searches for step in steps)
            reason = WITHOUT_SEARCH if idle else check_steps(steps, protocol)
        if reason:
            tally.reject(question, reason)
        else:
            usable.append(question)
    if by_evidence:
        for made in demonstrate(usable, retrieve, config.lengths):
            steps = gold.verified(made.question, made.steps, protocol)
            if reason := made.rejected or check_steps(steps, protocol):
                tally.reject(made.question, reason)
                continue
            written.append(Trajectory.of(made.question, steps, "gold"))
            tally.keep_retrieved(made.question, steps)
    else:
        written = by_sub_questions(config, usable, protocol, retrieve, tally)
    if tally.rejections:
        write_jsonl(rejections_of(output), tally.rejections)
    else:
        rejections_of(output).unlink(missing_ok=True)  # of a run that was killed before it wrote the trajectories
    write_jsonl(output, (t.to_json() for t in written))
    return tally


def by_sub_questions(
    config: CollectConfig, questions: list[Question], protocol: Protocol, retrieve: Retrieve, tally: Tally
) -> list[Trajectory]:
    """Trajectories whose queries are the sub-questions of the decompositions; for a protocol without search nothing is
    retrieved. A question of which a gold paragraph is not found is rejected, unless --insert-gold puts it there."""
    asked = gold.planned_searches if protocol.plans else lambda question: list(map(Search, queries(question)))
    documents_of: list[list[list[Document]]] = [[] for _ in questions]  # by question and hop
    found, rejected = [0] * len(questions), {}
    for hop in range(max((len(q.hops) for q in questions), default=0) if protocol.searches else 0):
        # One batch for the first queries of all questions, then one for the second queries, ...
        asking = [i for i, q in enumerate(questions) if hop < len(q.hops)]
        answers = retrieve_all(retrieve, [(questions[i], asked(questions[i])[hop]) for i in asking])
        for i, outcome in zip(asking, answers, strict=True):
            if isinstance(outcome, Failure):
                rejected[i] = "the retriever failed"
                outcome = []
            seed = f"{config.common.seed}/{questions[i].id}/{hop}"
            documents, was_there = gold.with_gold(questions[i], hop, outcome, config.retrieval.top_k, seed)
            documents_of[i].append(documents)
            found[i] += was_there
            if not (was_there or config.collect.insert_gold):
                rejected.setdefault(i, MISSED)
    written = []
    for i, (q, documents) in enumerate(zip(questions, documents_of, strict=True)):
        if i in rejected:
            tally.reject(q, rejected[i])
            continue
        draw = random.Random(f"{config.common.seed}/{q.id}/hurried").random()
        asked = gold.hasty(q) if draw < config.collect.hurried_share and len(q.hops) > 1 else q
        written.append(Trajectory.of(q, gold.shown(asked, documents, protocol), "gold"))
        tally.keep(len(written[-1].steps), len(documents), found[i])
    return written


def demonstrate(questions: Sequence[Question], retrieve: Retrieve, lengths: LengthSettings) -> list["Demonstration"]:
    """A demonstration of each question: one batch for the first queries of all, then one for the second ones, ...

    What stands further back in a document than about --max-document-tokens counts as not there.
    """
    made = [Demonstration(q, lengths.max_hops, CHARACTERS * lengths.max_document_tokens) for q in questions]
    while going := [one for one in made if not one.is_over]:
        asked = [(one.question, Search(one.steps[-1].queries[0])) for one in going]
        for one, outcome in zip(going, retrieve_all(retrieve, asked), strict=True):
            if isinstance(outcome, Failure):
                one.rejected = "the retriever failed"
            else:
                one.add(outcome)
    return made


@dataclass
class Demonstration:
    """The steps of a question as they grow, query by query, until it is answered or `rejected` for a reason."""

    question: Question
    max_hops: int
    document_length: int  # characters of a document that can be read
    steps: list[Step] = field(default_factory=list)
    rejected: str | None = None
    _found: set[int] = field(default_factory=set)  # hops whose evidence is written down
    _queries: list[str] = field(init=False)  # of each hop, with the answers of earlier ones
    _untried: list[str] = field(default_factory=list)  # what could be asked instead of the last step's query

    def __post_init__(self):
        self._queries = queries(self.question)
        self.steps.append(Step.asking(_opening(self.question), one_line(self.question.text)))

    @property
    def is_over(self) -> bool:
        return bool(self.rejected) or self.steps[-1].answer is not None

    def add(self, documents: Sequence[Document]) -> None:
        """Takes the documents of the last step's query, and writes the next step."""
        self.steps[-1] = self.steps[-1].with_documents([documents])
        news = []
        for i in self._missing:
            # A sub-question that refers to others waits for them, as nothing says before that its answer matters.
            waits = self._sub_question(i) and not used(self.question.hops[i]) <= self._found
            if not waits and self._is_read(i):
                news.append(i)
                self._found.add(i)
        if not news and len(self.steps) > 1:
            if self._untried:
                self.steps[-1] = Step.asking(self.steps[-1].analysis, self._untried.pop(0))
            else:
                self.rejected = MISSED
            return
        analysis = " ".join(dict.fromkeys(self._fact(i) for i in news)) or "Nothing of use was found."
        if len(analysis) > QUOTED:
            self.rejected = f"more than {QUOTED} characters to quote in a step"
        elif missing := self._missing:
            self._ask(analysis, missing)
        elif self._answer_stands_in_documents():
            analysis = " ".join(filter(None, [analysis, compared(self.question)]))
            self.steps.append(Step(analysis, answer=self.question.answers[0]))
        else:
            self.rejected = "an answer that stands in no retrieved document"

    @property
    def _missing(self) -> list[int]:
        return [i for i in range(len(self.question.hops)) if i not in self._found]

    def _is_read(self, i: int) -> bool:
        """Whether the fact of a hop stands in its gold paragraph, as it was retrieved so far."""
        hop = self.question.hops[i]
        gold = self.question.gold_index(hop.document)
        found = [d for step in self.steps for d in step.documents if self.question.gold_index(d) == gold]
        texts = [d.text[: self.document_length] for d in found]
        if self._sub_question(i):
            return any(stands_in(hop.answer, text) for text in texts)
        return any(hop.evidence and all(folded(s) in folded(text) for s in hop.evidence) for text in texts)

    def _fact(self, i: int) -> str:
        """What a hop has found: its sub-question and the answer, or the title of its paragraph and the evidence."""
        hop, asked = self.question.hops[i], self._sub_question(i)
        name = name_of(hop.document.title)
        return one_line(f"{asked} {hop.answer}." if asked else f"{name}: {' '.join(hop.evidence)}")

    def _sub_question(self, i: int) -> str | None:
        """The sub-question of a hop, with the answers of earlier ones; None if it is only a name to look up."""
        asked = self._queries[i]
        return asked if asked.endswith("?") and not same_query(asked, self.question.text) else None

    def _ask(self, analysis: str, missing: Sequence[int]) -> None:
        """Adds a step that looks up the first of the missing hops, or a later one if nothing finds the first."""
        written = " ".join([self.question.text, *(step.analysis for step in self.steps), analysis])
        asked = [query for step in self.steps for query in step.queries]
        choices = [one_line(choice) for i in missing for choice in self._choices(i, written)]
        fresh = [c for c in dict.fromkeys(choices) if not any(same_query(c, query) for query in asked)]
        if not fresh:
            self.rejected = "no query known for a missing paragraph"
        elif len(self.steps) == self.max_hops:
            self.rejected = f"more than {self.max_hops} queries"
        else:
            first, *self._untried = fresh
            self.steps.append(Step.asking(analysis, first))

    def _choices(self, i: int, written: str) -> list[str]:
        """What looks up a hop: the name of its paragraph, if the question or what was `written` down has it (retrievers
        find it oftener by that), then its sub-question with the answers of earlier hops."""
        hops = self.question.hops
        name = name_of(hops[i].document.title)
        known = all(j in self._found and stands_in(hops[j].answer, written) for j in used(hops[i]))
        return [name] * stands_in(name, written) + [self._queries[i]] * known

    def _answer_stands_in_documents(self) -> bool:
        answer, documents = self.question.answers[0], [d for step in self.steps for d in step.documents]
        texts = [f"{d.title} {d.text[: self.document_length]}" for d in documents]
        return normalize(answer) in VERDICTS or any(stands_in(answer, text) for text in texts)


def _opening(question: Question) -> str:
    """What the question names, by the titles of its gold paragraphs."""
    names = dict.fromkeys(name_of(d.title) for d in question.gold)
    known = sorted((question.text.find(name), name) for name in names if stands_in(name, question.text))
    return f"The question names {' and '.join(name for _, name in known)}." if known else "The question names nothing."
