"""Several layouts in the place of one: an episode is laid out by that of its question's source."""

from dataclasses import dataclass

from r3lite.core.episode import Document
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.protocols.transcript import Layout, Transcript
from r3lite.settings import LengthSettings


@dataclass(frozen=True)
class Layouts:
    """The layout of each source of questions: what an engine asks is passed on to that one."""

    tokenizer: Tokenizer
    lengths: LengthSettings
    of: dict[str, Layout]

    def open(self, transcript: Transcript) -> None:
        self.of[transcript.question.source].open(transcript)

    def turn_is_over(self, transcript: Transcript) -> bool:
        return self.of[transcript.question.source].turn_is_over(transcript)

    def readable(self, transcript: Transcript, ended: bool) -> str:
        return self.of[transcript.question.source].readable(transcript, ended)

    def close_turn(self, transcript: Transcript) -> None:
        self.of[transcript.question.source].close_turn(transcript)

    def splice(self, transcript: Transcript, documents: list[list[Document]]) -> None:
        self.of[transcript.question.source].splice(transcript, documents)
