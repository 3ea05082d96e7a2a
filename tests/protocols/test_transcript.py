"""The layout of an episode in tokens, for a protocol of user turns and one that stays in one assistant turn."""

from dataclasses import replace

import pytest

from r3lite.core.episode import ANSWERED, CUT_OFF, MALFORMED, Document, Question, Search, Step
from r3lite.core.errors import R3LiteError
from r3lite.protocols.layout import OPENINGS, Layout
from r3lite.protocols.markup import Tag
from r3lite.protocols.observations import LONGEST_TITLE
from r3lite.protocols.r3 import R3, Headings
from r3lite.protocols.registry import PROTOCOLS, build_protocol
from r3lite.protocols.tags import SOLUTION, WORKING_OUT, Tags
from r3lite.protocols.transcript import Transcript
from r3lite.settings import LengthSettings, ProtocolSettings
from tests.errors import raises

QUESTION = Question("q", "Where?", ("here",))
QUERY, ANSWER = Step.asking("I must look.", "what is where"), Step("So.", answer="here")
SHORT = [Document("0", "S", "It is here.")]
DOCUMENTS = [Document("1", "T", "long text " * 20), Document("2", "U", "more of it " * 20)]
EVERY = {
    "r3": R3("Q: {question}", "D: {documents}"),
    "tags": Tags("Q: {question}"),
    "solution": Tags("Q: {question}", WORKING_OUT, SOLUTION, search=None, information=None),
}
for_every_protocol = pytest.mark.parametrize("protocol", EVERY, indirect=True)


@pytest.fixture(params=["r3", "tags"])
def protocol(request):
    """Those that search, unless a test asks for more."""
    return EVERY[request.param]


@pytest.fixture
def layout(tokenizer, protocol):
    return Layout(tokenizer, protocol, LengthSettings(max_length=1000, max_new_tokens=100, max_hops=2))


def opened(layout):
    transcript = Transcript(QUESTION)
    layout.open(transcript)
    return transcript


def speak(layout, transcript, text, end=True):
    """Writes a turn token by token until it is over, and closes it."""
    for token in [*layout.tokenizer.encode(text), *[layout.tokenizer.stop_id] * end]:
        transcript.write([token])
        if layout.turn_is_over(transcript):
            break
    layout.close_turn(transcript)


def ask(layout, transcript, query="what is where"):
    """Writes the next step, which searches."""
    text = layout.protocol.render(Step.asking("I must look.", query), len(transcript.steps) + 1)
    speak(layout, transcript, text, end=layout.protocol.user_turns)


def text_since_last_turn(layout, transcript):
    """The text that was given since the last turn of the model."""
    last = max(i for i, action in enumerate(transcript.action_mask) if action)
    return layout.tokenizer.decode(transcript.tokens[last + 1 :])


def test_an_episode_grows_by_turns_and_documents(layout, protocol):
    transcript = opened(layout)
    assert transcript.tokens == layout.prompt("Where?") and not any(transcript.action_mask)
    ask(layout, transcript)
    assert (
        transcript.pending == (Search("what is where"),) and transcript.finish is None and transcript.steps == [QUERY]
    )
    layout.splice(transcript, [SHORT])
    assert transcript.pending == () and transcript.turn == [] and transcript.steps[0].documents == tuple(SHORT)
    assert protocol.observation("Where?", [Step.asking("a", "q", SHORT)]) in text_since_last_turn(layout, transcript)
    speak(layout, transcript, protocol.render(ANSWER, 2))
    assert transcript.finish == ANSWERED and transcript.episode().prediction == "here"
    assert [transcript.action_mask[end] for end in transcript.step_ends] == [True, True]


def test_an_observation_is_a_turn_of_its_own_or_stays_in_the_model_s(layout, protocol):
    transcript = opened(layout)
    ask(layout, transcript)
    layout.splice(transcript, [SHORT])
    turns = transcript.tokens.count(layout.tokenizer._marked.token_to_id("<|im_start|>"))
    assert turns == (4 if protocol.user_turns else 2)
    ends = transcript.tokens.count(layout.tokenizer.stop_id)
    assert ends == (3 if protocol.user_turns else 1)


