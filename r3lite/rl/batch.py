"""Sampled episodes as tensors, with everything that is known about each of their tokens.

A batch stays in host memory, where masks are read without waiting for the device; the model reads packs of its rows,
and losses get what is known of its action tokens, moved to the device. Position t of every [B, T] tensor belongs to
token t: whether the model sampled it, its log-probability given the tokens before it, the value of the state before
it, the reward paid after it.
"""

import random
from dataclasses import dataclass, fields, replace
from itertools import chain, pairwise

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from r3lite.models.causal_lm import CausalLM
from r3lite.models.logprobs import CHUNK, TopTokens, token_logprobs
from r3lite.models.packing import states_before


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
    old: Tensor | None = None  # [B, T] log-probabilities that ratios are taken to, at actions; None: `logprobs`
    reference: Tensor | None = None  # [B, T] log-probabilities under the reference policy, at actions
    advantages: Tensor | None = None  # [B, T] at actions
    value_targets: Tensor | None = None  # [B, T] what the critic should have said, at actions
    weights: Tensor | None = None  # [B, T] of each action token in the loss of its mini-batch

    @staticmethod
    def of(rollouts: list[Rollout]) -> "Batch":
        mask = pad_sequence([torch.tensor(r.action_mask) for r in rollouts], batch_first=True)
        logprobs = torch.tensor([x for r in rollouts for x in r.logprobs], dtype=torch.float32)  # [N]
        values = torch.tensor([x for r in rollouts for x in r.values], dtype=torch.float32)  # [N]
        rewards = torch.zeros(mask.shape)
        for i, rollout in enumerate(rollouts):
            for position, amount in rollout.rewards:
                assert rollout.action_mask[position], "a reward is paid at a token that the model sampled"
                rewards[i, position] += amount
        assert rewards.isfinite().all(), "a reward is a finite number"
        return Batch(
            tokens=pad_sequence([torch.tensor(r.tokens) for r in rollouts], batch_first=True),
            action_mask=mask,
            logprobs=torch.zeros(mask.shape).masked_scatter(mask, logprobs),
            values=torch.zeros(mask.shape).masked_scatter(mask, values),
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
    def old_logprobs(self) -> Tensor:
        """The log-probabilities [B, T] that ratios are taken to."""
        return self.logprobs if self.old is None else self.old

    @property
    def off_policy_actions(self) -> Tensor | None:
        """Which of the action tokens are off-policy, [N] bool; None: no row is."""
        return None if self.off_policy is None else self.off_policy.repeat_interleave(self.action_mask.sum(-1))

    def rescored(self, logprobs: Tensor) -> "Batch":
        """The batch with the trainer's log-probabilities [B, T] as `old`; off-policy rows keep those they came with."""
        if self.off_policy is not None:
            logprobs = torch.where(self.off_policy[:, None], self.logprobs, logprobs)
        return replace(self, old=logprobs)

    def token_rows(self) -> list[list[int]]:
        """The tokens of each row up to and including its last action: no loss depends on those after it."""
        lengths = (torch.arange(1, self.tokens.shape[1] + 1) * self.action_mask).amax(-1)  # [B]
        return [row[:length] for row, length in zip(self.tokens.tolist(), lengths.tolist(), strict=True)]

    def mini_batches(self, size: int, seed: str, by_group: bool) -> list[list[int]]:
        """The rows of each optimizer step of an epoch, shuffled by `seed`; the rows of a group stay together if asked.

        In as few steps as hold `size` on-policy rows each, about equally large: a few left over would make a step of
        their own. An off-policy row goes with the one before it.
        """
        units = [[row] for row in range(len(self))]
        if by_group:
            units = [torch.nonzero(self.groups == group)[:, 0].tolist() for group in self.groups.unique()]
        random.Random(seed).shuffle(units)
        parts: list[list[int]] = []
        for row in chain.from_iterable(units):
            if self.off_policy is not None and self.off_policy[row]:
                parts[-1].append(row)
            else:
                parts.append([row])
        steps = -(-len(parts) // size)
        cuts = [len(parts) * i // steps for i in range(steps + 1)]
        return [list(chain.from_iterable(parts[start:end])) for start, end in pairwise(cuts)]

    def spread(self, x: Tensor) -> Tensor:
        """A tensor [B, T] with x [N] at the action tokens, in row-major order, and 0 elsewhere."""
        return torch.zeros(self.tokens.shape, dtype=x.dtype).masked_scatter(self.action_mask, x)


@dataclass(frozen=True)
class ActionTokens:
    """What is known of the N action tokens of a micro-batch, on the device. Every tensor is [N], in row-major order.

    `known[rows]` is the same for a slice of them. A tensor that the batch does not have is None here.
    """

    old_logprobs: Tensor  # ratios are taken to these
    sampled_logprobs: Tensor  # those that the sampler recorded, which may be the same
    old_values: Tensor
    advantages: Tensor
    weights: Tensor
    reference: Tensor | None
    value_targets: Tensor | None
    off_policy: Tensor | None = None  # bool: its episode was not sampled in this round
    episode_log_ratios: Tensor | None = None  # mean log-ratio of each token's episode, if the algorithm asks for it

    @staticmethod
    def of(batch: Batch, device: torch.device) -> "ActionTokens":
        known = {
            "old_logprobs": batch.old_logprobs,
            "sampled_logprobs": batch.logprobs,
            "old_values": batch.values,
            "advantages": batch.advantages,
            "weights": batch.weights,
            "reference": batch.reference,
            "value_targets": batch.value_targets,
            "off_policy": None if batch.off_policy is None else batch.off_policy[:, None].expand(batch.tokens.shape),
        }
        at_actions = {name: None if x is None else x[batch.action_mask] for name, x in known.items()}
        return ActionTokens(
            **{name: None if x is None else x.to(device, non_blocking=True) for name, x in at_actions.items()}
        )

    def with_episode_log_ratios(self, logprobs: Tensor, lengths: list[int]) -> "ActionTokens":
        """The same with the mean log-ratio of each episode, from log-probabilities [N] of episodes so long."""
        assert sum(lengths) == len(logprobs)
        means = [ratios.mean().expand(len(ratios)) for ratios in (logprobs - self.old_logprobs).split(lengths)]
        return replace(self, episode_log_ratios=torch.cat(means))

    def __getitem__(self, rows: slice) -> "ActionTokens":
        known = (getattr(self, f.name) for f in fields(self))
        return ActionTokens(*(None if x is None else x[rows] for x in known))


def action_states(model: CausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """Runs the model over whole episodes: hidden states [N, C] before the action tokens, and these tokens [N].

    N counts action tokens in row-major order of the batch's action mask. A token is predicted by the state before it.
    """
    return states_before(model, batch.token_rows(), batch.action_mask.tolist())


def action_logprobs(
    model: CausalLM, batch: Batch, vocabulary: int, temperature: float, chunk: int = CHUNK, entropies: bool = False
) -> Tensor:
    """Log-probabilities [N] of the action tokens, under the distributions that they were drawn from; or the entropies
    [N] of these, in nats.

    The first `vocabulary` rows of the head are the tokens that may be sampled; the temperature is the sampler's.
    """
    hidden, targets = action_states(model, batch)
    head = model.head_weight[:vocabulary]
    return token_logprobs(hidden, head, targets, temperature, chunk, with_entropy=entropies)[entropies]
