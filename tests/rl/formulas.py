"""The gradient of each algorithm's whole loss, written down from its formula with plain operations in fp64."""

import functools

import torch
from torch import Tensor

from r3lite.models import lora
from r3lite.settings import LengthSettings, RLSettings
from tests.rl.conftest import ACTIONS, VOCABULARY
from tests.rl.plain import hidden_states

TEMPERATURE = 0.7
SETTINGS = {"kl_beta": 0.05, "clip_low": 0.1, "clip_high": 0.3, "entropy_coefficient": 0.02, "gamma": 0.9}
SETTINGS |= {"gae_lambda": 0.8, "value_clip": 0.2, "value_coefficient": 0.5, "negative_advantage_scale": 0.6}


class Plain:
    """What the formulas need of each episode, all in float64; `parameters` are the leaves of the policy."""

    def __init__(self, model, head):
        self.model, self.head = model, head
        self.upcast = functools.cache(lambda p: p.detach().double().requires_grad_(p.requires_grad))
        self.parameters = [self.upcast(p) for p in lora.adapter_parameters(model, "policy").values()]
        self.parameters += [self.upcast(p) for p in head.parameters()] if head is not None else []

    def episode(self, tokens: Tensor, actions: list[int], adapter: str = "policy") -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, entropies and values [n] of the n action tokens, from all logits of the row."""
        hidden = hidden_states(self.model, adapter, tokens, self.upcast)[[t - 1 for t in actions]]  # [n, C]
        logits = hidden @ self.upcast(self.model.head_weight)[:VOCABULARY].T / TEMPERATURE
        logprobs = logits - logits.exp().sum(-1, keepdim=True).log()  # [n, V]
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        values = torch.zeros(len(actions)).double()
        if self.head is not None:
            values = hidden @ self.upcast(self.head.weight) + self.upcast(self.head.bias)
        return logprobs[range(len(actions)), tokens[actions]], entropies, values


def surrogate(s: RLSettings, ratio: Tensor, advantage: Tensor) -> Tensor:
    """arXiv 1707.06347, eq. 7."""
    return torch.minimum(ratio * advantage, ratio.clip(1 - s.clip_low, 1 + s.clip_high) * advantage)


def scaled(s: RLSettings, advantages: Tensor) -> Tensor:
    return torch.where(advantages < 0, s.negative_advantage_scale * advantages, advantages)


def in_pair(s: RLSettings, paid: Tensor, row: int) -> Tensor:
    """GRPO's advantage of a row in its group of two, by what the rows are paid."""
    pair = paid[[row, partner(row)]]
    return scaled(s, (paid[row] - pair.mean()) / (pair.std() + 1e-4))


def ppo_gradients(s: RLSettings, plain: Plain, batch, steps: list[list[int]]) -> list[list[Tensor]]:
    """arXiv 1707.06347 with the KL penalty of 2203.02155; the gradient of each optimizer step on some rows."""
    at = [[t for t, c in enumerate(pattern) if c == "a"] for pattern in ACTIONS]
    advantages, targets = [], []
    for row, t in enumerate(at):
        reference = plain.episode(batch.tokens[row], t, "reference")[0].detach()
        old, values = batch.logprobs[row, t].double(), batch.values[row, t].double()
        rewards = batch.rewards[row, t].double() - s.kl_beta * (old - reference)
        delta = rewards + s.gamma * torch.cat((values[1:], values.new_zeros(1))) - values
        decay = s.gamma * s.gae_lambda
        gae = [sum(decay ** (k - i) * delta[k] for k in range(i, len(t))) for i in range(len(t))]
        advantages.append(torch.stack(gae))
        targets.append(advantages[-1] + values)
    every = torch.cat(advantages)
    advantages = [scaled(s, (a - every.mean()) / (every.var(correction=0) + 1e-8).sqrt()) for a in advantages]
    gradients = []
    for rows in steps:
        losses = []
        for row in rows:
            t = at[row]
            logprobs, entropies, values = plain.episode(batch.tokens[row], t)
            old = batch.values[row, t].double()
            near = old + (values - old).clip(-s.value_clip, s.value_clip)
            value_loss = 0.5 * torch.maximum((values - targets[row]) ** 2, (near - targets[row]) ** 2)
            ratio = (logprobs - batch.logprobs[row, t].double()).exp()
            policy_loss = -surrogate(s, ratio, advantages[row]) - s.entropy_coefficient * entropies
            losses.append(policy_loss + s.value_coefficient * value_loss)
        gradients.append(torch.autograd.grad(torch.cat(losses).mean(), plain.parameters))
    return gradients


