"""docs/cards.md says what the code predicts now."""

from bench import cards
from r3lite.devices.cards import card
from tests.bench import claims


def test_the_page_is_what_the_code_says_now():
    """If it fails after a change of the planner, the formulas or the table: python -m bench.cards > docs/cards.md"""
    assert (claims.ROOT / "docs" / "cards.md").read_text(encoding="utf-8") == cards.page()


def test_a_cell_is_the_figure_of_the_command_that_the_page_names(tmp_path, capsys):
    gtx_1650 = card("GTX 1650")
    flags = cards.flags(gtx_1650, "0.5B", cards.SFT[1024])
    assert flags == ["--card", "GTX 1650", "--model", "Qwen/Qwen2.5-0.5B-Instruct", "--max-length", "1024"]
    assert cards.flags(card("RTX 4060"), "3B", [])[-2:] == ["--vram-budget", "7GiB"]
    plan = cards.planned(cards.flags(gtx_1650, "0.5B", cards.SFT[1024]))
    assert plan.budget == 3840 << 20
    cell = cards.training(plan)
    assert cell == f"{16 * 1024 / plan.duration.seconds:,.0f} tokens/s"
    assert cards.planned(cards.flags(card("MX450"), "3B", cards.ROUND)) is None
    assert cards.training(None) == cards.learning(None) == cards.UNFIT
