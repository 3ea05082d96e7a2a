"""Supervised fine-tuning of a LoRA adapter on trajectories and conversations.

`SFTTrainer.step` reads as the algorithm: rows -> micro-batches -> loss on the assistant's turns -> backward -> update.
"""

import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from r3lite import command
from r3lite.settings import LengthSettings, SftConfig

if TYPE_CHECKING:  # torch is loaded after the arguments are read, so that --help answers at once
    from torch import Tensor

    from r3lite.datasets.trajectories import Conversation, Row, Trajectory
    from r3lite.policy import Policy
    from r3lite.protocols.base import Protocol


def length_of_run(config: SftConfig, rows: int) -> tuple[int, int | None]:
    """Optimizer steps of the run, and the number of rows after which it ends (None: --max-steps decides)."""
    if config.schedule.max_steps is not None:
        return config.schedule.max_steps, None
    last = math.ceil(config.schedule.epochs * rows)
    return math.ceil(last / rows_per_step(config)), last


def rows_per_step(config: SftConfig) -> int:
    return config.sft.batch_size * config.sft.gradient_accumulation


def read_data(
    config: SftConfig,
) -> "tuple[Protocol, list[Trajectory | Conversation], list[Trajectory | Conversation]]":
    """The protocol, with its prompt files read, rows to train on and rows held out."""
    from r3lite.datasets.order import hold_out
    from r3lite.datasets.trajectories import read_rows
    from r3lite.protocols.registry import build_protocol

    protocol = build_protocol(config.protocol)
    rows = read_rows(config.data.data, protocol, config.data.limit, config.data.skip_bad_rows)
    held_out = hold_out(rows, config.sft.validation_fraction, config.sft.validation_rows, config.common.seed)
    return protocol, *held_out


class SFTTrainer:
    """Takes the steps of a run: each lowers the mean cross-entropy of the tokens that the assistant wrote."""

    def __init__(self, config: SftConfig, policy: "Policy", vocabulary: int, rows: "list[Row]", held_out: "list[Row]"):
        """`vocabulary`: ids of the tokenizer; those beyond are padding of the embedding and get no probability."""
        from r3lite.datasets.trajectories import fingerprint

        self.config, self.policy, self.vocabulary, self.rows, self.held_out = config, policy, vocabulary, rows, held_out
        self.total, self.last_row = length_of_run(config, len(rows))
        facts = {
            "rows": len(rows),
            "validation_rows": len(held_out),
            "trained_tokens_per_epoch": sum(row.loss_tokens for row in rows),
            "trainable_parameters": sum(p.numel() for group in policy.optimizer.param_groups for p in group["params"]),
        }
        data = fingerprint([*rows, *held_out])
        self.state = policy.train_state(config.optimizer, config.model.model, data, facts)
        self.last_micro_batch: list[Row] = []

    def step(self, number: int) -> tuple[dict, int]:
        """One optimizer step; its loss is the mean over all trained tokens of its rows, however they are batched."""
        from r3lite.datasets.order import rows_of_step
        from r3lite.models.lora import cast_once
        from r3lite.training.metrics import with_perplexity

        per_step = rows_per_step(self.config)
        chosen = rows_of_step(number, len(self.rows), per_step, self.config.common.seed, self.last_row)
        rows = [self.rows[i] for i in chosen]
        self.policy.model.train()
        with cast_once(self.policy.model, self.policy.precision.dtype):
            loss = self.policy.grant.attempt("update", self.add_gradients, rows)
        norm, _ = self.state.update()
        epoch = ((number - 1) * per_step + len(rows)) / len(self.rows)
        record = {"loss": float(loss), "grad_norm": norm, "epoch": epoch}
        if self.held_out and (number % self.config.sft.validate_every == 0 or number == self.total):
            record["eval_loss"] = self.policy.grant.attempt("update", self.validation_loss)
        return with_perplexity(record), sum(len(row.tokens) for row in rows)

    def add_gradients(self, rows: "list[Row]") -> "Tensor":
        """The mean loss of a step's rows, and its gradients, however many passes they take."""
        count, total = sum(row.loss_tokens for row in rows), 0.0
        for group in self.micro_batches(rows):
            self.last_micro_batch = group
            loss = self.loss(group) / count
            self.policy.precision.backward(loss)
            total += loss.detach()
        return total.to("cpu", non_blocking=True)  # there when the gradients' norm is: a step waits for the device once

    def loss(self, rows: "list[Row]") -> "Tensor":
        """Summed cross-entropy of the rows' trained tokens, each predicted by the hidden state before it."""
        from r3lite.models.logprobs import cross_entropy, token_loss
        from r3lite.models.packing import Pack

        model = self.policy.model
        with self.policy.precision.autocast():
            pack = Pack.of([row.tokens for row in rows], model.head_weight.device, model.head_weight.dtype)
            states, targets = pack.predicted([row.loss_mask for row in rows])
            hidden = model(pack.tokens, pack)[0, states]  # [N, C]
            head = model.head_weight[: self.vocabulary]  # [V, C]
            chunk = self.policy.grant.memory.loss_chunk
            loss, _ = token_loss(hidden, head, targets, cross_entropy, chunk=chunk)
        return loss

    def micro_batches(self, rows: "list[Row]") -> "list[list[Row]]":
        """Rows in groups that go through the model together."""
        from r3lite.models.packing import groups

        tokens = [row.tokens for row in rows]
        found = groups(tokens, self.policy.grant.memory.micro_batch_tokens, self.config.sft.batch_size)
        return [[rows[i] for i in group] for group in found]

    def validation_loss(self) -> float:
        """Mean cross-entropy over all trained tokens of the rows held out."""
        import torch

        self.policy.model.eval()
        total = 0.0
        with torch.no_grad():
            for group in self.micro_batches(self.held_out):
                total += self.loss(group).item()
        return total / sum(row.loss_tokens for row in self.held_out)

    def explain_overflow(self) -> str:
        """Which layer overflowed first in the last micro-batch."""
        from r3lite.models.hooks import explain_overflow

        return explain_overflow(self.policy.model, lambda: self.loss(self.last_micro_batch))


