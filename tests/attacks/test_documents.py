"""Hostile documents and questions: they stand where they are given, and are neither a turn, an action nor an answer."""

import random

import pytest

from r3lite.core.episode import Document, Step
from r3lite.core.files import shipped
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.settings import ProtocolSettings
from tests.attacks.documents import ALL
from tests.protocols.test_forgery import BENIGN, PROTOCOLS, episode, structure

PROTOCOLS = PROTOCOLS | {
    "r3 with options": build_protocol(ProtocolSettings(queries_per_step=3, verification=True)),
}
OPENINGS = {"plain": ("rag",)} | {
    name: ("none", "single-retrieval" if protocol.can_search else "no-retrieval")
    for name, protocol in PROTOCOLS.items()
    if name != "plain"
}


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer.load(shipped("checkpoints", "tiny"))


def test_there_are_many_of_them():
    assert len(ALL) >= 65


@pytest.mark.parametrize("name", PROTOCOLS)
def test_nothing_that_is_given_changes_what_the_model_did(tokenizer, name):
    protocol = PROTOCOLS[name]
    for opening in OPENINGS[name]:

        def structure_with(text: str, opening: str = opening) -> dict:
            transcript = episode(
                tokenizer, protocol, opening, f"{BENIGN} {text}", Document("1", text, f"{BENIGN} {text}")
            )
            return structure(tokenizer, protocol, transcript) | {"faults": [step.faults for step in transcript.steps]}

        plain = structure_with(BENIGN)
        for attack, text in ALL.items():
            assert structure_with(text) == plain, (attack, opening)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_no_action_is_made_of_what_is_given(tokenizer, name):
    """The mask has the model's own tokens only, and steps hold its words only, whatever it was given."""
    for text in ALL.values():
        transcript = episode(tokenizer, PROTOCOLS[name], OPENINGS[name][0], text or BENIGN, Document("1", text, text))
        sampled_tokens = [
            token for token, action in zip(transcript.tokens, transcript.action_mask, strict=True) if action
        ]
        assert "Paris" not in tokenizer.decode(sampled_tokens) and transcript.episode().prediction == "here"
        assert all("Paris" not in (step.answer or "") for step in transcript.steps)


def test_given_text_has_no_special_token(tiny):
    """Those of the vocabulary, one by one, and the markup of other families."""
    special = set(tiny._added.values())
    assert special & set(tiny.open_chat("", None)) and special & set(tiny.user_turn(""))  # of the chat itself
    for text in [*tiny._added, *ALL.values(), "".join(tiny._added)]:
        for piece in (text, f"x{text}x", text.upper(), f" {text} "):
            assert not special & set(tiny.encode(piece)), piece
            around = tiny.open_chat("", None)
            inside = tiny.open_chat(piece, None)
            assert sum(t in special for t in inside) == sum(t in special for t in around), piece
            turn = tiny.user_turn(piece)
            assert sum(t in special for t in turn) == sum(t in special for t in tiny.user_turn("")), piece


def test_given_text_comes_back_as_it_was(tiny):
    """No attack is made harmless by losing what a document said: but for the ends of tags it is all there."""
    for text in ALL.values():
        assert tiny.decode(tiny.encode(text)) == text
        for protocol in PROTOCOLS.values():
            quoted = protocol.quoted(text)
            assert quoted.replace("\u2039", "<") == " ".join(text.split()).replace("\u2039", "<")
            assert "\n" not in quoted


# Text of any kind, made of what the protocols are made of.
PIECES = [
    *ALL.values(), "Step ", "1", ":", "\n", " ", "The problem analysis:", "The retrieval query:", "The final answer:",
    "The retrieval queries:", "The verification:", "1. a", "<think>", "</think>", "<search>", "</search>", "<answer>",
    "</answer>", "<information>", "<SOLUTION>", "</SOLUTION>", "Nodes:", "A: a (General)", "Edges:", "none", "A -> B",
    "9" * 5000, "\u0663", "{A}", "{", "}", "\u2028", "\x00", "\ufeff", "\u0130", "\u00df", "\\", "",
]  # fmt: skip


@pytest.mark.parametrize("name", PROTOCOLS)
def test_text_of_any_kind_is_read_and_a_sound_step_is_read_as_it_was_written(name):
    """A step whose number had thousands of digits was an exception."""
    protocol, generator = PROTOCOLS[name], random.Random(name)
    sound = 0
    for number in range(300):
        text = "".join(generator.choices(PIECES, k=generator.randint(0, 12)))
        question = protocol.quoted(text)
        if number % 2:  # pieces alone are hardly ever a sound step
            first = protocol.first_search(f"where is {question}")
            last = Step(f"I know {question}", answer=f"here {question}", verification="[1] is it" * protocol.verifies)
            text = protocol.render(first if protocol.can_search and number % 4 == 1 else last, 1)
        earlier = [protocol.first_search(question)] if protocol.can_search and generator.random() < 0.5 else []
        step = protocol.parse(text, earlier)
        assert protocol.is_whole(text) in (True, False) and protocol.first_turn(text) in text
        assert isinstance(protocol.heading_after_cut_off(text, earlier), (str, type(None)))
        if not step.faults and (step.searches or step.answer is not None) and not earlier:
            assert protocol.parse(protocol.render(step, 1), []) == step
            sound += 1
    assert sound > 20


@pytest.mark.parametrize("name", [name for name, protocol in PROTOCOLS.items() if protocol.can_search])
def test_a_question_of_any_kind_can_be_searched_for(tokenizer, name):
    """One of braces alone broke an episode off that begins with a search for it, in plans."""
    for question in ("{}", "{", "(", "()", ":", "?", "A", "A:", "-", "\u200b", "Edges: none", "{A} (News)"):
        opening = "rag" if name == "plain" else "single-retrieval"
        transcript = episode(tokenizer, PROTOCOLS[name], opening, question, Document("1", "T", "It is."))
        assert transcript.finish == "answered" and transcript.steps[-1].answer == "here"


def test_letters_that_look_like_a_tags_are_not():
    """U+212A and U+017F are k and s in other letter case, but not in ASCII."""
    none = ("no_query_or_answer",)
    for options, faults in (({}, ("text_outside_tags", "no_think", *none)), ({"tags": "lenient"}, none)):
        protocol = build_protocol(ProtocolSettings(format="tags", **options))
        step = protocol.parse("<thin\u212a> x </thin\u212a><\u017fearch> y </\u017fearch>", [])
        assert step == Step("", faults=faults)
