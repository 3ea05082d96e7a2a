"""Asks a trained model questions: streams its reasoning, with the documents that its queries bring, then the answer."""

import contextlib
import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from r3lite.assembly.answering import build_engine, open_retriever, plan_memory, why_no_answer
from r3lite.core import command
from r3lite.core.config import UsageError, check_texts
from r3lite.core.episode import Document, Episode, Question, Retrieve
from r3lite.core.errors import R3LiteError
from r3lite.settings import (
    AskSettings,
    Common,
    LengthSettings,
    MemorySettings,
    ModelSettings,
    ProcedureSettings,
    ProtocolSettings,
    RetrievalSettings,
    SamplingSettings,
    TruncationSettings,
)

if TYPE_CHECKING:  # torch is loaded after the arguments are read, so that --help answers at once
    from r3lite.retrieval.procedures import Finder
    from r3lite.rollout.engine import Engine
    from r3lite.rollout.sequence import Sequence

WIDE = 80  # columns of what is shown, but for the model's own lines
PROMPT = "question> "


@dataclass(frozen=True)
class AskConfig:
    """Asks a trained model: python -m r3lite.ask "Who directed ...?" --adapter runs/ppo --index my-index

    Shows its reasoning while it is sampled, the documents that each query brings, and the answer. Ctrl-C at the prompt
    ends; in the middle of an answer it stops that answer. Format, prompts, index and encoder are not taken from the
    adapter's run: pass the ones that it was trained with.
    """

    common: Common = Common()
    ask: AskSettings = AskSettings()
    model: ModelSettings = ModelSettings()
    memory: MemorySettings = MemorySettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    procedures: ProcedureSettings = ProcedureSettings()
    protocol: ProtocolSettings = ProtocolSettings()
    lengths: LengthSettings = LengthSettings()
    sampling: SamplingSettings = SamplingSettings(temperature=0.0)
    truncation: TruncationSettings = TruncationSettings()


@dataclass
class Conversation:
    """A model and a retriever that questions are put to, one after another."""

    engine: "Engine"
    retrieve: Retrieve
    finder: "Finder | None"  # of procedures
    seed: int
    as_json: bool
    asked: int = 0

    def ask(self, text: str) -> None:
        """Answers a question and prints the answer, with how it came about."""
        from r3lite.rollout.sequence import Listener

        turns = [""]  # the text of each

        def hear(new: str) -> None:
            turns[-1] += new
            if not self.as_json:
                print(printable(new), end="", flush=True)

        def look(sequence: "Sequence") -> None:
            turns.append("")
            if not self.as_json:
                print(f"\n{evidence(sequence)}", flush=True)

        question, seed = Question(f"{self.asked + 1}", text, ()), f"{self.seed}/{self.asked}"
        if self.finder:
            question = self.finder.before(question)
        if question.procedure and not self.as_json:
            print(f"{printable(question.procedure)}\n")
        self.asked += 1
        (sequence,) = self.engine.run([question], [seed], self.retrieve, listeners=[Listener(hear, look)])
        episode = sequence.episode()
        if self.as_json:
            print(json.dumps(record(episode, "\n".join(turns[:-1]))), flush=True)
        else:
            print(outcome(episode, self.engine.layout.protocol.faults), flush=True)


def ask(config: AskConfig) -> None:
    question = config.ask.question
    if question is not None and not question.strip():
        raise UsageError("the question is empty")
    if config.common.output:
        raise UsageError("--output has no use here, as no file is written; redirect what --json prints")
    sys.stdout.reconfigure(errors="replace")  # a model may write what the terminal's encoding lacks
    retrieve, finder = open_retriever(config)  # before the model is loaded, so that a missing index shows at once
    if config.model.adapter is None:
        print("warning: without --adapter, the model was never taught the step format", file=sys.stderr)
    conversation = Conversation(build_engine(config, 1), retrieve, finder, config.common.seed, config.ask.json)
    if question is not None:
        conversation.ask(question)
        return
    for line in lines(config.ask.json):
        try:
            check_texts({"question": line})
            conversation.ask(line)
        except KeyboardInterrupt:
            print("\nstopped; Ctrl-C again to leave", file=sys.stderr)
        except (R3LiteError, UsageError) as error:  # about this question, such as one that is too long
            print(f"\n{error}", file=sys.stderr)


def lines(as_json: bool) -> Iterator[str]:
    """Questions that are typed, or piped, up to an empty line or the end of the input."""
    with contextlib.suppress(ImportError):  # Windows has none, but a history of its own
        import readline  # noqa: F401  (input() has its history then)
    typed = sys.stdin.isatty()
    while True:
        if typed and as_json:
            print(PROMPT, end="", file=sys.stderr, flush=True)
        try:
            line = input(PROMPT if typed and not as_json else "").strip()
        except EOFError:
            line = ""
            if typed:
                print(file=sys.stderr)
        if not line:
            return
        if not typed and not as_json:
            print(f"{PROMPT}{printable(line)}")
        yield line


def record(episode: Episode, trace: str) -> dict:
    """What --json prints of an answer; `failure` is there if the retriever failed."""
    return {
        "question": episode.question.text,
        "final_answer": episode.prediction,
        "reasoning_trace": trace,
        "search_queries": episode.queries,
        "documents": [d.to_json() for d in episode.documents],
        **({"failure": episode.failure} if episode.failure else {}),
    }


def evidence(sequence: "Sequence") -> str:
    """What the queries of the last step brought, in lines that are set in; empty if the step has none.

    The queries of a plan's nodes stand before their documents: answers of other nodes were filled in, and each was
    asked at its kind of source.
    """
    step, told = sequence.steps[-1], []
    for search in step.searches:
        if search.source:
            told.append(textwrap.fill(printable(f"{search.query} ({search.source}):"), WIDE))
        told += [shown(document) for document in search.documents]
        if not search.documents and not sequence.failure:
            told.append("  (nothing was found)")
    if step.searches and sequence.failure:
        told.append(f"  no documents: the retriever failed: {sequence.failure}")
    return "".join(f"{line}\n" for line in told)


def shown(document: Document) -> str:
    """Id, title and first words of a passage, in two lines of at most WIDE columns."""
    line = printable(f"[{document.id}] {document.title}: {document.text}")
    return textwrap.fill(line, WIDE, initial_indent="  ", subsequent_indent="     ", max_lines=2, placeholder=" ...")


def outcome(episode: Episode, faults) -> str:
    """The answer, or why there is none, set apart from what stands before it."""
    if episode.prediction:
        return f"{'-' * WIDE}\nanswer: {printable(episode.prediction)}\n"
    return textwrap.fill(f"no answer: {why_no_answer(episode, faults)}", WIDE) + "\n"


def printable(text: str) -> str:
    """A text without control characters, which could steer a terminal; line breaks stay."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def main(argv: list[str] | None = None) -> int:
    def plan(config: AskConfig) -> str:
        return f"\nMemory, for an episode of {config.lengths.max_length} tokens\n{plan_memory(config, 1).table()}"

    return command.run("ask", AskConfig(), ask, argv, plan)


if __name__ == "__main__":
    sys.exit(main())