def train(config: SftConfig) -> None:
    data = read_data(config)

    import torch

    from r3lite.training import loop
    from r3lite.training.run_folder import RunFolder

    with RunFolder("sft", config, time.strftime("runs/sft-%Y%m%d-%H%M%S")) as run:
        torch.manual_seed(config.common.seed)  # of dropout; all else has streams of its own
        if loop.train(run, build_trainer(config, *data)):
            print(f"the adapter is in {run.output / 'adapter'}")


def build_trainer(
    config: SftConfig,
    protocol: "Protocol",
    rows: "list[Trajectory | Conversation]",
    validation: "list[Trajectory | Conversation]",
) -> SFTTrainer:
    """Lays the rows out in tokens, plans the memory that they take and loads the model."""
    from r3lite.datasets.trajectories import encode_row, encode_rows, lengths_of
    from r3lite.memory.plan import make_plan
    from r3lite.memory.workloads import sft_workload
    from r3lite.models.weights import resolve_folder
    from r3lite.policy import Training, load_policy
    from r3lite.protocols.tokenizer import Tokenizer
    from r3lite.protocols.transcript import Layout

    folder = resolve_folder(config.model.model)
    tokenizer = Tokenizer.load(folder)
    lengths = LengthSettings(max_length=config.sft.max_length, max_document_tokens=config.sft.max_document_tokens)
    layout = Layout(tokenizer, protocol, lengths)
    trained = encode_rows(rows, layout)
    held_out = [encoded for row in validation if (encoded := encode_row(row, layout))]
    known, (steps, _) = lengths_of(trained, held_out), length_of_run(config, len(trained))
    plan = make_plan(sft_workload(config.model, config.sft, config.lora, **known, steps=steps), config.memory)
    training = Training(config.lora, command.usual("sft", config).lora, config.optimizer, config.common.seed)
    policy = load_policy(folder, config.model, config.memory, plan, training)
    return SFTTrainer(config, policy, tokenizer.size, trained, held_out)


def plan(config: SftConfig) -> str:
    """What a run would do, for `--dry-run`; data that would have to be downloaded first are not counted."""
    from r3lite.memory.plan import make_plan
    from r3lite.memory.workloads import sft_workload

    memory = make_plan(sft_workload(config.model, config.sft, config.lora), config.memory)
    told = f"\nMemory, for rows of {config.sft.max_length} tokens\n{memory.table()}\n\n"
    if not config.data.data or not Path(config.data.data).exists():
        return told + f"{config.data.data or '--data'} is not here yet: its rows are not counted"
    _, rows, validation = read_data(config)
    total, _ = length_of_run(config, len(rows))
    return told + f"{len(rows)} rows, {len(validation)} more held out; {total} steps of {rows_per_step(config)} rows"


def main(argv: list[str] | None = None) -> int:
    return command.run("sft", SftConfig(), train, argv, plan)


if __name__ == "__main__":
    sys.exit(main())
