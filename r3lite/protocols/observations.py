"""The observations of an episode in tokens: the documents and requests after the model's turns, cut to fit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from r3lite.core.episode import Document, Step
from r3lite.protocols.base import Protocol
from r3lite.protocols.thoughts import Thoughts
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.protocols.transcript import Transcript
from r3lite.settings import LengthSettings

ANSWER_ROOM = 32  # tokens that stay free for a forced answer
LEAST_DOCUMENT = 16  # a document is not cut below this many tokens: it is dropped instead
LONGEST_TITLE = 64  # tokens; titles are not cut further, because gold paragraphs are recognized by them


@dataclass(frozen=True)
class Observations:
    """Writes documents and requests in the protocol's wording."""

    tokenizer: Tokenizer
    protocol: Protocol
    thoughts: Thoughts

    def fit(
        self,
        transcript: Transcript,
        documents: Sequence[Sequence[Document]],
        lengths: LengthSettings,
    ) -> tuple[Step, list[int] | None]:
        """Cuts documents, then drops some, until a whole turn and a forced answer fit after them.

        `documents` has a list for each query of the last step. Each time, the last document of the longest list is
        dropped. Returns the last step with its cut documents, and the tokens to append; or the step without documents
        and None, if not even one document per query fits.
        """
        heading = self.thoughts.closing_text(self.tokenizer.generation_prompt) + self.protocol.answer_prefix(1)
        request_length = len(self.of_text(self.protocol.answer_request))
        heading_length = len(self.tokenizer.encode_written(heading))
        reserved = lengths.max_new_tokens + request_length + heading_length + ANSWER_ROOM
        available = lengths.max_length - len(transcript.tokens) - reserved
        *earlier, last = transcript.steps
        limit = lengths.max_document_tokens
        by_query = [list(of_query) for of_query in documents]
        while True:
            step = self.cut(last, by_query, limit)
            observation = self.turn_end(transcript) + self.of_documents(transcript, [*earlier, step])
            if len(observation) <= available:
                return step, observation
            if limit // 2 >= LEAST_DOCUMENT:
                limit //= 2
                continue
            most_documents = max(by_query, key=len)
            if len(most_documents) <= 1:
                return last, None
            most_documents.pop()

    def cut(self, step: Step, documents: Sequence[Sequence[Document]], max_tokens: int) -> Step:
        """Returns the step with these documents, one list per query, cut: the texts to `max_tokens`, and the titles."""
        cut_documents = []
        for documents_of_query in documents:
            cut_documents.append([self._cut_document(document, max_tokens) for document in documents_of_query])
        return step.with_documents(cut_documents)

    def _cut_document(self, document: Document, max_tokens: int) -> Document:
        """Returns a document with its title and its text cut."""
        title = self.tokenizer.cut(document.title, LONGEST_TITLE)
        text = self.tokenizer.cut(document.text, max_tokens)
        return replace(document, title=title, text=text)

    def of_documents(self, transcript: Transcript, steps: Sequence[Step]) -> list[int]:
        """Returns the tokens of the documents of the last of `steps`, in the protocol's wording.

        `steps` are the transcript's, or others to try out whether their documents fit. If the transcript is empty, the
        tokens include the beginning of the chat.
        """
        question = transcript.question
        observation = self.protocol.observation(self.protocol.quoted(question.text), steps)
        if not transcript.tokens:  # the documents stand in the user turn that opens the chat
            if question.procedure:
                observation = f"{question.procedure}\n\n{observation}"
            return self.tokenizer.open_chat(observation, self.protocol.system, question.earlier)
        return self.of_text(observation)

    def of_text(self, observation: str) -> list[int]:
        """Returns the tokens of a text that is given to the model: a user turn, or text in the same assistant turn."""
        if self.protocol.user_turns:
            return self.tokenizer.user_turn(observation)
        return self.tokenizer.encode(observation)

    def turn_end(self, transcript: Transcript) -> list[int]:
        """Returns the tokens between the model's turn and an observation.

        In a protocol with user turns, this is the token that ends the assistant turn, unless the model wrote it. In a
        protocol that stays in one assistant turn, it is the opening of a new one, if the model ended its turn.
        """
        is_ended = transcript.tokens[-1:] == [self.tokenizer.stop_id]
        if self.protocol.user_turns:
            if is_ended or not transcript.tokens:
                return []
            return [self.tokenizer.stop_id]
        if is_ended:
            return self.tokenizer.assistant_turn()
        return []
