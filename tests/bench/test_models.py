"""docs/models.md says what the code plans now."""

from bench import models
from tests.bench import claims


def test_the_page_is_what_the_code_says_now():
    """If it fails after a change of the planner or the models: python -m bench.models > docs/models.md"""
    assert (claims.ROOT / "docs" / "models.md").read_text(encoding="utf-8") == models.page()
