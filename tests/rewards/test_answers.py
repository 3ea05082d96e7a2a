import pytest

from r3lite.core.episode import CUT_OFF, Episode, Question
from r3lite.rewards.answers import answer_f1, contains_gold, exact_match, hop_weighted, rouge_l, rouge_l_levels
from tests.rewards.episodes import GOLD, QUESTION, answered, search

SENTENCE = Question("q", "What happened?", ("police killed the gunman",))


def test_exact_match_and_f1():
    assert [exact_match(answered(text)) for text in ("the Ada!", "Ada Lovelace", "Bob")] == [1, 0, 0]
    # One of two words, and one of one: P = 1/2, R = 1.
    assert [answer_f1(answered(text)) for text in ("Ada Byron", "Ada Lovelace", "Bob")] == pytest.approx([1, 2 / 3, 0])


@pytest.mark.parametrize(
    ("text", "paid"),
    [("It was Ada, of course.", 1), ("Ada", 1), ("Adam", 0), ("Byron", 0), ("a Da", 0), ("", 0)],
)
def test_an_answer_that_holds_the_gold_one_as_words(text, paid):
    assert contains_gold(answered(text)) == paid


def test_a_gold_answer_in_a_script_without_spaces():
    tokyo = Question("q", "?", ("東京",))
    assert [contains_gold(answered(text, question=tokyo)) for text in ("首都は東京です", "首都は京都です")] == [1, 0]


def test_a_gold_answer_of_articles_only_stands_in_nothing():
    assert contains_gold(answered("whatever", question=Question("q", "Which letter?", ("A",)))) == 0


def test_rouge_l():
    # police kill the gunman: 3 words of 4 in order on both sides. Of the two gold answers the better one counts.
    assert rouge_l(answered("police kill the gunman", question=SENTENCE)) == 0.75
    assert rouge_l(answered("Ada")) == 1.0 and rouge_l(answered("Lady Ada Byron")) == pytest.approx(0.8)
    assert rouge_l(Episode(QUESTION, [search()], CUT_OFF)) == 0.0


def test_rouge_l_in_levels():
    texts = [
        "Police killed the gunman.",
        "police kill the gunman",
        "police the",
        "police went home today",
        "nobody",
        "",
    ]
    # ROUGE-L F1: exact; 3/4; 2 of 2 and of 4, 2/3; 1/4; none; no answer.
    assert [rouge_l_levels(answered(s, question=SENTENCE)) for s in texts] == [5, 3, 0, -1, -1, -1]
    tuned = {"high": 0.6, "low": 0.2, "pay_high": 2.0, "pay_low": -0.5}
    assert [rouge_l_levels(answered(s, question=SENTENCE), **tuned) for s in texts] == [5, 2, 2, 0, -0.5, -0.5]


def test_an_exact_match_that_rouge_has_no_words_for():
    """ROUGE-L knows a to z: the right answer in another script was paid as nothing alike."""
    assert rouge_l_levels(answered("東京", question=Question("q", "?", ("東京",)))) == 5


def test_the_weight_of_hops():
    def of(text, hops, *hits):
        gold = tuple(GOLD[0].__class__(str(i), f"T{i}", f"Text {i}") for i in range(hops))
        question = Question("q", "?", ("Ada Byron",), gold=gold)
        return hop_weighted(answered(text, search(*(gold[i] for i in hits)), question=question))

    assert of("Ada Byron", 2, 0, 1) == pytest.approx(0.8 * 0.9 + 0.2)
    # F1 of one word of two is 2/3; one paragraph of three; three hops weigh 1.5.
    assert of("Ada", 3, 1) == pytest.approx((0.8 * 0.3 * 2 / 3 + 0.2 / 3) * 1.5)
    assert of("Bob", 4, 0, 1, 2, 3) == pytest.approx(0.2 * 2)
    assert of("Ada Byron", 0) is None
