"""Compares an exported model with the one that it was made of, by the logits after some prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from r3lite.models.causal_lm import CausalLM


@dataclass(frozen=True)
class Parity:
    """Over `prompts` prompts: the largest and the mean difference of the logits after them, and how often the likeliest
    next token is the same."""

    prompts: int
    largest: float
    mean: float
    same_token: int

    def summary(self) -> str:
        differ = f"the logits differ by {self.mean:.2g} in the mean and {self.largest:.2g} at most"
        same = f"the likeliest next token is the same after {self.same_token} of them"
        return f"parity      over {self.prompts} prompts {differ}; {same}"


@torch.no_grad()
def next_logits(model: CausalLM, prompts: Sequence[list[int]], vocabulary: int, title: str) -> Tensor:
    """Logits [n, vocabulary], fp32, of the token after each prompt."""
    bar = tqdm(prompts, desc=title, unit="prompt", disable=None)
    device = model.head_weight.device
    rows = [model.logits(model(torch.tensor([ids], device=device))[:, -1])[0, :vocabulary].float().cpu() for ids in bar]
    return torch.stack(rows)


def compare(before: Tensor, after: Tensor) -> Parity:
    """`before` and `after` [n, V]."""
    difference = (before - after).abs()
    same = (before.argmax(-1) == after.argmax(-1)).sum()
    return Parity(len(before), difference.max().item(), difference.mean().item(), int(same))
