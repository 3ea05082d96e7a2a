"""What a comparison comes to: dates of every form in the data sets, and what is not compared."""

import pytest

from r3lite.core.episode import Document, Hop, Question
from r3lite.datasets.gold import compared, date

FILMS = Document("0", "Alva (film)", ""), Document("1", "Berta", "")
PEOPLE = Document("2", "Carl", ""), Document("3", "Dora", "")


def comparison_sentence(
    a: str, b: str, answer: str, text: str = "Whose director died first, Alva or Berta?", kind="bridge_comparison"
):
    hops = (
        Hop("Who is the director of Alva?", "Carl", FILMS[0]),
        Hop("Who is the director of Berta?", "Dora", FILMS[1]),
        Hop("When did #1 die?", a, PEOPLE[0]),
        Hop("When did #2 die?", b, PEOPLE[1]),
    )
    return compared(Question("q", text, (answer,), hops=hops, type=kind))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("June 9, 1956", (1956, 6, 9)),
        ("19 February 1913", (1913, 2, 19)),
        ("October 1893", (1893, 10)),
        ("950", (950,)),
        ("9 may 1956", (1956, 5, 9)),
        ("June 1, 1950 and June 3, 1950", None),
        ("about 1950", None),
        ("India", None),
    ],
)
def test_dates(text, expected):
    assert date(text) == expected


def test_the_earlier_date_comes_first_with_what_the_question_asks_about():
    comparison = "Berta (9 June 1940) is before Alva (1956)."
    assert comparison_sentence("1956", "9 June 1940", "Berta") == comparison
    assert comparison_sentence("1956", "9 June 1940", "alva") == comparison


@pytest.mark.parametrize(
    ("a", "b", "answer"),
    [
        ("1956", "June 9, 1956", "Alva"),  # which is first is not known
        ("1956", "1956", "Alva"),
        ("1956", "unknown", "Alva"),
        ("1956", "1960", "Carl"),  # the answer is of neither film
        ("1956", "1960", "yes"),
    ],
)
def test_what_does_not_decide_is_not_compared(a, b, answer):
    assert comparison_sentence(a, b, answer) is None


def test_only_comparisons_are_compared():
    assert comparison_sentence("1956", "1960", "Alva", kind="compositional") is None


def test_whether_two_facts_are_the_same():
    text = "Are the directors of Alva and Berta of the same country?"
    assert comparison_sentence("India", "Italian", "no", text) == "India and Italian are not the same."
    ends_with_same = "Are the nationalities of both directors the same?"
    assert comparison_sentence("India", "Italian", "no", ends_with_same) == "India and Italian are not the same."
    assert comparison_sentence("American", "U.S.", "yes", text) == "American and U.S. are the same."
    # The facts of HotpotQA are whole sentences: one was made of two, with stops in it.
    facts = ("Ann is an American singer.", "Bob was a British painter.")
    hops = [Hop(f"Person {i}", fact, PEOPLE[i], (fact,)) for i, fact in enumerate(facts)]
    question = Question("q", "Are Ann and Bob of the same country?", ("no",), hops=tuple(hops), type="comparison")
    assert compared(question) == "They are not the same."