def test_written_steps_are_laid_out_like_sampled_ones(layout, protocol):
    transcript = opened(layout)
    ask(layout, transcript)
    layout.splice(transcript, [DOCUMENTS])
    speak(layout, transcript, protocol.render(ANSWER, 2))
    laid_out = layout.lay_out(QUESTION, [QUERY.with_documents([DOCUMENTS]), ANSWER], layout.lengths.max_document_tokens)
    assert (laid_out.tokens, laid_out.action_mask) == (transcript.tokens, transcript.action_mask)
    assert (laid_out.steps, laid_out.step_ends) == (transcript.steps, transcript.step_ends)


@for_every_protocol
def test_an_answer_at_once_is_laid_out_like_a_sampled_one(layout, protocol):
    transcript = opened(layout)
    speak(layout, transcript, protocol.render(ANSWER, 1))
    laid_out = layout.lay_out(QUESTION, [ANSWER], layout.lengths.max_document_tokens)
    assert transcript.finish == ANSWERED and transcript.steps == [ANSWER]
    assert (laid_out.tokens, laid_out.action_mask) == (transcript.tokens, transcript.action_mask)
    ends = layout.tokenizer.decode(laid_out.turn).endswith(protocol.stop_strings)
    assert (laid_out.tokens[-1] == layout.tokenizer.stop_id) == (protocol.user_turns or not ends)


def test_an_assistant_turn_that_the_model_has_ended_is_opened_again(tokenizer):
    """Lenient reading takes a query whose tag is missing because the turn ended: what follows needs a turn to be in."""
    layout = Layout(tokenizer, Tags("Q: {question}", lenient=True), LengthSettings(max_length=1000))
    transcript = opened(layout)
    speak(layout, transcript, "<search> what is where")
    assert transcript.pending == (Search("what is where"),)
    layout.splice(transcript, [SHORT])
    end, *observation = transcript.tokens[transcript.step_ends[0] :]
    assert (
        end == tokenizer.stop_id
        and observation[1] == tokenizer._marked.token_to_id("<|im_start|>")
        and observation.count(tokenizer._marked.token_to_id("<|im_start|>")) == 1
    )
    assert tokenizer.decode(observation) == "\nassistant\n" + layout.protocol.observation(
        "Where?", [Step.asking("a", "q", SHORT)]
    )
    assert transcript.action_mask[transcript.step_ends[0] :] == [True] + [False] * len(observation)


def test_an_answer_is_forced_after_the_last_search(layout, protocol):
    transcript = opened(layout)
    for query in ("one", "two", "three"):
        ask(layout, transcript, query)
        if transcript.pending:
            layout.splice(transcript, [[]])
    assert [s.faults for s in transcript.steps] == [(), ()]
    assert transcript.pending == () and transcript.finish is None
    assert protocol.answer_request in text_since_last_turn(layout, transcript)
    assert layout.tokenizer.decode(transcript.tokens).endswith(protocol.answer_heading)
    speak(layout, transcript, " here" if protocol.user_turns else " here </answer>")
    assert transcript.finish == ANSWERED and len(transcript.step_ends) == 3
    last = transcript.steps[2]
    assert (last.analysis, last.searches, last.answer) == (QUERY.analysis, (), "here")
    assert last.faults == ("answer_was_forced",)


def test_a_prediction_is_never_our_own_text(layout, protocol):
    """A small model copies what stands before the heading: our request is no answer."""
    for phrase in ("Nothing more can be looked up.", "give the final answer"):
        transcript = opened(layout)
        for query in ("one", "two", "three"):
            ask(layout, transcript, query)
            layout.splice(transcript, [[]]) if transcript.pending else None
        speak(layout, transcript, f" {phrase}" if protocol.user_turns else f" {phrase} </answer>")
        assert transcript.finish == MALFORMED and transcript.episode().prediction == ""


