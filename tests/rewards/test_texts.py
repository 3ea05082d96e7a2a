import pytest

from r3lite.core.episode import ANSWERED, Episode, Question, Step
from r3lite.rewards.texts import keyword_overlap, language_penalty, length_penalty, logical_connectors
from tests.rewards.episodes import QUESTION


def wrote(analysis, query=None, answer="Ada", question=QUESTION):
    return Episode(question, [Step.asking(analysis, query), Step("", answer=answer)], ANSWERED)


@pytest.mark.parametrize(("words", "paid"), [(1, 0), (10, 0), (11, -0.1), (15, -0.5), (20, -1), (99, -1)])
def test_the_penalty_for_length_begins_late_and_ends(words, paid):
    # An analysis, a query of two words and an answer of one.
    episode = wrote(" ".join(["x"] * (words - 3)), "where now") if words > 3 else wrote("")
    assert length_penalty(episode, most=10) == pytest.approx(paid)


def test_letters_of_another_script():
    # 6 Latin and 5 Cyrillic letters, and the answer's 3 Latin ones. Question and gold answers are Latin.
    assert language_penalty(wrote("Wer ist да нет")) == pytest.approx(-5 / 14)
    assert language_penalty(wrote("Élève, naïve: 12 + 3!")) == 0
    assert language_penalty(wrote("", answer="12")) == 0
    # The gold answer's script may be written, and kana with Chinese characters.
    japanese = Question("q", "Which city?", ("東京",))
    assert language_penalty(wrote("とうきょう is カナ", answer="東京", question=japanese)) == 0


def test_a_verification_is_written_by_the_model_too():
    """The penalties of length and of scripts left it out, so that text could be moved there."""
    step = Step("One two.", answer="Ada", verification="три четыре")
    episode = Episode(QUESTION, [step], ANSWERED)
    assert length_penalty(episode, most=4) == pytest.approx(-1 / 4)
    assert language_penalty(episode) == pytest.approx(-9 / 18)


def test_keywords_of_the_best_gold_answer():
    question = Question("q", "?", ("The Battle of Hastings in 1066", "Norman conquest"))
    # battle, hastings, 1066: the article, `of` and `in` are no keywords.
    assert keyword_overlap(wrote("A battle in 1066.", answer="war", question=question)) == pytest.approx(2 / 3)
    assert keyword_overlap(wrote("A battle.", answer="The Norman conquest", question=question)) == 1
    assert keyword_overlap(wrote("Nothing.", "Hastings", "war", question)) == 0  # a query is no reasoning
    assert keyword_overlap(wrote("It is not.", answer="x", question=Question("q", "?", ("not",)))) == 1


def test_connectors_are_whole_words_and_each_counts_once():
    text = "Because it rained, because. THEREFORE some sofas; thus-far."  # neither `so` nor `some` nor `sofas`
    assert logical_connectors(wrote(text)) == 1
    assert logical_connectors(wrote(text), most=4) == 3 / 4
    assert logical_connectors(wrote("some sofas")) == 0
    assert logical_connectors(wrote("In step 1 it rained."), most=1, words=("step", "therefore")) == 1


def test_correct_japanese_is_no_other_script():
    """The marks for a long vowel and for repetition, and forms of full and half width, were other scripts."""
    japanese = Question("q", "どこのラーメンですか?", ("佐々木",))
    assert language_penalty(wrote("コーヒーと人々、ゝ々〆ヽ、ﾗｰﾒﾝ、㍿", answer="佐々木", question=japanese)) == 0
    assert language_penalty(wrote("\uff21\uff22\uff23, x\u00b2, \ufb01ne", answer="Ada")) == 0
    assert language_penalty(wrote("Hawai\u02bbi")) == 0  # an apostrophe that is a letter of no script
    assert language_penalty(wrote("コーヒー", answer="A")) == pytest.approx(-4 / 5)


def test_keywords_in_a_script_without_spaces():
    question = Question("q", "?", ("東京",))
    assert keyword_overlap(wrote("首都は東京です。", answer="x", question=question)) == 1
    assert keyword_overlap(wrote("首都は京都です。", answer="x", question=question)) == 1 / 2
