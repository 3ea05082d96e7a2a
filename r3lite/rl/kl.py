"""The weight of the KL divergence, fixed or adapted from round to round."""

from r3lite.records import Record, Source

GAIN = 0.1  # K_beta of arXiv 1909.08593
MOST_ERROR = 0.2


class KlCoefficient:
    """beta. With a target it follows the controller of arXiv 1909.08593, section 2.2, and is part of checkpoints:

    e = clip((KL - target) / target, -0.2, 0.2); beta <- beta (1 + 0.1 e), once a round.

    KL is the mean over a round's tokens, in nats; the paper's is that of a whole answer.
    """

    def __init__(self, beta: float, target: float | None):
        self.beta, self.target = beta, target

    def follow(self, measured: float | None) -> dict[str, float]:
        """Goes on to the next round after a KL of `measured`; the metrics of it, none if beta is fixed."""
        if self.target is None:
            return {}
        assert measured is not None, "with a target there is a reference, and so a KL"
        used, error = self.beta, (measured - self.target) / self.target
        self.beta *= 1 + GAIN * min(max(error, -MOST_ERROR), MOST_ERROR)
        return {"kl_beta": used}

    def state_dict(self) -> dict:
        return {"beta": self.beta}

    def load_state_dict(self, state: dict) -> None:
        record = Record(state, Source("the checkpoint's weight of the KL", "Name another checkpoint."))
        self.beta = record.number("beta")
