"""Every format from data to scores, by the commands, on the tiny checkpoint: a step of each, with noise for a model."""

import json
from pathlib import Path

import pytest

from r3lite import collect, evaluate, ppo, sft
from r3lite.core.files import shipped

WORLD = shipped("data", "world")


@pytest.mark.parametrize("name", ["tags", "solution", "dag", str(Path(__file__).parent / "data" / "own_tags.toml")])
def test_a_format_goes_through_all_commands(tmp_path, name):
    rows, trained = str(tmp_path / "rows.jsonl"), str(tmp_path / "sft")
    short = ["--preset", "tiny", "--format", name, "--init-prompt", "prompts/tiny/init_prompt.txt", "--limit", "4"]
    questions = ["--data", str(WORLD / "train.jsonl")]
    assert collect.main([*short, *questions, "--output", rows]) == 0
    steps = ["--max-steps", "1", "--validation-fraction", "0"]
    assert sft.main([*short, "--data", rows, *steps, "--output", trained]) == 0
    limits = ["--adapter", trained, "--max-new-tokens", "24"]
    small = ["--max-steps", "1", "--batch-size", "2", "--num-generations", "2"]
    assert ppo.main([*short, *questions, *limits, *small, "--output", str(tmp_path / "ppo")]) == 0
    assert len((tmp_path / "ppo" / "episodes.jsonl").read_text().splitlines()) == 4
    baseline = ["--baseline", "no-retrieval"]
    assert evaluate.main([*short, *questions, *limits, *baseline, "--output", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "scores.json").read_text())["n"] == 4
