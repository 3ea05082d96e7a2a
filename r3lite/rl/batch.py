"""Sampled episodes as padded tensors [B, T], and the numbers of their action tokens as flat tensors [N].

A batch stays in host memory, where masks are read without waiting for the device. The model runs on packs of its rows,
and the losses get the numbers of its action tokens, moved to the device. Position t of every [B, T] tensor belongs to
token t: whether the model sampled it, its log-probability given the tokens before it, the value of the state before
it, the reward given after it.
"""

import random
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from r3lite.models.causal_lm import CausalLM
from r3lite.models.logprobs import CHUNK, TopTokens, token_logprobs
from r3lite.models.packing import states_before


@dataclass(frozen=True)
class Rollout:
    """One sampled episode of T tokens, N of which are action tokens."""

    tokens: list[int]  # [T]
    action_mask: list[bool]  # [T]: True if the model sampled the token
    logprobs: list[float]  # [N] of the action tokens
    values: list[float]  # [N] of the states before the action tokens
    rewards: list[tuple[int, float]]  # (index of an action token, its reward)
    group: int  # the rollouts of one question have the same
    cut_off: bool = False  # it reached a token limit before its answer
    off_policy: bool = False  # not sampled in this round; `logprobs` are those of the policy that wrote it
    failed: bool = False  # its answer is wrong
    teacher: TopTokens | None = None  # a teacher's distributions of its N action tokens
    signal: float | None = None  # by what the rollouts of a group are told apart; None: the sum of its rewards

    @property
    def total(self) -> float:
        return float(sum(reward for _, reward in self.rewards))

    @staticmethod
    def with_final_reward(
        tokens: list[int], action_mask: list[bool], logprobs: list[float] | None, reward: float, group: int
    ) -> "Rollout":
        """An episode whose whole reward is given at its last action token, with values 0.

        Without `logprobs` they are 0: the probability of every token under the policy that wrote it is taken to be 1.
        """
        zeros = [0.0] * sum(action_mask)
        end = len(action_mask) - 1 - action_mask[::-1].index(True)
        return Rollout(tokens, action_mask, zeros if logprobs is None else logprobs, zeros, [(end, reward)], group)


