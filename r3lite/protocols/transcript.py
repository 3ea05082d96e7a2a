"""An episode in tokens with its action mask: one layout for SFT rows, rollouts and baselines.

An episode is one growing token sequence. A `Transcript` holds it. A `Layout` appends the prompt, the documents and the
headings of forced answers, and decides after each turn how the episode goes on. The text comes from a protocol; the
turns are written by a model or taken from a trajectory. No text is decoded and encoded again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from r3lite.core.episode import ANSWERED, CUT_OFF, MALFORMED, Document, Episode, Question, Search, Step
from r3lite.core.errors import R3LiteError
from r3lite.protocols import base
from r3lite.protocols.chat import ThinkingChat
from r3lite.protocols.chat_template import THINK
from r3lite.protocols.thoughts import Thoughts
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.settings import LengthSettings

ANSWER_ROOM = 32  # tokens kept free for a forced answer
LEAST_DOCUMENT = 16  # a document is not cut below this many tokens: it is dropped instead
BYTES = "\ufffd"  # decoded from bytes that are not a whole character
LONGEST_TITLE = 64  # tokens; titles are not cut further, because gold paragraphs are recognized by them


@dataclass
class Transcript:
    """The tokens of one episode and its steps so far."""

    question: Question
    tokens: list[int] = field(default_factory=list)  # [T]
    action_mask: list[bool] = field(default_factory=list)  # [T]: True if the model wrote the token, False if given
    steps: list[Step] = field(default_factory=list)
    step_ends: list[int] = field(default_factory=list)  # index of each step's last token, to which its reward belongs
    finish: str | None = None  # None: the episode goes on
    turn_start: int = 0  # index of the first token of the current turn
    awaiting_answer: Step | None = None  # the step whose forced answer the current turn writes
    forced_step: Step | None = None  # the same of the last turn, if the episode ended with a forced answer
    pending: tuple[Search, ...] = ()  # searches of the last step that wait for their documents
    failure: str | None = None  # why the retriever failed, if it failed at a query of the episode

    def observe(self, tokens: Sequence[int]) -> None:
        """Appends given tokens; a new turn starts after them."""
        self.tokens += tokens
        self.action_mask += [False] * len(tokens)
        self.turn_start, self.awaiting_answer = len(self.tokens), None

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
        """Tokens written in the current turn."""
        return self.tokens[self.turn_start :]

    def episode(self) -> Episode:
        return Episode(self.question, list(self.steps), self.finish, sum(self.action_mask), self.failure)


@dataclass(frozen=True)
class Opening:
    """What a baseline puts between the prompt and the model's first turn, so that only the answer is left to write."""

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
        """The tokens of the prompt with `question`, after the `earlier` messages of a conversation."""
        opening = self.protocol.opening(self.protocol.quoted(question))
        if procedure:
            opening = f"{procedure}\n\n{opening}"
        return self.tokenizer.open_chat(opening, self.protocol.system, earlier, self.protocol.shots)

    def open(self, transcript: Transcript) -> None:
        """Appends the prompt to an empty transcript, and what the opening has besides.

        Then the transcript may have `pending` queries, or be finished if there is no room for an answer.
        """
        question = transcript.question
        prompt = self.prompt(question.text, question.earlier, question.procedure)
        self.check_room(question, prompt)
        if not (self.opening.searches and self.opening.plain):  # else the documents are in the prompt: _observation
            transcript.observe(prompt)
        if self.opening.searches:
            step = self.protocol.first_search(self.protocol.quoted(question.text))
            transcript.observe(self._thoughts.written(transcript.tokens, self.protocol.render(step, 1)))
            transcript.add_step(step)
            transcript.pending = step.searches
        elif self.opening.forces_answer:
            self._begin_answer(transcript)

    def check_room(self, question: Question, prompt: Sequence[int]) -> None:
        """Raises R3LiteError if a prompt leaves no room for an answer."""
        if len(prompt) + ANSWER_ROOM > self.lengths.max_length:
            limit = f"--max-length {self.lengths.max_length} leaves no room for an answer"
            remedy = "Raise --max-length, shorten the prompt file, or remove the question."
            raise R3LiteError(f"question {question.id} and its prompt have {len(prompt)} tokens; {limit}", remedy)

    def turn_is_over(self, transcript: Transcript) -> bool:
        """Whether the last token written ends the current turn: by the stop token, a stop string or a limit."""
        turn = transcript.turn
        full = len(turn) >= self.lengths.max_new_tokens or len(transcript.tokens) >= self.lengths.max_length
        if full or turn[-1] == self.tokenizer.stop_id:
            return True
        # A stop string of n bytes spans at most n tokens, and ends in this one if it is complete only now. Few tokens
        # have its last character, or some bytes of it, so that little text is decoded.
        stops, last = self.protocol.stop_strings, turn[-1]
        if last not in self._may_close:
            text = self.tokenizer.decode([last])
            self._may_close[last] = any(s[-1] in text or (BYTES in text and not s[-1].isascii()) for s in stops)
        return self._may_close[last] and any(s in self.tokenizer.decode(turn[-len(s.encode()) :]) for s in stops)

    def readable(self, transcript: Transcript, ended: bool) -> str:
        """The text of the current turn for a user: with its forced heading, without its thought, up to a stop string.

        While the turn goes on, the text of each call continues that of the call before: incomplete characters, and
        what may be the beginning of a thought or of a stop string, are left out until the turn has `ended`.
        """
        text = self._read(transcript)
        if transcript.awaiting_answer is not None:
            text = "\n" * bool(transcript.awaiting_answer.analysis) + self.protocol.answer_heading + text
        stops = self.protocol.stop_strings
        if found := [text.index(s) for s in stops if s in text]:
            return text[: min(found)]
        if ended:
            return text
        text = text.rstrip(BYTES)
        if THINK.startswith(text.strip()):  # perhaps the beginning of a thought
            return ""
        begun = max((n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        return text[: len(text) - begun]

    def close_turn(self, transcript: Transcript) -> None:
        """Parses the finished turn into a step and adds it.

        Then the transcript is finished, or has `pending` queries, or goes on with a turn for a forced answer.
        """
        text, steps = self._read(transcript), transcript.steps
        whole = transcript.tokens[-1] == self.tokenizer.stop_id or self.protocol.is_whole(text)
        if transcript.awaiting_answer is not None:
            self._close_answer(transcript, text, whole)
            return
        step = self.protocol.parse(text, steps)
        if not whole:
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

    def _close_answer(self, transcript: Transcript, text: str, whole: bool) -> None:
        """Adds the step that awaits its answer, with that of the finished turn. A copy of our request is no answer."""
        step, begun = self.protocol.read_answer(text, transcript.steps), transcript.awaiting_answer
        copied = any(base.same_query(step.answer or "", sentence) for sentence in base.NO_MORE.split(". "))
        answer = step.answer if whole and not copied else None
        transcript.finish = ANSWERED if answer is not None else MALFORMED if whole else CUT_OFF
        faults = tuple(dict.fromkeys((*begun.faults, *step.faults, *[base.CUT_OFF] * (not whole))))
        transcript.forced_step = begun
        transcript.awaiting_answer = None
        transcript.add_step(Step(begun.analysis, answer=answer, faults=faults))

    def splice(self, transcript: Transcript, documents: Sequence[Sequence[Document]]) -> None:
        """Appends the documents of the pending queries, one list per query; forces an answer if none fit."""
        transcript.pending = ()
        step, given = self._fit(transcript, documents)
        transcript.steps[-1] = step
        if given is None:
            if self.opening.plain:
                what = f"question {transcript.question.id} with a document and an answer"
                cause = f"--max-length {self.lengths.max_length} has no room for {what}"
                raise R3LiteError(cause, "Raise --max-length, or lower --max-new-tokens.")
            transcript.step_ends.pop()
            self._force_answer(transcript, transcript.steps.pop(), base.NO_ROOM)
            return
        transcript.observe(given)
        if self.opening.forces_answer:
            self._begin_answer(transcript)

    def lay_out(self, question: Question, steps: Iterable[Step], document_tokens: int) -> Transcript:
        """The transcript of an episode in which the model wrote `steps`, with documents of at most `document_tokens`.

        Its tokens are those of a rollout with the same text, except that the limits of `lengths` are not applied.
        """
        transcript = Transcript(question)
        transcript.observe(self.prompt(question.text))
        for step in steps:
            text = self.protocol.render(step, len(transcript.steps) + 1)
            written = self._thoughts.written(transcript.tokens, text)
            if self.protocol.user_turns or not text.endswith(self.protocol.stop_strings):
                written = [*written, self.tokenizer.stop_id]
            transcript.write(written)
            transcript.add_step(self._cut(step, [s.documents for s in step.searches], document_tokens))
            if step.answer is None:
                transcript.observe(self._observation(transcript, transcript.steps))
        return transcript

    def _force_answer(self, transcript: Transcript, step: Step, why: str) -> None:
        """Opens a last turn for the answer of `step`, after the protocol's request for it.

        The step keeps its analysis, loses its queries and gets the fault `why`.
        """
        request = self._end(transcript) + self._given(self.protocol.answer_request)
        self._begin_answer(transcript, replace(step, searches=(), faults=(*step.faults, why)), request)

    def _begin_answer(
        self, transcript: Transcript, step: Step | None = None, request: Sequence[int] = (), heading: str | None = None
    ) -> None:
        """Appends `request` and the heading of an answer, by default the protocol's, and awaits the answer of `step`
        (of an empty one for a baseline); cuts the episode off if there is no room."""
        if heading is None:
            heading = self.protocol.answer_opening(len(transcript.steps) + 1)
        tokens = [*transcript.tokens, *request]
        thought_end = self._thoughts.end(tokens, len(tokens) if request else transcript.turn_start)
        given = [*request, *self.tokenizer.encode_written(thought_end + heading)]
        if len(transcript.tokens) + len(given) >= self.lengths.max_length:
            transcript.finish = CUT_OFF
            if step:
                transcript.add_step(step)
            return
        transcript.observe(given)
        transcript.awaiting_answer = step or Step()

    def _fit(self, transcript: Transcript, documents: Sequence[Sequence[Document]]) -> tuple[Step, list[int] | None]:
        """Cuts documents, then drops them from the end, until a whole turn and a forced answer fit after them.

        Returns the last step with its cut documents, and the tokens to append; or the step without documents and None,
        if not even one document per query fits.
        """
        heading = self._thoughts.end(self.tokenizer.opening) + self.protocol.answer_opening(1)
        forced = len(self._given(self.protocol.answer_request)) + len(self.tokenizer.encode_written(heading))
        kept_free = self.lengths.max_new_tokens + forced + ANSWER_ROOM
        room = self.lengths.max_length - len(transcript.tokens) - kept_free
        *earlier, last = transcript.steps
        limit, kept = self.lengths.max_document_tokens, [list(of_query) for of_query in documents]
        while True:
            step = self._cut(last, kept, limit)
            given = self._end(transcript) + self._observation(transcript, [*earlier, step])
            if len(given) <= room:
                return step, given
            if limit // 2 >= LEAST_DOCUMENT:
                limit //= 2
            elif len(longest := max(kept, key=len)) > 1:
                longest.pop()
            else:
                return last, None

    def _cut(self, step: Step, documents: Sequence[Sequence[Document]], max_tokens: int) -> Step:
        """The step with these documents, one list per query, their titles and texts cut."""

        def cut(d: Document) -> Document:
            title = self.tokenizer.cut(d.title, LONGEST_TITLE)
            return replace(d, title=title, text=self.tokenizer.cut(d.text, max_tokens))

        return step.with_documents([[cut(d) for d in found] for found in documents])

    def _observation(self, transcript: Transcript, steps: Sequence[Step]) -> list[int]:
        """The tokens of the documents of the last step, in the protocol's wording."""
        question = transcript.question
        observation = self.protocol.observation(self.protocol.quoted(question.text), steps)
        if not transcript.tokens:
            return self.tokenizer.open_chat(observation, self.protocol.system, question.earlier)
        return self._given(observation)

    def _given(self, observation: str) -> list[int]:
        """The tokens of an observation: a user turn, or text in the same assistant turn."""
        if self.protocol.user_turns:
            return self.tokenizer.user_turn(observation)
        return self.tokenizer.encode(observation)

    def _read(self, transcript: Transcript) -> str:
        """The text of the current turn as the protocol reads it."""
        if transcript.awaiting_answer is not None:
            return self.tokenizer.decode(transcript.turn)
        return self._thoughts.read(transcript.tokens, transcript.turn_start)

    def _end(self, transcript: Transcript) -> list[int]:
        """The tokens between the model's turn and an observation.

        Before a user turn: the token that ends the assistant turn, unless the model wrote it. In a protocol that stays
        in one assistant turn: the opening of another one, if the model ended it.
        """
        ended = transcript.tokens[-1:] == [self.tokenizer.stop_id]
        if self.protocol.user_turns:
            return [] if ended or not transcript.tokens else [self.tokenizer.stop_id]
        return self.tokenizer.assistant_turn() if ended else []
