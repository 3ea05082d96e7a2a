"""`quickstart`: what it refuses before the first stage, and its table."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from r3lite import quickstart
from r3lite.assembly.stages import (
    HURRIED,
    Stage,
    check_rl,
    evaluation_arguments,
    introduction,
    print_what_next,
    report,
    run_stage,
    teacher_scores,
)
from r3lite.core.exit_status import INTERRUPTED, TERMINATED, Terminated
from r3lite.core.files import write_json, write_jsonl
from r3lite.core.invocation import resolve
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.settings import QuickstartSettings
from r3lite.settings.protocol import FORMATS
from tests.commands import CONFIGS
from tests.errors import shows

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["used", "used/file"])
def test_an_output_that_is_in_use_is_refused_at_once(tmp_path, monkeypatch, capsys, name):
    """It did three stages again and stopped at the fourth, with advice that named a flag it does not have."""
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("x")
    monkeypatch.setattr("r3lite.assembly.stages.run_stage", lambda *_, **__: pytest.fail("a stage began"))
    assert quickstart.main(["--output", str(tmp_path / name)]) == 1
    error = capsys.readouterr().err
    assert shows(error, "output-not-empty", tmp_path / name) and "Pass a new folder" in error


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_settings_that_rl_refuses_are_refused_at_once(tmp_path, monkeypatch, capsys, dry_run):
    """RL refused them after the cold start had been trained."""
    monkeypatch.setattr("r3lite.assembly.stages.run_stage", lambda *_, **__: pytest.fail("a stage began"))
    flags = ["--format", "solution", "--algorithm", "verifree", "--output", str(tmp_path / "run")]
    assert quickstart.main([*flags, *dry_run]) == 2
    error = capsys.readouterr().err
    assert shows(error, "algorithm-with-format", "verifree", "solution") and "--retriever is none" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("format", FORMATS)
def test_rl_accepts_every_other_algorithm_with_every_format(tmp_path, algorithm, format):
    if (algorithm, format) == ("verifree", "solution"):
        pytest.skip("has nothing to read")
    flags = ["--format", format, "--algorithm", algorithm]
    check_rl(resolve("quickstart", quickstart.QuickstartConfig(), flags), tmp_path)


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
    summary = json.loads((tmp_path / "quickstart.json").read_text(encoding="utf-8"))
    assert summary["teacher"] == taught_by and [s["stage"] for s in summary["stages"]] == ["SFT", "PPO"]
    # One resample of four draws the second question twice, in which nothing was gained: twice that is p.
    assert summary["em_gain"] == {"value": 0.5, "low": 0.0, "high": 1.0, "p": pytest.approx(0.5, abs=0.03)}


def test_the_first_lines_say_what_happens_and_for_how_long(tmp_path):
    config = quickstart.QuickstartConfig()
    text = introduction(config, tmp_path)
    assert len(text.splitlines()) == 2 and "5 to 15 minutes" in text and str(tmp_path) in text
    quick = quickstart.QuickstartConfig(quickstart=QuickstartSettings(quick=True))
    assert "half a minute" in introduction(quick, tmp_path)


@pytest.mark.parametrize(
    ("steps", "end", "expected"),
    [
        ([], {"prediction": "", "finish": "cut_off", "em": 0.0}, ["  no answer (cut off); right: Oslo"]),
        (
            [{"query": "Ann"}, {"searches": [{"query": "Bo"}, {"query": "Cy"}]}, {"answer": "Rome"}],
            {"prediction": "Rome", "finish": "answered", "em": 0.0},
            [
                "  1 searches for: Ann",
                "  2 searches for: Bo",
                "  2 searches for: Cy",
                "  3 answers: Rome (wrong; right: Oslo)",
            ],
        ),
        (
            [{"answer": "Oslo"}],
            {"prediction": "Oslo", "finish": "answered", "em": 1.0},
            ["  1 answers: Oslo (right)"],
        ),
    ],
)
def test_an_evaluation_is_four_scores_and_one_question(tmp_path, monkeypatch, capsys, steps, end, expected):
    """Of the untrained model it was twenty rows of zeros."""
    scores = {name: {"value": 0.5} for name in ("em", "f1", "format_adherence", "retrieval_recall", "mean_searches")}
    write_json(tmp_path / "scores.json", {"n": 2, **scores, "retrieval_recall": {"value": None}})
    line = {"id": "1", "question": "Where?", "answers": ["Oslo"], "steps": steps}
    write_jsonl(tmp_path / "predictions.jsonl", [line | end, line | {"question": "Who?"}])
    summary = Stage("SFT", tmp_path, 1.0).summary().splitlines()
    head = ["EM 0.500, F1 0.500, format 0.500, recall 0.000 (2 questions)", "a question: Where?"]
    assert summary == [*head, *expected]

    class Evaluate:
        @staticmethod
        def main(arguments):
            print("twenty rows")
            return 0

    run_stage("evaluate", {"evaluate": Evaluate}, "evaluate", ["--x"])
    assert capsys.readouterr().out == "\n== evaluate\n$ python -m r3lite.evaluate --x\n"


def test_the_last_lines_are_whole_commands_for_own_documents(tmp_path, capsys):
    print_what_next(tmp_path, quickstart.QuickstartConfig())
    out = capsys.readouterr().out
    title = re.search(r'README.md, "(.*?)"', out)[1]
    assert f"## {title}\n" in (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [shlex.split(line)[2:] for line in out.splitlines() if line.strip().startswith("python -m")]
    names = [name.removeprefix("r3lite.") for name, *_ in commands]
    assert names == ["ask", "serve", "index", "collect", "sft", "ask"]
    for name, (_, *arguments) in zip(names, commands, strict=True):
        config, _ = CONFIGS[name]
        resolve(name, config, arguments).check_settings(name)


@pytest.mark.parametrize(("status", "error"), [(INTERRUPTED, KeyboardInterrupt), (TERMINATED, Terminated)])
def test_a_training_that_is_interrupted_says_how_to_score_it(tmp_path, capsys, status, error):
    """After 48 minutes there was only the command that continues RL, and none to the last scores."""
    config = quickstart.QuickstartConfig()
    arguments = evaluation_arguments(config, tmp_path, name="PPO", adapter=tmp_path / "ppo")
    stopped = SimpleNamespace(main=lambda arguments: status)
    with pytest.raises(error):
        run_stage("RL", {"ppo": stopped}, "ppo", ["--x"], evaluation=arguments)
    *_, command = capsys.readouterr().err.strip().split("score it with: ")
    _, _, name, *words = shlex.split(command)
    assert name == "r3lite.evaluate" and str(tmp_path / "ppo") in words
    resolve("evaluate", CONFIGS["evaluate"][0], words).check_settings("evaluate")