def grpo_gradients(s: RLSettings, plain: Plain, batch, steps: list[list[int]]) -> list[list[Tensor]]:
    """arXiv 2402.03300, eq. 3 and 4; the gradient of each optimizer step on some rows."""
    gradients = []
    for rows in steps:
        losses = []
        for row in rows:
            t = [t for t, c in enumerate(ACTIONS[row]) if c == "a"]
            group = batch.rewards[row // 2 * 2 : row // 2 * 2 + 2].double().sum(-1)
            advantage = scaled(s, (batch.rewards[row].double().sum() - group.mean()) / (group.std() + 1e-4))
            logprobs, entropies, _ = plain.episode(batch.tokens[row], t)
            reference = plain.episode(batch.tokens[row], t, "reference")[0].detach()
            ratio = (logprobs - batch.logprobs[row, t].double()).exp()
            kl = (reference - logprobs).exp() - (reference - logprobs) - 1
            losses.append((-surrogate(s, ratio, advantage) - s.entropy_coefficient * entropies + s.kl_beta * kl).mean())
        gradients.append(torch.autograd.grad(sum(losses) / len(losses), plain.parameters))
    return gradients


AT = [[t for t, c in enumerate(pattern) if c == "a"] for pattern in ACTIONS]
LENGTHS = LengthSettings(max_hops=1, max_new_tokens=4)  # an episode samples at most 12 tokens: three turns


def off_reference(plain: Plain, batch, row: int) -> Tensor:
    """log pi_old - log pi_ref [n] of an episode's action tokens."""
    return batch.logprobs[row, AT[row]].double() - plain.episode(batch.tokens[row], AT[row], "reference")[0].detach()


def terms(s: RLSettings, plain: Plain, batch, row: int, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """Of each action token of an episode, the surrogate with the bonus, and k2 of the KL [n]; `advantage` [n] or []."""
    logprobs, entropies, _ = plain.episode(batch.tokens[row], AT[row])
    d = logprobs - plain.episode(batch.tokens[row], AT[row], "reference")[0].detach()
    ratio = (logprobs - batch.logprobs[row, AT[row]].double()).exp()
    return surrogate(s, ratio, advantage) + s.entropy_coefficient * entropies, d**2 / 2


def partner(row: int) -> int:
    """The other episode of a group of two."""
    return row + 1 if row % 2 == 0 else row - 1


def dr_grpo_gradients(s: RLSettings, plain: Plain, batch, steps: list[list[int]]) -> list[list[Tensor]]:
    """arXiv 2503.20783: no std, and a constant, 12 tokens, in place of each length. The KL is k2."""
    paid = batch.rewards.double().sum(-1)
    gradients = []
    for rows in steps:
        loss = 0.0
        for row in rows:
            advantage = scaled(s, paid[row] - (paid[row] + paid[partner(row)]) / 2)
            gain, kl = terms(s, plain, batch, row, advantage)
            loss = loss - (gain - s.kl_beta * kl).sum() / 12 / len(rows)
        gradients.append(torch.autograd.grad(loss, plain.parameters))
    return gradients


def dapo_gradients(s: RLSettings, plain: Plain, batch, steps: list[list[int]]) -> list[list[Tensor]]:
    """arXiv 2503.14476, eq. 8 and 13, with L_max = 8 and L_cache = 4; episode 3 was cut off and has no loss."""
    penalty = torch.tensor([max(0.0, (len(t) - (8 - 4)) / 4) for t in AT]).double()
    assert penalty.tolist() == [0.25, 0.0, 0.25, 0.5]
    paid = batch.rewards.double().sum(-1) - s.overlong_penalty * penalty
    gradients = []
    for rows in steps:
        loss, tokens = torch.zeros(()).double(), sum(len(AT[row]) for row in rows if row != 3)
        for row in rows:
            if row != 3:
                advantage = in_pair(s, paid, row)
                gain, kl = terms(s, plain, batch, row, advantage)
                loss = loss - (gain - s.kl_beta * kl).sum() / tokens
        gradients.append(torch.autograd.grad(loss, plain.parameters))
    return gradients


def gspo_gradients(s: RLSettings, plain: Plain, batch, steps: list[list[int]]) -> list[list[Tensor]]:
    """arXiv 2507.18071, eq. 5 to 7 as they stand: the gradient goes through the ratio of the whole episode."""
    paid = batch.rewards.double().sum(-1)
    gradients = []
    for rows in steps:
        losses = []
        for row in rows:
            advantage = in_pair(s, paid, row)
            logprobs, entropies, _ = plain.episode(batch.tokens[row], AT[row])
            ratio = (logprobs.sum() - batch.logprobs[row, AT[row]].double().sum()).exp() ** (1 / len(AT[row]))
            _, kl = terms(s, plain, batch, row, advantage)
            regularizer = s.kl_beta * kl - s.entropy_coefficient * entropies
            losses.append(-surrogate(s, ratio, advantage) + regularizer.mean())
        gradients.append(torch.autograd.grad(sum(losses) / len(rows), plain.parameters))
    return gradients


def rloo_gradients(s: RLSettings, plain: Plain, batch, steps: list[list[int]]) -> list[list[Tensor]]:
    """arXiv 2402.14740: the KL in the reward, the other episode as baseline, a sum over tokens."""
    kl = torch.stack([off_reference(plain, batch, row).sum() for row in range(4)])
    paid = batch.rewards.double().sum(-1) - s.kl_beta * kl
    gradients = []
    for rows in steps:
        gains = [terms(s, plain, batch, row, scaled(s, paid[row] - paid[partner(row)]))[0].sum() for row in rows]
        gradients.append(torch.autograd.grad(-sum(gains) / len(rows), plain.parameters))
    return gradients


def reinforce_pp_gradients(s: RLSettings, plain: Plain, batch, steps: list[list[int]]) -> list[list[Tensor]]:
    """arXiv 2501.03262: what is paid from a token on, whitened over the round; a mean over tokens."""
    worth = []
    for row, t in enumerate(AT):
        paid = batch.rewards[row, t].double() - s.kl_beta * off_reference(plain, batch, row)
        worth.append(torch.stack([sum(s.gamma ** (k - i) * paid[k] for k in range(i, len(t))) for i in range(len(t))]))
    every = torch.cat(worth)
    worth = [scaled(s, (a - every.mean()) / (every.var(correction=0) + 1e-8).sqrt()) for a in worth]
    gradients = []
    for rows in steps:
        gains = torch.cat([terms(s, plain, batch, row, worth[row])[0] for row in rows])
        gradients.append(torch.autograd.grad(-gains.mean(), plain.parameters))
    return gradients


def reinforce_baseline_gradients(s: RLSettings, plain: Plain, batch, steps: list[list[int]]) -> list[list[Tensor]]:
    """The same with the group's mean as baseline, and k2 of the KL in the loss."""
    paid = batch.rewards.double().sum(-1)
    gradients = []
    worth = [(paid[row] - (paid[row] + paid[partner(row)]) / 2).expand(len(t)) for row, t in enumerate(AT)]
    every = torch.cat(worth)
    worth = [scaled(s, (a - every.mean()) / (every.var(correction=0) + 1e-8).sqrt()) for a in worth]
    for rows in steps:
        parts = [terms(s, plain, batch, row, worth[row]) for row in rows]
        loss = torch.cat([s.kl_beta * kl - gain for gain, kl in parts]).mean()
        gradients.append(torch.autograd.grad(loss, plain.parameters))
    return gradients


def mixed_gradients(s: RLSettings, plain: Plain, batch, steps: list[list[int]]) -> list[list[Tensor]]:
    """arXiv 2504.14945 and 2510.02245: rows 1 and 3 are another's: w / (w + gamma), no clip, no KL; else GRPO."""
    paid = batch.rewards.double().sum(-1)
    gradients = []
    for rows in steps:
        losses = []
        for row in rows:
            advantage = in_pair(s, paid, row)
            logprobs, entropies, _ = plain.episode(batch.tokens[row], AT[row])
            if row in (1, 3):
                w = logprobs.exp() / batch.logprobs[row, AT[row]].double().exp()
                gain = w / (w + s.shaping_gamma) * advantage + s.entropy_coefficient * entropies
            else:
                gain, k2 = terms(s, plain, batch, row, advantage)
                gain = gain - s.kl_beta * k2
            losses.append(-gain.mean())
        gradients.append(torch.autograd.grad(sum(losses) / len(losses), plain.parameters))
    return gradients


def dgpo_gradients(s: RLSettings, plain: Plain, batch, steps: list[list[int]]) -> list[list[Tensor]]:
    """arXiv 2508.20324: of episodes that the teacher speaks of the divergence of all logits from what it says, with one
    more token for all that it leaves out; of the others GRPO."""
    paid = batch.rewards.double().sum(-1)
    gradients = []
    for rows in steps:
        losses = []
        for row in rows:
            teacher = batch.teacher[row]
            if teacher is None:
                gain, kl = terms(s, plain, batch, row, in_pair(s, paid, row))
                losses.append((s.kl_beta * kl - gain).mean())
                continue
            hidden = hidden_states(plain.model, "policy", batch.tokens[row], plain.upcast)[[t - 1 for t in AT[row]]]
            q = (hidden @ plain.upcast(plain.model.head_weight)[:VOCABULARY].T).softmax(-1)  # as the teacher: at 1
            p, q = teacher.logprobs.double().exp(), q.gather(-1, teacher.ids.long())
            p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p, q))
            losses.append(s.teacher_weight * (p * (p / q).log()).sum(-1).mean())
        gradients.append(torch.autograd.grad(sum(losses) / len(losses), plain.parameters))
    return gradients


