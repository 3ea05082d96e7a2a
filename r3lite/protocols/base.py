"""The interface of a protocol, which parses and renders the text of an episode turn by turn.

A protocol knows text and steps, but no tokens, no limits and no model: `layout.Layout` lays its text out in tokens.
"""

import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property

from r3lite.core.answer_match import split_words, stands_in
from r3lite.core.episode import Step
from r3lite.protocols.templates import messages

# Names of faults that a step can have.
TURN_CUT_OFF = "cut_off"  # equal to CUT_OFF, the `finish` of an episode that ends with such a step
ANSWER_WAS_FORCED = "answer_was_forced"
NO_ROOM = "no_room"
COPIED_EXAMPLE = "copied_example"
# Those of every protocol that searches.
BLANK_QUERY = "blank_query"
REPEATED_QUERY = "repeated_query"
IDLE_QUERY_FAULTS = frozenset({BLANK_QUERY, REPEATED_QUERY})  # faults of queries that retrieve nothing new
NO_MORE = "Nothing more can be looked up. Give the final answer."  # the request for a forced answer
# Faults that the layout finds, whatever the protocol. The texts are worded to follow `step k`.
LAYOUT_FAULTS = {
    TURN_CUT_OFF: "was not finished within the token limit",
    ANSWER_WAS_FORCED: "searches although only the final answer was allowed",
    NO_ROOM: "has no room for documents",
    COPIED_EXAMPLE: "answers with words of the prompt's worked example",
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
    """Returns a question, title or passage on one line, because further lines could look like parts of the prompt."""
    return " ".join(text.split())


def same_query(query: str, other_query: str) -> bool:
    """Returns whether two queries have the same words in the same order.

    Case, punctuation, spaces and invisible characters do not count.
    """
    return _words(query) == _words(other_query)


def _words(text: str) -> list[str]:
    characters = unicodedata.normalize("NFKC", text)
    # The category Cf is that of invisible characters, such as a zero-width joiner.
    visible = (character for character in characters if unicodedata.category(character) != "Cf")
    return split_words("".join(visible))


def repeats_request(answer: str) -> bool:
    """Returns whether an answer only repeats a sentence of NO_MORE, the request for an answer."""
    return any(same_query(answer, sentence) for sentence in NO_MORE.split(". "))


def asked_before(query: str, earlier: Sequence[Step]) -> bool:
    """Returns whether one of the `earlier` steps has the same query, see `same_query`."""
    return any(same_query(query, earlier_query) for step in earlier for earlier_query in step.queries)


def new_query_counts(steps: Sequence[Step]) -> list[int]:
    """Returns for each step of an episode how many of its queries are new: neither blank nor asked before.

    The queries of a step are compared with each other. They are compared with those of earlier steps only if the
    protocol gave the step the fault REPEATED_QUERY. At least one query of a step with this fault is not new, even if
    this comparison finds none.
    """
    counts = []
    for index, step in enumerate(steps):
        has_repeated = REPEATED_QUERY in step.faults
        queries = list(filter(None, step.queries))
        new_queries: list[str] = []
        for query in queries:
            is_old = has_repeated and asked_before(query, steps[:index])
            if not is_old and not any(same_query(query, new_query) for new_query in new_queries):
                new_queries.append(query)
        count = len(new_queries)
        if has_repeated and new_queries:
            count = min(count, len(queries) - 1)
        counts.append(count)
    return counts


def faults_if(**is_present: object) -> list[str]:
    """Returns the names of faults that are present. Each keyword is a fault's name, its value whether it is present."""
    return [name for name, present in is_present.items() if present]


class Protocol(ABC):
    """The text of the prompt, of the model's steps and of the observations in reply.

    A turn is what the model samples without a break: up to the token that ends an assistant turn of the chat, or up
    to a stop string. Each turn is one step. A step that searches is followed by an observation: text with documents.

    `user_turns` says where an observation stands. True: it is a user turn of the chat, so the assistant turn before it
    ends, and another one begins after it. False: it is inserted after the stop string, inside the assistant turn.
    """

    init_prompt: str  # opens an episode; has {question}, and perhaps a worked example (see `templates.messages`)
    faults: Mapping[str, str]  # by name: what a step with this fault does, worded to follow `step k`
    stop_strings: tuple[str, ...]  # each ends a turn, and is part of the turn's text
    user_turns: bool
    system: str | None  # the system message; None: the default of the model's chat markup
    can_search: bool = True  # a step can have searches; if False, an episode is one turn
    thinks: bool = False  # a turn begins with <think>; if False, a thinking model's thoughts are not parsed
    plans: bool = False  # the first step is a plan of all searches
    searches_by_graph: bool = False  # a step may have a graph of searches, each with its kind of source
    most_queries: int = 1  # how many queries a step may have
    verifies: bool = False  # an answer has to be verified against the documents
    answer_request: str = NO_MORE  # the observation before a turn for a forced answer
    answer_heading: str  # stands before an answer; the layout writes it if the answer is forced

    def __post_init__(self) -> None:
        messages(self.init_prompt)  # raises R3LiteError if the prompt is no chat

    def question_message(self, question: str) -> str:
        """Returns the text of the user turn with the question; `question` must be `quoted`."""
        return self._messages[-1]["content"].replace("{question}", question)

    @property
    def shots(self) -> list[dict[str, str]]:
        """The messages of the worked example, which stand before `question_message`."""
        return self._messages[:-1]

    def copies_example(self, answer: str, context: str) -> bool:
        """Returns whether an answer is in the worked example, but not in the `context`.

        The context is the text of the question and of its documents.
        """
        example = " ".join(message["content"] for message in self.shots)
        return stands_in(answer, example) and not stands_in(answer, context)

    @cached_property
    def _messages(self) -> list[dict[str, str]]:
        return messages(self.init_prompt)

    # Returns a question, title or passage as a text in which nothing could be taken for a part of the protocol.
    quoted = staticmethod(one_line)

    @abstractmethod
    def parse(self, text: str, earlier: Sequence[Step]) -> Step:
        """Returns the step that a turn's text states, with the names of its faults; `earlier` are the steps before it.

        The text of a forced answer is read by `read_answer` instead. A step that has neither searches nor an answer is
        malformed: the episode ends with it.
        """

    def is_whole(self, text: str) -> bool:
        """Returns whether a turn's text is complete, although the model did not write the stop token."""
        return any(stop in text for stop in self.stop_strings)

    @abstractmethod
    def render(self, step: Step, number: int) -> str:
        """Returns the text of step `number` as the model should write it, without its documents."""

    def observation(self, question: str, steps: Sequence[Step]) -> str:
        """Returns the text with the documents of the last of an episode's `steps`; `question` must be `quoted`.

        A protocol that can search overrides this method. The override passes titles and texts through `quoted`, so that
        nothing in a document looks like its end or like another document.
        """
        raise AssertionError("a protocol that searches needs an observation")

    def read_answer(self, text: str, earlier: Sequence[Step]) -> Step:
        """Returns the step of a forced answer, without an analysis; `text` is what the model wrote for it."""
        raise AssertionError("a protocol with an answer heading reads what follows it")

    def answer_prefix(self, number: int) -> str:
        """Returns the text at the beginning of a turn for the forced answer of step `number`."""
        return self.answer_heading

    def begins_answer(self, text: str) -> bool:
        """Returns whether a turn has the heading of the answer at a place where `parse` takes it for the heading."""
        return self.answer_heading in text

    def heading_after_cut_off(self, text: str, earlier: Sequence[Step]) -> str | None:
        """Returns the text that is appended to a turn that reached its token limit, to force an answer in this turn.

        None: no answer is forced, because the turn has begun to answer or no answer can follow it.
        """
        if self.begins_answer(text):
            return None
        return f"\n{self.answer_heading}"

    def step_request(self, number: int) -> str:
        """Returns a text that asks a teacher, a model that was not trained on the protocol, for step `number`."""
        raise AssertionError("a format of --format asks for its steps")

    def first_search(self, question: str) -> Step:
        """Returns a first step whose query is the question itself, which must be `quoted`."""
        return Step.asking(f"I need to find out: {question}", question)

    def example(self) -> list[Step]:
        """Returns example steps whose parts describe what belongs in them."""
        verification = ""
        if self.verifies:
            verification = "which documents show each fact that the answer rests on"
        answer = Step(
            "why the question can be answered now",
            answer="the answer in a few words",
            verification=verification,
        )
        if not self.can_search:
            return [answer]
        search = Step.asking("what is known so far and what has to be found next", "one short question")
        return [search, answer]

    def first_turn(self, reply: str) -> str:
        """Returns the reply up to the first stop string, at which a remote model may not have stopped."""
        for stop in self.stop_strings:
            reply = reply.partition(stop)[0]
        return reply
