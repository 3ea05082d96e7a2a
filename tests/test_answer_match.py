import pytest

from r3lite.answer_match import exact_match, f1, normalize, rule_of
from r3lite.episode import Question


def test_normalization_in_the_official_order():
    assert normalize('The "A" Team,  1984!') == "team 1984"
    assert normalize("U.S.A.") == "usa"
    assert normalize("an  apple\n\ta day") == "apple day"


def test_articles_leave_no_double_spaces():
    # Articles were taken out before the punctuation and after the spaces: "Lord of the Rings" had two spaces in it
    # and was no exact match of "Lord of Rings"; `"The" Beatles` kept its article.
    assert normalize("Lord of the Rings") == "lord of rings"
    assert exact_match('"The" Beatles', ["Beatles"]) == 1.0
    assert exact_match("lord of rings", ["The Lord of the Rings."]) == 1.0


def test_a_trailing_letter_n_stays():
    # strip("\\n") strips the letter n: "London" became "Londo".
    assert normalize("London\n") == "london"
    assert exact_match("London", ["London\n"]) == 1.0
    assert exact_match("Londo", ["London"]) == 0.0


def test_articles_inside_words_stay():
    assert normalize("Theatre Anatomy") == "theatre anatomy"


def test_two_answers_do_not_count_as_one():
    assert exact_match("Paris or London", ["Paris", "London"]) == 0.0
    assert exact_match("Paris London", ["Paris", "London"]) == 0.0
    assert f1("Paris or London", ["Paris", "London"]) == pytest.approx(0.5)  # of the better alias: 1/3 and 1


def test_f1_by_hand():
    # 2 shared words of 3 predicted and 4 gold: 2 * (2/3)(1/2) / (2/3 + 1/2) = 4/7
    assert f1("president Barack Obama", ["Barack Hussein Obama II"]) == pytest.approx(4 / 7)
    assert f1("big big", ["big"]) == pytest.approx(2 / 3)  # a repeated word counts as often as it is shared
    assert f1("x", ["y"]) == 0.0


def test_the_best_alias_counts():
    assert exact_match("NYC", ["New York City", "NYC"]) == 1.0
    assert f1("New York", ["Big Apple", "New York City"]) == pytest.approx(0.8)
    assert exact_match("NYC", []) == f1("NYC", []) == 0.0


@pytest.mark.parametrize(
    "predicted, answer", [("yes", "no"), ("yes it is", "yes"), ("no", "no man"), ("noanswer", "a noanswer x")]
)
def test_hotpotqa_gives_no_credit_between_a_verdict_and_anything_else(predicted, answer):
    assert f1(predicted, [answer], "hotpotqa") == 0.0


def test_verdicts_under_both_rules():
    assert f1("Yes.", ["yes"], "hotpotqa") == 1.0
    assert f1("yes it is", ["yes"], "musique") == pytest.approx(0.5)


def test_empty_sides():
    assert f1("the", ["a"], "musique") == 1.0  # both empty after normalization: equal
    assert f1("", ["Paris"], "musique") == 0.0
    assert f1("Paris", ["the"], "musique") == 0.0
    assert f1("", ["Paris"], "hotpotqa") == 0.0


def test_the_rule_follows_the_data_set():
    assert rule_of(Question("1", "q", ("a",), gold_by="title")) == "hotpotqa"
    assert rule_of(Question("1", "q", ("a",), gold_by="text")) == "musique"
