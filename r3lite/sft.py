"""Supervised fine-tuning of a LoRA adapter on trajectories and conversations.

A step reads as the algorithm: rows -> micro-batches -> loss on what the assistant wrote -> backward -> update.
"""

import math
import random
import sys
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from r3lite import command
from r3lite.settings import LengthSettings, SftConfig

if TYPE_CHECKING:  # torch is loaded after the arguments are read, so that --help answers at once
    from torch import Tensor

    from r3lite.datasets.trajectories import Conversation, Row, Trajectory
    from r3lite.protocols.tokenizer import Tokenizer

ADAPTER = "policy"


def trained_tokens(rows: "list[Row]") -> int:
    """How many tokens carry loss. The first token of a row has none before it that could predict it."""
    return sum(sum(row.trained[1:]) for row in rows)


def rows_of_step(step: int, count: int, per_step: int, seed: int, last: int | None) -> list[int]:
    """Indices of the rows of step 1, 2, ...: passes over all `count` rows, each shuffled anew, up to row `last`.

    A function of the step, so that a resumed run needs no position in the data.
    """
    stop = step * per_step if last is None else min(step * per_step, last)
    chosen = []
    for epoch in range((step - 1) * per_step // count, (stop - 1) // count + 1):
        order = list(range(count))
        random.Random(f"{seed}/sft/{epoch}").shuffle(order)
        chosen += order[max(0, (step - 1) * per_step - epoch * count) : stop - epoch * count]
    return chosen


def length_of_run(config: SftConfig, rows: int) -> tuple[int, int | None]:
    """Optimizer steps of the run, and the number of rows after which it ends (None: --max-steps says when)."""
    if config.schedule.max_steps is not None:
        return config.schedule.max_steps, None
    last = math.ceil(config.schedule.epochs * rows)
    return math.ceil(last / (config.sft.batch_size * config.sft.gradient_accumulation)), last


def read(config: SftConfig) -> "tuple[list[Trajectory | Conversation], list[Trajectory | Conversation]]":
    """Rows to train on and rows held out. Rows of one question go together: its answer must not be known."""
    from r3lite.datasets.trajectories import read_rows
    from r3lite.protocols.registry import build_protocol

    protocol = build_protocol(config.protocol)
    rows = read_rows(config.data.data, protocol, config.data.limit, config.data.skip_bad_rows)
    of_id = Counter(row.id for row in rows)
    ids = sorted(of_id)
    random.Random(f"{config.common.seed}/sft/validation").shuffle(ids)
    room, held_out = min(int(config.sft.validation_fraction * len(rows)), config.sft.validation_rows), set()
    for id in ids:
        if of_id[id] <= room and len(held_out) < len(ids) - 1:
            held_out.add(id)
            room -= of_id[id]
    return [row for row in rows if row.id not in held_out], [row for row in rows if row.id in held_out]


class Trainer:
    """The model with the adapter that is trained, and what one step does with them."""

    def __init__(
        self, config: SftConfig, folder: Path, tokenizer: "Tokenizer", rows: "list[Row]", validation: "list[Row]"
    ):
        """Loads the base, frozen, as its memory plan says, and puts the adapter on it."""
        from r3lite import grant
        from r3lite.memory import workloads
        from r3lite.models import activation_checkpointing, lora, packing
        from r3lite.models.hooks import explain_overflow
        from r3lite.policy import load_base
        from r3lite.training import loop, optim
        from r3lite.training.out_of_memory import Grant

        self.config, self.tokenizer, self.rows, self.validation = config, tokenizer, rows, validation
        self.total, self.last = length_of_run(config, len(rows))
        tokens = [row.tokens for row in [*rows, *validation]]
        shape = max(map(len, tokens)), packing.common_prefix(min(tokens), max(tokens))
        workload = workloads.sft_workload(config.model, config.sft, config.lora, *shape)
        plan = workloads.make_plan(workload, config.memory)
        self.model, self.precision = load_base(folder, config.model, config.memory, plan)
        self.device = self.precision.device
        if config.model.adapter:
            lora.load_adapter(self.model, ADAPTER, config.model.adapter, trainable=True)
        else:
            s = config.lora
            shape = s.lora_r, s.lora_alpha, s.lora_dropout, s.lora_targets, s.rslora
            lora.add_adapter(self.model, ADAPTER, *shape, seed=config.common.seed)
        lora.set_adapter(self.model, ADAPTER)
        parameters = lora.adapter_parameters(self.model, ADAPTER)
        group = optim.Group(parameters, config.optimizer.learning_rate)
        self.training = loop.Training(
            optimizer=optim.adamw([group], config.optimizer.weight_decay),
            precision=self.precision,
            max_grad_norm=config.optimizer.max_grad_norm,
            save_adapter=lambda folder: lora.save_adapter(self.model, ADAPTER, folder, config.model.model),
            data=fingerprint([*self.rows, *self.validation]),
            facts={
                "rows": len(self.rows),
                "validation_rows": len(self.validation),
                "trained_tokens_per_epoch": trained_tokens(self.rows),
                "trainable_parameters": sum(p.numel() for p in parameters.values()),
            },
            explain=lambda: explain_overflow(self.model, lambda: self.loss(self.last_rows)),
        )
        self.grant = Grant(
            plan,
            workloads.fixed(config.memory),
            lambda memory: activation_checkpointing.enable(self.model, grant.Grant(memory)),
            self.training,
        )

    def loss(self, rows: "list[Row]") -> "Tensor":
        """Summed cross-entropy of the rows' trained tokens, each predicted by the hidden state before it."""
        from r3lite.models.logprobs import cross_entropy, token_loss
        from r3lite.models.packing import Pack

        with self.precision.autocast():
            pack = Pack.of([row.tokens for row in rows], self.device, self.model.head_weight.dtype)
            states, targets = pack.predicted([row.trained for row in rows])
            hidden = self.model(pack.tokens, pack)[0, states]  # [N, C]
            head = self.model.head_weight[: self.tokenizer.size]  # ids beyond the tokenizer are only padding
            chunk = self.grant.memory.loss_chunk
            loss, _ = token_loss(hidden, head, targets, cross_entropy, chunk=chunk)
        return loss

    def step(self, number: int) -> tuple[dict, int]:
        """One optimizer step; its loss is the mean over all trained tokens of its rows, however they are batched."""
        settings = self.config.sft
        per_step = settings.batch_size * settings.gradient_accumulation
        chosen = rows_of_step(number, len(self.rows), per_step, self.config.common.seed, self.last)
        rows = [self.rows[i] for i in chosen]
        self.model.train()
        self.grant.resume()
        total_loss = self.grant.attempt("update", self.add_gradients, rows)
        norm, _ = self.training.update()
        seen = (number - 1) * per_step + len(rows)
        record = {"loss": total_loss, "grad_norm": norm, "epoch": seen / len(self.rows)}
        if self.validation and (number % settings.validate_every == 0 or number == self.total):
            record["eval_loss"] = self.grant.attempt("update", self.validation_loss)
        return record, sum(len(row.tokens) for row in rows)

    def add_gradients(self, rows: "list[Row]") -> float:
        """The mean loss of a step's rows, and its gradients, however many passes they take."""
        count, total = trained_tokens(rows), 0.0
        for group in self.micro_batches(rows):
            self.last_rows = group
            loss = self.loss(group) / count
            self.precision.backward(loss)
            total += loss.detach()  # read once, at the end: each reading waits for the device
        return float(total)

    def micro_batches(self, rows: "list[Row]") -> "list[list[Row]]":
        """Rows in groups that go through the model together."""
        from r3lite.models.packing import groups

        limits = self.grant.memory.micro_batch_tokens, self.config.sft.batch_size
        return [[rows[i] for i in group] for group in groups([row.tokens for row in rows], *limits)]

    def validation_loss(self) -> float:
        """Mean cross-entropy over all trained tokens of the rows held out."""
        import torch

        self.model.eval()
        total = 0.0
        with torch.no_grad():
            for group in self.micro_batches(self.validation):
                total += self.loss(group).item()
        return total / trained_tokens(self.validation)


def fingerprint(rows: "list[Row]") -> str:
    """CRC-32 of tokens and masks, so that a run is not resumed on other data under the same name."""
    value = 0
    for row in rows:
        value = zlib.crc32(repr((row.tokens, row.trained)).encode(), value)
    return f"{value:08x}"


def work(config: SftConfig) -> None:
    rows, validation = read(config)

    import torch

    from r3lite.datasets.trajectories import encode_row, encode_rows
    from r3lite.models.weights import resolve_folder
    from r3lite.protocols.registry import build_layout
    from r3lite.protocols.tokenizer import Tokenizer
    from r3lite.training.loop import Run, train

    run = Run("sft", config, time.strftime("runs/sft-%Y%m%d-%H%M%S"))
    torch.manual_seed(config.common.seed)  # of dropout; all else has streams of its own
    folder = resolve_folder(config.model.model)
    tokenizer = Tokenizer.load(folder)
    lengths = LengthSettings(max_length=config.sft.max_length, max_document_tokens=config.sft.max_document_tokens)
    layout = build_layout(tokenizer, config.protocol, lengths)
    trained = encode_rows(rows, layout)
    held_out = [encoded for row in validation if (encoded := encode_row(row, layout))]
    trainer = Trainer(config, folder, tokenizer, trained, held_out)
    if train(run, trainer.training, trainer.total, trainer.step):
        print(f"the adapter is in {run.output / 'adapter'}")


def plan(config: SftConfig) -> str:
    """What a run would do, for `--dry-run`; data that would have to be downloaded first are not counted."""
    from r3lite.memory import workloads

    memory = workloads.make_plan(workloads.sft_workload(config.model, config.sft, config.lora), config.memory)
    told = f"\nMemory, for rows of {config.sft.max_length} tokens\n{memory.table()}\n\n"
    if not config.data.data or not Path(config.data.data).exists():
        return told + f"{config.data.data or '--data'} is not here yet: its rows are not counted"
    rows, validation = read(config)
    total, _ = length_of_run(config, len(rows))
    per_step = config.sft.batch_size * config.sft.gradient_accumulation
    return told + f"{len(rows)} rows, {len(validation)} more held out; {total} steps of {per_step} rows"


def main(argv: list[str] | None = None) -> int:
    return command.run("sft", SftConfig(), work, argv, plan)


if __name__ == "__main__":
    sys.exit(main())