@dataclass(frozen=True)
class Batch:
    """Rollouts padded on the right to [B, T]. Padding is never an action, so no loss and no mean reads it.

    The learner fills in the fields from `old` on. Off-policy rows stand behind the others of their group.
    """

    tokens: Tensor  # [B, T] long
    action_mask: Tensor  # [B, T] bool: sampled by the model; the one mask of all losses, means and denominators
    logprobs: Tensor  # [B, T] of the sampler, at actions
    values: Tensor  # [B, T] of the critic while sampling, at actions
    rewards: Tensor  # [B, T] at actions
    groups: Tensor  # [B] long
    cut_off: Tensor  # [B] bool
    failed: Tensor  # [B] bool
    signals: Tensor  # [B] see Rollout.signal
    teacher: list[TopTokens | None]  # [B] see Rollout
    off_policy: Tensor | None = None  # [B] bool: see Rollout; None: no row is off-policy
    old: Tensor | None = None  # [B, T] log-probabilities under the old policy, at actions; None: `logprobs`
    reference: Tensor | None = None  # [B, T] log-probabilities under the reference policy, at actions
    advantages: Tensor | None = None  # [B, T] at actions
    value_targets: Tensor | None = None  # [B, T] returns that the critic is trained to predict, at actions
    weights: Tensor | None = None  # [B, T] of each action token in the loss of its mini-batch

    @staticmethod
    def of(rollouts: list[Rollout]) -> "Batch":
        mask = pad_sequence([torch.tensor(r.action_mask) for r in rollouts], batch_first=True)
        logprobs = torch.tensor([x for r in rollouts for x in r.logprobs], dtype=torch.float32)  # [N]
        values = torch.tensor([x for r in rollouts for x in r.values], dtype=torch.float32)  # [N]
        rewards = torch.zeros(mask.shape)
        for i, rollout in enumerate(rollouts):
            for position, reward in rollout.rewards:
                assert rollout.action_mask[position], "a reward belongs to a token that the model sampled"
                rewards[i, position] += reward
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
            signals=torch.tensor([r.total if r.signal is None else r.signal for r in rollouts]),
            off_policy=torch.tensor([r.off_policy for r in rollouts]) if any(r.off_policy for r in rollouts) else None,
            teacher=[r.teacher for r in rollouts],
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, index: list[int]) -> "Batch":
        """The batch of the rows `index`."""
        tensors = {name: x[index] for name, x in vars(self).items() if isinstance(x, Tensor)}
        return Batch(**tensors, teacher=[self.teacher[i] for i in index])

    @property
    def old_logprobs(self) -> Tensor:
        """log pi_old [B, T], the denominator of the ratios."""
        return self.logprobs if self.old is None else self.old

    @property
    def off_policy_actions(self) -> Tensor | None:
        """Which of the action tokens are off-policy, [N] bool; None: no row is."""
        return None if self.off_policy is None else self.off_policy.repeat_interleave(self.action_mask.sum(-1))

    def rescored(self, logprobs: Tensor) -> "Batch":
        """The batch with the trainer's log-probabilities [B, T] as `old`; off-policy rows keep their recorded ones."""
        if self.off_policy is not None:
            logprobs = torch.where(self.off_policy[:, None], self.logprobs, logprobs)
        return replace(self, old=logprobs)

    def token_rows(self) -> list[list[int]]:
        """The tokens of each row up to its last action token: no loss depends on those after it."""
        lengths = (torch.arange(1, self.tokens.shape[1] + 1) * self.action_mask).amax(-1)  # [B]
        return [row[:length] for row, length in zip(self.tokens.tolist(), lengths.tolist(), strict=True)]

    def mini_batches(self, size: int, seed: str, by_group: bool) -> list[list[int]]:
        """The rows of each mini-batch of an epoch, shuffled by `seed`: whole groups with `by_group`, else single rows.

        The fewest mini-batches of at most `size` on-policy rows, about equally large, so that no small rest makes a
        step of its own. Groups whose size does not divide a mini-batch are split between two. An off-policy row goes
        with the row before it, which is of its group.
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
        """x [N], numbers of the action tokens in row-major order, as a tensor [B, T] with 0 elsewhere."""
        return torch.zeros(self.tokens.shape, dtype=x.dtype).masked_scatter(self.action_mask, x)


@dataclass(frozen=True)
class ActionTokens:
    """The numbers of the N action tokens of a micro-batch, on the device: tensors [N] in row-major order.

    A tensor that the batch does not have is None here, too. `actions[rows]` is a slice of all of them.
    """

    old_logprobs: Tensor  # log pi_old, the denominator of the ratios
    sampled_logprobs: Tensor  # recorded by the sampler; equal to `old_logprobs` unless --old-logprobs is trainer
    old_values: Tensor
    advantages: Tensor
    weights: Tensor
    reference: Tensor | None
    value_targets: Tensor | None
    off_policy: Tensor | None = None  # bool: its episode was not sampled in this round
    episode_log_ratios: Tensor | None = None  # mean log-ratio of each token's episode, if the algorithm asks for it

    @staticmethod
    def of(batch: Batch, device: torch.device) -> "ActionTokens":
        tensors = {
            "old_logprobs": batch.old_logprobs,
            "sampled_logprobs": batch.logprobs,
            "old_values": batch.values,
            "advantages": batch.advantages,
            "weights": batch.weights,
            "reference": batch.reference,
            "value_targets": batch.value_targets,
            "off_policy": None if batch.off_policy is None else batch.off_policy[:, None].expand(batch.tokens.shape),
        }
        mask = batch.action_mask
        return ActionTokens(
            **{name: None if x is None else x[mask].to(device, non_blocking=True) for name, x in tensors.items()}
        )

    def with_episode_log_ratios(self, logprobs: Tensor, lengths: list[int]) -> "ActionTokens":
        """With the mean log-ratio of each token's episode, from log-probabilities [N]; `lengths` are the episodes'."""
        assert sum(lengths) == len(logprobs)
        means = [ratios.mean().expand(len(ratios)) for ratios in (logprobs - self.old_logprobs).split(lengths)]
        return replace(self, episode_log_ratios=torch.cat(means))

    def __getitem__(self, rows: slice) -> "ActionTokens":
        return ActionTokens(**{name: None if x is None else x[rows] for name, x in vars(self).items()})


def action_states(model: CausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """Runs the model on whole episodes: the hidden states [N, C] that predict the action tokens, and these tokens [N].

    In row-major order. The hidden state of token t - 1 predicts token t.
    """
    return states_before(model, batch.token_rows(), batch.action_mask.tolist())


def action_logprobs(
    model: CausalLM, batch: Batch, vocabulary: int, temperature: float, chunk: int = CHUNK, entropies: bool = False
) -> Tensor:
    """Log-probabilities [N] of the action tokens, or with `entropies` the entropies [N] of their distributions (nats).

    The distributions are the sampler's: over the first `vocabulary` ids, at its temperature.
    """
    hidden, targets = action_states(model, batch)
    head = model.head_weight[:vocabulary]
    logprobs, entropy = token_logprobs(hidden, head, targets, temperature, chunk, with_entropy=entropies)
    return entropy if entropies else logprobs
