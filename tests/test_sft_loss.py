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
    made = supervised.build_trainer(config, *read_data(config))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in lora.adapter_parameters(made.policy.model, POLICY).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return made


def by_hand(made: supervised.SFTTrainer, rows: list[Row]) -> float:
    """Mean cross-entropy of the trained tokens, row by row, from all logits."""
    losses = []
    with torch.no_grad():
        for row in rows:
            logits = made.policy.model.logits(made.policy.model(torch.tensor([row.tokens])))[0, :, : made.vocabulary]
            logprobs = logits.log_softmax(-1)
            losses += [-logprobs[t - 1, row.tokens[t]].item() for t in range(1, len(row.tokens)) if row.action_mask[t]]
    return sum(losses) / len(losses)


def test_the_loss_by_hand_over_rows_of_different_lengths(toy):
    """A mean of the micro-batches' means would weigh the tokens of short rows more."""
    made = trainer(toy, batch_size=3, gradient_accumulation=3)
    made.policy.model.eval()
    rows = made.rows[:8]  # the last micro-batch is smaller
    assert len({sum(row.action_mask) for row in rows}) > 1
    count = sum(row.loss_tokens for row in rows)
    groups = made.micro_batches(rows)
    assert [len(g) for g in groups] == [3, 3, 2]
    with torch.no_grad():
        loss = sum(made.loss(g).item() for g in groups) / count
    assert loss == pytest.approx(by_hand(made, rows), abs=1e-5)
    assert made.validation_losses()["eval_loss"] == pytest.approx(by_hand(made, made.held_out), abs=1e-5)


def gradients(made: supervised.SFTTrainer, rows: list[Row], together: int) -> list[torch.Tensor]:
    """A step's gradients, its rows taken so many at a time."""
    count, parameters = (
        sum(row.loss_tokens for row in rows),
        lora.adapter_parameters(made.policy.model, POLICY).values(),
    )
    for parameter in parameters:
        parameter.grad = None
    made.policy.model.train()
    for start in range(0, len(rows), together):
        made.policy.precision.backward(made.loss(rows[start : start + together]) / count)
    return [parameter.grad.clone() for parameter in parameters]


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_accumulation_equals_one_big_batch(toy, layers):
    made = trainer(toy, recompute_layers=layers)
    rows = made.rows[:7]
    whole = gradients(made, rows, 7)
    assert max(g.abs().max() for g in whole) > 1e-3
    for batch_size in (1, 2, 3):
        for one, parts in zip(whole, gradients(made, rows, batch_size)):
            torch.testing.assert_close(parts, one, rtol=1e-4, atol=1e-6)


def test_loss_falls_on_what_the_assistant_wrote_and_never_on_documents(toy):
    made, tokenizer = trainer(toy), ChatTokenizer.load(toy[toy.index("--model") + 1])
    assert any("SECRET" in tokenizer.decode(row.tokens) for row in made.rows)
    for row in made.rows:
        trained = tokenizer.decode([t for t, on in zip(row.tokens, row.action_mask) if on])
        assert "SECRET" not in trained
        assert "was born in" not in trained
        assert trained.startswith("Step 1:\nThe problem analysis: I need to find out")
        assert "Step 2:" in trained
        assert sum(t == tokenizer.stop_id and on for t, on in zip(row.tokens, row.action_mask)) == 2
    # Other words after the last trained token change no gradient; other words before it are read, but not predicted.
    row = made.rows[0]
    longer = Row(tokens=[*row.tokens, 7, 8, 9], action_mask=[*row.action_mask, False, False, False])
    for one, other in zip(gradients(made, [row], 1), gradients(made, [longer], 1)):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-7)


def test_ids_beyond_the_tokenizer_have_no_probability(toy):
    made = trainer(toy)
    made.policy.model.eval()
    assert made.vocabulary < made.policy.model.config.vocab_size
    with torch.no_grad():
        before = made.loss(made.rows[:2]).item()
        made.policy.model.head_weight[made.vocabulary :] = 100.0
        assert made.loss(made.rows[:2]).item() == before
