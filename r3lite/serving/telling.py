"""The progress of an answer as it grows, and the answer in the end: steps, and the passages that they rest on."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from r3lite.core.answer_match import in_a_row, normalize, split_words
from r3lite.core.episode import ANSWERED, CUT_OFF, Document, Episode, Step
from r3lite.protocols.base import Protocol
from r3lite.protocols.transcript import Transcript
from r3lite.serving.asks import Ask, NumberedPassage, ServedAnswer, Tell


@dataclass
class GrowingAnswer:
    """An answer while the model writes it: the ask, the transcript of the answer, and the text of its turns so far."""

    ask: Ask
    transcript: Transcript
    protocol: Protocol
    tell: Tell | None  # None: nobody wants the progress
    turns: list[str] = field(default_factory=lambda: [""])

    def take_text(self, piece: str) -> None:
        """Takes a piece of the current turn; sends it, with the analysis, query and answer of the turn so far."""
        self.turns[-1] += piece
        if self.tell is None:
            return
        step = self.protocol.parse(self.turns[-1], self.transcript.steps)
        analysis_length = len(step.analysis) - self._heading_characters(step.analysis)
        self.tell(
            {
                "type": "text",
                "text": piece,
                "step": len(self.transcript.steps) + 1,
                "analysis": step.analysis[:analysis_length],
                "query": query_text(step),
                "answer": step.answer,
            }
        )

    def take_step(self, transcript: Transcript) -> None:
        """Ends the current turn; sends the step that it ends, with the passages of its query."""
        self.turns.append("")
        if self.tell is None:
            return
        step = transcript.steps[-1]
        episode = transcript.episode()
        record = step_record(step, len(transcript.steps), numbered(episode.documents))
        passages = [asdict(passage) for passage in sources_of(episode) if passage.number in record["sources"]]
        failed = bool(transcript.failure and step.searches and not step.documents)
        self.tell({"type": "step", **record, "documents": passages, "failed": failed})

    def answer(self, why: str) -> ServedAnswer:
        """Returns the answer. If there is none, `why` is the reason that the reply names.

        The answer of a chat that was cut off is the text so far.
        """
        episode = self.transcript.episode()
        trace = "\n".join(turn for turn in self.turns if turn)
        final_answer = episode.prediction
        if self.ask.mode == "chat" and not final_answer:  # cut off
            final_answer = self.protocol.parse(trace, ()).answer or ""
        numbers = numbered(episode.documents)
        sampled_tokens = sum(self.transcript.action_mask)
        return ServedAnswer(
            final_answer=final_answer,
            reasoning_trace=trace,
            search_queries=episode.queries,
            steps=[step_record(step, i, numbers) for i, step in enumerate(episode.steps, 1)],
            sources=sources_of(episode, final_answer),
            finish=ANSWERED if final_answer and episode.finish != CUT_OFF else episode.finish,
            why=None if final_answer else why,
            failed=bool(episode.failure),
            prompt_tokens=len(self.transcript.tokens) - sampled_tokens,
            completion_tokens=sampled_tokens,
            mode=self.ask.mode,
            adapter=self.ask.adapter,
        )

    def _heading_characters(self, analysis: str) -> int:
        """Returns how many characters at the end of an analysis may be the beginning of the heading that follows it."""
        longest = 0
        # A step whose texts are "\0" is rendered: between the two "\0" stands the heading that separates them.
        for step in (Step.asking("\0", "\0"), Step("\0", answer="\0")):
            parts = self.protocol.render(step, 1).split("\0")
            if len(parts) != 3:
                continue
            heading = parts[1].rstrip()
            for length in range(1, len(heading)):
                if analysis.endswith(heading[:length]):
                    longest = max(longest, length)
        return longest


def numbered(documents: Iterable[Document]) -> dict[Document, int]:
    """Returns the number of each passage, in the order in which it was first found."""
    return {document: number for number, document in enumerate(dict.fromkeys(documents), 1)}


def query_text(step: Step) -> str | None:
    """Returns the queries of a step as one text; None without any."""
    return "; ".join(step.queries) or None


def step_record(step: Step, number: int, numbers: dict[Document, int]) -> dict[str, Any]:
    """Returns a step as JSON, its passages by their numbers."""
    return {
        "number": number,
        "analysis": step.analysis,
        "query": query_text(step),
        "answer": step.answer,
        "sources": [numbers[document] for document in step.documents],
        "faults": list(step.faults),
    }


def sources_of(episode: Episode, answer: str = "") -> list[NumberedPassage]:
    """Returns the passages of an episode, each once; `cited` marks those that have the answer word for word."""
    answer_words = split_words(normalize(answer))
    passages = []
    for document, number in numbered(episode.documents).items():
        words = split_words(normalize(f"{document.title} {document.text}"))
        passages.append(
            NumberedPassage(
                number,
                id=document.id,
                title=document.title,
                text=document.text,
                cited=in_a_row(answer_words, words),
            )
        )
    return passages
