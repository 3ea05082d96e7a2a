"""Supervised fine-tuning of a LoRA adapter, or of all weights, on trajectories and conversations.

`SFTTrainer.step` is the algorithm: rows -> micro-batches -> loss on the assistant's turns -> backward -> update.
"""

import sys
import time
from contextlib import nullcontext
from itertools import chain

import torch
from torch import Tensor

from r3lite.assembly.graph_passes import GraphPasses
from r3lite.assembly.inputs import fingerprint_of_adapter
from r3lite.assembly.policy import Policy, Training, load_policy
from r3lite.core.errors import R3LiteError
from r3lite.core.spans import NO_SPANS, build_spans
from r3lite.datasets.order import rows_of_step
from r3lite.datasets.sources import ExamplesBySource, build_mixture, encode_fitting, encode_rows_of, read_data
from r3lite.datasets.trajectories import Row, Trajectory, fingerprint, lengths_of
from r3lite.devices.ranks import ALONE, Ranks
from r3lite.memory.plan import make_plan
from r3lite.memory.workloads import sft_workload
from r3lite.models import hooks
from r3lite.models.logprobs import cross_entropy, token_loss
from r3lite.models.lora import cast_once
from r3lite.models.packing import pack_rows, states_before
from r3lite.models.weights import resolve_folder
from r3lite.protocols.base import Protocol
from r3lite.protocols.layout import Layout
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.rl.losses import sum_by_name
from r3lite.settings import LengthSettings, SftConfig
from r3lite.training import loop
from r3lite.training.earlier_run import FEWEST_STEPS, QUESTIONS_FILE, question_hash
from r3lite.training.metrics import means_by_source, with_perplexity
from r3lite.training.run_folder import RunFolder


