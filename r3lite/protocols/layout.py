"""The layout of episodes in tokens: one for SFT rows, rollouts and baselines.

A `Layout` appends the prompt, the documents and the headings of forced answers to a transcript, and decides after each
turn how the episode goes on. The text comes from a protocol; the turns are written by a model or taken from a
trajectory. No text is decoded and encoded again.
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
    """How an episode begins. In some baselines we make the first search or write the answer's heading for the model."""

    # If plain, the protocol is PlainAnswer (protocols/registry.py): one user turn, with the documents, if any, and the
    # question.
    plain: bool = False
    retrieves_first: bool = False  # documents are retrieved before the first turn; the question itself is the query
    forces_answer: bool = False  # the first turn begins with the heading of an answer


# By the values of --baseline. `gold` opens as `rag` does, but with another retriever, that of the gold paragraphs: see
# EvaluateSettings.implied.
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
    """Lays out the episodes of a protocol in tokens, within the limits of `lengths`."""

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
            self.tokenizer.check_thinking()

    def prompt(self, text: str, earlier: Sequence[dict[str, str]] = (), procedure: str = "") -> list[int]:
        """Returns the tokens of the prompt with a question's text, after the `earlier` messages of a conversation."""
        opening = self.protocol.opening(self.protocol.quoted(text))
        if procedure:
            opening = f"{procedure}\n\n{opening}"
        return self.tokenizer.open_chat(
            opening,
            system=self.protocol.system,
            earlier=earlier,
            shots=self.protocol.shots,
        )

    def open(self, transcript: Transcript) -> None:
        """Appends what comes before the model's first turn, as far as it is known, to an empty transcript.

        Without `retrieves_first`: the prompt, and with `forces_answer` the heading of the answer. If there is then no
        room for an answer, the transcript is finished: CUT_OFF.
        With `retrieves_first`: the prompt and a step whose queries are `pending`. `splice` appends their documents.
        With `retrieves_first` and `plain`: only the step. `splice` appends the prompt, which contains the documents.
        """
        question = transcript.question
        prompt = self.prompt(question.text, question.earlier, question.procedure)
        self.check_room(question, prompt)  # also if the prompt is appended later, with documents
        if not self.opening.retrieves_first:
            transcript.observe(prompt)
            if self.opening.forces_answer:
                self._begin_answer(transcript)
            return
        first_step = self.protocol.first_search(self.protocol.quoted(question.text))
        if not self.opening.plain:
            transcript.observe(prompt)
            text = self.protocol.render(first_step, 1)
            transcript.observe(self._thoughts.encode_turn(transcript.tokens, text))
        # In a plain chat there is no token yet: the step's end is -1. Nothing reads it: the ends of steps are for
        # training (rewards, expansions), which has no baselines.
        transcript.add_step(first_step)
        transcript.pending = first_step.searches

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
        """Returns whether the last token ends the current turn: by the stop token, a stop string or a limit.

        A stop string in an open thought is a quotation, unless the thought is part of the format.
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
        """Parses the finished turn into a step and adds it.

        Then the transcript is finished, or has `pending` queries, or goes on with a turn for a forced answer. After a
        last turn (`Transcript.is_last_turn`) it is finished.
        """
        text = self.turn_text.read(transcript)
        # The model ended the turn by the stop token, or with a text that is whole by the protocol's rule, such as at a
        # stop string. Otherwise a limit cut the turn off.
        ended_by_model = transcript.tokens[-1] == self.tokenizer.stop_id or self.protocol.is_whole(text)
        if transcript.forced_step is not None:
            self._close_answer(transcript, text, ended_by_model)
        elif ended_by_model:
            self._close_step(transcript, self.protocol.parse(text, transcript.steps))
        else:
            self._close_cut_off(transcript, text)

    def _close_step(self, transcript: Transcript, step: Step) -> None:
        """Adds the step of a turn that the model ended, or forces its answer if the episode may not search any more."""
        searching_steps = [earlier_step for earlier_step in transcript.steps if earlier_step.searches]
        # --end-at-idle-query ends an episode at a blank or repeated query. Blank queries need no check here: a step
        # with only blank queries has no searches.
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
            return  # the step is added with its answer
        transcript.add_step(step)

    def _close_cut_off(self, transcript: Transcript, text: str) -> None:
        """Closes a turn that a limit cut off: forces an answer after its text, or ends the episode as CUT_OFF.

        An answer can be forced if the model has not begun to write one (`Protocol.heading_after_cut_off`), and not
        after a last turn.
        """
        step = self.protocol.parse(text, transcript.steps)
        # Faults of an unfinished text mean nothing, so TURN_CUT_OFF takes their place.
        step = replace(step, searches=(), answer=None, faults=(base.TURN_CUT_OFF,))
        heading = self.protocol.heading_after_cut_off(text, transcript.steps)
        if heading is not None and not transcript.is_last_turn:
            self._begin_answer(transcript, step, heading=heading)
            return
        transcript.finish = CUT_OFF
        transcript.add_step(step)

    def _close_answer(self, transcript: Transcript, text: str, ended_by_model: bool) -> None:
        """Adds the forced step with the turn's answer, and ends the episode.

        A turn that a limit cut off (not `ended_by_model`) has no answer. Nor has a turn that only repeats our request.
        """
        forced_step = transcript.forced_step
        step = self.protocol.read_answer(text, transcript.steps)
        repeats_request = base.repeats_request(step.answer or "")
        faults = [*forced_step.faults, *step.faults]
        answer = None
        if not ended_by_model:
            # Faults of an unfinished text mean nothing.
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
        transcript.add_step(replace(forced_step, answer=answer, faults=tuple(dict.fromkeys(faults))))

    def _faults_of_answer(self, answer: str, transcript: Transcript) -> list[str]:
        """Returns the fault of an answer that was copied from the worked example; nothing otherwise.

        A model that was not trained on the format may copy it, and the copy looks like an answer.
        """
        texts = [transcript.question.text]
        for step in transcript.steps:
            texts += [f"{document.title} {document.text}" for document in step.documents]
        if self.protocol.copies_example(answer, "\n".join(texts)):
            return [base.COPIED_EXAMPLE]
        return []

    def splice(self, transcript: Transcript, documents: Sequence[Sequence[Document]]) -> None:
        """Appends the documents of the pending queries, one list per query.

        If no documents fit, it forces an answer, or raises R3LiteError in a plain chat.
        """
        transcript.pending = ()
        step, observation = self.observations.fit(transcript, documents, self.lengths)
        transcript.steps[-1] = step
        if observation is None:  # not even one short document per query fits
            if self.opening.plain:
                cause = (
                    f"--max-length {self.lengths.max_length} has no room for "
                    f"question {transcript.question.id} with a document and an answer"
                )
                raise R3LiteError(cause, "Raise --max-length, or lower --max-new-tokens.", code="length-too-small")
            # The step is removed here, and added again with its answer.
            transcript.steps.pop()
            transcript.step_ends.pop()
            self._force_answer(transcript, step, base.NO_ROOM)
            return
        transcript.observe(observation)
        if self.opening.forces_answer:
            self._begin_answer(transcript)

    def lay_out(self, question: Question, steps: Iterable[Step], document_tokens: int) -> Transcript:
        """Returns the transcript of an episode in which the model wrote `steps`.

        The text of each document is cut to `document_tokens` tokens. Earlier messages and the procedure of the question
        are left out; if it has neither, the tokens equal those of a rollout with the same text. The limits of `lengths`
        are not applied.
        """
        transcript = Transcript(question)
        transcript.observe(self.prompt(question.text))
        for step in steps:
            text = self.protocol.render(step, len(transcript.steps) + 1)
            turn = self._thoughts.encode_turn(transcript.tokens, text)
            # Without `user_turns` the documents follow inside the assistant turn: a step that searches ends with a stop
            # string, without a stop token.
            ends_at_stop_string = not self.protocol.user_turns and text.endswith(self.protocol.stop_strings)
            if not ends_at_stop_string:
                turn = [*turn, self.tokenizer.stop_id]
            transcript.write(turn)
            documents = [search.documents for search in step.searches]
            transcript.add_step(self.observations.cut(step, documents, document_tokens))
            if step.answer is None:
                transcript.observe(self.observations.of_documents(transcript, transcript.steps))
        return transcript

    def _force_answer(self, transcript: Transcript, step: Step, fault: str) -> None:
        """Begins a last turn for the answer of `step`, after the protocol's request for an answer.

        The step keeps its analysis, loses its queries and gets the `fault`.
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
        """Appends `request` and the heading of a forced answer; if no answer fits, the episode is CUT_OFF.

        `step` gets the answer; None: an empty step, for a baseline. A `request` ends the current message and asks for
        the answer in a new one; without it, the answer continues the current message. By default the heading is the
        protocol's; an open thought is ended before it. The turn, which is what the model samples, begins behind the
        heading, also within a message (`Transcript.observe`).
        """
        if heading is None:
            heading = self.protocol.answer_opening(len(transcript.steps) + 1)
        closing_text = self._thoughts.end_before_answer(transcript.tokens, request, transcript.turn_start)
        observation = [*request, *self.tokenizer.encode_written(closing_text + heading)]
        if len(transcript.tokens) + len(observation) >= self.lengths.max_length:
            transcript.finish = CUT_OFF
            if step:
                transcript.add_step(step)
            return
        transcript.observe(observation)
        transcript.forced_step = step or Step()
