"""The tokens of an episode: one layout for SFT rows, rollouts and baselines.

An episode is one growing token sequence, each token with its place in the action mask. `Layout` appends to it what is
given and decides how the episode goes on after each turn. What the text says is the protocol's; who writes the turns,
a model or a trajectory, is the caller's. Nothing is decoded and tokenized again.
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

ANSWER_ROOM = 32  # tokens kept free for a forced answer, as long as the limit of an episode allows
LEAST_DOCUMENT = 16  # a document is not cut below this many tokens; it is dropped instead, or the row is too long
# Tokens of a title. It is cut no further, however little room there is: it tells which passages are gold.
LONGEST_TITLE = 64


@dataclass
class Transcript:
    """The tokens of one episode and its steps so far.

    `action_mask` is True if the model wrote the token and False if it was given. `step_ends[k]` is the index of
    the last token of step k: the step's reward belongs to it.
    """

    question: Question
    tokens: list[int] = field(default_factory=list)
    action_mask: list[bool] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    step_ends: list[int] = field(default_factory=list)
    finish: str | None = None  # None: the episode goes on
    turn_start: int = 0  # index of the first token of the current turn
    held: Step | None = None  # a step that only its answer is missing from, which the current turn gives
    pending: tuple[Search, ...] = ()  # those of the last step, which wait for their documents
    failure: str | None = None  # why the retriever failed, if it did at a query of the episode

    def observe(self, tokens: Sequence[int]) -> None:
        """Appends given tokens; the next turn starts after them."""
        self.tokens += tokens
        self.action_mask += [False] * len(tokens)
        self.turn_start, self.held = len(self.tokens), None

    def write(self, tokens: Sequence[int]) -> None:
        """Appends tokens of the model's own."""
        self.tokens += tokens
        self.action_mask += [True] * len(tokens)

    def add_step(self, step: Step) -> None:
        """Takes the tokens so far as the end of a step."""
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
    """What an episode holds after its prompt, before the model's first turn: nothing, or what a baseline gives it.

    A baseline gives the model all of an episode but the answer, in the layout that it was trained on or a plain chat.
    """

    searches: bool = False  # a first step with the question itself as its query, and the documents that it brings
    forces_answer: bool = False  # the heading of an answer, so that the model's first turn is the answer
    plain: bool = False  # a chat without steps, in whose first user turn the documents stand, if there are any


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
    """How the episodes of a protocol are laid out in tokens, within the limits of `lengths`."""

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
        """The tokens that an episode about `question` opens with, after the `earlier` messages of a conversation."""
        opening = self.protocol.opening(self.protocol.quoted(question))
        if procedure:
            opening = f"{procedure}\n\n{opening}"
        return self.tokenizer.open_chat(opening, self.protocol.system, earlier, self.protocol.shots)

    def open(self, transcript: Transcript) -> None:
        """Gives an empty transcript its prompt, and what the opening has besides.

        It may then have `pending` queries, or be finished if there is no room for an answer.
        """
        question = transcript.question
        prompt = self.prompt(question.text, question.earlier, question.procedure)
        self.check_room(question, prompt)
        waits = self.opening.searches and self.opening.plain  # the prompt, for the documents: see _observation
        transcript.observe([] if waits else prompt)
        if self.opening.searches:
            step = self.protocol.first_search(self.protocol.quoted(question.text))
            transcript.observe(self._thoughts.written(transcript.tokens, self.protocol.render(step, 1)))
            transcript.add_step(step)
            transcript.pending = step.searches
        elif self.opening.forces_answer:
            self._begin_answer(transcript)

    def check_room(self, question: Question, prompt: Sequence[int]) -> None:
        """Raises R3LiteError if an episode is full before an answer."""
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
        # A stop string of n characters spans at most n tokens, and it is only now complete if it ends in this one. Few
        # tokens have its last character, so that little text is decoded.
        stops, last = self.protocol.stop_strings, turn[-1]
        if last not in self._may_close:
            self._may_close[last] = any(s[-1] in self.tokenizer.decode([last]) for s in stops)
        return self._may_close[last] and any(s in self.tokenizer.decode(turn[-len(s) :]) for s in stops)

    def readable(self, transcript: Transcript, ended: bool) -> str:
        """The text of the current turn, from its forced heading up to a stop string, without its thought.

        Until the turn has `ended` it grows at its end only: a character whose bytes are not all there is held back,
        and so is what may be the beginning of a thought or of a stop string.
        """
        text = self._read(transcript)
        if transcript.held is not None:
            text = "\n" * bool(transcript.held.analysis) + self.protocol.answer_heading + text
        stops = self.protocol.stop_strings
        if found := [text.index(s) for s in stops if s in text]:
            return text[: min(found)]
        if ended:
            return text
        text = text.rstrip("\ufffd")  # what bytes that make no character are decoded to
        if THINK.startswith(text.strip()):  # perhaps the beginning of a thought
            return ""
        held = max((n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        return text[: len(text) - held]

    def close_turn(self, transcript: Transcript) -> None:
        """Adds the step that the finished turn means.

        Then the transcript is finished, or has `pending` queries, or a step is `held` until its answer is given.
        """
        text, steps = self._read(transcript), transcript.steps
        whole = transcript.tokens[-1] == self.tokenizer.stop_id or self.protocol.is_whole(text)
        if transcript.held is not None:
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
        """Adds the step that was held, with the answer of the finished turn. What repeats our request is no answer."""
        step, held = self.protocol.read_answer(text, transcript.steps), transcript.held
        ours = any(base.same_query(step.answer or "", sentence) for sentence in base.NO_MORE.split(". "))
        answer = step.answer if whole and not ours else None
        transcript.finish = ANSWERED if answer is not None else MALFORMED if whole else CUT_OFF
        faults = tuple(dict.fromkeys((*held.faults, *step.faults, *[base.CUT_OFF] * (not whole))))
        transcript.held = None
        transcript.add_step(Step(held.analysis, answer=answer, faults=faults))

    def splice(self, transcript: Transcript, documents: Sequence[Sequence[Document]]) -> None:
        """Gives a transcript the documents of its pending queries, a list of each.

        An answer is forced if there is no room for any.
        """
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
        """The transcript of an episode in which the model wrote `steps`; documents are cut to `document_tokens` each.

        It equals the rollout of the same text, except that the limits of `lengths` are not applied.
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
        """Opens a last turn in which only the answer of a step is left to write, after the protocol's request for it.

        The step keeps its analysis, loses its queries and has the fault `why`.
        """
        request = self._end(transcript) + self._given(self.protocol.answer_request)
        self._begin_answer(transcript, replace(step, searches=(), faults=(*step.faults, why)), request)

    def _begin_answer(
        self, transcript: Transcript, step: Step | None = None, request: Sequence[int] = (), heading: str | None = None
    ) -> None:
        """Gives `request` and the heading of an answer, by default the protocol's; cuts the episode off if there is no
        room for them. The answer becomes that of `step`; a baseline has none."""
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
        transcript.held = step or Step()

    def _fit(self, transcript: Transcript, documents: Sequence[Sequence[Document]]) -> tuple[Step, list[int] | None]:
        """Documents cut, or dropped from the end, until a whole turn and a forced answer still fit after them.

        Returns the last step with the documents as they are given, and the tokens to give; None, and the step as it
        is, if not even one document of each query fits.
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
        """The step with these documents of each of its queries, their titles and texts cut."""

        def cut(d: Document) -> Document:
            title = self.tokenizer.cut(d.title, LONGEST_TITLE)
            return replace(d, title=title, text=self.tokenizer.cut(d.text, max_tokens))

        return step.with_documents([[cut(d) for d in found] for found in documents])

    def _observation(self, transcript: Transcript, steps: Sequence[Step]) -> list[int]:
        """The tokens of what follows the searches of the last of the steps."""
        question = transcript.question
        observation = self.protocol.observation(self.protocol.quoted(question.text), steps)
        if not transcript.tokens:
            return self.tokenizer.open_chat(observation, self.protocol.system, question.earlier)
        return self._given(observation)

    def _given(self, observation: str) -> list[int]:
        """The tokens of an observation after the model's turn: a user turn, or plain text in the same turn."""
        if self.protocol.user_turns:
            return self.tokenizer.user_turn(observation)
        return self.tokenizer.encode(observation)

    def _read(self, transcript: Transcript) -> str:
        """The text of the current turn as the protocol reads it."""
        if transcript.held is not None:
            return self.tokenizer.decode(transcript.turn)
        return self._thoughts.read(transcript.tokens, transcript.turn_start)

    def _end(self, transcript: Transcript) -> list[int]:
        """What stands between the model's turn and what is given.

        Before a user turn that is the token that ends the assistant turn, if the model has not written it itself.
        A protocol that goes on in the assistant turn opens another if the model has ended it.
        """
        ended = transcript.tokens[-1:] == [self.tokenizer.stop_id]
        if self.protocol.user_turns:
            return [] if ended or not transcript.tokens else [self.tokenizer.stop_id]
        return self.tokenizer.assistant_turn() if ended else []
