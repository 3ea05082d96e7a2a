"""Settings of the loop around a step: length, checkpoints, optimizer."""

import importlib.util
from dataclasses import dataclass
from typing import ClassVar, Literal

from r3lite.core.config import Count, Fraction, Free, NonNegative, Positive, Section, UsageError, Whole
from r3lite.core.errors import R3LiteError

# Where each schedule of the learning rate ends, as a fraction of its peak.
ENDS = {"cosine": 0.1, "linear": 0.0, "constant": 1.0}


@dataclass(frozen=True)
class Schedule(Section):
    """Length of the run, checkpoints and resuming."""

    max_steps: Count | None = None
    """optimizer steps (SFT) or rollout-and-update rounds (RL); the learning-rate schedule spans them"""
    epochs: Positive = 1.0
    """passes over the data if --max-steps is not given; replaces the max_steps of default, preset or file"""
    save_every: Free[Whole] = 50
    """steps between checkpoints; 0: only at the end"""
    keep_checkpoints: Free[Count] = 2
    """newest checkpoints kept"""
    stop_after: Free[Count | None] = None
    """exit cleanly after this many steps of this process, with the schedule unchanged"""
    resume: Free[str | None] = None
    """auto: newest sound checkpoint in --output, or a fresh start; or the folder of a run or a checkpoint"""


@dataclass(frozen=True)
class TrackSettings(Section):
    """Tracking."""

    track: Free[Literal["none", "tensorboard", "wandb"]] = "none"
    """also log to TensorBoard in the run folder, or to Weights & Biases with the key in WANDB_API_KEY (extra track)"""
    track_project: Free[str] = "r3lite"
    """project of Weights & Biases"""
    track_name: Free[str | None] = None
    """name of the run there; by default that of the run folder"""
    track_spans: Free[Literal["none", "chrome", "opentelemetry"]] = "none"
    """also write when each part of a step began and ended: chrome: trace.json, for chrome://tracing and Perfetto;
    opentelemetry: spans.jsonl, which its collector reads"""

    def check(self) -> None:
        if self.track != "none" and importlib.util.find_spec(self.track) is None:
            raise R3LiteError(f"--track {self.track} needs the package {self.track}", "pip install 'r3lite[track]'")


@dataclass(frozen=True)
class OptimizerSettings(Section):
    """Optimizer."""

    implied: ClassVar = {"learning_rate_schedule": {name: {"min_learning_rate": end} for name, end in ENDS.items()}}

    learning_rate: Positive = 2e-4
    """peak learning rate of AdamW on the adapter"""
    lora_plus_ratio: Positive = 1.0
    """learning rate of LoRA's B matrices, as a multiple of that of its A matrices (LoRA+, arXiv 2402.12354)"""
    learning_rate_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """how the rate goes from its peak to --min-learning-rate; it also sets the latter: 0.1, 0 and 1"""
    min_learning_rate: Fraction = 0.1
    """end of the schedule, as a fraction of the peak; 1: constant after the warm-up"""
    warmup: Fraction = 0.03
    """fraction of the steps in which the rate rises linearly"""
    weight_decay: NonNegative = 0.0
    """decoupled weight decay"""
    max_grad_norm: Positive = 1.0
    """gradients are clipped to this norm"""

    def check(self) -> None:
        if self.learning_rate_schedule == "constant" and self.min_learning_rate != 1:
            least = self.min_learning_rate
            raise UsageError(f"--min-learning-rate is {least}, and a constant rate does not fall: leave one out")
        if self.learning_rate_schedule == "linear" and self.min_learning_rate == 1:
            raise UsageError("--min-learning-rate is 1, and a linear schedule to it does not fall: pass a smaller one")
