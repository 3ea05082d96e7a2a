"""Supervised fine-tuning of a LoRA adapter, or of all weights, on trajectories and conversations.

`SFTTrainer.step` is the algorithm: rows -> micro-batches -> loss on the assistant's turns -> backward -> update.
"""

import time
from contextlib import nullcontext
from itertools import chain

import torch
from torch import Tensor
from tqdm import tqdm

from r3lite.assembly.inputs import of_adapter
from r3lite.assembly.policy import Policy, Training, load_policy
from r3lite.core.bars import BRIEF
from r3lite.core.errors import R3LiteError
from r3lite.core.spans import build_spans, span
from r3lite.datasets.order import rows_of_step
from r3lite.datasets.sources import Rows, build_mixture, encode_fitting, encode_rows_of, read_data
from r3lite.datasets.trajectories import Row, Trajectory, fingerprint, lengths_of
from r3lite.devices.ranks import ALONE, Ranks
from r3lite.memory.plan import make_plan
from r3lite.memory.workloads import sft_workload
from r3lite.models import hooks
from r3lite.models.logprobs import cross_entropy, token_loss
from r3lite.models.lora import cast_once
from r3lite.models.packing import groups, states_before
from r3lite.models.weights import resolve_folder
from r3lite.protocols.base import Protocol
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.protocols.transcript import Layout
from r3lite.rl.losses import sum_by_name
from r3lite.settings import LengthSettings, SftConfig
from r3lite.training import loop
from r3lite.training.earlier_run import QUESTIONS, question_hash
from r3lite.training.metrics import means_by_source, with_perplexity
from r3lite.training.run_folder import RunFolder


class SFTTrainer:
    """Takes the steps of a run. The loss is the mean cross-entropy of the assistant's tokens."""

    def __init__(self, config: SftConfig, policy: Policy, vocabulary: int, rows: list[Row], held_out: list[Row]):
        """`vocabulary`: number of the tokenizer's ids; the embedding's further rows are padding, with probability 0."""
        self.config, self.policy, self.vocabulary, self.rows, self.held_out = config, policy, vocabulary, rows, held_out
        self.total, self.last_row = config.length(len(rows))
        self.ranks, self.spans = policy.ranks, build_spans(config.tracking.track_spans) if policy.ranks.first else None
        self.mixture = build_mixture(config.mixture, rows, f"{config.common.seed}/sft")
        facts = {
            "rows": len(rows),
            "validation_rows": len(held_out),
            "trained_tokens_per_epoch": sum(row.loss_tokens for row in rows),
            "trainable_parameters": sum(p.numel() for group in policy.optimizer.param_groups for p in group["params"]),
        }
        data = fingerprint([*rows, *held_out])
        inputs = self.ranks.shared(lambda: of_adapter(config.model))
        self.state = policy.train_state(config.optimizer, config.model.model, data, inputs, facts)
        self.last_micro_batch: list[Row] = []

    def step(self, number: int) -> tuple[dict, int]:
        """One optimizer step; returns its metrics and its tokens. The loss is the mean over all trained tokens of its
        rows, however they are divided into micro-batches and among ranks."""
        per_step, seed = self.config.rows_per_step, self.config.common.seed
        chosen = rows_of_step(number, len(self.rows), per_step, seed, self.last_row, self.mixture)
        rows = [self.rows[i] for i in chosen]
        self.policy.model.train()
        with span(self.spans, "update", rows=len(rows)):
            with cast_once(self.policy.model, self.policy.precision.dtype):
                shares = self.policy.grant.attempt("update", self.add_gradients, rows)
            norm, _ = self.state.update()
        shares = sum_by_name(self.ranks.gather(shares))
        epoch = ((number - 1) * per_step + len(rows)) / len(self.rows)
        record = means_by_source("loss", shares, tokens_of(rows)) | {"grad_norm": norm, "epoch": epoch}
        if self.held_out and (number % self.config.sft.validate_every == 0 or number == self.total):
            with span(self.spans, "validate", rows=len(self.held_out)):
                record |= self.validation_losses()
        return with_perplexity(record), sum(len(row.tokens) for row in rows)

    def rehearse(self) -> None:
        """Computes the gradients of the run's largest micro-batch, and drops them."""
        longest = sorted(self.rows, key=lambda row: len(row.tokens))[-self.config.rows_per_step :]
        rows, full = longest, self.policy.full  # of which each rank takes its share
        if self.ranks.size == 1:
            rows = max(self.micro_batches(longest), key=lambda group: sum(len(row.tokens) for row in group))
        self.policy.model.train()
        with self.policy.grant.rehearsal(), full.rehearsal() if full else nullcontext():
            self.policy.grant.attempt("update", self.add_gradients, rows)

    def add_gradients(self, rows: list[Row]) -> dict[str, Tensor]:
        """Accumulates the gradients of the mean loss over a step's rows; returns the share of each source in that mean.

        The sum of losses of a micro-batch is divided by the trained tokens of all rows of the step, on all ranks.
        """
        count, shares, groups = sum(row.loss_tokens for row in rows), {}, self.micro_batches(rows)
        if self.policy.full and len(groups) > 1:  # each pass changes the weights
            cause = (
                f"with --no-lora the {len(rows)} rows of a step must be one pass through the model, not {len(groups)}"
            )
            raise R3LiteError(cause, "Remove --gradient-accumulation and --micro-batch-tokens, or --no-lora.")
        for group in groups:
            self.last_micro_batch = group
            loss = self.loss(group) / count
            try:
                self.policy.precision.backward(loss)
                if self.policy.full:
                    self.policy.full.finish()
            except torch.OutOfMemoryError as error:
                if not self.policy.precision.changed_weights:
                    raise  # it can be tried again
                remedy = "Close other programs or pass a smaller --vram-budget, and continue with --resume auto."
                raise R3LiteError(f"memory ran out in the middle of an update ({error})", remedy) from error
            shares[group[0].source] = shares.get(group[0].source, 0.0) + loss.detach()
        # Copied while the gradients' norm is computed, so that a step waits for the device once.
        return {name: loss.to("cpu", non_blocking=True) for name, loss in shares.items()}

    def loss(self, rows: list[Row]) -> Tensor:
        """The summed cross-entropy of the rows' trained tokens, in nats; hidden state t - 1 predicts token t."""
        model = self.policy.model
        with self.policy.precision.autocast():
            hidden, targets = states_before(model, [row.tokens for row in rows], [row.loss_mask for row in rows])
            head = model.head_weight[: self.vocabulary]  # [V, C]
            chunk = self.policy.grant.memory.loss_chunk
            full = self.policy.full if torch.is_grad_enabled() else None
            head_grad = full.head_gradient()[: self.vocabulary] if full else None
            loss, _ = token_loss(hidden, head, targets, cross_entropy, chunk=chunk, head_grad=head_grad)
        return loss

    def micro_batches(self, rows: list[Row]) -> list[list[Row]]:
        """This rank's share of the rows, in groups that go through the model together. A group has rows of one source
        only, so that each source's loss is known."""
        limit, most, made = self.policy.grant.memory.micro_batch_tokens, self.config.sft.batch_size, []
        rows = [rows[i] for i in self.ranks.share([len(row.tokens) for row in rows])]
        for name in dict.fromkeys(row.source for row in rows):
            some = [row for row in rows if row.source == name]
            made += [[some[i] for i in group] for group in groups([row.tokens for row in some], limit, most)]
        return made

    def validation_losses(self) -> dict[str, float]:
        """Mean cross-entropy over the trained tokens of all held-out rows, and of each source's."""
        sums = sum_by_name(self.ranks.gather(self.policy.grant.attempt("update", self.held_out_losses)))
        tokens = tokens_of(self.held_out)
        return means_by_source("eval_loss", {n: x / sum(tokens.values()) for n, x in sums.items()}, tokens)

    def held_out_losses(self) -> dict[str, float]:
        """Summed cross-entropy of this rank's share of the held-out rows, by source."""
        self.policy.model.eval()
        sums = dict.fromkeys((row.source for row in self.held_out), 0.0)
        with torch.no_grad():
            for group in tqdm(self.micro_batches(self.held_out), "validating", unit="batch", **BRIEF):
                sums[group[0].source] += self.loss(group).item()
        return sums

    def explain_overflow(self) -> str:
        """Which layer overflowed first in the last micro-batch."""
        return hooks.explain_overflow(self.policy.model, lambda: self.loss(self.last_micro_batch))


