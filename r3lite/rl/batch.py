"""Episodes as padded tensors [B, T] (`Batch`), and log-probabilities, advantages and more of their N action tokens.

A batch stays in host memory, where masks are read without waiting for the device. The model runs on packs of its rows,
and the losses get flat tensors [N] of its action tokens on the device (`ActionTokens`). Position t of every [B, T]
tensor belongs to token t: whether this token is an action, its log-probability given the tokens before it, the value of
the state before it, the reward given after it.
"""

import math
import random
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from r3lite.core.token_record import TokenRecord
from r3lite.models.causal_lm import CausalLM
from r3lite.models.logprobs import CHUNK, TopTokens, token_logprobs
from r3lite.models.packing import states_before


@dataclass(frozen=True)
class Rollout:
    """An episode with its rewards: sampled in this round, replayed from an earlier one, or written by a teacher.

    It may also be an episode whose answer was replaced by the right one.
    """

    record: TokenRecord  # its T tokens, N of which are actions
    token_rewards: list[tuple[int, float]]  # (index of an action token, its reward)
    group: int  # number of the group: the rollouts of one draw of a question
    cut_off: bool = False  # the episode reached a token limit before its answer
    # False with `teacher`, whose rows have `guided_loss`, whoever wrote their tokens. Else True if the actions were not
    # sampled in this round: then the algorithm has another loss, or no KL, for them. The log-probabilities in `record`
    # are, for a replayed episode, those of the policy that sampled it; for a teacher's trace, 0; for a right answer,
    # the current policy's.
    off_policy: bool = False
    failed: bool = False  # see EpisodeReward.failed
    teacher: TopTokens | None = None  # a teacher's distributions for the N action tokens
    signal: float | None = None  # see EpisodeReward.signal; None: `total`

    @property
    def total(self) -> float:
        """The sum of the episode's rewards."""
        return float(sum(reward for _, reward in self.token_rewards))

    @staticmethod
    def with_final_reward(record: TokenRecord, reward: float, group: int) -> "Rollout":
        """Returns a rollout whose whole reward is given at its last action token. All values are 0.

        If the record has no log-probabilities, they are 0, as if the policy that wrote the tokens had been certain.
        """
        mask = record.action_mask
        zeros = [0.0] * sum(mask)
        last_action = len(mask) - 1 - mask[::-1].index(True)  # index of the last True
        record = TokenRecord(
            tokens=record.tokens,
            action_mask=mask,
            logprobs=record.logprobs or zeros,
            values=zeros,
        )
        return Rollout(record, token_rewards=[(last_action, reward)], group=group)


