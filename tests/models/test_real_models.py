"""Real models against transformers: logits, and what they answer. `R3LITE_MODELS` names their folders, with commas."""

import json
import os

import pytest
import torch

from bench.real_weights import compare
from r3lite.models.weights import load_model
from r3lite.protocols.tokenizer import Tokenizer

FOLDERS = [folder for folder in os.environ.get("R3LITE_MODELS", "").split(",") if folder]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDERS, reason="R3LITE_MODELS names no folder with real weights"),
]


@pytest.fixture(scope="module")
def questions(shared) -> list[str]:
    rows = json.loads((shared / "data" / "hotpotqa" / "train_100.json").read_text(encoding="utf-8"))
    return [row["question"] for row in rows[:20]]


@pytest.mark.parametrize("folder", FOLDERS)
@torch.no_grad()
def test_twenty_questions_are_answered_as_by_transformers(folder, questions):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = load_model(folder, torch.float32, "cpu")
    tokenizer = Tokenizer.load(folder)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    for question in questions:
        prompt = tokenizer.open_chat(question)
        text = reference.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False, enable_thinking=False
        )
        assert prompt == reference(text, add_special_tokens=False)["input_ids"]
        comparison = compare(ours, theirs, tokenizer, prompt)
        assert comparison.difference < 1e-4 * max(1, comparison.largest)
        assert comparison.agreeing == comparison.written