@for_every_protocol
def test_a_turn_that_ran_out_of_room_keeps_its_analysis_and_answers(layout, protocol):
    """Only the heading of the answer is given, in the same turn."""
    transcript = opened(layout)
    speak(layout, transcript, protocol.render(Step("x" * 200, answer="what"), 1)[:150])
    if transcript.forced_step is None:
        assert protocol.plans and transcript.finish == CUT_OFF  # what is cut off is a plan
        return
    assert transcript.finish is None and transcript.steps == [] and "x" * 20 in transcript.forced_step.analysis
    turns = transcript.tokens.count(layout.tokenizer._marked.token_to_id("<|im_start|>"))
    speak(layout, transcript, " here" if protocol.user_turns else f" here {protocol.answer.closing}")
    assert (
        transcript.tokens.count(layout.tokenizer._marked.token_to_id("<|im_start|>")) == turns
        and transcript.finish == ANSWERED
    )
    (step,) = transcript.steps
    assert step.answer == "here" and "x" * 20 in step.analysis and step.faults == ("cut_off",)


@pytest.mark.parametrize("lenient", [False, True])
def test_a_thought_of_a_format_that_thinks_is_ended_once(tokenizer, lenient):
    """The layout and the protocol both ended it, so that answers were written and learned after a stray tag."""
    protocol = Tags("Q: {question}", lenient=lenient)
    layout = Layout(tokenizer, protocol, LengthSettings(max_length=1000, max_new_tokens=100, max_hops=2))
    for opening in ("<think>", "<Think>") if lenient else ("<think>",):
        transcript = opened(layout)
        prompt = len(transcript.tokens)
        speak(layout, transcript, f"{opening} {'x' * 200}", end=False)
        text = tokenizer.decode(transcript.tokens[prompt:])
        assert text == f"{opening} {'x' * (len(text) - len(opening) - 18)}</think>\n<answer>"


def test_a_search_in_place_of_the_forced_answer_is_malformed(layout, protocol):
    transcript = opened(layout)
    for query in ("one", "two", "three"):
        ask(layout, transcript, query)
        layout.splice(transcript, [[]]) if transcript.pending else None
    separator = "" if not protocol.user_turns else "\n"
    speak(layout, transcript, separator + protocol.render(Step.asking("x", "four"), 4))
    assert transcript.finish == MALFORMED


@for_every_protocol
def test_a_turn_ends_at_its_limit_and_is_cut_off(layout, protocol):
    transcript = opened(layout)
    speak(layout, transcript, protocol.render(Step("x", answer="what" * 60), 1))
    assert transcript.finish == CUT_OFF and transcript.steps[0].faults == ("cut_off",)
    assert len(transcript.turn) == layout.lengths.max_new_tokens


@for_every_protocol
def test_nonsense_is_malformed(layout):
    transcript = opened(layout)
    speak(layout, transcript, "I do not know.")
    assert transcript.finish == MALFORMED and transcript.steps[0].faults


@for_every_protocol
def test_a_turn_is_over_at_the_token_that_completes_a_stop_string(layout, protocol):
    for stop in protocol.stop_strings:
        transcript = opened(layout)
        for token in layout.tokenizer.encode(stop):
            assert not transcript.turn or not layout.turn_is_over(transcript)
            transcript.write([token])
        assert layout.turn_is_over(transcript)


@pytest.mark.parametrize(
    "protocol",
    [
        Tags("Q: {question}", search=Tag("<探す>", "</探す>")),
        R3("Q: {question}", "D: {documents}", headings=Headings(documents="見つけた文書")),
    ],
)
def test_a_stop_string_whose_characters_take_several_tokens_ends_a_turn(layout, protocol):
    """It was looked for in as many tokens as it has characters, and in tokens that have its last character whole."""
    stop = protocol.stop_strings[0]
    transcript = opened(layout)
    for token in layout.tokenizer.encode(f"ask {stop}"):
        assert not transcript.turn or not layout.turn_is_over(transcript)
        transcript.write([token])
    assert layout.turn_is_over(transcript)