def tokens_of(rows: list[Row]) -> dict[str, int]:
    """Trained tokens of each source's rows."""
    return {name: sum(r.loss_tokens for r in rows if r.source == name) for name in {r.source for r in rows}}


def train(config: SftConfig, ranks: Ranks) -> None:
    """Runs SFT in its run folder, from the first step or from a checkpoint."""
    data = read_data(config)
    with RunFolder("sft", config, time.strftime("runs/sft-%Y%m%d-%H%M%S"), ranks=ranks) as run:
        torch.manual_seed(config.common.seed)  # of dropout; all other random draws have their own streams
        if hashes := hashes_of_questions(data[1]):
            run.notes[QUESTIONS] = {"hashes": hashes}
        trainer = build_trainer(config, *data, ranks)
        if loop.train(run, trainer, spans=trainer.spans):
            print(f"wrote the {trainer.state.result} to {run.output / trainer.state.result}")


def hashes_of_questions(rows: Rows) -> list[str]:
    """The hashes of the questions of all trajectories, in order, so that `ppo` can tell whether it trains on them."""
    examples = chain.from_iterable(rows.values())
    return sorted({question_hash(example.question) for example in examples if isinstance(example, Trajectory)})


def build_trainer(
    config: SftConfig, protocols: dict[str, Protocol], rows: Rows, validation: Rows, ranks: Ranks = ALONE
) -> SFTTrainer:
    """Encodes the rows, plans the memory that they take and loads the model."""
    folder = resolve_folder(config.model.model)
    tokenizer = Tokenizer.load(folder, config.model.thinking)
    lengths = LengthSettings(max_length=config.sft.max_length, max_document_tokens=config.sft.max_document_tokens)
    layouts = {name: Layout(tokenizer, protocol, lengths) for name, protocol in protocols.items()}
    if config.lora.no_lora and len(rows) > 1 and config.rows_per_step > 1:
        raise R3LiteError("--no-lora needs rows of one source per step", "Pass --batch-size 1, or remove --no-lora.")
    trained, held_out = encode_rows_of(rows, layouts), encode_fitting(validation, layouts)
    known, (steps, _) = lengths_of(trained, held_out), config.length(len(trained))
    plan = make_plan(sft_workload(config, **known, steps=steps), config.memory)
    training = Training(
        config.lora,
        config.optimizer,
        config.common.seed,
        set_by_user=config.set_by_user,
        ranks=ranks,
    )
    policy = load_policy(folder, config.model, config.memory, plan, training)
    return SFTTrainer(config, policy, tokenizer.size, trained, held_out)
