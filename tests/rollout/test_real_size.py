"""At Qwen2.5-0.5B's width: what is recorded of forced tokens depends on no company, and is what a trainer computes.

Random weights give a flat distribution, in which the last bit decides what is sampled: so tokens are forced.
"""

import pytest
import torch

from r3lite.core.episode import Document, Question
from r3lite.models import lora
from r3lite.models.weights import load_model
from r3lite.protocols.r3 import R3
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.rl.batch import Batch, Rollout, action_logprobs
from r3lite.settings import LengthSettings

PROTOCOL = R3("Answer the question step by step. Question: {question}", "{documents}")
DOCUMENTS = [Document("1", "Rome", "Rome is the capital of Italy, on the Tiber. " * 4)]
SCRIPT = {
    str(i): [
        f"Step 1:\nThe problem analysis: {'why ' * i}\nThe retrieval query: Rome {i}",
        f"Step 2:\nThe problem analysis: {'so ' * (5 - i)}\nThe final answer: Italy",
    ]
    for i in range(5)
}


def run(scripted, **settings) -> dict[str, Rollout]:
    lengths = LengthSettings(max_new_tokens=64, max_length=512, max_hops=2)
    engine = scripted(SCRIPT, protocol=PROTOCOL, lengths=lengths, **settings)
    questions = [Question(i, f"Where is city number {i}?" + " Please." * int(i), ("Italy",)) for i in SCRIPT]
    sequences = engine.run(questions, list(SCRIPT), lambda pairs: [DOCUMENTS for _ in pairs])
    assert all(s.finish == "answered" for s in sequences)
    return {s.question.id: Rollout(s, [], 0) for s in sequences}


@pytest.fixture(scope="module")
def real(qwen_dir):
    """The model with an adapter that matters, and its tokenizer."""
    model = load_model(qwen_dir, torch.float32, "cpu")
    lora.add_adapter(model, "policy", 8, 16)
    for name, parameter in lora.adapter_parameters(model, "policy").items():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
    lora.set_adapter(model, "policy")
    return model, Tokenizer.load(qwen_dir)


def test_recorded_log_probs_do_not_depend_on_company_and_equal_the_trainers(scripted_with, real):
    scripted = scripted_with(*real)
    together = run(scripted)
    for settings in ({"rollout_batch_size": 2}, {"rollout_batch_size": 1}, {"micro_batch_tokens": 33}):
        for id, rollout in run(scripted, **settings).items():
            assert rollout.record.tokens == together[id].record.tokens
            assert rollout.record.logprobs == pytest.approx(together[id].record.logprobs, abs=1e-4)
    batch = Batch.of(list(together.values()))
    with torch.no_grad():
        logprobs = action_logprobs(real[0], batch, real[1].size, 1.0)
    assert (logprobs - batch.logprobs[batch.action_mask]).abs().max() <= 1e-4
    assert len(logprobs) > 100 and logprobs.std() > 0.1