class SFTTrainer:
    """Takes the steps of a run. The loss is the mean cross-entropy of the assistant's tokens."""

    def __init__(self, config: SftConfig, policy: Policy, vocabulary: int, rows: list[Row], held_out: list[Row]):
        """`vocabulary`: number of the tokenizer's ids; the embedding's further rows are padding, with probability 0."""
        self.config = config
        self.policy = policy
        self.vocabulary = vocabulary
        self.rows = rows
        self.held_out = held_out
        # `total`: optimizer steps of the run. `row_limit`: the number of rows after which it ends, or None if only
        # `total` ends it.
        self.total, self.row_limit = config.steps_and_row_limit(len(rows))
        self.ranks = policy.ranks
        self.spans = build_spans(config.tracking.track_spans) if policy.ranks.first else NO_SPANS
        self.mixture = build_mixture(config.mixture, rows, f"{config.common.seed}/sft")
        self.state = policy.train_state(
            settings=config.optimizer,
            base_model=config.model.model,
            # `data` and `inputs` are compared when a run is resumed; `facts` go into the results of the run.
            data=fingerprint([*rows, *held_out]),
            inputs=self.ranks.from_first(lambda: fingerprint_of_adapter(config.model)),
            facts={
                "rows": len(rows),
                "validation_rows": len(held_out),
                "trained_tokens_per_epoch": sum(row.loss_tokens for row in rows),
                "trainable_parameters": count_parameters(policy),
            },
        )
        self.last_micro_batch: list[Row] = []  # for `explain_overflow`
        if config.sft.cuda_graphs:
            self.run_pass = GraphPasses(policy, vocabulary, self.run_pass).run_pass

    def step(self, number: int) -> tuple[dict, int]:
        """Takes one optimizer step and returns its metrics and its number of tokens.

        The loss is the mean over all trained tokens of the step's rows, however the rows are divided into micro-batches
        and among ranks.
        """
        rows_per_step = self.config.rows_per_step
        indices = rows_of_step(
            step=number,
            count=len(self.rows),
            per_step=rows_per_step,
            seed=self.config.common.seed,
            row_limit=self.row_limit,
            mixture=self.mixture,
        )
        rows = [self.rows[i] for i in indices]
        self.policy.model.train()
        with self.spans.span("update", rows=len(rows)):
            # This calls `add_gradients(rows)`. If memory runs out, it drops the gradients, makes the passes of the
            # phase "update" smaller and calls it again. (The other phase, "sample", is RL's.) `policy.grant`
            # has the sizes of the passes; it is a `ShrinkingGrant` (memory/shrinking.py).
            rank_loss_parts = self.policy.grant.run_within_memory("update", self.add_gradients, rows)
            norm, _ = self.state.update()  # waits for the device, so that `rank_loss_parts` can be read
        loss_parts = sum_by_name(self.ranks.gather(rank_loss_parts))
        # A part is the summed loss of a source / all loss tokens: the parts add up to the mean loss. `means_by_source`
        # rescales each part to the mean loss of its source.
        record = means_by_source("loss", loss_parts, count_loss_tokens(rows))
        record["grad_norm"] = norm
        record["epoch"] = ((number - 1) * rows_per_step + len(rows)) / len(self.rows)
        if self.held_out and (number % self.config.sft.validate_every == 0 or number == self.total):
            with self.spans.span("validate", rows=len(self.held_out)):
                record |= self.validation_losses()
        return with_perplexity(record), count_tokens(rows)

    def rehearse(self) -> None:
        """Tries out whether memory suffices for a step of the run's longest rows, and drops the gradients.

        Sizes of passes that had to be reduced stay reduced. A single process tries the largest micro-batch of these
        rows. Several ranks try all of the rows instead: `add_gradients` would divide the rows of one micro-batch among
        the ranks, and no rank would try a full one. Micro-batches of shorter rows may have more tokens, but at most
        `micro_batch_tokens`, for which the memory plan allows.
        """
        rows = sorted(self.rows, key=lambda row: len(row.tokens))[-self.config.rows_per_step :]
        if self.ranks.size == 1:
            rows = max(self.micro_batches(rows), key=count_tokens)
        self.policy.model.train()
        full_tuning_rehearsal = nullcontext()
        if self.policy.full_tuning:
            full_tuning_rehearsal = self.policy.full_tuning.rehearsal()
        with self.policy.grant.rehearsal(), full_tuning_rehearsal:
            self.policy.grant.run_within_memory("update", self.add_gradients, rows)

    def add_gradients(self, rows: list[Row]) -> dict[str, Tensor]:
        """Adds the gradients of the mean loss over `rows`: the rows of a step, or those that `rehearse` tries.

        This rank runs only its share of them.

        Returns, by source, the sum of the losses of this rank's rows of the source, divided by the loss tokens of all
        `rows`. Added over sources and ranks, these parts are the mean loss. They are copied from a GPU without waiting:
        read them only after `state.update`, the only place where a step waits for the device.
        """
        loss_tokens = sum(row.loss_tokens for row in rows)
        micro_batches = self.micro_batches(rows)
        if self.policy.full_tuning and len(micro_batches) > 1:  # each pass would change the weights
            passes = len(micro_batches)
            cause = f"with --no-lora the {len(rows)} rows of a step must be one pass through the model, not {passes}"
            raise R3LiteError(
                cause, "Remove --gradient-accumulation and --micro-batch-tokens, or --no-lora.", code="no-lora-passes"
            )
        loss_parts: dict[str, Tensor] = {}
        # The adapter does not change before the update: all passes share one copy of it in their dtype.
        with cast_once(self.policy.model, self.policy.precision.dtype):
            for micro_batch in self.ranks.with_progress(micro_batches, "learning", "passes"):
                self.last_micro_batch = micro_batch
                loss = self.run_pass(micro_batch, loss_tokens)
                source = micro_batch[0].source  # of all its rows, see `micro_batches`
                loss_parts[source] = loss_parts.get(source, 0.0) + loss
        return {source: part.to("cpu", non_blocking=True) for source, part in loss_parts.items()}

    def run_pass(self, rows: list[Row], loss_tokens: int) -> Tensor:
        """Adds the gradients of the summed loss of `rows` / `loss_tokens`, and returns this quotient, detached.

        In full fine-tuning, updates the weights instead. The backward pass then updates each layer, and `apply_last`
        updates norm, head and embedding.
        """
        loss = self.loss(rows) / loss_tokens
        try:
            self.policy.precision.backward(loss)
            if self.policy.full_tuning:
                self.policy.full_tuning.apply_last()
        except torch.OutOfMemoryError as error:
            if not self.policy.precision.changed_weights:
                raise  # this step has changed no weight yet, so it can be tried again
            remedy = "Close other programs or pass a smaller --vram-budget, and continue with --resume auto."
            raise R3LiteError(
                f"memory ran out in the middle of an update ({error})", remedy, code="memory-mid-update"
            ) from error
        return loss.detach()

    def loss(self, rows: list[Row]) -> Tensor:
        """Returns the sum of the cross-entropies of the rows' trained tokens, in nats, as a scalar tensor.

        Hidden state t - 1 predicts token t: `hidden` [n, C] are the states before the n trained tokens, `targets` [n]
        these tokens.
        """
        model = self.policy.model
        with self.policy.precision.autocast():
            hidden, targets = states_before(model, [row.tokens for row in rows], [row.action_mask for row in rows])
            head_grad_out = None
            if self.policy.full_tuning and torch.is_grad_enabled():
                # A buffer of zeros [V, C], to which the backward pass adds the head's gradient: autograd itself would
                # hold several tensors of this size (full_tuning.py).
                head_grad_out = self.policy.full_tuning.head_gradient()[: self.vocabulary]
            loss, _ = token_loss(
                hidden,
                head_weight=model.head_weight[: self.vocabulary],  # [V, C]
                targets=targets,
                loss=cross_entropy,
                chunk=self.policy.grant.memory.loss_chunk,
                head_grad=head_grad_out,
            )
        return loss

    def micro_batches(self, rows: list[Row]) -> list[list[Row]]:
        """Returns this rank's share of the rows, in packs that go through the model together.

        A pack has rows of one source only, so that each source's loss is known.
        """
        indices = self.ranks.rows_of_rank([len(row.tokens) for row in rows])
        rows_by_source: dict[str, list[Row]] = {}
        for i in indices:
            rows_by_source.setdefault(rows[i].source, []).append(rows[i])
        limit = self.policy.grant.memory.micro_batch_tokens
        micro_batches = []
        for source_rows in rows_by_source.values():
            for pack in pack_rows([row.tokens for row in source_rows], limit, self.config.sft.batch_size):
                micro_batches.append([source_rows[i] for i in pack])
        return micro_batches

    def validation_losses(self) -> dict[str, float]:
        """Returns the mean cross-entropy over all trained tokens of the held-out rows, and over each source's."""
        # The phase "update" is that of all passes over whole rows, also of those without gradients.
        rank_sums = self.policy.grant.run_within_memory("update", self.held_out_loss_sums)
        sums = sum_by_name(self.ranks.gather(rank_sums))
        loss_tokens = count_loss_tokens(self.held_out)
        total = sum(loss_tokens.values())
        loss_parts = {source: loss / total for source, loss in sums.items()}
        return means_by_source("eval_loss", loss_parts, loss_tokens)

    def held_out_loss_sums(self) -> dict[str, float]:
        """Returns the summed cross-entropy of this rank's share of the held-out rows, by source."""
        self.policy.model.eval()
        sums = dict.fromkeys((row.source for row in self.held_out), 0.0)
        with torch.no_grad():
            micro_batches = self.micro_batches(self.held_out)
            for micro_batch in self.ranks.with_progress(micro_batches, "validating", "passes"):
                sums[micro_batch[0].source] += self.loss(micro_batch).item()
        return sums

    def explain_overflow(self) -> str:
        """Runs the last micro-batch again without gradients, and returns which layer overflowed first."""
        return hooks.explain_overflow(self.policy.model, lambda: self.loss(self.last_micro_batch))


