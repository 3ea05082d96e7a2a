"""An episode in tokens with its action mask: one layout for SFT rows, rollouts and baselines.

An episode is one growing token sequence. A `Transcript` holds it. A `Layout` appends the prompt, the documents and the
headings of forced answers, and decides after each turn how the episode goes on. The text comes from a protocol; the
turns are written by a model or taken from a trajectory. No text is decoded and encoded again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from r3lite.core.episode import ANSWERED, CUT_OFF, MALFORMED, Document, Episode, Question, Search, Step
from r3lite.core.errors import R3LiteError
from r3lite.core.token_record import TokenRecord
from r3lite.protocols import base
from r3lite.protocols.chat import ThinkingChat
from r3lite.protocols.chat_template import THINK
from r3lite.protocols.thoughts import Thoughts
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.settings import LengthSettings

ANSWER_ROOM = 32  # tokens that stay free for a forced answer
LEAST_DOCUMENT = 16  # a document is not cut below this many tokens: it is dropped instead
BYTES = "\ufffd"  # decoded from bytes that are not a whole character
LONGEST_TITLE = 64  # tokens; titles are not cut further, because gold paragraphs are recognized by them


@dataclass
class Transcript(TokenRecord):
    """The tokens of one episode and its steps so far."""

    question: Question
    steps: list[Step] = field(default_factory=list)
    step_ends: list[int] = field(default_factory=list)  # index of each step's last token, to which its reward belongs
    finish: str | None = None  # None: the episode goes on
    turn_start: int = 0  # index of the first token of the current turn
    awaiting_answer: Step | None = None  # the step whose forced answer the current turn writes
    forced_step: Step | None = None  # the same of the last turn, if the episode ended with a forced answer
    pending: tuple[Search, ...] = ()  # searches of the last step that wait for their documents
    failure: str | None = None  # why the retriever failed, if it failed at a query of the episode

    def observe(self, tokens: Sequence[int]) -> None:
        """Appends tokens that the model did not write; a new turn starts after them."""
        self.tokens += tokens
        self.action_mask += [False] * len(tokens)
        self.turn_start = len(self.tokens)
        self.awaiting_answer = None

    def write(self, tokens: Sequence[int]) -> None:
        """Appends tokens that the model wrote."""
        self.tokens += tokens
        self.action_mask += [True] * len(tokens)

    def add_step(self, step: Step) -> None:
        """Adds a step that ends at the last token."""
        self.steps.append(step)
        self.step_ends.append(len(self.tokens) - 1)

    @property
    def turn(self) -> list[int]:
        """The tokens of the current turn."""
        return self.tokens[self.turn_start :]

    def episode(self) -> Episode:
        """Returns the episode so far, without its tokens."""
        return Episode(
            question=self.question,
            steps=list(self.steps),
            finish=self.finish,
            tokens_written=sum(self.action_mask),
            failure=self.failure,
        )


@dataclass(frozen=True)
class Opening:
    """The text that a baseline puts between the prompt and the model's first turn: the model writes only the answer."""

    searches: bool = False  # a first step whose query is the question itself, and its documents
    forces_answer: bool = False  # the heading of an answer
    plain: bool = False  # a chat without steps, whose first user turn has the documents, if there are any


# By the values of --baseline.
OPENINGS = {
    "none": Opening(),
    "rag": Opening(searches=True, plain=True),
    "closed-book": Opening(plain=True),
    "gold": Opening(searches=True, plain=True),  # `implied` of its settings names the retriever
    "no-retrieval": Opening(forces_answer=True),
    "single-retrieval": Opening(searches=True, forces_answer=True),
}


