"""The GRPO of examples/ reads steps, computes the loss of the package and trains; the example of README.md runs."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from r3lite.core.files import shipped
from r3lite.models import lora
from r3lite.models.tensor_files import read_tensors
from r3lite.models.weights import fingerprint, load_model
from r3lite.rl.losses import clipped_surrogate, episode_mean

ROOT = Path(__file__).parent.parent
FILE = ROOT / "examples" / "grpo_in_one_file.py"
TINY = shipped("checkpoints", "tiny")


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("grpo_in_one_file", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_short_and_uses_nothing_above_the_model_and_the_tokenizer():
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    modules = re.findall(r"^from r3lite\.(\w+)", text, re.MULTILINE)
    assert set(modules) == {"core", "models", "protocols"}


@pytest.fixture
def episode(example):
    question = {"question": "Who?", "answer": "Harbe Town", "answer_aliases": []}
    return example.Episode(question, tokens=[1, 2], is_action=[False, False])


@pytest.mark.parametrize(
    ("text", "is_over", "well_formed", "queries", "answer"),
    [
        ("Step 1:\nThe problem analysis: a\nThe retrieval query: who is it?", False, 1, ["who is it?"], ""),
        ("Step 1:\nThe problem analysis: a\nThe final answer: Harbe", True, 1, [], "Harbe"),
        ("Step 2:\nThe problem analysis: a\nThe retrieval query: who?", False, 0, ["who?"], ""),
        ("The final answer: Harbe", True, 0, [], "Harbe"),
        ("Step 1:\nThe problem analysis: a", True, 0, [], ""),
        ("The retrieval query: who?\nThe final answer: Harbe", True, 0, [], ""),
    ],
)
def test_a_turn_is_read_as_a_step(example, episode, tokenizer, text, is_over, well_formed, queries, answer):
    retriever = example.Retriever(
        ["Harbe Town: Harbe Town is a town.", "Grolwin: Grolwin is who?", "Melsti: a", "B: b"]
    )
    turn = [*tokenizer.encode(text), tokenizer.stop_id]
    assert example.close_turn(episode, turn, tokenizer, retriever) == is_over
    assert (episode.steps, episode.well_formed_steps) == (1, well_formed)
    assert (episode.queries, episode.answer) == (queries, answer)
    observation = tokenizer.decode(episode.tokens[2:])
    assert ("[1] Grolwin: Grolwin is who?\n[2] " in observation) == bool(queries)
    assert not any(episode.is_action)


def test_a_turn_without_an_end_is_no_step(example, episode, tokenizer):
    turn = tokenizer.encode("Step 1:\nThe problem analysis: a\nThe final answer: Harbe")
    assert example.close_turn(episode, turn, tokenizer, example.Retriever(["a: b"]))
    assert episode.answer == "" and example.reward(episode) == 0


def test_the_reward_is_that_of_the_tiny_preset(example, episode):
    episode.steps, episode.well_formed_steps, episode.answer = 4, 3, "harbe town"
    assert example.reward(episode) == pytest.approx(1.2 + 0.375)
    episode.answer = "Harbe"
    assert example.reward(episode) == pytest.approx(0.2 * 2 / 3 + 0.375)


def test_the_loss_is_that_of_the_package(example):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 1, 4])
    mask = torch.arange(4) < lengths[:, None]  # [B, T]
    logprobs, old_logprobs = torch.randn(2, 3, 4, generator=generator) / 3
    advantages = torch.tensor([1.0, -0.5, 0.2])
    losses, _ = clipped_surrogate(logprobs - old_logprobs, advantages[:, None], 0.2, 0.2)
    expected = (losses * episode_mean(mask)).sum()
    loss = example.grpo_loss(logprobs[mask], old_logprobs[mask], advantages, lengths)
    assert torch.allclose(loss, expected)


def test_it_trains_an_adapter(example, monkeypatch, tmp_path, capsys):
    model = load_model(TINY, torch.float32, "cpu")
    lora.add_adapter(model, "policy", r=4, alpha=8)
    lora.save_adapter(model, "policy", tmp_path / "start", base_model="tiny")
    for name, value in {"QUESTIONS_PER_ROUND": 2, "GROUP_SIZE": 2, "GROUPS_PER_STEP": 1, "MAX_TURN_TOKENS": 8}.items():
        monkeypatch.setattr(example, name, value)
    monkeypatch.setattr(example, "reward", lambda episode: float(sum(episode.tokens)))  # no two episodes are equal
    example.train(str(tmp_path / "start"), str(tmp_path / "run"), rounds=2)
    assert re.fullmatch(r"(round \d: mean reward [\d.]+\n){2}", capsys.readouterr().out)
    trained = read_tensors(tmp_path / "run" / "adapter" / lora.WEIGHTS)
    assert all(tensor.isfinite().all() for tensor in trained.values())
    assert any(tensor.any() for name, tensor in trained.items() if ".lora_B." in name)  # zeros at the start


def test_the_example_of_the_readme_runs(monkeypatch, tmp_path, capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("## In Python\n")[2].partition("\n## ")[0]
    code = section.partition("```python\n")[2].partition("```")[0]
    lines = [line for line in code.splitlines() if not line.startswith("#")]  # what it prints is a comment
    assert 0 < len(lines) <= 14
    model = load_model(TINY, torch.float32, "cpu")
    lora.add_adapter(model, "policy", r=4, alpha=8)
    lora.save_adapter(model, "policy", tmp_path / "adapter", base_model="tiny", fingerprint=fingerprint(TINY))
    adapter = "runs/quickstart/sft"
    assert adapter in code
    monkeypatch.chdir(ROOT)
    exec(code.replace(adapter, str(tmp_path)), {})
    assert re.fullmatch(r"\[.*\] .*0\.\d+", capsys.readouterr().out.splitlines()[-1])
