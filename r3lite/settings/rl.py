"""Settings of reinforcement learning."""

from dataclasses import dataclass
from typing import Annotated, Literal

from r3lite.config import Bounds, Count, Fraction, NonNegative, Positive, Section

Algorithm = Literal["ppo", "grpo"]  # the keys of rl.algorithms.ALGORITHMS; a test holds them to it


@dataclass(frozen=True)
class RLSettings(Section):
    """Reinforcement learning."""

    algorithm: Algorithm = "ppo"
    """ppo: critic and GAE (arXiv 1707.06347); grpo: group-normalized rewards (arXiv 2402.03300)"""
    batch_size: Annotated[int, Bounds(low=1, high=4096)] = 8
    """questions of one round"""
    num_generations: Annotated[int, Bounds(low=1, high=1024)] = 8
    """episodes sampled per question"""
    kl_beta: NonNegative = 0.001
    """weight of the KL divergence from the reference adapter"""
    update_epochs: Annotated[int, Bounds(low=1, high=100)] = 1
    """passes over the episodes of a round"""
    mini_batch_size: Count = 16
    """episodes of one optimizer step"""
    micro_batch_size: Count | None = None
    """most episodes of one pass; by default as many as --micro-batch-tokens holds"""
    clip_low: NonNegative = 0.2
    """the probability ratio is clipped below at 1 - this"""
    clip_high: NonNegative = 0.2
    """the probability ratio is clipped above at 1 + this"""
    value_clip: NonNegative = 0.2
    """values are clipped at this distance from the old ones (ppo)"""
    value_coefficient: NonNegative = 0.1
    """weight of the value loss (ppo)"""
    value_learning_rate: Positive = 1e-3
    """learning rate of the value head (ppo)"""
    negative_advantage_scale: NonNegative = 1.0
    """negative advantages are multiplied by this; below 1 a small model drifts less into noise"""
    gamma: Fraction = 1.0
    """discount (ppo)"""
    gae_lambda: Fraction = 0.95
    """lambda of generalized advantage estimation (arXiv 1506.02438) (ppo)"""
    entropy_coefficient: NonNegative = 0.0
    """weight of an entropy bonus"""
