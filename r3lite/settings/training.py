"""Settings of a training run: length, checkpoints, tracking, optimizer, validation, guard against a collapse."""

import importlib.util
from typing import Annotated, ClassVar, Literal

from r3lite.core.config import (
    Basic,
    Bounds,
    Count,
    Fraction,
    Free,
    NonNegative,
    Positive,
    Section,
    Whole,
)
from r3lite.core.errors import R3LiteError, UsageError
from r3lite.core.needs import Needs, NeedsOthers
from r3lite.settings.conditions import tunes_adapter
from r3lite.settings.data import DATA_FILE

Share = Annotated[float, Bounds(above=0, high=1)]
Factor = Annotated[float, Bounds(above=1, high=10**9)]
# Where each schedule of the learning rate ends, as a fraction of its peak.
ENDS = {"cosine": 0.1, "linear": 0.0, "constant": 1.0}


class Schedule(Section):
    """Length of the run, checkpoints and resuming."""

    needs: ClassVar = (Needs("epochs", "a run without --max-steps", lambda s: s.max_steps is None),)

    max_steps: Basic[Count | None] = None
    """optimizer steps, or rounds in RL. A round samples episodes and learns from them. The learning-rate schedule spans
    them"""
    epochs: Basic[Positive] = 1.0
    """passes over the data; replaces --max-steps. This is that of the defaults, preset or file: both flags together are
    an error"""
    save_every: Basic[Free[Whole]] = 50
    """steps between checkpoints; 0: only at the end"""
    keep_checkpoints: Free[Count] = 2
    """number of latest checkpoints to keep"""
    stop_after: Free[Count | None] = None
    """save and exit after this many steps in this process; the learning-rate schedule stays the same"""
    resume: Basic[Free[str | None]] = None
    """auto, a run folder or a checkpoint. auto: the latest valid checkpoint in --output, or a new run if there is
    none"""


class TrackSettings(Section):
    """Tracking."""

    needs: ClassVar = (Needs("track_project track_name", "--track wandb", lambda s: s.track == "wandb"),)

    track: Free[Literal["none", "tensorboard", "wandb"]] = "none"
    """also log to TensorBoard in the run folder, or to Weights & Biases, which needs WANDB_API_KEY (extra track)"""
    track_project: Free[str] = "r3lite"
    """Weights & Biases project"""
    track_name: Free[str | None] = None
    """Weights & Biases run name; default: name of the run folder"""
    track_spans: Free[Literal["none", "chrome", "opentelemetry"]] = "none"
    """also write when each part of a step started and ended; chrome: trace.json, for chrome://tracing and Perfetto;
    opentelemetry: spans.jsonl, for an OpenTelemetry collector"""

    def check(self) -> None:
        if self.track != "none" and importlib.util.find_spec(self.track) is None:
            raise R3LiteError(
                f"--track {self.track} needs the package {self.track}",
                "pip install 'r3lite[track]'",
                code="package-missing",
            )


class OptimizerSettings(Section):
    """Optimizer."""

    implied: ClassVar = {"learning_rate_schedule": {name: {"min_learning_rate": end} for name, end in ENDS.items()}}
    needs: ClassVar = (NeedsOthers("lora_plus_ratio", "a run without --no-lora", tunes_adapter),)

    learning_rate: Basic[Positive] = 2e-4
    """peak learning rate of AdamW"""
    lora_plus_ratio: Positive = 1.0
    """learning rate of LoRA's B matrices, as a multiple of that of the A matrices (LoRA+, arXiv 2402.12354)"""
    learning_rate_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """how the rate falls to --min-learning-rate, which this also sets: to 0.1, 0 or 1 of the peak"""
    min_learning_rate: Fraction = 0.1
    """learning rate at the end, as a fraction of the peak; 1: constant after the warm-up"""
    warmup: Fraction = 0.03
    """fraction of the steps in which the learning rate rises linearly"""
    weight_decay: NonNegative = 0.0
    """decoupled weight decay"""
    max_grad_norm: Positive = 1.0
    """clip gradients to this norm; with --no-lora, clip each tensor to its share of it, by size"""

    def check(self) -> None:
        if self.learning_rate_schedule == "constant" and self.min_learning_rate != 1:
            end = self.min_learning_rate
            raise UsageError(
                f"--min-learning-rate is {end}, but a constant rate does not fall: remove one", code="constant-rate"
            )
        if self.learning_rate_schedule == "linear" and self.min_learning_rate == 1:
            raise UsageError(
                "--min-learning-rate is 1, but a linear schedule must fall: pass a smaller one", code="linear-rate"
            )


