"""Rounds of RL whose episodes are sampled on other machines, with the adapter of now or a round ahead.

The requests are in `rollout/remote.py` and `rollout/vllm.py`; what a worker answers is in `rollout_service.py`.
"""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from r3lite.assembly.rl_round import Round, RoundSampler
from r3lite.assembly.rollout_service import facts_of
from r3lite.core.config import UsageError
from r3lite.core.errors import R3LiteError
from r3lite.core.listening import TOKEN, bearer
from r3lite.core.spans import Stopwatch
from r3lite.core.terminal import say
from r3lite.devices.ranks import Ranks
from r3lite.llm.http_client import Link
from r3lite.models import weights
from r3lite.retrieval.setup import Setup
from r3lite.rewards.judge import Judge
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.rl.batch import Batch, Rollout, action_states
from r3lite.rl.learner import Learner
from r3lite.rollout.remote import LARGEST, REMEDY, RemoteEngine, RolloutWorker
from r3lite.rollout.vllm import VllmServer
from r3lite.rollout.wire import AdapterFiles
from r3lite.settings import PpoConfig
from r3lite.training.state import TrainState


@dataclass(frozen=True)
class RemoteSampler:
    """Samples the rounds of `sampler`, whose engine is remote; with --max-staleness 1 each while the one before is
    learned from. The adapter that the coming round is sampled with is then a part of the run's state."""

    sampler: RoundSampler
    learner: Learner
    state: TrainState

    @property
    def judge(self) -> Judge | None:
        return self.sampler.judge

    @property
    def ranks(self) -> Ranks:
        return self.sampler.ranks

    def sample(self, number: int, watch: Stopwatch) -> Round:
        """Samples and scores a round as RoundSampler.sample does."""
        engine = self.sampler.engine
        config = self.sampler.config
        is_ahead = config.remote.max_staleness > 0
        if is_ahead and engine.adapter and not engine.ahead:  # resumed, with the adapter that the checkpoint has
            self._go_ahead(number)
        with tempfile.TemporaryDirectory(prefix="r3lite-") as folder:
            self.state.save_adapter(Path(folder))
            engine.adapter = AdapterFiles.read(Path(folder))
        sampled = self.sampler.sample(number, watch)
        if self.learner.value_head is not None:
            with watch.stage("values"):
                self._value(sampled)
        if is_ahead and number < config.rounds(len(self.sampler.questions)):
            self._go_ahead(number + 1)
        return sampled.with_metrics(engine.metrics())

    def _go_ahead(self, number: int) -> None:
        """Has round `number` sampled with the adapter that the engine has."""
        sampler = self.sampler
        questions, seeds = sampler.order.of_round(number, sampler.config.rl.batch_size)
        sampler.engine.go_ahead(questions, seeds, sampler.retrieve)

    def _value(self, sampled: Round) -> None:
        """Gives the episodes the values of the critic, which did not run when they were sampled."""
        rollouts = []
        for sequence in sampled.sequences:
            rollout = Rollout(
                tokens=sequence.tokens,
                action_mask=sequence.action_mask,
                logprobs=sequence.logprobs,
                values=sequence.values,
                rewards=[],
                group=0,
            )
            rollouts.append(rollout)
        batch = Batch.of(rollouts)
        values = self.learner.grant.attempt("update", state_values, self.learner, batch)
        for sequence, row_values, mask in zip(sampled.sequences, values, batch.action_mask, strict=True):
            sequence.values = row_values[mask].tolist()


@torch.no_grad()
def state_values(learner: Learner, batch: Batch) -> torch.Tensor:
    """Returns the critic's values [B, T] of the states before the action tokens."""
    values = torch.zeros_like(batch.values)
    with learner.precision.autocast():
        for rows in learner.micro_batches(batch):
            part = batch.rows(rows)
            hidden, _ = action_states(learner.model, part)
            values[rows] = part.spread(learner.value_head(hidden).float().cpu())
    return values


def check(config: PpoConfig) -> None:
    """Refuses settings beside which --max-staleness 1 would not be what it says."""
    rl = config.rl
    if not config.remote.max_staleness:
        return
    if rl.importance_cap is None:
        raise UsageError("--max-staleness 1 needs an --importance-cap, such as 2")
    if ALGORITHMS[rl.algorithm].has_replay:
        raise UsageError(f"--max-staleness 1 does not work with {rl.algorithm}, which replays episodes: pass 0")
    if rl.kl_budget:
        raise UsageError("--max-staleness 1 does not work with --kl-budget, which measures the last update: pass 0")
    if config.validation.eval_data and config.guard.guard == "roll-back":
        raise UsageError("--max-staleness 1 does not work with rollbacks to the best --eval-data: pass --guard warn")


def plan(config: PpoConfig) -> str:
    """Returns how a run would sample its episodes, for --dry-run."""
    servers = ", ".join(config.remote.rollout_server)
    adapter = "the newest adapter"
    if config.remote.max_staleness:
        adapter = "the adapter before the last update"
    correction = "no correction"
    if config.rl.importance_cap:
        correction = f"importance weights of at most {config.rl.importance_cap:g}"
    return f"\n\nEpisodes are sampled by {servers} (not contacted now), each round with {adapter}; {correction}"


def build(sampler: RoundSampler, learner: Learner, state: TrainState, setup: Setup, output: Path) -> RemoteSampler:
    """Returns a sampler of the same rounds on the servers of the settings, each of which is asked what it is."""
    config = sampler.config
    local = sampler.engine
    facts = facts_of(
        config,
        base=weights.fingerprint(weights.resolve_folder(config.model.model)),
        nf4=local.grant.memory.nf4,
        layouts=local.layouts,
        setup=setup,
    )
    headers = bearer(TOKEN)
    servers = []
    for url in config.remote.rollout_server:
        link = Link(
            url.rstrip("/"),
            remedy=REMEDY,
            seconds=config.remote.rollout_timeout,
            most=LARGEST,
            headers=headers,
        )
        version = link.ask("/version", None, server="a rollout server", read=lambda reply: reply)
        if "r3lite" in version:
            servers.append(RolloutWorker(link, facts, local.layout_of))
        elif "version" in version:
            servers.append(VllmServer(link, config, layout_of=local.layout_of, output=output))
        else:
            raise R3LiteError(f"{url} is neither an r3lite rollout worker nor a vLLM server", REMEDY)
    say(f"episodes are sampled by {', '.join(server.check() for server in servers)}")
    engine = RemoteEngine(servers)
    if config.remote.max_staleness:
        state.parts["rollouts"] = engine
    return RemoteSampler(replace(sampler, engine=engine), learner, state)