@dataclass
class Layout:
    """Lays out the episodes of a protocol in tokens, within the limits of `lengths`."""

    tokenizer: Tokenizer
    protocol: base.Protocol
    lengths: LengthSettings
    opening: Opening = Opening()
    _may_close: dict[int, bool] = field(default_factory=dict, init=False, repr=False)  # see turn_is_over

    def __post_init__(self):
        self._thoughts = Thoughts(self.tokenizer, self.protocol.thinks)
        if isinstance(self.protocol, ThinkingChat):
            self.tokenizer.check_thinking()

    def prompt(self, question: str, earlier: Sequence[dict[str, str]] = (), procedure: str = "") -> list[int]:
        """Returns the tokens of the prompt with `question`, after the `earlier` messages of a conversation."""
        opening = self.protocol.opening(self.protocol.quoted(question))
        if procedure:
            opening = f"{procedure}\n\n{opening}"
        return self.tokenizer.open_chat(
            opening,
            system=self.protocol.system,
            earlier=earlier,
            shots=self.protocol.shots,
        )

    def open(self, transcript: Transcript) -> None:
        """Appends the prompt to an empty transcript, then the search or the heading of the opening.

        Then the transcript may have `pending` queries, or be finished if there is no room for an answer.
        """
        question = transcript.question
        prompt = self.prompt(question.text, question.earlier, question.procedure)
        self.check_room(question, prompt)
        documents_are_in_prompt = self.opening.searches and self.opening.plain  # then `_observation` writes it
        if not documents_are_in_prompt:
            transcript.observe(prompt)
        if self.opening.searches:
            step = self.protocol.first_search(self.protocol.quoted(question.text))
            text = self.protocol.render(step, 1)
            transcript.observe(self._thoughts.written(transcript.tokens, text))
            transcript.add_step(step)
            transcript.pending = step.searches
        elif self.opening.forces_answer:
            self._begin_answer(transcript)

    def check_room(self, question: Question, prompt: Sequence[int]) -> None:
        """Raises R3LiteError if a prompt leaves no room for an answer."""
        if len(prompt) + ANSWER_ROOM > self.lengths.max_length:
            limit = f"--max-length {self.lengths.max_length} leaves no room for an answer"
            remedy = "Raise --max-length, shorten the prompt file, or remove the question."
            raise R3LiteError(
                f"question {question.id} and its prompt have {len(prompt)} tokens; {limit}",
                remedy,
                code="prompt-too-long",
            )

    def turn_is_over(self, transcript: Transcript) -> bool:
        """Returns whether the last token ends the current turn: by the stop token, a stop string or a limit."""
        turn = transcript.turn
        if len(turn) >= self.lengths.max_new_tokens or len(transcript.tokens) >= self.lengths.max_length:
            return True
        last_token = turn[-1]
        if last_token == self.tokenizer.stop_id:
            return True
        if last_token not in self._may_close:
            self._may_close[last_token] = self._may_end_stop_string(last_token)
        if not self._may_close[last_token]:
            return False
        # A stop string of n bytes spans at most n tokens, and ends in this one if it is complete only now.
        stops = self.protocol.stop_strings
        return any(stop in self.tokenizer.decode(turn[-len(stop.encode()) :]) for stop in stops)

    def _may_end_stop_string(self, token: int) -> bool:
        """Returns whether a token has the last character of a stop string, or some bytes of it.

        Few tokens have, so that little text is decoded.
        """
        text = self.tokenizer.decode([token])
        has_bytes = BYTES in text
        for stop in self.protocol.stop_strings:
            last_character = stop[-1]
            if last_character in text or (has_bytes and not last_character.isascii()):
                return True
        return False

    def readable(self, transcript: Transcript, ended: bool) -> str:
        """Returns the text of the current turn for a user: with its forced heading, without its thought, and up to a
        stop string.

        While the turn goes on, the text of each call continues that of the call before: incomplete characters, and
        what may be the beginning of a thought or of a stop string, are left out until the turn has `ended`.
        """
        text = self._read(transcript)
        if transcript.awaiting_answer is not None:
            text = self.protocol.answer_heading + text
            if transcript.awaiting_answer.analysis:
                text = f"\n{text}"
        stops = self.protocol.stop_strings
        stop_places = [text.index(stop) for stop in stops if stop in text]
        if stop_places:
            return text[: min(stop_places)]
        if ended:
            return text
        text = text.rstrip(BYTES)
        if THINK.startswith(text.strip()):  # perhaps the beginning of a thought
            return ""
        held_back = max((_overlap(text, stop) for stop in stops), default=0)
        return text[: len(text) - held_back]

    def close_turn(self, transcript: Transcript) -> None:
        """Parses the finished turn into a step and adds it.

        Then the transcript is finished, or has `pending` queries, or goes on with a turn for a forced answer.
        """
        text = self._read(transcript)
        steps = transcript.steps
        is_complete = transcript.tokens[-1] == self.tokenizer.stop_id or self.protocol.is_whole(text)
        if transcript.awaiting_answer is not None:
            self._close_answer(transcript, text, is_complete)
            return
        step = self.protocol.parse(text, steps)
        if not is_complete:
            step = replace(step, searches=(), answer=None, faults=(base.CUT_OFF,))
            heading = self.protocol.finishing(text, steps)
            if heading is not None:
                self._begin_answer(transcript, step, heading=heading)
                return
            transcript.finish = CUT_OFF
        elif step.answer is not None:
            transcript.finish = ANSWERED
        elif not step.searches or (self.lengths.end_at_idle_query and base.REPEATED_QUERY in step.faults):
            transcript.finish = MALFORMED
        elif sum(bool(s.searches) for s in steps) >= self.lengths.max_hops:
            self._force_answer(transcript, step, base.ANSWER_WAS_FORCED)
            return
        transcript.add_step(step)
        if transcript.finish is None:
            transcript.pending = step.searches

    def _close_answer(self, transcript: Transcript, text: str, is_complete: bool) -> None:
        """Adds the step that awaits its answer, with that of the finished turn. A copy of our request is no answer."""
        awaiting = transcript.awaiting_answer
        step = self.protocol.read_answer(text, transcript.steps)
        is_copy = any(base.same_query(step.answer or "", sentence) for sentence in base.NO_MORE.split(". "))
        faults = [*awaiting.faults, *step.faults]
        answer = None
        if not is_complete:
            faults.append(base.CUT_OFF)
            transcript.finish = CUT_OFF
        elif is_copy or step.answer is None:
            transcript.finish = MALFORMED
        else:
            answer = step.answer
            transcript.finish = ANSWERED
        transcript.forced_step = awaiting
        transcript.awaiting_answer = None
        transcript.add_step(Step(awaiting.analysis, answer=answer, faults=tuple(dict.fromkeys(faults))))

    def splice(self, transcript: Transcript, documents: Sequence[Sequence[Document]]) -> None:
        """Appends the documents of the pending queries, one list per query; forces an answer if none fit."""
        transcript.pending = ()
        step, observation = self._fit(transcript, documents)
        transcript.steps[-1] = step
        if observation is None:
            if self.opening.plain:
                cause = (
                    f"--max-length {self.lengths.max_length} has no room for "
                    f"question {transcript.question.id} with a document and an answer"
                )
                raise R3LiteError(cause, "Raise --max-length, or lower --max-new-tokens.", code="length-too-small")
            transcript.step_ends.pop()
            self._force_answer(transcript, transcript.steps.pop(), base.NO_ROOM)
            return
        transcript.observe(observation)
        if self.opening.forces_answer:
            self._begin_answer(transcript)

    def lay_out(self, question: Question, steps: Iterable[Step], document_tokens: int) -> Transcript:
        """Returns the transcript of an episode in which the model wrote `steps`, with documents of at most
        `document_tokens` tokens.

        Its tokens are those of a rollout with the same text, except that the limits of `lengths` are not applied.
        """
        transcript = Transcript(question)
        transcript.observe(self.prompt(question.text))
        for step in steps:
            text = self.protocol.render(step, len(transcript.steps) + 1)
            turn = self._thoughts.written(transcript.tokens, text)
            if self.protocol.user_turns or not text.endswith(self.protocol.stop_strings):
                turn = [*turn, self.tokenizer.stop_id]
            transcript.write(turn)
            documents = [search.documents for search in step.searches]
            transcript.add_step(self._cut(step, documents, document_tokens))
            if step.answer is None:
                transcript.observe(self._observation(transcript, transcript.steps))
        return transcript

    def _force_answer(self, transcript: Transcript, step: Step, fault: str) -> None:
        """Opens a last turn for the answer of `step`, after the protocol's request for it.

        The step keeps its analysis, loses its queries and gets the `fault`.
        """
        request = self._end(transcript) + self._given(self.protocol.answer_request)
        step = replace(step, searches=(), faults=(*step.faults, fault))
        self._begin_answer(transcript, step, request)

    def _begin_answer(
        self,
        transcript: Transcript,
        step: Step | None = None,
        request: Sequence[int] = (),
        heading: str | None = None,
    ) -> None:
        """Appends `request` and the heading of an answer, by default the protocol's, and awaits the answer of `step`
        (of an empty one for a baseline); cuts the episode off if there is no room."""
        if heading is None:
            heading = self.protocol.answer_opening(len(transcript.steps) + 1)
        tokens = [*transcript.tokens, *request]
        turn_start = transcript.turn_start
        if request:
            turn_start = len(tokens)
        thought_end = self._thoughts.end(tokens, turn_start)
        observation = [*request, *self.tokenizer.encode_written(thought_end + heading)]
        if len(transcript.tokens) + len(observation) >= self.lengths.max_length:
            transcript.finish = CUT_OFF
            if step:
                transcript.add_step(step)
            return
        transcript.observe(observation)
        transcript.awaiting_answer = step or Step()

    def _fit(self, transcript: Transcript, documents: Sequence[Sequence[Document]]) -> tuple[Step, list[int] | None]:
        """Cuts documents, then drops them from the end, until a whole turn and a forced answer fit after them.

        Returns the last step with its cut documents, and the tokens to append; or the step without documents and None,
        if not even one document per query fits.
        """
        heading = self._thoughts.end(self.tokenizer.opening) + self.protocol.answer_opening(1)
        request_length = len(self._given(self.protocol.answer_request))
        heading_length = len(self.tokenizer.encode_written(heading))
        reserved = self.lengths.max_new_tokens + request_length + heading_length + ANSWER_ROOM
        available = self.lengths.max_length - len(transcript.tokens) - reserved
        *earlier, last = transcript.steps
        limit = self.lengths.max_document_tokens
        by_query = [list(of_query) for of_query in documents]
        while True:
            step = self._cut(last, by_query, limit)
            observation = self._end(transcript) + self._observation(transcript, [*earlier, step])
            if len(observation) <= available:
                return step, observation
            if limit // 2 >= LEAST_DOCUMENT:
                limit //= 2
                continue
            longest = max(by_query, key=len)
            if len(longest) <= 1:
                return last, None
            longest.pop()

    def _cut(self, step: Step, documents: Sequence[Sequence[Document]], max_tokens: int) -> Step:
        """Returns the step with these documents, one list per query, their titles and texts cut."""

        def cut(document: Document) -> Document:
            title = self.tokenizer.cut(document.title, LONGEST_TITLE)
            text = self.tokenizer.cut(document.text, max_tokens)
            return replace(document, title=title, text=text)

        return step.with_documents([[cut(document) for document in of_query] for of_query in documents])

    def _observation(self, transcript: Transcript, steps: Sequence[Step]) -> list[int]:
        """Returns the tokens of the documents of the last step, in the protocol's wording."""
        question = transcript.question
        observation = self.protocol.observation(self.protocol.quoted(question.text), steps)
        if not transcript.tokens:
            return self.tokenizer.open_chat(observation, self.protocol.system, question.earlier)
        return self._given(observation)

    def _given(self, observation: str) -> list[int]:
        """Returns the tokens of an observation: a user turn, or text in the same assistant turn."""
        if self.protocol.user_turns:
            return self.tokenizer.user_turn(observation)
        return self.tokenizer.encode(observation)

    def _read(self, transcript: Transcript) -> str:
        """Returns the text of the current turn as the protocol reads it."""
        if transcript.awaiting_answer is not None:
            return self.tokenizer.decode(transcript.turn)
        return self._thoughts.read(transcript.tokens, transcript.turn_start)

    def _end(self, transcript: Transcript) -> list[int]:
        """Returns the tokens between the model's turn and an observation.

        Before a user turn: the token that ends the assistant turn, unless the model wrote it. In a protocol that stays
        in one assistant turn: the opening of another one, if the model ended it.
        """
        is_ended = transcript.tokens[-1:] == [self.tokenizer.stop_id]
        if self.protocol.user_turns:
            if is_ended or not transcript.tokens:
                return []
            return [self.tokenizer.stop_id]
        if is_ended:
            return self.tokenizer.assistant_turn()
        return []


def _overlap(text: str, stop: str) -> int:
    """Returns how many characters at the end of a text may be the beginning of a stop string."""
    for length in range(len(stop) - 1, 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
