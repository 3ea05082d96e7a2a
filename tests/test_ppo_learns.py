"""Reinforcement learning learns: on the tiny base a reward rises round by round, and does not if learning is broken.

What is paid can be learned in a few rounds: to end the turn within 9 tokens, which the base does one time in eight. A
model that is broken does not end its turns, so that damage cannot pass for learning: it did while going on was paid.
"""

import json
import statistics

import pytest

from r3lite import ppo
from r3lite.core import run_files
from r3lite.core.files import write_jsonl
from r3lite.rewards import reward
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.training import metrics, optim


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    """Runs eight rounds of 32 episodes of at most 9 tokens, or `--max-steps`; returns the mean reward of each."""
    for name, text in (("init", "{question}"), ("step", "{documents}")):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    questions = [{"id": str(i), "question": f"Where is {i}?", "answer": "there"} for i in range(4)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)) + "\n", encoding="utf-8")
    prompts = [x for name in ("init", "step") for x in (f"--{name}-prompt", str(tmp_path / f"{name}.txt"))]

    def paid(episode, *_) -> reward.EpisodeReward:
        right = float(episode.finish != "cut_off" and all("cut_off" not in step.faults for step in episode.steps))
        return reward.EpisodeReward([right] + [0.0] * (len(episode.steps) - 1), {"em": right, "outcome": right})

    monkeypatch.setattr(reward, "score", paid)
    traces = [{"question": q["question"], "reasoning": "I know.", "answer": "there"} for q in questions]
    write_jsonl(tmp_path / "traces.jsonl", traces)

    def run(*extra_flags: str) -> list[float]:
        flags = "--preset tiny --dtype fp32 --retriever none --batch-size 4 --num-generations 8 --mini-batch-size 16"
        flags += " --update-epochs 1 --max-new-tokens 9 --max-length 64 --max-steps 8 --warmup 0 --learning-rate 4e-3"
        data = ["--data", str(tmp_path / "questions.jsonl"), "--output", str(tmp_path / "run")]
        if {"luffy", "hybrid"} & set(extra_flags):
            data += ["--traces", str(tmp_path / "traces.jsonl")]
        assert ppo.main([*flags.split(), *prompts, *data, *extra_flags]) == 0
        return [record["reward"] for record in metrics.read(tmp_path / "run" / run_files.METRICS)]

    return run


def learned(rewards: list[float]) -> bool:
    """Whether the last rounds are far above the first, which shows chance."""
    assert len(rewards) >= 8 and 0 < rewards[0] < 0.35
    end = statistics.fmean(rewards[-3:])
    assert not 0.5 < end < 0.8, "neither learned nor not"
    return end >= 0.8


# verifree rewards no sampled answers; tests/test_verifree.py shows that it learns.
SAMPLED = [name for name, cls in ALGORITHMS.items() if not cls.has_teacher and not cls.learns_right_answers]


@pytest.mark.parametrize("algorithm", SAMPLED)
def test_the_reward_rises(rewards, algorithm):
    # At the others' rate Dr. GRPO is paid 1.0 in the sixth round, and then falls: 0.78 in the mean of the last three.
    # At that rate the KL divergence of hybrid jumps in the fourth round; below it, it learns in more rounds.
    gently = {
        "dr-grpo": ["--learning-rate", "2e-3"],
        "hybrid": ["--learning-rate", "3e-3", "--max-steps", "14"],
    }
    assert learned(rewards("--algorithm", algorithm, *gently.get(algorithm, [])))


def test_failed_episodes_learn_from_a_teacher(rewards, tmp_path):
    """With the advantages away, only what GRPO has taught another adapter is left to learn from."""
    assert learned(rewards("--algorithm", "grpo"))
    (tmp_path / "run").rename(tmp_path / "teacher")
    teacher = ["--teacher", "tiny", "--teacher-adapter", str(tmp_path / "teacher"), "--teacher-quantize", "none"]
    assert learned(rewards("--algorithm", "dgpo", *teacher))
    (tmp_path / "run").rename(tmp_path / "with advantages")
    assert learned(rewards("--algorithm", "dgpo", *teacher, "--failed-below", "1000"))


def test_without_learning_it_does_not(rewards):
    """The control: the same rounds, with steps too small to change a token."""
    assert not learned(rewards("--algorithm", "grpo", "--learning-rate", "1e-12"))


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_up_the_gradient_it_does_not(rewards, monkeypatch, algorithm):
    """The control: the policy, not the critic, takes its steps the wrong way."""
    real_adamw = optim.adamw

    def adamw(groups, weight_decay):
        optimizer = real_adamw(groups, weight_decay)
        optimizer.param_groups[0]["maximize"] = True
        return optimizer

    monkeypatch.setattr(optim, "adamw", adamw)
    assert not learned(rewards("--algorithm", algorithm))
