"""What is known of remote models by their names: what they cost, and which setting has them think."""

import re

from r3lite.core.errors import R3LiteError
from r3lite.settings import JudgeSettings

# US dollars per million tokens read and written.
PRICES = {"gemini-3.5-flash-lite": (0.30, 2.50), "gemini-2.5-flash": (0.30, 2.50)}
# More output tokens, because thoughts count against the limit: for a model that thinks, and for one set to think
# as little as it can.
THINKING_ROOM, LEAST_THINKING_ROOM = 8192, 512


def prices_of(settings: JudgeSettings) -> tuple[float, float] | None:
    """US dollars per million tokens read and written, or None if they are not known.

    Raises R3LiteError if a cap on cost needs them.
    """
    model = settings.judge_model.removeprefix("models/")
    given = (settings.judge_input_price, settings.judge_output_price)
    prices = tuple(PRICES.get(model, (None, None))[i] if price is None else price for i, price in enumerate(given))
    if None not in prices:
        return prices
    if settings.judge_max_cost is not None:
        remedy = "Pass --judge-input-price and --judge-output-price, in US dollars per million tokens."
        raise R3LiteError(f"the price of {model} is not known, so --judge-max-cost cannot be kept", remedy)
    return None


def thinking(model: str, wanted: bool) -> tuple[dict, int]:
    """The fields of a request that say whether a model is to think, and how many tokens its thoughts may take."""
    if re.match(r"(models/)?gemini-[12]\b", model):  # before thinking had levels
        budget = THINKING_ROOM if wanted else 0
        return {"thinking_budget": budget}, budget
    if wanted:
        return {"thinking_level": "HIGH"}, THINKING_ROOM
    return {"thinking_level": "MINIMAL"}, LEAST_THINKING_ROOM
