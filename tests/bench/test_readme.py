"""bench/README.md names benches that exist, and every bench."""

import re
from pathlib import Path

import bench

FOLDER = Path(bench.__file__).parent
NAMES = re.findall(r"`(\w+)`", (FOLDER / "README.md").read_text(encoding="utf-8"))


def test_every_bench_that_the_readme_names_is_there():
    """It named `ranks` after that bench had become `checkouts`."""
    assert [name for name in NAMES if not (FOLDER / f"{name}.py").exists()] == []


def test_the_readme_names_every_bench():
    commands = [file.stem for file in FOLDER.glob("*.py") if "__main__" in file.read_text(encoding="utf-8")]
    assert sorted(set(commands) - set(NAMES)) == []
