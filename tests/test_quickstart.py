"""`quickstart`: what it refuses before the first stage, and its table."""

import json
import re

import pytest

from r3lite import quickstart
from r3lite.assembly.stages import HURRIED, Stage, report, teacher_scores
from r3lite.core.files import write_json, write_jsonl
from r3lite.settings import QuickstartSettings
from tests.errors import shows


@pytest.mark.parametrize("name", ["used", "used/file"])
def test_an_output_that_is_in_use_is_refused_at_once(tmp_path, monkeypatch, capsys, name):
    """It did three stages again and stopped at the fourth, with advice that named a flag it does not have."""
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("x")
    monkeypatch.setattr("r3lite.assembly.stages.run_stage", lambda *_, **__: pytest.fail("a stage began"))
    assert quickstart.main(["--output", str(tmp_path / name)]) == 1
    error = capsys.readouterr().err
    assert shows(error, "output-not-empty", tmp_path / name) and "Pass a new folder" in error


def test_the_table_names_the_hasty_teacher_and_what_it_gets_right(tmp_path, capsys):
    """Without it, what RL adds looks like more than it is: flawless trajectories need no RL to reach 0.9."""
    rows = [{"answers": ["a"], "steps": [{"answer": answer}]} for answer in ("a", "A.", "b", "c")]
    write_jsonl(tmp_path / "trajectories.jsonl", rows)
    taught_by = teacher_scores(tmp_path / "trajectories.jsonl")
    assert taught_by == {"n": 4, "em": 0.5, "f1": 0.5, "hurried_share": HURRIED}
    stages = []
    line = {"question": "Who?", "steps": [], "f1": 0.0, "recall": None}
    for name, right in (("SFT", (0.0, 1.0)), ("PPO", (1.0, 1.0))):
        (tmp_path / name).mkdir()
        keys = ("em", "f1", "format_adherence", "retrieval_recall", "mean_searches")
        write_json(tmp_path / name / "scores.json", {"n": 2, **{key: {"value": 0.5} for key in keys}})
        lines = [line | {"id": str(i), "em": em} for i, em in enumerate(right)]
        write_jsonl(tmp_path / name / "predictions.jsonl", lines)
        stages.append(Stage(name, tmp_path / name, 1.0))
    report(stages, taught_by, tmp_path, 2.0, quickstart.QuickstartConfig())
    assert re.search(
        r"teacher +0\.500 +0\.500 +the 4 trajectories for SFT; deliberately hasty", capsys.readouterr().out
    )
    quick = quickstart.QuickstartConfig(quickstart=QuickstartSettings(quick=True))
    report(stages, taught_by, tmp_path, 2.0, quick)
    assert "--quick only shows that everything runs" in capsys.readouterr().out
    written = json.loads((tmp_path / "quickstart.json").read_text(encoding="utf-8"))
    assert written["teacher"] == taught_by and [s["stage"] for s in written["stages"]] == ["SFT", "PPO"]
    # One resample of four draws the second question twice, in which nothing was gained: twice that is p.
    assert written["em_gain"] == {"value": 0.5, "low": 0.0, "high": 1.0, "p": pytest.approx(0.5, abs=0.03)}
