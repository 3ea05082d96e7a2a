"""Runs that are sampled elsewhere: how tests make them, and what they compare."""

from pathlib import Path

import pytest
import torch

from r3lite.assembly import remote_rollouts, rl_setup, rollout_service
from r3lite.assembly.rl_round import RoundSampler
from r3lite.core.invocation import resolve
from r3lite.datasets.sources import read_questions_of
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.rl.batch import Batch, Rollout
from r3lite.settings import PpoConfig, RolloutWorkerConfig
from r3lite.training import optim
from tests.cold_start import arguments

# Without drafts: which passes have them depends on the episodes that are sampled together, and they round differently.
SHORT = ["--dtype", "fp32", "--max-new-tokens", "48", "--max-hops", "2", "--draft-tokens", "0"]


def worker_flags(cold: Path, *extra_flags: str) -> list[str]:
    return ["--preset", "tiny", "--index", str(cold / "index"), *SHORT, *extra_flags]


def service_of(cold: Path, *extra_flags: str, token: str | None = None):
    flags = worker_flags(cold, *extra_flags)
    return rollout_service.build_service(resolve("rollout_worker", RolloutWorkerConfig(), flags, "ppo"), token)


def config_of(cold: Path, *extra_flags: str) -> PpoConfig:
    flags = arguments(cold, cold / "unused", "--algorithm", "grpo", *SHORT, *extra_flags)
    return resolve("ppo", PpoConfig(), flags)


def sampler_of(config: PpoConfig, output: Path, elsewhere: bool = True):
    """The sampler of a run, as `reinforcement.train` makes it, and its learner and state."""
    remote_rollouts.check(config)
    questions = read_questions_of(config.data, config.mixture)
    setup = Setup(config.retrieval, questions, config.common.seed)
    engine, learner, state = rl_setup.build_learning(config, questions)
    sampler = RoundSampler(config, questions, engine, build_retriever(setup), None)
    if elsewhere:
        sampler = remote_rollouts.build_remote_sampler(sampler, engine, learner, state, setup, output)
    return sampler, learner, state


def equal(sequences, expected, within: float = 1e-4) -> None:
    assert len(sequences) == len(expected)
    for a, b in zip(sequences, expected, strict=True):
        assert (a.question.id, a.tokens, a.action_mask) == (b.question.id, b.tokens, b.action_mask)
        assert (a.steps, a.step_ends, a.finish, a.index) == (b.steps, b.step_ends, b.finish, b.index)
        assert a.logprobs == pytest.approx(b.logprobs, abs=within)


def perturb(state) -> None:
    """Moves the policy, as an update does."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in optim.parameters(state.optimizer).items():
            if "lora_B" in name:
                weight += 0.01 * torch.randn(weight.shape, generator=generator)


def rollouts_of(sequences) -> Batch:
    """Episodes of groups of three that are paid 0, 1 and 2 at their ends."""
    paid = [Rollout.with_final_reward(s, float(i % 3), i // 3) for i, s in enumerate(sequences)]
    return Batch.of(paid)


def trainers_difference(learner, sequences) -> float:
    """The largest one between the recorded log-probabilities and those that the trainer computes now."""
    batch = rollouts_of(sequences)
    return float((learner.policy_logprobs(batch) - batch.logprobs).abs().max())
