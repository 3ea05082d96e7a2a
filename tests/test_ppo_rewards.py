"""A user's own reward in a run: from a folder outside the package into metrics and episodes.jsonl."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from r3lite import ppo
from tests.cold_start import arguments, logged
from tests.errors import shows

OWN = """
def brevity(episode, most=3):
    words = sum(len(step.analysis.split()) for step in episode.steps)
    return -max(words - most, 0) / most

def up_to_three_hops(episode):
    return 1.0 if episode.question.hop_count <= 3 else None

def fails(episode):
    return 1 / 0
"""
TABLES = """
[[ppo.rewards]]
name = "my_rewards:brevity"
weight = 0.01
most = 5

[[ppo.rewards]]
name = "answer_f1"
weight = 2.0

[[ppo.rewards]]
name = "search_excess"
weight = 0.1
"""
SHORT = "--max-steps 1 --max-new-tokens 64 --max-hops 1 --warmup 0 --algorithm grpo".split()  # noqa: SIM905


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "my.toml").write_text(TABLES, encoding="utf-8")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("my_rewards", None)


def test_every_part_is_in_the_metrics_and_the_episodes(cold, folder, capsys):
    """Run as users do, by the console's module and from their own folder."""
    flags = arguments(cold, folder / "run", *SHORT, "--config", "my.toml")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-m", "r3lite", "ppo", *flags], check=True, cwd=folder, env=environment)
    episodes, (record,) = logged(folder / "run", "episodes.jsonl"), logged(folder / "run", "metrics.jsonl")
    names = ["my_rewards:brevity", "answer_f1", "search_excess"]
    for episode in episodes:
        words = sum(len(step["analysis"].split()) for step in episode["steps"])
        paid = episode["rewards"]
        assert paid["my_rewards:brevity"] == pytest.approx(-0.01 * max(words - 5, 0) / 5)
        assert paid["answer_f1"] == pytest.approx(2 * paid["f1"])
        parts = sum(paid[name] for name in ("format", "process", "outcome", *names))
        assert sum(episode["step_rewards"]) == pytest.approx(parts)
    assert any(episode["rewards"]["my_rewards:brevity"] < 0 for episode in episodes)
    for name in names:
        mean = sum(episode["rewards"][name] for episode in episodes) / len(episodes)
        assert record[f"rewards/{name}/mean"] == pytest.approx(mean)

    # Its own config.toml goes on with it; other weights do not.
    resume = ["--config", str(folder / "run" / "config.toml"), "--output", str(folder / "run"), "--resume", "auto"]
    assert ppo.main(resume) == 0
    assert ppo.main([*resume, "--rewards", "answer_f1=1"]) == 1
    assert shows(capsys.readouterr().err, "resume-settings-differ", "rewards (was")


def test_a_missing_part_leaves_its_episodes_out(cold, folder):
    flags = arguments(cold, folder / "run", *SHORT, "--rewards", "my_rewards:up_to_three_hops")
    assert ppo.main(flags) == 0
    episodes, (record,) = logged(folder / "run", "episodes.jsonl"), logged(folder / "run", "metrics.jsonl")
    missing = [episode["id"].startswith("4hop") for episode in episodes]
    assert 0 < sum(missing) == record["missing_rewards"] < len(episodes)
    assert [episode["rewards"] is None for episode in episodes] == missing
    assert record["rewards/my_rewards:up_to_three_hops/mean"] == 1.0


def test_a_function_that_fails_ends_the_run_with_its_name(cold, folder, capsys):
    assert ppo.main(arguments(cold, folder / "run", *SHORT, "--rewards", "my_rewards:fails")) == 1
    stderr = capsys.readouterr().err
    assert "the reward my_rewards:fails failed on question " in stderr and "ZeroDivisionError" in stderr
    assert f"{folder / 'my_rewards.py'}, line 10" in stderr and "Traceback" not in stderr


def test_names_are_checked_before_anything_is_loaded(folder, capsys):
    for value, message in {
        "answer_f2": "did you mean answer_f1?",
        "my_rewards:brevit": "did you mean brevity?",
        "gold_recall=1 --format solution": "--rewards has gold_recall, which needs searches, but --format solution",
    }.items():
        assert ppo.main(["--dry-run", "--rewards", *value.split()]) == 2
        assert message in capsys.readouterr().err
