"""The loss of `sft`, by hand: over rows of different lengths, batched or accumulated, on what the assistant wrote."""

import pytest
import torch

from r3lite import sft
from r3lite.assembly import supervised
from r3lite.assembly.policy import POLICY
from r3lite.core.invocation import with_values
from r3lite.datasets.sources import read_data
from r3lite.datasets.trajectories import Row
from r3lite.models import lora
from r3lite.protocols.tokenizer import Tokenizer as ChatTokenizer
from tests.test_sft import toy  # noqa: F401

# ruff: noqa: F811 (a fixture is an argument by its name)


def trainer(toy: list[str], **settings) -> supervised.SFTTrainer:
    """The recipe's trainer on the toy, its LoRA's B no longer zero."""
    config = with_values(sft.SftConfig(), dict(zip((a[2:].replace("-", "_") for a in toy[::2]), toy[1::2])) | settings)
    sft_trainer = supervised.build_trainer(config, *read_data(config))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in lora.adapter_parameters(sft_trainer.policy.model, POLICY).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return sft_trainer


def by_hand(sft_trainer: supervised.SFTTrainer, rows: list[Row]) -> float:
    """Mean cross-entropy of the trained tokens, row by row, from all logits."""
    losses = []
    with torch.no_grad():
        for row in rows:
            logits = sft_trainer.policy.model.logits(sft_trainer.policy.model(torch.tensor([row.tokens])))[
                0, :, : sft_trainer.vocabulary
            ]
            logprobs = logits.log_softmax(-1)
            losses += [-logprobs[t - 1, row.tokens[t]].item() for t in range(1, len(row.tokens)) if row.action_mask[t]]
    return sum(losses) / len(losses)


def test_the_loss_by_hand_over_rows_of_different_lengths(toy):
    """A mean of the micro-batches' means would weigh the tokens of short rows more."""
    sft_trainer = trainer(toy, batch_size=3, gradient_accumulation=3)
    sft_trainer.policy.model.eval()
    rows = sft_trainer.rows[:8]  # the last micro-batch is smaller
    assert len({sum(row.action_mask) for row in rows}) > 1
    count = sum(row.loss_tokens for row in rows)
    groups = sft_trainer.micro_batches(rows)
    assert [len(g) for g in groups] == [3, 3, 2]
    with torch.no_grad():
        loss = sum(sft_trainer.loss(g).item() for g in groups) / count
    assert loss == pytest.approx(by_hand(sft_trainer, rows), abs=1e-5)
    assert sft_trainer.validation_losses()["eval_loss"] == pytest.approx(
        by_hand(sft_trainer, sft_trainer.held_out), abs=1e-5
    )


def gradients(sft_trainer: supervised.SFTTrainer, rows: list[Row], together: int) -> list[torch.Tensor]:
    """A step's gradients, its rows taken so many at a time."""
    count, parameters = (
        sum(row.loss_tokens for row in rows),
        lora.adapter_parameters(sft_trainer.policy.model, POLICY).values(),
    )
    for parameter in parameters:
        parameter.grad = None
    sft_trainer.policy.model.train()
    for start in range(0, len(rows), together):
        sft_trainer.policy.precision.backward(sft_trainer.loss(rows[start : start + together]) / count)
    return [parameter.grad.clone() for parameter in parameters]


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_accumulation_equals_one_big_batch(toy, layers):
    sft_trainer = trainer(toy, recompute_layers=layers)
    rows = sft_trainer.rows[:7]
    full_batch = gradients(sft_trainer, rows, 7)
    assert max(g.abs().max() for g in full_batch) > 1e-3
    for batch_size in (1, 2, 3):
        for one, parts in zip(full_batch, gradients(sft_trainer, rows, batch_size)):
            torch.testing.assert_close(parts, one, rtol=1e-4, atol=1e-6)


def test_loss_falls_on_what_the_assistant_wrote_and_never_on_documents(toy):
    sft_trainer = trainer(toy)
    tokenizer = ChatTokenizer.load(toy[toy.index("--model") + 1])
    assert any("SECRET" in tokenizer.decode(row.tokens) for row in sft_trainer.rows)
    for row in sft_trainer.rows:
        trained = tokenizer.decode([t for t, on in zip(row.tokens, row.action_mask) if on])
        assert "SECRET" not in trained
        assert "was born in" not in trained
        assert trained.startswith("Step 1:\nThe problem analysis: I need to find out")
        assert "Step 2:" in trained
        assert sum(t == tokenizer.stop_id and on for t, on in zip(row.tokens, row.action_mask)) == 2
    # Other words after the last trained token change no gradient; other words before it are read, but not predicted.
    row = sft_trainer.rows[0]
    longer = Row(tokens=[*row.tokens, 7, 8, 9], action_mask=[*row.action_mask, False, False, False])
    for grad, longer_grad in zip(gradients(sft_trainer, [row], 1), gradients(sft_trainer, [longer], 1)):
        torch.testing.assert_close(longer_grad, grad, rtol=1e-5, atol=1e-7)


def test_ids_beyond_the_tokenizer_have_no_probability(toy):
    sft_trainer = trainer(toy)
    sft_trainer.policy.model.eval()
    assert sft_trainer.vocabulary < sft_trainer.policy.model.config.vocab_size
    with torch.no_grad():
        loss_before = sft_trainer.loss(sft_trainer.rows[:2]).item()
        sft_trainer.policy.model.head_weight[sft_trainer.vocabulary :] = 100.0
        assert sft_trainer.loss(sft_trainer.rows[:2]).item() == loss_before
