"""The notebook: its outputs are stripped, and its cells run in order."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CELLS = json.loads((ROOT / "docs" / "r3lite.ipynb").read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
PIP = [sys.executable, "-m", "pip", "install", "--quiet"]
# What the notebook takes of IPython.
STUB = """
class HTML:
    def __init__(self, data):
        self.data = data

def display(shown):
    print("displayed:", shown.data[:15], shown.data.count("&lt;svg"))
"""


def test_the_notebook_has_no_outputs_and_is_plain_python():
    for cell in CELLS:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)
    for code in CODE:
        compile(code, "cell", "exec")


@pytest.mark.parametrize("in_clone", [True, False])
def test_r3lite_is_installed_from_the_clone_or_from_the_address(monkeypatch, tmp_path, in_clone):
    commands = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    monkeypatch.chdir(ROOT / "docs" if in_clone else tmp_path)
    code = CODE[0].replace('REPOSITORY = ""', 'REPOSITORY = "https://host/r3lite"')
    exec(code if not in_clone else CODE[0], {})
    assert commands[-1] == [*PIP, str(ROOT if in_clone else tmp_path / "r3lite-clone")]
    cloned = ["git", "clone", "--depth", "1", "https://host/r3lite", str(tmp_path / "r3lite-clone")]
    assert commands[:-1] == ([] if in_clone else [cloned])


@pytest.mark.slow
def test_the_whole_notebook_runs(tmp_path):
    """14 seconds of one core. r3lite is found, so that nothing is installed."""
    (tmp_path / "IPython").mkdir()
    (tmp_path / "IPython" / "__init__.py").touch()
    (tmp_path / "IPython" / "display.py").write_text(STUB, encoding="utf-8")
    (tmp_path / "cells.py").write_text("\n\n".join(CODE), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}
    command = [sys.executable, "cells.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    displayed = next(line for line in done.stdout.splitlines() if line.startswith("displayed:"))
    assert displayed.startswith("displayed: <iframe srcdoc=") and int(displayed.split()[-1]) > 10
    assert "grpo, 16 questions" in done.stdout and "retrieval_recall" in done.stdout
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "grpo" / "episodes.jsonl").exists() and (run / "curves.html").exists()
