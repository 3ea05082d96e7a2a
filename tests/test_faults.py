"""A share of bench.stress.faults: kills at counted moments, and a disk that is full from one on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.stress.fault_runs import RunResult, draw_moments
from bench.stress.folder_content import content, differences

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the bench forks, and reads /proc")
def test_killed_or_without_room_every_command_goes_on_to_the_same(tmp_path):
    """Before they were swept, each kill of prepare, export, collect, index and evaluate left a file for good."""
    command = [sys.executable, "-m", "bench.stress.faults", "--quick", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    (run,) = json.loads((tmp_path / "faults.json").read_text(encoding="utf-8"))["runs"]
    assert run["tried"] == run["held"] == 12 and sum(r.get("kills", 0) for r in run["records"]) == 10


def test_moments_are_drawn_from_each_class_in_turn():
    """A file of a thousand writes does not draw all of the kills."""
    import random

    moments = [("open", f"cache/{'a' * 64}.json")] * 1000 + [("open", "x"), ("rename", "x")]
    drawn = list(draw_moments(moments, 3, random.Random(0)))
    assert {moments[i][:2] for i in drawn} == {moments[0], ("open", "x"), ("rename", "x")}
    assert len(list(draw_moments(moments, 8, random.Random(0)))) == 8 and not list(
        draw_moments([], 3, random.Random(0))
    )


def test_times_are_no_difference_and_everything_else_is(tmp_path):
    for name, seconds, loss in (("a", 1.0, 2.0), ("b", 3.0, 2.0), ("c", 1.0, 2.5)):
        (tmp_path / name / "empty").mkdir(parents=True)
        line = json.dumps({"step": 1, "step_time": seconds, "loss": loss})
        (tmp_path / name / "metrics.jsonl").write_text(f"{line}\n")
    a, b, c = (content(tmp_path / name) for name in "abc")
    assert differences(a, b) == [] and differences(a, c) == ["differs: metrics.jsonl"]
    assert differences(a, {}) == ["only uninterrupted: empty/", "only uninterrupted: metrics.jsonl"]


def test_a_clear_end_is_one_message_without_a_traceback():
    error = "\nr3lite.sft stopped: no room\n  Make some.\n"
    assert (
        RunResult(1, error, [], 0.0).is_clear_error
        and RunResult(2, "r3lite.sft: --x is missing\n", [], 0.0).is_clear_error
    )
    assert not RunResult(0, error, [], 0.0).is_clear_error and not RunResult(1, error + error, [], 0.0).is_clear_error
    assert not RunResult(1, f"Traceback (most recent call last):{error}", [], 0.0).is_clear_error
