"""Placeholders of prompts: what may take a prompt's place."""

import pytest

from r3lite.protocols.templates import unfit


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Step {step}: {documents}", None),
        ("{documents} {step} { } {} {a b} {question", None),  # as a prompt file may have them
        ("{step}", "it lost {documents}"),
        ("", "it lost {documents}; it lost {step}"),
        ("{documents}{documents}{step}", "it has {documents} 2 times"),
        ("{documents} {step} {query}", "it has {query}, which the first prompt does not have"),
        ("{Documents} {step}", "it lost {documents}; it has {Documents}, which the first prompt does not have"),
    ],
)
def test_what_may_take_a_prompts_place(text, problem):
    assert unfit(text, "{documents}\nGo on with step {step}.") == problem


def test_a_prompt_whose_messages_make_no_chat_cannot_take_the_place_of_one():
    first = "[user]\nx\n[assistant]\ny\n[user]\n{question}"
    assert unfit(first, first) is None and unfit("{question}", first) is None
    assert unfit(first.replace("[assistant]", "[user]"), first) == (
        "the lines [user] and [assistant] in the opening prompt do not alternate"
    )
    assert unfit(first.replace("{question}", "z"), first) == "it lost {question}"
