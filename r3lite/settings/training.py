"""Settings of the loop around a step: length, checkpoints, optimizer, validation and the guard against a collapse."""

import importlib.util
from typing import Annotated, ClassVar, Literal

from r3lite.core.config import Bounds, Count, Fraction, Free, NonNegative, Positive, Section, Whole
from r3lite.core.errors import R3LiteError, UsageError

Share = Annotated[float, Bounds(above=0, high=1)]
Factor = Annotated[float, Bounds(above=1, high=10**9)]
# Where each schedule of the learning rate ends, as a fraction of its peak.
ENDS = {"cosine": 0.1, "linear": 0.0, "constant": 1.0}


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
    """gradients are clipped to this norm; with --no-lora those of each tensor to a share of it, by its size"""

    def check(self) -> None:
        if self.learning_rate_schedule == "constant" and self.min_learning_rate != 1:
            least = self.min_learning_rate
            raise UsageError(f"--min-learning-rate is {least}, and a constant rate does not fall: leave one out")
        if self.learning_rate_schedule == "linear" and self.min_learning_rate == 1:
            raise UsageError("--min-learning-rate is 1, and a linear schedule to it does not fall: pass a smaller one")


class ValidationSettings(Section):
    """Validation during training."""

    eval_data: str | None = None
    """question file, or name,subset,split, answered greedily now and then; adapter/ is the checkpoint of the best F1"""
    eval_every: Count = 10
    """rounds between validations; there is one before the first round and one after the last"""
    eval_questions: Count = 64
    """most questions of --eval-data that are answered, drawn with --eval-seed"""
    eval_seed: Annotated[int, Bounds(low=0, high=2**63 - 1)] = 0
    """seed of that draw"""


class GuardSettings(Section):
    """Collapse guard (docs/collapse.md); none switches a limit off.

    "At the start" means in the first rounds, until they have 32 episodes.
    """

    # Free, so that a run that the guard has stopped can go on without it.
    guard: Free[Literal["roll-back", "warn", "off"]] = "roll-back"
    """roll-back, with --eval-data: go on from the best checkpoint more carefully; warn, or without it: only print it"""
    guard_rollbacks: Whole = 3
    """most rollbacks; if a limit is crossed after the last, the run stops with the reason"""
    guard_rate_factor: Share = 0.25
    """a rollback multiplies the learning rates by this"""
    guard_kl_factor: Annotated[float, Bounds(low=1, high=1000)] = 2.0
    """a rollback multiplies --kl-beta by this"""
    guard_patience: Count = 5
    """rounds in a row that must be beyond a limit"""
    guard_validations: Count = 2
    """validations in a row that must be beyond the limit of F1"""
    guard_f1_drop: Share | None = 0.1
    """validation F1 lower than the best by more than this, and by more than chance explains"""
    guard_hacking: Share | None = 0.1
    """reward higher than when the F1 of the episodes was best, and that F1 lower by more than this"""
    guard_malformed: Share | None = 0.3
    """more malformed or cut-off episodes than at the start, as a share of all"""
    guard_queries: Share | None = 0.3
    """more episodes with a blank or repeated query than at the start, as a share of all"""
    guard_searches: Factor | None = 3.0
    """searches per episode changed by this factor since the start"""
    guard_length: Factor | None = 3.0
    """sampled tokens per episode changed by this factor since the start"""
    guard_repetition: Share | None = 0.25
    """more repeated 4-grams of tokens within a turn than at the start, as a share of all"""
    guard_entropy_rise: Factor | None = 4.0
    """entropy grown by this factor since the start"""
    guard_entropy_fall: Factor | None = 50.0
    """entropy shrunk by this factor since the start"""
    guard_right_likelihood: NonNegative | None = 0.2
    """mean log-probability per token of right episodes lower than at the start by more than this, in nats"""
    guard_kl: NonNegative | None = 1.0
    """KL divergence from the reference, in nats per token"""
    guard_variance: Fraction | None = 0.95
    """share of groups whose rewards are all equal, while the reward is below its best"""
