"""Binary files and texts changed at random, and sizes that no file has: each is used or refused, in time and memory.

A process of its own reads first the sound files, then hundreds of others made of them, and says what each came to. No
read may take 10 s or a GiB more than the sound ones, or end in another exception than R3LiteError.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_files_changed_at_random_are_used_or_refused_in_time_and_memory(tmp_path):
    pytest.importorskip("gguf", reason="needs the extra gguf")
    pytest.importorskip("pypdf", reason="needs the extra documents")
    pytest.importorskip("transformers")
    program = [sys.executable, str(Path(__file__).with_name("hostile_files.py")), str(tmp_path)]
    run = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    summary = json.loads(run.stdout.splitlines()[-1])
    assert summary["wrong"] == {} and summary["slowest"] < 10 and summary["more_mib"] < 1024, summary
    assert summary["tried"] >= 1000 and summary["refused"] > summary["tried"] / 3