@dataclass(frozen=True)
class Batch:
    """Rollouts padded on the right to [B, T]. Padding is never an action, so no loss and no mean reads it.

    `Batch.of` leaves `trainer_logprobs` and the fields after it None; the learner sets them. The first row
    of a group is on-policy.
    """

    tokens: Tensor  # [B, T] long
    # [B, T] bool: see TokenRecord.action_mask. This is the one mask of all losses, means and denominators.
    action_mask: Tensor
    # "At actions": only the numbers at the positions of action tokens mean something.
    logprobs: Tensor  # [B, T] at actions: Rollout.record.logprobs, for sampled rows those that the sampler recorded
    values: Tensor  # [B, T] at actions: the critic's values while sampling
    rewards: Tensor  # [B, T] at actions
    groups: Tensor  # [B] long, see Rollout.group
    cut_off: Tensor  # [B] bool, see Rollout.cut_off
    failed: Tensor  # [B] bool, see EpisodeReward.failed
    signals: Tensor  # [B] see Rollout.signal
    teacher: list[TopTokens | None]  # [B] see Rollout.teacher
    off_policy: Tensor | None = None  # [B] bool, see Rollout.off_policy; None: no row is off-policy
    # [B, T] at actions: log pi_old as the trainer computed it. None: `logprobs` are log pi_old.
    trainer_logprobs: Tensor | None = None
    reference: Tensor | None = None  # [B, T] at actions: log-probabilities under the reference policy
    advantages: Tensor | None = None  # [B, T] at actions
    value_targets: Tensor | None = None  # [B, T] at actions: the returns that the critic is trained to predict
    weights: Tensor | None = None  # [B, T] at actions: the weight of each token in the loss of its mini-batch

    @staticmethod
    def of(rollouts: list[Rollout]) -> "Batch":
        """Returns the batch of some rollouts: row i is rollout i."""
        records = [rollout.record for rollout in rollouts]
        mask = _padded([record.action_mask for record in records])
        logprobs = list(chain.from_iterable(record.logprobs for record in records))
        values = list(chain.from_iterable(record.values for record in records))
        off_policy = None
        if any(rollout.off_policy for rollout in rollouts):
            off_policy = torch.tensor([rollout.off_policy for rollout in rollouts])
        return Batch(
            tokens=_padded([record.tokens for record in records]),
            action_mask=mask,
            logprobs=_scattered(torch.tensor(logprobs, dtype=torch.float32), mask),
            values=_scattered(torch.tensor(values, dtype=torch.float32), mask),
            rewards=_padded_rewards(rollouts, mask.shape),
            groups=torch.tensor([rollout.group for rollout in rollouts]),
            cut_off=torch.tensor([rollout.cut_off for rollout in rollouts]),
            failed=torch.tensor([rollout.failed for rollout in rollouts]),
            signals=torch.tensor([_signal(rollout) for rollout in rollouts]),
            off_policy=off_policy,
            teacher=[rollout.teacher for rollout in rollouts],
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def select(self, rows: list[int]) -> "Batch":
        """Returns the batch of some rows, in this order."""
        tensors = {}  # without the fields that are None: in the new batch, too, they are None by default
        for name, x in vars(self).items():
            if isinstance(x, Tensor):
                tensors[name] = x[rows]
        teacher = [self.teacher[row] for row in rows]
        return Batch(**tensors, teacher=teacher)

    @property
    def old_logprobs(self) -> Tensor:
        """log pi_old [B, T], the denominator of the ratios."""
        if self.trainer_logprobs is None:
            return self.logprobs
        return self.trainer_logprobs

    @property
    def off_policy_actions(self) -> Tensor | None:
        """Which action tokens are off-policy, [N] bool; None: no row is off-policy."""
        if self.off_policy is None:
            return None
        actions_per_row = self.action_mask.sum(-1)
        return self.off_policy.repeat_interleave(actions_per_row)

    def with_trainer_logprobs(self, logprobs: Tensor) -> "Batch":
        """Returns the batch with the trainer's log-probabilities [B, T] as log pi_old.

        In off-policy rows log pi_old stays `self.logprobs`.
        """
        if self.off_policy is not None:
            logprobs = torch.where(self.off_policy[:, None], self.logprobs, logprobs)
        return replace(self, trainer_logprobs=logprobs)

    def token_rows(self) -> list[list[int]]:
        """Returns the tokens of each row up to its last action token: no loss depends on the tokens after it."""
        positions_from_1 = torch.arange(1, self.tokens.shape[1] + 1)  # [T]
        lengths = (positions_from_1 * self.action_mask).amax(-1)  # [B]: position of the last action, counted from 1
        rows = zip(self.tokens.tolist(), lengths.tolist(), strict=True)
        return [tokens[:length] for tokens, length in rows]

    def mini_batches(self, size: int, seed: str, by_group: bool) -> list[list[int]]:
        """Returns the indices of the rows of each mini-batch of an epoch.

        First the rows are shuffled with `seed`. With `by_group` the groups are shuffled instead, and the rows of a
        group stay neighbours in their order. Then the list of rows is cut into as few mini-batches as possible with at
        most `size` on-policy rows each. They are of about equal size, so that none is small. A cut may divide a group,
        but never separates an off-policy row from the row before it.
        """
        if by_group:
            blocks = [self.rows_of_group(group).tolist() for group in self.groups.unique()]
        else:
            blocks = [[row] for row in range(len(self))]
        random.Random(seed).shuffle(blocks)
        # A unit is an on-policy row and the off-policy rows after it. No cut divides a unit, so that off-policy rows
        # do not change the number of optimizer steps, and each step has on-policy rows.
        units: list[list[int]] = []
        for row in chain.from_iterable(blocks):
            if self.off_policy is not None and self.off_policy[row]:
                # The row before it is of the same group: algorithms with off-policy rows shuffle `by_group`, and the
                # first row of a group is on-policy.
                units[-1].append(row)
            else:
                units.append([row])
        count = math.ceil(len(units) / size)
        bounds = [len(units) * i // count for i in range(count + 1)]  # indices in `units`
        return [list(chain.from_iterable(units[start:end])) for start, end in pairwise(bounds)]

    def rows_of_group(self, group: Tensor) -> Tensor:
        """Returns the indices [N] of the rows of a group, in their order."""
        return torch.nonzero(self.groups == group)[:, 0]

    def spread(self, x: Tensor) -> Tensor:
        """Returns numbers x [N] of the action tokens, in row-major order, as a tensor [B, T] with 0 elsewhere."""
        return _scattered(x, self.action_mask)


def _padded(rows: list[list]) -> Tensor:
    """Returns rows of numbers, padded on the right with 0 to [B, T]."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def _scattered(x: Tensor, mask: Tensor) -> Tensor:
    """Returns a tensor [B, T] with x [N] where the mask [B, T] is True, in row-major order, and 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=x.dtype).masked_scatter(mask, x)


def _padded_rewards(rollouts: list[Rollout], shape: torch.Size) -> Tensor:
    """Returns the rewards of rollouts as a tensor [B, T], each at its token."""
    rewards = torch.zeros(shape)
    for row, rollout in enumerate(rollouts):
        for position, reward in rollout.token_rewards:
            assert rollout.record.action_mask[position], "a reward belongs to an action token"
            rewards[row, position] += reward
    assert rewards.isfinite().all(), "a reward is a finite number"
    return rewards


def _signal(rollout: Rollout) -> float:
    if rollout.signal is None:
        return rollout.total
    return rollout.signal


@dataclass(frozen=True)
class ActionTokens:
    """Log-probabilities, advantages and more of the N action tokens of a micro-batch, on the device.

    They are tensors [N] in row-major order. A tensor that the batch does not have is None here, too. `actions[places]`
    takes the same slice of each tensor.
    """

    old_logprobs: Tensor  # log pi_old, the denominator of the ratios
    sampled_logprobs: Tensor  # Batch.logprobs; equal to `old_logprobs` unless --old-logprobs is trainer
    old_values: Tensor
    advantages: Tensor
    weights: Tensor
    reference: Tensor | None
    value_targets: Tensor | None
    off_policy: Tensor | None = None  # bool: see Rollout.off_policy
    episode_log_ratios: Tensor | None = None  # mean log-ratio of each token's episode, for algorithms that use it

    @staticmethod
    def of(batch: Batch, device: torch.device) -> "ActionTokens":
        """Takes the action tokens out of a batch, and moves them to the device."""
        off_policy = None
        if batch.off_policy is not None:
            off_policy = batch.off_policy[:, None].expand(batch.tokens.shape)
        tensors = {
            "old_logprobs": batch.old_logprobs,
            "sampled_logprobs": batch.logprobs,
            "old_values": batch.values,
            "advantages": batch.advantages,
            "weights": batch.weights,
            "reference": batch.reference,
            "value_targets": batch.value_targets,
            "off_policy": off_policy,
        }
        actions = {}
        for name, x in tensors.items():
            actions[name] = None if x is None else x[batch.action_mask].to(device, non_blocking=True)
        return ActionTokens(**actions)

    def with_episode_log_ratios(self, logprobs: Tensor, lengths: list[int]) -> "ActionTokens":
        """Returns a copy with `episode_log_ratios`: the mean of log pi - log pi_old over each token's episode.

        `logprobs` are log pi [N] of the current policy. `lengths` has the number of action tokens of each episode.
        """
        assert sum(lengths) == len(logprobs)
        log_ratios = logprobs - self.old_logprobs
        means = [of_episode.mean().expand(len(of_episode)) for of_episode in log_ratios.split(lengths)]
        return replace(self, episode_log_ratios=torch.cat(means))

    def __getitem__(self, places: slice) -> "ActionTokens":
        tensors = {}
        for name, x in vars(self).items():
            tensors[name] = None if x is None else x[places]
        return ActionTokens(**tensors)


def action_states(model: CausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """Runs the model on whole episodes.

    Returns the hidden states [N, C] that predict the action tokens, and these tokens [N], in row-major order. The
    hidden state of token t - 1 predicts token t.
    """
    # A mask is padded to T, which may be longer than its row of tokens: `states_before` reads len(row) entries of it.
    return states_before(model, batch.token_rows(), batch.action_mask.tolist())


def action_logprobs(
    model: CausalLM,
    batch: Batch,
    vocabulary: int,
    temperature: float,
    chunk: int = CHUNK,
) -> Tensor:
    """Returns the log-probabilities [N] of the action tokens.

    The distributions are those that the sampler records: over the first `vocabulary` token ids, at its temperature.
    `chunk` is how many tokens' logits are in memory at a time.
    """
    hidden, targets = action_states(model, batch)
    head = model.head_weight[:vocabulary]
    logprobs, _ = token_logprobs(hidden, head, targets, temperature=temperature, chunk=chunk)
    return logprobs


def action_entropies(
    model: CausalLM,
    batch: Batch,
    vocabulary: int,
    temperature: float,
    chunk: int = CHUNK,
) -> Tensor:
    """Returns the entropies [N], in nats, of the model's current distributions at the action tokens.

    The parameters are those of `action_logprobs`.
    """
    hidden, targets = action_states(model, batch)
    head = model.head_weight[:vocabulary]
    _, entropies = token_logprobs(hidden, head, targets, temperature=temperature, chunk=chunk, with_entropy=True)
    return entropies