def count_parameters(policy: Policy) -> int:
    """Returns the number of the parameters that are trained."""
    return sum(parameter.numel() for group in policy.optimizer.param_groups for parameter in group["params"])


def count_tokens(rows: list[Row]) -> int:
    """Returns the number of all tokens of rows."""
    return sum(len(row.tokens) for row in rows)


def count_loss_tokens(rows: list[Row]) -> dict[str, int]:
    """Returns the number of trained tokens of each source's rows."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.source] = counts.get(row.source, 0) + row.loss_tokens
    return counts


def train(config: SftConfig, ranks: Ranks) -> None:
    """Runs SFT in its run folder, from the first step or from a checkpoint."""
    protocols, examples_by_source, validation = read_data(config)
    with RunFolder("sft", config, time.strftime("runs/sft-%Y%m%d-%H%M%S"), ranks=ranks) as run:
        torch.manual_seed(config.common.seed)  # seeds dropout; all other random draws have their own streams
        hashes = hashes_of_questions(examples_by_source)
        if hashes:
            # RL reads this file, and warns if its questions are those of the demonstrations.
            run.further_files[QUESTIONS_FILE] = {"hashes": hashes}
        trainer = build_trainer(
            config,
            protocols=protocols,
            examples_by_source=examples_by_source,
            validation=validation,
            ranks=ranks,
        )
        if loop.train(run, trainer, spans=trainer.spans):
            print(f"wrote the {trainer.state.result} to {run.output / trainer.state.result}")


def few_steps_warning(config: SftConfig, rows: int) -> str:
    """Returns a warning if this number of rows makes fewer than FEWEST_STEPS steps, else "".

    With --max-steps, where `row_limit` is None, there is no warning: the user chose the number of steps.
    """
    steps, row_limit = config.steps_and_row_limit(rows)
    if row_limit is None or steps >= FEWEST_STEPS:
        return ""
    rows_per_step = config.rows_per_step
    return (
        f"{rows} rows make only {steps} steps of {rows_per_step}, in which a model hardly learns the step format: "
        f"collect from more documents or questions, lower --gradient-accumulation, or raise --epochs ({FEWEST_STEPS} "
        "steps or more)"
    )


def hashes_of_questions(examples_by_source: ExamplesBySource) -> list[str]:
    """Returns the hashes of the questions of all trajectories, sorted. RL reads them to warn if it trains on the same
    questions."""
    examples = chain.from_iterable(examples_by_source.values())
    return sorted({question_hash(example.question) for example in examples if isinstance(example, Trajectory)})


def build_trainer(
    config: SftConfig,
    protocols: dict[str, Protocol],
    examples_by_source: ExamplesBySource,
    validation: ExamplesBySource,
    ranks: Ranks = ALONE,
) -> SFTTrainer:
    """Encodes the examples into rows, plans the memory that they take and loads the model."""
    if config.lora.no_lora and len(examples_by_source) > 1 and config.rows_per_step > 1:
        raise R3LiteError(
            "--no-lora needs rows of one source per step",
            "Pass --batch-size 1, or remove --no-lora.",
            code="no-lora-sources",
        )
    folder = resolve_folder(config.model.model)
    tokenizer = Tokenizer.load(folder, config.model.thinking)
    lengths = LengthSettings(max_length=config.sft.max_length, max_document_tokens=config.sft.max_document_tokens)
    layouts = {name: Layout(tokenizer, protocol, lengths) for name, protocol in protocols.items()}
    rows = encode_rows_of(examples_by_source, layouts)
    held_out = encode_fitting(validation, layouts)  # rows that are too long are left out, perhaps all
    steps, _ = config.steps_and_row_limit(len(rows))
    message = few_steps_warning(config, len(rows))
    if message and ranks.first:
        print(f"warning: {message}", file=sys.stderr)
    # `lengths_of` returns the keyword arguments `longest`, `shared`, `mean_tokens` and `writes` of `sft_workload`.
    workload = sft_workload(config, **lengths_of(rows, held_out), steps=steps)
    training = Training(
        lora=config.lora,
        optimizer=config.optimizer,
        seed=config.common.seed,
        set_by_user=config.set_by_user,
        ranks=ranks,
    )
    policy = load_policy(
        folder,
        settings=config.model,
        memory=config.memory,
        plan=make_plan(workload, config.memory),
        training=training,
    )
    return SFTTrainer(
        config,
        policy=policy,
        vocabulary=tokenizer.size,
        rows=rows,
        held_out=held_out,
    )
