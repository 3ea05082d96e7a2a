"""The progress of an answer as it grows, and the answer in the end: steps, and the passages that they rest on."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from r3lite.core.answer_match import in_a_row, normalize, split_words
from r3lite.core.episode import ANSWERED, CUT_OFF, Document, Episode, Step
from r3lite.protocols.base import Protocol
from r3lite.protocols.transcript import Transcript
from r3lite.serving.asks import Answer, Ask, Source, Tell


@dataclass
class Growing:
    """An ask and the transcript that answers it, with what has been heard of it."""

    ask: Ask
    transcript: Transcript
    protocol: Protocol
    tell: Tell | None  # None: the answer alone is wanted
    turns: list[str] = field(default_factory=lambda: [""])

    def hear(self, piece: str) -> None:
        """Takes a piece of the current turn and sends it, with what it means so far."""
        self.turns[-1] += piece
        if self.tell is None:
            return
        step = self.protocol.parse(self.turns[-1], self.transcript.steps)
        analysis = step.analysis[: len(step.analysis) - self._beginning(step.analysis)]
        so_far = {"step": len(self.transcript.steps) + 1, "analysis": analysis, "query": asked(step)}
        self.tell({"type": "text", "text": piece, **so_far, "answer": step.answer})

    def look(self, transcript: Transcript) -> None:
        """Takes the end of a step and sends it, with the passages of its query."""
        self.turns.append("")
        if self.tell is None:
            return
        step, episode = transcript.steps[-1], transcript.episode()
        record = step_record(step, len(transcript.steps), numbered(episode.documents))
        found = [asdict(source) for source in sources_of(episode) if source.number in record["sources"]]
        failed = bool(transcript.failure and step.searches and not step.documents)
        self.tell({"type": "step", **record, "documents": found, "failed": failed})

    def answer(self, why: str) -> Answer:
        """How it ended; `why` says why there is no answer. What a chat has said until it was cut off is its answer."""
        episode = self.transcript.episode()
        trace = "\n".join(turn for turn in self.turns if turn)
        found = episode.prediction
        if self.ask.mode == "chat" and not found:  # cut off
            found = self.protocol.parse(trace, ()).answer or ""
        numbers = numbered(episode.documents)
        written = sum(self.transcript.action_mask)
        return Answer(
            final_answer=found,
            reasoning_trace=trace,
            search_queries=episode.queries,
            steps=[step_record(step, i, numbers) for i, step in enumerate(episode.steps, 1)],
            sources=sources_of(episode, found),
            finish=ANSWERED if found and episode.finish != CUT_OFF else episode.finish,
            why=None if found else why,
            failed=bool(episode.failure),
            prompt_tokens=len(self.transcript.tokens) - written,
            completion_tokens=written,
            mode=self.ask.mode,
            adapter=self.ask.adapter,
        )

    def _beginning(self, analysis: str) -> int:
        """Characters at the end of an analysis that may be the beginning of what follows it, such as a heading."""
        query = self.protocol.render(Step.asking("\0", "\0"), 1).split("\0")
        answer = self.protocol.render(Step("\0", answer="\0"), 1).split("\0")
        between = [parts[1].rstrip() for parts in (query, answer) if len(parts) == 3]
        return max((n for text in between for n in range(1, len(text)) if analysis.endswith(text[:n])), default=0)


def numbered(documents: Iterable[Document]) -> dict[Document, int]:
    """The number of each passage, in the order in which it was first found."""
    return {document: number for number, document in enumerate(dict.fromkeys(documents), 1)}


def asked(step: Step) -> str | None:
    """The queries of a step as one text."""
    return "; ".join(step.queries) or None


def step_record(step: Step, number: int, numbers: dict[Document, int]) -> dict[str, Any]:
    """A step as JSON, its passages by their numbers."""
    record = {"number": number, "analysis": step.analysis, "query": asked(step), "answer": step.answer}
    return record | {"sources": [numbers[document] for document in step.documents], "faults": list(step.faults)}


def sources_of(episode: Episode, answer: str = "") -> list[Source]:
    """The passages of an episode, each once. Cited are those that hold the answer word for word."""
    sought, sources = split_words(normalize(answer)), []
    for d, number in numbered(episode.documents).items():
        cited = in_a_row(sought, split_words(normalize(f"{d.title} {d.text}")))
        sources.append(Source(number, d.id, d.title, d.text, cited))
    return sources
