"""A wheel installed elsewhere has all that a user needs: presets, prompts, the sample world, the tiny checkpoint."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_wheel_works_from_another_folder(tmp_path):
    root = Path(__file__).parents[1]
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path), str(root)]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    run = [sys.executable, "-m", "r3lite.evaluate", "--preset", "tiny", "--limit", "2", "--output", "out"]
    world = tmp_path / "site" / "r3lite" / "data" / "world"
    (tmp_path / "elsewhere").mkdir()
    data = ["--data", str(world / "test.jsonl"), "--corpus", str(world / "corpus.jsonl")]
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"}
    subprocess.run([*run, *data], check=True, cwd=tmp_path / "elsewhere", env=environment)
    assert (tmp_path / "elsewhere" / "out" / "scores.json").exists()