class ValidationSettings(Section):
    """Validation during training."""

    needs: ClassVar = (Needs("eval_every eval_questions eval_seed", "--eval-data", lambda s: s.eval_data),)

    eval_data: Basic[Annotated[str | None, DATA_FILE]] = None
    """question file or name,subset,split, for validation. adapter/ is the checkpoint with the best F1"""
    eval_every: Basic[Count] = 10
    """rounds between validations. There is also one before the first round and one after the last"""
    eval_questions: Count = 64
    """maximum questions of --eval-data, sampled with --eval-seed"""
    eval_seed: Annotated[int, Bounds(low=0, high=2**63 - 1)] = 0
    """random seed for that sample"""


class GuardSettings(Section):
    """Collapse guard (docs/collapse.md): changes since the first rounds, of 32 episodes; none disables a limit."""

    needs: ClassVar = (
        NeedsOthers("guard_kl_factor", "--kl-beta above 0", lambda s: s.kl_beta),
        NeedsOthers("guard_kl", "--kl-beta above 0, or --kl-budget", lambda s: s.kl_beta or s.kl_budget),
        NeedsOthers("guard_validations guard_f1_drop", "--eval-data", lambda s: s.eval_data),
        NeedsOthers(
            "guard_rollbacks guard_rate_factor guard_kl_factor",
            "--guard roll-back with --eval-data",
            lambda s: s.guard == "roll-back" and s.eval_data,
        ),
        Needs("", "--guard roll-back or warn", lambda s: s.guard != "off", but="guard"),
    )

    # Free, so that a run that the guard has stopped can be resumed without the guard.
    guard: Free[Literal["roll-back", "warn", "off"]] = "roll-back"
    """roll-back: return to the best checkpoint and continue more carefully; warn, or no --eval-data: only warn"""
    guard_rollbacks: Whole = 3
    """maximum rollbacks; if a limit is crossed after the last one, the run stops and says why"""
    guard_rate_factor: Share = 0.25
    """a rollback multiplies the learning rates by this"""
    guard_kl_factor: Annotated[float, Bounds(low=1, high=1000)] = 2.0
    """a rollback multiplies --kl-beta by this"""
    guard_patience: Count = 5
    """consecutive rounds that must be beyond a limit"""
    guard_validations: Count = 2
    """consecutive validations that must be beyond the F1 limit"""
    guard_f1_drop: Share | None = 0.1
    """validation F1 below the best by more than this, and by more than chance explains"""
    guard_hacking: Share | None = 0.1
    """reward above its value when the F1 of the episodes was best, while that F1 has dropped by more than this"""
    guard_malformed: Share | None = 0.3
    """increase in malformed or cut-off episodes, as a share of all"""
    guard_queries: Share | None = 0.3
    """increase in episodes with a blank or repeated query, as a share of all"""
    guard_searches: Factor | None = 3.0
    """searches per episode up or down by this factor"""
    guard_length: Factor | None = 3.0
    """sampled tokens per episode up or down by this factor"""
    guard_repetition: Share | None = 0.25
    """increase in repeated 4-grams of tokens within a turn, as a share of all"""
    guard_entropy_rise: Factor | None = 4.0
    """entropy up by this factor"""
    guard_entropy_fall: Factor | None = 50.0
    """entropy down by this factor"""
    guard_right_likelihood: NonNegative | None = 0.2
    """drop in mean log-probability per token of correct episodes, in nats"""
    guard_kl: NonNegative | None = 0.1
    """KL divergence from the reference, in nats per token"""
    guard_variance: Fraction | None = 0.95
    """share of groups whose answers are all rewarded alike, while the reward is below its best"""
