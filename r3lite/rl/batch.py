"""Sampled episodes as tensors: what was sampled, with which probability, and what was paid for it where.

They stay in the host's memory, where masks are read without waiting for the device; the model gets packs of them.
Position t of every [B, T] tensor speaks of token t: whether the model sampled it, its log-probability given the
tokens before it, the value of the state before it, the reward paid after it.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rollout:
    """One sampled episode, in numbers. `rewards` are (token index, amount); a question's rollouts share a `group`."""

    tokens: list[int]
    action: list[bool]
    logprobs: list[float]
    values: list[float]
    rewards: list[tuple[int, float]]
    group: int


@dataclass
class Batch:
    """Rollouts padded on the right to [B, T]; padding is no action, so nothing reads it."""

    tokens: Tensor  # [B, T] long
    action: Tensor  # [B, T] bool: sampled by the model; the one mask of all losses, means and denominators
    logprobs: Tensor  # [B, T] of the sampler, at actions
    values: Tensor  # [B, T] of the critic while sampling, at actions
    rewards: Tensor  # [B, T]
    groups: Tensor  # [B] long

    @staticmethod
    def of(rollouts: list[Rollout]) -> "Batch":
        longest = max(len(r.tokens) for r in rollouts)

        def padded(rows, fill, dtype):
            return torch.tensor([row + [fill] * (longest - len(row)) for row in rows], dtype=dtype)

        rewards = torch.zeros(len(rollouts), longest)
        for i, rollout in enumerate(rollouts):
            for position, amount in rollout.rewards:
                assert rollout.action[position], "a reward is paid at a token that the model sampled"
                rewards[i, position] += amount
        return Batch(
            tokens=padded((r.tokens for r in rollouts), 0, torch.long),
            action=padded((r.action for r in rollouts), False, torch.bool),
            logprobs=padded((r.logprobs for r in rollouts), 0.0, torch.float32),
            values=padded((r.values for r in rollouts), 0.0, torch.float32),
            rewards=rewards,
            groups=torch.tensor([r.group for r in rollouts]),
        )

    def rows(self, index: list[int]) -> "Batch":
        """The rollouts `index`."""
        return Batch(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    @property
    def lengths(self) -> Tensor:
        """Tokens [B] up to and including each row's last action; what follows it can teach nothing."""
        positions = torch.arange(1, self.tokens.shape[1] + 1)
        return (positions * self.action).amax(-1)

    def read(self) -> list[list[int]]:
        """The tokens of each row that the model is to read: `lengths` of them."""
        return [row[:length] for row, length in zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)]
