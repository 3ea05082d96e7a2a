"""CONTRIBUTING.md and SKILL.md: what they name is there, and the documents are as short as they promise."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GUIDES = [ROOT / "CONTRIBUTING.md", ROOT / "SKILL.md"]


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_links_and_files_of_a_guide_are_there(path):
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!http)([^)#]+)", text)
    named = re.findall(r"(?<![\w/.])((?:docs|tests|bench|r3lite|data|\.ci)/[\w./]*)", text)
    inside = re.findall(r"`((?:core|models|rewards|retrieval|settings)/[\w.]*)", text)
    assert len(named) > 5
    missing = [name for name in [*links, *named] if not (ROOT / name.rstrip(".")).exists()]
    missing += [name for name in inside if not (ROOT / "r3lite" / name).exists()]
    assert missing == []


def test_the_readme_names_the_guides():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"]({path.name})" in text for path in GUIDES)


def test_documents_are_short():
    """A document that is too long is not read."""

    def words(path: Path) -> int:
        return len(path.read_text(encoding="utf-8").split())

    assert words(ROOT / "README.md") <= 1_300
    assert sum(words(path) for path in (ROOT / "docs").glob("*.md")) <= 22_000
    assert len((ROOT / "SKILL.md").read_text(encoding="utf-8").splitlines()) <= 80
