"""Prices and ways of thinking, by the names of models."""

from r3lite.core.errors import R3LiteError
from r3lite.llm.limits import prices_of
from r3lite.settings import JudgeSettings
from tests.errors import raises


def test_known_and_given_prices():
    assert prices_of(JudgeSettings(judge_max_cost=1.0)) == (0.30, 2.50)
    assert prices_of(JudgeSettings(judge_model="models/gemini-2.5-flash", judge_input_price=0.0)) == (0.0, 2.50)
    assert prices_of(JudgeSettings(judge_model="x", judge_input_price=1.0, judge_output_price=2.0)) == (1.0, 2.0)


def test_a_model_without_a_price_is_not_free():
    assert prices_of(JudgeSettings(judge_model="x", judge_output_price=2.0)) is None
    with raises(R3LiteError, "price-unknown", "x"):
        prices_of(JudgeSettings(judge_model="x", judge_output_price=2.0, judge_max_cost=1.0))
