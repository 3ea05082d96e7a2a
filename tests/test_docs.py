"""What the documents say of the code is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAP = ROOT / "docs" / "architecture.md"


def test_every_file_on_the_map_is_there():
    """A name is looked for in the repository, in the package, or in the room that its paragraph has named before."""
    missing, places = [], [ROOT, ROOT / "r3lite"]
    for name in re.findall(r"[\w./]+(?:\.py|/)(?=[`\s,;:])", MAP.read_text(encoding="utf-8")):
        found = next((place / name for place in places if (place / name).exists()), None)
        if found is None:
            missing.append(name)
        else:
            places[2:] = [found if found.is_dir() else found.parent]
    assert missing == []


def test_every_room_is_on_the_map():
    text = MAP.read_text(encoding="utf-8")
    rooms = [path.parent.name for path in (ROOT / "r3lite").glob("*/__init__.py")]
    assert [room for room in rooms if f"  {room}/ " not in text] == []


@pytest.mark.parametrize("path", [ROOT / "README.md", MAP], ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(path):
    links = re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []
