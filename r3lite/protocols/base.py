"""The interface of a protocol: the text of an episode, seen one turn of the model at a time.

A protocol knows text and steps. It knows no token ids, no limits and no model: `transcript.Layout` decides where its
text stands among the tokens of an episode.
"""

import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property

from r3lite.core.episode import Step
from r3lite.protocols.templates import messages

CUT_OFF, ANSWER_WAS_FORCED, NO_ROOM = "cut_off", "answer_was_forced", "no_room"
BLANK_QUERY, REPEATED_QUERY = "blank_query", "repeated_query"  # faults of every protocol that searches
IDLE = frozenset({BLANK_QUERY, REPEATED_QUERY})  # of queries that bring nothing new
NO_MORE = "Nothing more can be looked up. Give the final answer."
# Faults that a layout finds, whatever the protocol; worded to follow `step k`.
LAYOUT_FAULTS = {
    CUT_OFF: "was not finished within the token limit",
    ANSWER_WAS_FORCED: "searches although only the final answer was allowed",
    NO_ROOM: "has no room for documents",
}
# Faults of protocols whose steps have a query or an answer.
STEP_FAULTS = {
    "no_query_or_answer": "has neither a query nor an answer",
    "query_and_answer": "has both a query and an answer",
    BLANK_QUERY: "has an empty query",
    "blank_answer": "has an empty answer",
    REPEATED_QUERY: "repeats an earlier query",
    **LAYOUT_FAULTS,
}


def one_line(text: str) -> str:
    """A question, title or passage as it stands in a prompt: its line breaks would begin lines of the prompt's own."""
    return " ".join(text.split())


def same_query(a: str, b: str) -> bool:
    """Whether two queries are the same words, whatever their case, punctuation, spaces and invisible characters."""
    return _words(a) == _words(b)


def _words(text: str) -> list[str]:
    visible = (c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) != "Cf")
    return re.findall(r"\w+", "".join(visible).casefold())


def asked_before(query: str, earlier: Sequence[Step]) -> bool:
    """Whether one of the `earlier` steps asked the same."""
    return any(same_query(query, other) for step in earlier for other in step.queries)


def named(**faults: object) -> list[str]:
    """The names of the faults that are there, in order."""
    return [name for name, found in faults.items() if found]


class Protocol(ABC):
    """How an episode opens, what a turn of the model means, and what is given to it in reply.

    A turn is what the model samples without a break: up to the token that ends an assistant turn of the chat, or up
    to a stop string. Each turn is one step. What follows a step that asks is an observation: text with documents.

    `user_turns` says how observations are laid out. True: an observation is a user turn of the chat; the assistant
    turn before it is ended first, and the next assistant turn is opened after it. False: an observation is spliced in
    after the stop string, inside the same assistant turn, which ends with the answer.
    """

    init_prompt: str  # opens an episode; has {question}, and perhaps a worked example (see `templates.messages`)
    faults: Mapping[str, str]  # name -> what a step with it does, worded to follow `step k`
    stop_strings: tuple[str, ...]  # a turn is over as soon as it has one of them, which stays part of its text
    user_turns: bool
    system: str | None  # the system message; None: the default of the model's chat markup
    searches: bool = True  # whether a step can ask; if not, an episode is one turn
    thinks: bool = False  # whether a turn begins with <think>; if not, a thinking model's thoughts are not read
    plans: bool = False  # whether the first step is a plan of all searches
    names_sources: bool = False  # whether searches name the kind of source that they are meant for
    most_queries: int = 1  # of a step
    verifies: bool = False  # whether an answer has to be verified before it is given
    answer_request: str = NO_MORE  # the observation before a turn in which only the answer is left to write
    answer_heading: str  # given before the answer in such a turn

    def __post_init__(self) -> None:
        messages(self.init_prompt)  # refuses a prompt whose messages make no chat

    def opening(self, question: str) -> str:
        """The user turn with the question, which is `quoted` already."""
        return self._messages[-1]["content"].replace("{question}", question)

    @property
    def shots(self) -> list[dict[str, str]]:
        """The messages of the worked example, which stand before `opening`."""
        return self._messages[:-1]

    @cached_property
    def _messages(self) -> list[dict[str, str]]:
        return messages(self.init_prompt)

    # A question, title or passage as it stands in an episode: nothing in it may look like the protocol's own.
    quoted = staticmethod(one_line)

    @abstractmethod
    def parse(self, text: str, earlier: Sequence[Step]) -> Step:
        """The step that a turn's text (with its forced prefix) means after the `earlier` ones; faults are named in it.

        A step without searches and answer is malformed: the episode ends with it.
        """

    def is_whole(self, text: str) -> bool:
        """Whether a turn that was not ended by the model has all that it needs."""
        return any(stop in text for stop in self.stop_strings)

    @abstractmethod
    def render(self, step: Step, number: int) -> str:
        """The text of step `number` as the model should write it. Its documents belong to the next observation."""

    def observation(self, question: str, steps: Sequence[Step]) -> str:
        """The text given after the searches of the last of an episode's `steps`, with their documents; `question` is
        `quoted` already. Needed if it `searches`.

        Nothing in a document may look like the end of it, or like another one: see `quoted`.
        """
        raise AssertionError("a protocol that searches needs an observation")

    def read_answer(self, text: str, earlier: Sequence[Step]) -> Step:
        """The step of an answer that was forced, without an analysis: `text` follows `answer_heading`. Needed if there
        is such a heading."""
        raise AssertionError("a protocol with an answer heading reads what follows it")

    def answer_opening(self, number: int) -> str:
        """What is given at the beginning of a turn in which only the answer of step `number` is left to write."""
        return self.answer_heading

    def finishing(self, text: str, earlier: Sequence[Step]) -> str | None:
        """What is given to a turn that ran out of room so that the answer is left to write, after what it has of an
        analysis; None if nothing can be answered there, or it has begun to answer."""
        return None if self.answer_heading in text else f"\n{self.answer_heading}"

    def step_request(self, number: int) -> str:
        """What asks a model that was not trained on the protocol, such as a teacher, for the text of step `number`."""
        raise AssertionError("a format of --format asks for its steps")

    def first_search(self, question: str) -> Step:
        """A first step whose query is the question itself, `quoted` already."""
        return Step.asking(f"I need to find out: {question}", question)

    def example(self) -> list[Step]:
        """The steps of an episode that tell in words what belongs into their parts."""
        ask = Step.asking("what is known so far and what has to be found next", "one short question")
        checked = "which documents show each fact that the answer rests on" * self.verifies
        last = Step("why the question can be answered now", answer="the answer in a few words", verification=checked)
        return [ask, last] if self.searches else [last]

    def first_turn(self, reply: str) -> str:
        """The part of a reply that is a turn: what a model that is not stopped at a stop string adds is left out."""
        for stop in self.stop_strings:
            reply = reply.partition(stop)[0]
        return reply
