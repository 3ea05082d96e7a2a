"""Settings of the validation during reinforcement learning, and of the guard that notices a collapse."""

from dataclasses import dataclass
from typing import Annotated, Literal

from r3lite.core.config import Bounds, Count, Fraction, Free, NonNegative, Section, Whole

Share = Annotated[float, Bounds(above=0, high=1)]
Factor = Annotated[float, Bounds(above=1, high=10**9)]


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class GuardSettings(Section):
    """Collapse guard (docs/collapse.md); none switches a limit off.

    "At the start" means in the first rounds, until they have 32 episodes.
    """

    # Free, so that a run that the guard has stopped can go on without it.
    guard: Free[Literal["roll-back", "warn", "off"]] = "roll-back"
    """roll-back: if a limit is crossed, go on from the best checkpoint more carefully, which needs --eval-data; warn:
    only print it, as without --eval-data"""
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
