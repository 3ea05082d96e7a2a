"""Asks a model one question after another, and shows in a terminal how each is answered; used by ask."""

import json
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from r3lite.assembly.answering import why_no_answer
from r3lite.core.episode import Document, Episode, Question, Retrieve
from r3lite.core.terminal import printable
from r3lite.retrieval.procedures import Finder
from r3lite.rollout.engine import Engine
from r3lite.rollout.sequence import Listener, Sequence

COLUMNS = 80  # the width of what is printed; the model's own lines are not wrapped


@dataclass
class AskSession:
    """A model and a retriever that questions are put to, one after another."""

    engine: Engine
    retrieve: Retrieve
    finder: Finder | None  # of procedures
    seed: int
    as_json: bool
    question_count: int = 0

    def ask(self, text: str) -> None:
        """Answers a question and prints the answer, with how it came about."""
        turns = [""]  # the text of each turn

        def hear(piece: str) -> None:
            turns[-1] += piece
            if not self.as_json:
                print(printable(piece), end="", flush=True)

        def look(sequence: Sequence) -> None:
            turns.append("")
            if not self.as_json:
                print(f"\n{evidence(sequence)}", flush=True)

        question = Question(id=f"{self.question_count + 1}", text=text, answers=())
        seed = f"{self.seed}/{self.question_count}"
        if self.finder:
            question = self.finder.with_procedure(question)
        if question.procedure and not self.as_json:
            print(f"{printable(question.procedure)}\n")
        self.question_count += 1
        (sequence,) = self.engine.run(
            questions=[question],
            seeds=[seed],
            retrieve=self.retrieve,
            listeners=[Listener(hear, look)],
        )
        episode = sequence.episode()
        if self.as_json:
            # The last text is empty. So is the first if plain RAG has searched before the model's first turn.
            trace = "\n".join(turn for turn in turns if turn)
            print(json.dumps(record(episode, trace)), flush=True)
        else:
            print(outcome(episode, self.engine.layout.protocol.faults), flush=True)


def say_plain(baseline: str) -> None:
    """Says on stderr that the model does not answer in steps, and what it does instead."""
    does = "plain RAG: one search for the question, then a short answer"
    if baseline == "closed-book":
        does = "a short answer, without documents"
    advice = "Pass --adapter RUN for an answer in steps, or --steps on."
    print(f"The model was not trained on the step format, so this is {does}. {advice}", file=sys.stderr)


def record(episode: Episode, trace: str) -> dict:
    """Returns what --json prints of an answer; `failure` is in it if the retriever failed."""
    values = {
        "question": episode.question.text,
        "final_answer": episode.prediction,
        "reasoning_trace": trace,
        "search_queries": episode.queries,
        "documents": [document.to_json() for document in episode.documents],
    }
    if episode.failure:
        values["failure"] = episode.failure
    return values


def evidence(sequence: Sequence) -> str:
    """Returns what the queries of the last step retrieved, in indented lines; empty if the step has none.

    A search with a `kind` is a node of a plan. Its query is printed before its documents, because answers of other
    nodes may have been filled in: it is not always what the model wrote.
    """
    step = sequence.steps[-1]
    lines = []
    for search in step.searches:
        if search.kind:
            lines.append(textwrap.fill(printable(f"{search.query} ({search.kind}):"), COLUMNS))
        lines += [summary(document) for document in search.documents]
        if not search.documents and not sequence.failure:
            lines.append("  (nothing was found)")
    has_empty_search = any(not search.documents for search in step.searches)
    if has_empty_search and sequence.failure:
        lines.append(printable(f"  no documents: the retriever failed: {sequence.failure}"))
    return "".join(f"{line}\n" for line in lines)


def summary(document: Document) -> str:
    """Returns id, title and first words of a passage, in two lines of at most COLUMNS columns."""
    return textwrap.fill(
        printable(f"[{document.id}] {document.title}: {document.text}"),
        width=COLUMNS,
        initial_indent="  ",
        subsequent_indent="     ",
        max_lines=2,
        placeholder=" ...",
    )


def outcome(episode: Episode, faults: Mapping[str, str]) -> str:
    """Returns the answer, or why there is none, set apart from what stands before it.

    An answer without a document is marked: it comes from the model's weights alone.
    """
    if episode.prediction:
        note = "" if episode.documents else "\n(no document was read)"
        return f"{'-' * COLUMNS}\nanswer: {printable(episode.prediction)}{note}\n"
    return textwrap.fill(printable(f"no answer: {why_no_answer(episode, faults)}"), COLUMNS) + "\n"