def test_documents_are_cut_then_dropped_then_an_answer_is_forced(tokenizer, protocol):
    """What must fit after the documents: a whole turn, and the forced answer after it."""
    outcomes = set()
    whole_texts = {document.text.strip() for document in DOCUMENTS}
    for limit in range(300, 1500, 20):
        lengths = LengthSettings(max_length=limit, max_new_tokens=100, max_document_tokens=300)
        layout = Layout(tokenizer, protocol, lengths)
        transcript = opened(layout)
        ask(layout, transcript)
        layout.splice(transcript, [DOCUMENTS])
        documents = [d for step in transcript.steps for d in step.documents]
        are_cut = any(document.text.strip() not in whole_texts for document in documents)
        outcomes.add((len(documents), are_cut))
        if step := transcript.forced_step or (transcript.finish and transcript.steps[0]):
            assert not documents and not step.searches
        else:
            assert documents and len(transcript.tokens) + 100 <= limit
        assert len(transcript.tokens) < limit
    # Both whole, both cut, one cut, none. One whole would have left room for a cut one.
    assert outcomes == {(2, False), (2, True), (1, True), (0, False)}


def test_a_long_title_takes_no_more_room_than_a_title_may(tokenizer, protocol):
    """However long it is, the other documents are there as they are without it, and no answer is forced."""
    layout = Layout(tokenizer, protocol, LengthSettings(max_length=1000, max_new_tokens=100))
    endless = Document("9", "endless " * 25_000, "Short.")
    for documents in ([endless, *SHORT], [*SHORT, endless], [endless]):
        transcript = opened(layout)
        ask(layout, transcript)
        layout.splice(transcript, [documents])
        step_documents = transcript.steps[0].documents
        assert transcript.forced_step is None and not transcript.steps[0].faults
        assert [(d.id, d.text) for d in step_documents] == [(d.id, d.text) for d in documents]
        (cut,) = (d.title for d in step_documents if d.id == "9")
        assert endless.title.startswith(cut) and 0 < len(tokenizer.encode(cut)) <= LONGEST_TITLE
        assert all(d in step_documents for d in SHORT if d in documents)
    laid = layout.lay_out(QUESTION, [Step.asking("a", "q", [endless]), ANSWER], 50)
    assert laid.steps[0].documents[0].title == cut


def test_a_search_without_room_for_documents_is_told_from_one_too_many(tokenizer, protocol):
    layout = Layout(tokenizer, protocol, LengthSettings(max_length=1000, max_new_tokens=100))
    transcript = opened(layout)
    ask(layout, transcript)
    layout.lengths = replace(layout.lengths, max_length=len(transcript.tokens) + 200)
    layout.splice(transcript, [DOCUMENTS])
    step = transcript.forced_step or transcript.steps[-1]
    assert step.faults == ("no_room",) and "no room for documents" in protocol.faults["no_room"]


@for_every_protocol
def test_a_prompt_that_leaves_no_room_is_refused(tokenizer, protocol):
    layout = Layout(tokenizer, protocol, LengthSettings(max_length=40))
    with raises(R3LiteError, "prompt-too-long", "q", "--max-length 40"):
        opened(layout)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_format_of_the_settings_chooses_the_protocol(tokenizer, name):
    layout = Layout(
        tokenizer, build_protocol(ProtocolSettings(format=name)), LengthSettings(), OPENINGS["no-retrieval"]
    )
    assert isinstance(layout.protocol, type(PROTOCOLS[name](ProtocolSettings(format=name))))
    transcript = opened(layout)
    assert transcript.forced_step == Step()
    assert layout.tokenizer.decode(transcript.tokens).endswith(layout.protocol.answer_heading)


def test_an_episode_may_end_at_a_repeated_query(tokenizer, protocol):
    """Its query stays in the step, and nothing is retrieved for it."""
    for ends in (False, True):
        limits = LengthSettings(max_length=1000, max_new_tokens=100, max_hops=3, end_at_idle_query=ends)
        layout = Layout(tokenizer, protocol, limits)
        transcript = opened(layout)
        ask(layout, transcript)
        layout.splice(transcript, [SHORT])
        ask(layout, transcript, query="What is WHERE?")
        assert transcript.steps[-1].queries == ("What is WHERE?",) and "repeated_query" in transcript.steps[-1].faults
        assert (transcript.finish, transcript.pending) == (
            (MALFORMED, ()) if ends else (None, (Search("What is WHERE?"),))
        )