def dpo_gradient(s: RLSettings, plain: Plain, batch) -> list[Tensor]:
    """arXiv 2305.18290, eq. 7, on every pair of a group; plus the negative log-likelihood of 2404.19733, in the mean
    over the tokens of the preferred episode. The mean over the pairs of a group, then over the groups."""
    paid = batch.rewards.double().sum(-1)
    group_losses = []
    for group in batch.groups.unique():
        rows = (batch.groups == group).nonzero()[:, 0].tolist()
        losses = []
        for pair in [(w, loser) for w in rows for loser in rows if paid[w] > paid[loser]]:
            better, worse = (plain.episode(batch.tokens[row], AT[row])[0] for row in pair)
            d = [plain.episode(batch.tokens[row], AT[row], "reference")[0].detach().sum() for row in pair]
            h = s.kl_beta * ((better.sum() - d[0]) - (worse.sum() - d[1]))
            losses.append(-torch.nn.functional.logsigmoid(h) - s.likelihood_weight * better.mean())
        if losses:
            group_losses.append(sum(losses) / len(losses))
    return list(torch.autograd.grad(sum(group_losses) / len(batch.groups.unique()), plain.parameters))


def verifree_gradients(s: RLSettings, plain: Plain, batch, steps: list[list[int]]) -> list[list[Tensor]]:
    """arXiv 2505.21493: rows 0 and 1 are analyses, each compared with the other; rows 2 and 3 are right answers, whose
    advantage is the probability that they are rewarded with. No std, and 4 tokens, the most of a turn, in place of each
    length. The KL is that of the analyses."""
    p = batch.rewards.double().sum(-1)
    advantages = [scaled(s, p[0] - p[1]), scaled(s, p[1] - p[0]), scaled(s, p[2]), scaled(s, p[3])]
    gradients = []
    for rows in steps:
        loss = 0.0
        for row in rows:
            gain, kl = terms(s, plain, batch, row, advantages[row])
            if row in (0, 1):
                gain = gain - s.kl_beta * kl
            loss = loss - gain.sum() / LENGTHS.max_new_tokens / len(rows)
        gradients.append(torch.autograd.grad(loss, plain.parameters))
    return gradients
