"""The layout of episodes in tokens: one for SFT rows, rollouts and baselines.

A `Layout` appends the prompt, the documents and the headings of forced answers to a transcript, and decides after each
turn how the episode goes on. The text comes from a protocol; the turns are written by a model or taken from a
trajectory. The tokens of a turn stay as they are: they are never decoded and encoded again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from r3lite.core.episode import ANSWERED, CUT_OFF, MALFORMED, SEARCHING, Document, Question, Step
from r3lite.core.errors import R3LiteError
from r3lite.protocols import base
from r3lite.protocols.chat import ThinkingChat
from r3lite.protocols.observations import ANSWER_ROOM, Observations
from r3lite.protocols.thoughts import Thoughts
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.protocols.transcript import Transcript
from r3lite.protocols.turn_text import TurnText
from r3lite.settings import LengthSettings


@dataclass(frozen=True)
class Opening:
    """How an episode begins. In baselines the layout may search, or write the heading of the answer, for the model."""

    # The protocol is PlainAnswer (plain_answer.py): one user turn holds the documents, if any, then the question.
    plain: bool = False
    retrieves_first: bool = False  # the question itself is the first query, before the first turn of the model
    forces_answer: bool = False  # the first turn begins with the heading of an answer


# By the value of --baseline. `gold` opens as `rag` does; it differs by its retriever, which returns the gold paragraphs
# (EvaluateSettings.implied).
OPENINGS = {
    "none": Opening(),
    "rag": Opening(plain=True, retrieves_first=True),
    "closed-book": Opening(plain=True),
    "gold": Opening(plain=True, retrieves_first=True),
    "no-retrieval": Opening(forces_answer=True),
    "single-retrieval": Opening(retrieves_first=True, forces_answer=True),
}


@dataclass
class Layout:
    """Lays out the episodes of a protocol in tokens, within the limits that `lengths` sets."""

    tokenizer: Tokenizer
    protocol: base.Protocol
    lengths: LengthSettings
    opening: Opening = Opening()
    turn_text: TurnText = field(init=False, repr=False, compare=False)
    observations: Observations = field(init=False, repr=False, compare=False)
    _thoughts: Thoughts = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        self._thoughts = Thoughts(self.tokenizer, self.protocol.thinks)
        self.turn_text = TurnText(self.tokenizer, self.protocol, self._thoughts)
        self.observations = Observations(self.tokenizer, self.protocol, self._thoughts)
        if isinstance(self.protocol, ThinkingChat):
            self.tokenizer.refuse_if_thinking_is_off()

    def prompt(self, text: str, earlier: Sequence[dict[str, str]] = (), procedure: str = "") -> list[int]:
        """Returns the tokens of the prompt: all that comes before the model's first turn, without documents.

        The last message of the prompt has the procedure, if there is one, and the question's `text`. The `earlier`
        messages of a conversation stand before it.
        """
        # `quoted` makes headings and tags in the question harmless.
        message = self.protocol.question_message(self.protocol.quoted(text))
        if procedure:
            message = f"{procedure}\n\n{message}"
        return self.tokenizer.open_chat(
            message,
            system=self.protocol.system,
            earlier=earlier,
            shots=self.protocol.shots,
        )

    def open(self, transcript: Transcript) -> None:
        """Begins an empty transcript. What is appended depends on the opening:

        - Without `retrieves_first`: the prompt, and with `forces_answer` the heading of the answer. If there is no room
          for this heading and an answer, the transcript is finished: CUT_OFF.
        - With `retrieves_first`: the prompt, then a first step whose search is `pending`. `splice` appends the
          documents.
        - With `retrieves_first` and `plain`: no tokens; the first step is added. `splice` appends the prompt, which has
          the documents in it.
        """
        question = transcript.question
        prompt = self.prompt(question.text, question.earlier, question.procedure)
        self.check_room(question, prompt)  # even where `splice` appends the prompt later
        if not self.opening.retrieves_first:
            transcript.observe(prompt)
            if self.opening.forces_answer:
                self._begin_answer(transcript)
            return
        first_step = self.protocol.first_search(self.protocol.quoted(question.text))
        if not self.opening.plain:
            transcript.observe(prompt)
            text = self.protocol.render(first_step, 1)
            # Without the stop token, which `splice` appends with the documents.
            transcript.observe(self._thoughts.encode_turn(transcript.tokens, text))
        # In a plain chat there is no token yet, so the step's end is -1. Nothing reads this end: only training
        # (rewards, expansions) reads the ends of steps, and training has no baselines.
        transcript.add_step(first_step)
        transcript.pending = first_step.searches

    def check_room(self, question: Question, prompt: Sequence[int]) -> None:
        """Raises R3LiteError if a prompt leaves no room for an answer."""
        if len(prompt) + ANSWER_ROOM > self.lengths.max_length:
            limit = f"--max-length {self.lengths.max_length} leaves no room for an answer"
            raise R3LiteError(
                f"question {question.id} and its prompt have {len(prompt)} tokens; {limit}",
                "Raise --max-length, shorten the prompt file, or remove the question.",
                code="prompt-too-long",
            )

    def turn_is_over(self, transcript: Transcript) -> bool:
        """Returns whether the last token ends the current turn: by the stop token, a stop string or a limit.

        A stop string inside an open thought does not end the turn, because the model only quotes it there. If the
        protocol's format itself has thoughts (`Protocol.thinks`), every stop string ends the turn.
        """
        turn = transcript.turn
        if len(turn) >= self.lengths.max_new_tokens or len(transcript.tokens) >= self.lengths.max_length:
            return True
        if turn[-1] == self.tokenizer.stop_id:
            return True
        if not self.turn_text.ends_with_stop(turn):
            return False
        return self.protocol.thinks or not self._thoughts.is_open(transcript.tokens, transcript.turn_start)

    def close_turn(self, transcript: Transcript) -> None:
        """Parses the finished turn into a step, and decides how the transcript goes on.

        The step is added to the transcript, which is then finished or has `pending` searches. Or a turn for a forced
        answer begins; when that turn is over, `_close_answer` adds the step. After a last turn
        (`Transcript.is_last_turn`) the transcript is always finished.
        """
        text = self.turn_text.read(transcript)
        # The model ended the turn if it wrote the stop token, or if the text is complete by the protocol's rule, such
        # as at a stop string. Otherwise a limit cut the turn off.
        ended_by_model = transcript.tokens[-1] == self.tokenizer.stop_id or self.protocol.is_whole(text)
        if transcript.forced_step is not None:
            self._close_answer(transcript, text, ended_by_model)
        elif ended_by_model:
            self._close_step(transcript, self.protocol.parse(text, transcript.steps))
        else:
            self._close_cut_off(transcript, text)

    def _close_step(self, transcript: Transcript, step: Step) -> None:
        """Adds the step of a turn that the model ended. If the step searches after --max-hops, forces an answer."""
        searching_steps = [earlier_step for earlier_step in transcript.steps if earlier_step.searches]
        # Idle queries are blank or repeated ones. --end-at-idle-query ends an episode at a repeated query, even beside
        # new ones. Blank queries need no check: a step that has no other query has no searches, which ends the episode
        # without the flag, too.
        ends_at_repeated_query = self.lengths.end_at_idle_query and base.REPEATED_QUERY in step.faults
        if step.answer is not None:
            step = replace(step, faults=(*step.faults, *self._faults_of_answer(step.answer, transcript)))
            transcript.finish = ANSWERED
        elif not step.searches or ends_at_repeated_query:
            transcript.finish = MALFORMED
        elif transcript.is_last_turn:
            transcript.finish = SEARCHING
        elif len(searching_steps) < self.lengths.max_hops:
            transcript.pending = step.searches
        else:
            self._force_answer(transcript, step, base.ANSWER_WAS_FORCED)
            return  # _close_answer adds the step, with its answer
        transcript.add_step(step)

    def _close_cut_off(self, transcript: Transcript, text: str) -> None:
        """Closes a turn that a limit cut off: forces an answer after its text, or ends the episode as CUT_OFF.

        No answer is forced after a last turn, or if the model has begun to write an answer
        (`Protocol.heading_after_cut_off`).
        """
        step = self.protocol.parse(text, transcript.steps)
        # TURN_CUT_OFF replaces the faults that `parse` reports: in an unfinished text they mean nothing.
        step = replace(step, searches=(), answer=None, faults=(base.TURN_CUT_OFF,))
        heading = self.protocol.heading_after_cut_off(text, transcript.steps)
        if heading is not None and not transcript.is_last_turn:
            self._begin_answer(transcript, step, heading=heading)
            return
        transcript.finish = CUT_OFF
        transcript.add_step(step)

    def _close_answer(self, transcript: Transcript, text: str, ended_by_model: bool) -> None:
        """Adds the step whose answer was forced, with the answer of this turn, and ends the episode.

        The step gets no answer if a limit cut the turn off (not `ended_by_model`), if the turn only repeats the request
        for an answer, or if the protocol reads none: the turn is blank, or has a second answer or a query.
        """
        forced_step = transcript.forced_step
        step = self.protocol.read_answer(text, transcript.steps)
        repeats_request = base.repeats_request(step.answer or "")
        faults = [*forced_step.faults, *step.faults]
        answer = None
        if not ended_by_model:
            # `step.faults` are left out: in an unfinished text they mean nothing.
            faults = [*forced_step.faults, base.TURN_CUT_OFF]
            transcript.finish = CUT_OFF
        elif repeats_request or step.answer is None:
            transcript.finish = MALFORMED
        else:
            answer = step.answer
            faults += self._faults_of_answer(answer, transcript)
            transcript.finish = ANSWERED
        transcript.closed_forced_step = forced_step
        transcript.forced_step = None
        # Each fault once.
        transcript.add_step(replace(forced_step, answer=answer, faults=tuple(dict.fromkeys(faults))))

    def _faults_of_answer(self, answer: str, transcript: Transcript) -> list[str]:
        """Returns the fault COPIED_EXAMPLE if an answer was copied from the prompt's worked example, else no fault.

        A model that was not trained on the format may copy the example's answer, and the copy looks like an answer.
        """
        texts = [transcript.question.text]
        for step in transcript.steps:
            texts += [f"{document.title} {document.text}" for document in step.documents]
        if self.protocol.copies_example(answer, "\n".join(texts)):
            return [base.COPIED_EXAMPLE]
        return []

    def splice(self, transcript: Transcript, documents: Sequence[Sequence[Document]]) -> None:
        """Appends the documents of the pending searches, one list per search, cut so that they fit.

        If not even one document per search fits, forces an answer; in a plain chat, raises R3LiteError.
        """
        transcript.pending = ()
        step, observation = self.observations.fit(transcript, documents, self.lengths)
        transcript.steps[-1] = step
        if observation is None:  # nothing fits
            if self.opening.plain:
                raise R3LiteError(
                    f"--max-length {self.lengths.max_length} has no room for "
                    f"question {transcript.question.id} with a document and an answer",
                    "Raise --max-length, or lower --max-new-tokens.",
                    code="length-too-small",
                )
            # The step is removed here; _close_answer adds it again, with its answer.
            transcript.steps.pop()
            transcript.step_ends.pop()
            self._force_answer(transcript, step, base.NO_ROOM)
            return
        transcript.observe(observation)
        if self.opening.forces_answer:
            self._begin_answer(transcript)

    def lay_out(self, question: Question, steps: Iterable[Step], document_tokens: int) -> Transcript:
        """Returns the transcript of an episode as if the model had written `steps`, for SFT.

        The text of each document is cut to `document_tokens` tokens. The limits of `lengths` are not applied. The
        tokens equal those of a rollout with the same text. A trajectory's question has no earlier messages and no
        procedure, so the prompt has none.
        """
        transcript = Transcript(question)
        transcript.observe(self.prompt(question.text))
        for step in steps:
            text = self.protocol.render(step, len(transcript.steps) + 1)
            turn = self._thoughts.encode_turn(transcript.tokens, text)
            # In a protocol without `user_turns` every step ends with a stop string. No stop token follows it: neither
            # behind a search, whose documents follow in the same assistant turn, nor behind the answer.
            if self.protocol.user_turns:
                turn = [*turn, self.tokenizer.stop_id]
            transcript.write(turn)
            documents = [search.documents for search in step.searches]
            transcript.add_step(self.observations.cut(step, documents, document_tokens))
            if step.answer is None:
                transcript.observe(self.observations.of_documents(transcript, transcript.steps))
        return transcript

    def _force_answer(self, transcript: Transcript, step: Step, fault: str) -> None:
        """Begins a turn for the forced answer of `step`, after the protocol's request for an answer.

        The step keeps its analysis, loses its searches and gets the `fault`.
        """
        request = self.observations.turn_end(transcript) + self.observations.of_text(self.protocol.answer_request)
        step = replace(step, searches=(), faults=(*step.faults, fault))
        self._begin_answer(transcript, step, request)

    def _begin_answer(
        self,
        transcript: Transcript,
        step: Step | None = None,
        request: Sequence[int] = (),
        heading: str | None = None,
    ) -> None:
        """Begins a turn for a forced answer: appends `request` and `heading`, and sets `forced_step`.

        If these and one token of an answer do not fit, the episode is finished instead: CUT_OFF. A `step` is then added
        without an answer.

        `step`: the step that gets the answer; None: an empty step, in a baseline.
        `request`: tokens that ask for the answer. In chat formats they end the model's message and open a new one. If
        empty, the heading continues the current message.
        `heading`: the text before the answer; None: the protocol's `answer_prefix`. A thought that is open where the
        heading belongs is ended first.
        """
        if heading is None:
            heading = self.protocol.answer_prefix(len(transcript.steps) + 1)
        # `encode_written`: `</think>` becomes the special token, as a model writes it; for `encode` it is plain text.
        closing_text = self._thoughts.closing_text_before_answer(transcript.tokens, request, transcript.turn_start)
        observation = [*request, *self.tokenizer.encode_written(closing_text + heading)]
        if len(transcript.tokens) + len(observation) >= self.lengths.max_length:
            transcript.finish = CUT_OFF
            if step:
                transcript.add_step(step)
            return
        transcript.observe(observation)
        transcript.forced_step = step or Step()
