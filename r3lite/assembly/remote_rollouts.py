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
from r3lite.rollout.remote import LARGEST, REMEDY, RemoteEngine, Worker
from r3lite.rollout.vllm import VllmServer
from r3lite.rollout.wire import Adapter
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
        """As RoundSampler.sample."""
        sampler, engine, config = self.sampler, self.sampler.engine, self.sampler.config
        late, size = config.remote.max_staleness, config.rl.batch_size
        if late and engine.adapter and not engine.ahead:  # resumed, with the adapter that the checkpoint has kept
            engine.go_ahead(*sampler.order.of_round(number, size), sampler.retrieve)
        with tempfile.TemporaryDirectory(prefix="r3lite-") as folder:
            self.state.save_adapter(Path(folder))
            engine.adapter = Adapter.saved(Path(folder))
        made = sampler.sample(number, watch)
        if self.learner.value_head is not None:
            with watch.stage("values"):
                self._value(made)
        if late and number < config.rounds(len(sampler.questions)):
            engine.go_ahead(*sampler.order.of_round(number + 1, size), sampler.retrieve)
        return replace(made, extra_metrics=made.extra_metrics | engine.metrics())

    def _value(self, made: Round) -> None:
        """Gives the episodes what the critic says of them now, as it was not there when they were sampled."""
        batch = Batch.of([Rollout(s.tokens, s.action_mask, s.logprobs, s.values, [], 0) for s in made.sequences])
        found = self.learner.grant.attempt("update", state_values, self.learner, batch)
        for sequence, values, mask in zip(made.sequences, found, batch.action_mask, strict=True):
            sequence.values = values[mask].tolist()


@torch.no_grad()
def state_values(learner: Learner, batch: Batch) -> torch.Tensor:
    """The critic's values [B, T] of the states before the action tokens."""
    found = torch.zeros_like(batch.values)
    with learner.precision.autocast():
        for rows in learner.micro_batches(batch):
            part = batch.rows(rows)
            hidden, _ = action_states(learner.model, part)
            found[rows] = part.spread(learner.value_head(hidden).float().cpu())
    return found


def check(config: PpoConfig) -> None:
    """Refuses settings beside which --max-staleness 1 would not be what it says."""
    rl, late = config.rl, config.remote.max_staleness
    if late and rl.importance_cap is None:
        raise UsageError("--max-staleness 1 needs an --importance-cap, such as 2")
    if late and ALGORITHMS[rl.algorithm].has_replay:
        raise UsageError(f"--max-staleness 1 does not work with {rl.algorithm}, which replays episodes: pass 0")
    if late and rl.kl_budget:
        raise UsageError("--max-staleness 1 does not work with --kl-budget, which measures the last update: pass 0")
    if late and config.validation.eval_data and config.guard.guard == "roll-back":
        raise UsageError("--max-staleness 1 does not work with rollbacks to the best --eval-data: pass --guard warn")


def plan(config: PpoConfig) -> str:
    """What a run would do, for --dry-run."""
    servers, late = ", ".join(config.remote.rollout_server), config.remote.max_staleness
    which = "the adapter before the last update" if late else "the newest adapter"
    cap = f"importance weights of at most {config.rl.importance_cap:g}" if config.rl.importance_cap else "no correction"
    return f"\n\nEpisodes are sampled by {servers} (not contacted now), each round with {which}; {cap}"


def build(sampler: RoundSampler, learner: Learner, state: TrainState, setup: Setup, output: Path) -> RemoteSampler:
    """The same rounds, sampled by the servers of the settings, each of which is asked what it is."""
    config, local = sampler.config, sampler.engine
    base = weights.fingerprint(weights.resolve_folder(config.model.model))
    facts = facts_of(config, base, local.grant.memory.nf4, local.layouts, setup)
    servers, headers = [], bearer(TOKEN)
    for url in config.remote.rollout_server:
        link = Link(url.rstrip("/"), REMEDY, config.remote.rollout_timeout, LARGEST, headers)
        version = link.ask("/version", None, "a rollout server", lambda reply: reply)
        if "r3lite" in version:
            servers.append(Worker(link, facts, local.layout_of))
        elif "version" in version:
            servers.append(VllmServer(link, config, local.layout_of, output))
        else:
            raise R3LiteError(f"{url} is neither an r3lite rollout worker nor a vLLM server", REMEDY)
    say(f"episodes are sampled by {', '.join(server.check() for server in servers)}")
    engine = RemoteEngine(servers)
    if config.remote.max_staleness:
        state.parts["rollouts"] = engine
    return RemoteSampler(replace(sampler, engine=engine), learner, state)
