"""The weight of the KL divergence, adapted from round to round."""

from r3lite.core.records import Record, Source

GAIN = 0.1  # K_beta of arXiv 1909.08593
MOST_ERROR = 0.2


class KlFactor:
    """What --kl-beta is multiplied by: an adapted factor, and a scale that whoever guards the run may set.

    With a target the factor follows the controller of arXiv 1909.08593, section 2.2, and is part of checkpoints;
    without one it stays 1: e = clip((KL - target) / target, -0.2, 0.2); factor <- factor (1 + 0.1 e), once a round.

    KL is the mean over a round's tokens, in nats; the paper's is that of a whole answer.
    """

    def __init__(self, target: float | None):
        self.target, self.factor, self.scale = target, 1.0, 1.0

    @property
    def value(self) -> float:
        return self.factor * self.scale

    def follow(self, measured: float) -> None:
        """Goes on to the next round after a KL of `measured`."""
        if self.target is not None:
            error = (measured - self.target) / self.target
            self.factor *= 1 + GAIN * min(max(error, -MOST_ERROR), MOST_ERROR)

    def state_dict(self) -> dict:
        return {"factor": self.factor}

    def load_state_dict(self, state: dict) -> None:
        record = Record(state, Source("the checkpoint's weight of the KL", "Pass another checkpoint."))
        self.factor = record.number("factor")
