"""Sampled episodes as tensors, with everything that is known about each of their tokens.

A batch stays in host memory, where masks are read without waiting for the device; the model reads packs of its rows,
and losses get what is known of its action tokens, moved to the device. Position t of every [B, T] tensor belongs to
token t: whether the model sampled it, its log-probability given the tokens before it, the value of the state before
it, the reward paid after it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import chain, pairwise

import torch
from torch import Tensor

from r3lite.models.logprobs import TopTokens


@dataclass(frozen=True)
class Rollout:
    """One sampled episode, in numbers."""

    tokens: list[int]
    action_mask: list[bool]  # of each token, whether the model sampled it
    logprobs: list[float]  # of the action tokens
    values: list[float]  # of the states before the action tokens
    rewards: list[tuple[int, float]]  # (index of an action token, amount)
    group: int  # the rollouts of one question share it
    cut_off: bool = False  # it reached a token limit before its answer
    off_policy: bool = False  # not sampled in this round; `logprobs` are those of the policy that its tokens are from
    failed: bool = False  # its answer was not right
    teacher: TopTokens | None = None  # what a teacher would have said at its action tokens

    @staticmethod
    def paid_at_end(
        tokens: list[int], action_mask: list[bool], logprobs: list[float] | None, reward: float, group: int
    ) -> "Rollout":
        """An episode of whose steps nothing is told: all of its reward is paid at its last action token. No critic saw
        it; without `logprobs` the policy that wrote it is taken to be sure of each token."""
        nothing = [0.0] * sum(action_mask)
        end = len(action_mask) - 1 - action_mask[::-1].index(True)
        return Rollout(tokens, action_mask, nothing if logprobs is None else logprobs, nothing, [(end, reward)], group)


@dataclass(frozen=True)
class Batch:
    """Rollouts padded on the right to [B, T]. Padding is never an action, so no loss and no mean reads it.

    The last fields are filled in while a round is learned from; until then they are None, as is `off_policy` if it
    tells of no row. Off-policy rows stand behind the others of their group.
    """

    tokens: Tensor  # [B, T] long
    action_mask: Tensor  # [B, T] bool: sampled by the model; the one mask of all losses, means and denominators
    logprobs: Tensor  # [B, T] of the sampler, at actions
    values: Tensor  # [B, T] of the critic while sampling, at actions
    rewards: Tensor  # [B, T]
    groups: Tensor  # [B] long
    cut_off: Tensor  # [B] bool
    failed: Tensor  # [B] bool
    teacher: list[TopTokens | None]  # what it would have said at each row's action tokens; None: nothing
    off_policy: Tensor | None = None  # [B] bool: see Rollout; None: no row is
    rescored: Tensor | None = None  # [B, T] log-probabilities of the trainer before the round's first step, at actions
    reference: Tensor | None = None  # [B, T] log-probabilities under the reference policy, at actions
    advantages: Tensor | None = None  # [B, T] at actions
    value_targets: Tensor | None = None  # [B, T] what the critic should have said, at actions
    weights: Tensor | None = None  # [B, T] of each action token in the loss of its mini-batch

    @staticmethod
    def of(rollouts: list[Rollout]) -> "Batch":
        longest = max(len(r.tokens) for r in rollouts)

        def padded(rows, fill, dtype):
            return torch.tensor([row + [fill] * (longest - len(row)) for row in rows], dtype=dtype)

        def at_actions(rows):
            flat = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.float32)  # [N]
            return torch.zeros(mask.shape).masked_scatter(mask, flat)

        mask = padded((r.action_mask for r in rollouts), False, torch.bool)
        rewards = torch.zeros(len(rollouts), longest)
        for i, rollout in enumerate(rollouts):
            for position, amount in rollout.rewards:
                assert rollout.action_mask[position], "a reward is paid at a token that the model sampled"
                rewards[i, position] += amount
        assert rewards.isfinite().all(), "a reward is a finite number"
        return Batch(
            tokens=padded((r.tokens for r in rollouts), 0, torch.long),
            action_mask=mask,
            logprobs=at_actions(r.logprobs for r in rollouts),
            values=at_actions(r.values for r in rollouts),
            rewards=rewards,
            groups=torch.tensor([r.group for r in rollouts]),
            cut_off=torch.tensor([r.cut_off for r in rollouts]),
            failed=torch.tensor([r.failed for r in rollouts]),
            off_policy=torch.tensor([r.off_policy for r in rollouts]) if any(r.off_policy for r in rollouts) else None,
            teacher=[r.teacher for r in rollouts],
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, index: list[int]) -> "Batch":
        """The rollouts `index`, with all that is known of them."""
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {name: x[index] for name, x in known.items() if isinstance(x, Tensor)}
        return Batch(**tensors, teacher=[self.teacher[i] for i in index])

    @property
    def old(self) -> Tensor:
        """The log-probabilities [B, T] that ratios are taken to: the trainer's if it was asked, else the sampler's; of
        off-policy rows those that they came with."""
        if self.rescored is None:
            return self.logprobs
        if self.off_policy is None:
            return self.rescored
        return torch.where(self.off_policy[:, None], self.logprobs, self.rescored)

    @property
    def returns(self) -> Tensor:
        """The sum of rewards [B] of each episode."""
        return self.rewards.sum(-1)

    @property
    def lengths(self) -> Tensor:
        """Tokens [B] up to and including each row's last action; no loss depends on those after it."""
        positions = torch.arange(1, self.tokens.shape[1] + 1)
        return (positions * self.action_mask).amax(-1)

    def token_rows(self) -> list[list[int]]:
        """The tokens of each row that the model is run on: the first `lengths` of them."""
        return [row[:length] for row, length in zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)]

    def by_teacher(self) -> list[list[int]]:
        """The rows that a teacher says nothing of, and those that it does, apart if there are both."""
        untaught = [i for i, said in enumerate(self.teacher) if said is None]
        taught = [i for i, said in enumerate(self.teacher) if said is not None]
        return [rows for rows in (untaught, taught) if rows]

    def at_actions(self, x: Tensor) -> Tensor:
        """The entries [N] of x [B, T] at the action tokens, in row-major order."""
        return x[self.action_mask]

    @property
    def off_policy_actions(self) -> Tensor | None:
        """Which of the action tokens are off-policy, [N] bool; None: no row is."""
        return None if self.off_policy is None else self.at_actions(self.off_policy[:, None].expand(self.tokens.shape))

    def on_policy_only(self, x: Tensor) -> Tensor:
        """The columns of x [.., N] that belong to on-policy action tokens."""
        off = self.off_policy_actions
        if off is None:
            return x
        return x[..., torch.nonzero(~off)[:, 0].to(x.device, non_blocking=True)]  # found on the host: no wait

    def mini_batches(self, order: Iterable[int], size: int) -> list[list[int]]:
        """Rows in this order, in as few parts as hold `size` on-policy ones each, about equally large: a few left over
        would make a step of their own. An off-policy row goes with the one before it."""
        parts: list[list[int]] = []
        for row in order:
            if self.off_policy is not None and self.off_policy[row]:
                parts[-1].append(row)
            else:
                parts.append([row])
        steps = -(-len(parts) // size)
        cuts = [len(parts) * i // steps for i in range(steps + 1)]
        return [list(chain.from_iterable(parts[start:end])) for start, end in pairwise(cuts)]

    def spread(self, x: Tensor) -> Tensor:
        """The inverse of `at_actions`: a tensor [B, T] with x [N] at the action tokens and 0 elsewhere."""
        return torch.zeros(self.tokens.shape, dtype=x.dtype).masked_scatter(self.action_mask, x)


@dataclass(frozen=True)
class ActionTokens:
    """What is known of the N action tokens of a micro-batch, on the device. Every tensor is [N], in row-major order.

    `known[rows]` is the same for a slice of them. A tensor that the batch does not have is None here.
    """

    old_logprobs: Tensor
    old_values: Tensor
    advantages: Tensor
    weights: Tensor
    reference: Tensor | None
    value_targets: Tensor | None
    sampled: Tensor | None = None  # log-probabilities of the sampler, if those of old_logprobs are not
    off_policy: Tensor | None = None  # bool: its episode was not sampled in this round
    episode_log_ratios: Tensor | None = None  # mean log-ratio of each token's episode, if the algorithm asks for it

    @staticmethod
    def of(batch: Batch, device: torch.device) -> "ActionTokens":
        def moved(x: Tensor | None) -> Tensor | None:
            return None if x is None else batch.at_actions(x).to(device, non_blocking=True)

        off = batch.off_policy_actions
        return ActionTokens(
            old_logprobs=moved(batch.old),
            old_values=moved(batch.values),
            advantages=moved(batch.advantages),
            weights=moved(batch.weights),
            reference=moved(batch.reference),
            value_targets=moved(batch.value_targets),
            sampled=None if batch.rescored is None else moved(batch.logprobs),
            off_policy=None if off is None else off.to(device, non_blocking=True),
        )

    @property
    def sampled_logprobs(self) -> Tensor:
        """The log-probabilities that the sampler recorded."""
        return self.old_logprobs if self.sampled is None else self.sampled

    def with_episode_log_ratios(self, logprobs: Tensor, lengths: list[int]) -> "ActionTokens":
        """The same with the mean log-ratio of each episode, from log-probabilities [N] of episodes so long."""
        assert sum(lengths) == len(logprobs)
        means = [ratios.mean().expand(len(ratios)) for ratios in (logprobs - self.old_logprobs).split(lengths)]
        return replace(self, episode_log_ratios=torch.cat(means))

    def __getitem__(self, rows: slice) -> "ActionTokens":
        known = (getattr(self, f.name) for f in fields(self))
        return ActionTokens(*(None if x is None else x[rows] for x in known))
