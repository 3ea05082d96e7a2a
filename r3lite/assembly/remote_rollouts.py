"""Rounds of RL whose episodes are sampled on other machines: with the newest adapter, or one round ahead with the
adapter before it.

The requests are in `rollout/remote.py` and `rollout/vllm.py`; what a worker answers is in `rollout_service.py`.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from r3lite.assembly.rl_round import RoundSampler
from r3lite.assembly.rollout_service import facts_of
from r3lite.core.config import UsageError
from r3lite.core.episode import Question
from r3lite.core.errors import R3LiteError
from r3lite.core.listening import TOKEN, bearer
from r3lite.core.terminal import say
from r3lite.llm.http_client import Link
from r3lite.models import weights
from r3lite.retrieval.setup import Setup
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.rl.batch import Batch, Rollout, action_states
from r3lite.rl.learner import Learner
from r3lite.rollout.engine import Engine
from r3lite.rollout.remote import LARGEST, REMEDY, RemoteEngine, RolloutWorker
from r3lite.rollout.sequence import Sequence
from r3lite.rollout.vllm import VllmServer
from r3lite.settings import PpoConfig
from r3lite.training.state import TrainState


def add_values(learner: Learner, sequences: list[Sequence]) -> None:
    """Sets the critic's values in the episodes, since the servers run no critic."""
    # The values depend on neither rewards nor groups.
    batch = Batch.of([Rollout(sequence, token_rewards=[], group=0) for sequence in sequences])
    values = learner.grant.run_within_memory("update", state_values, learner, batch)
    for sequence, row_values, mask in zip(sequences, values, batch.action_mask, strict=True):
        sequence.values = row_values[mask].tolist()


@torch.no_grad()
def state_values(learner: Learner, batch: Batch) -> torch.Tensor:
    """Returns the critic's values [B, T] of the states before the action tokens, 0 at other tokens."""
    values = torch.zeros_like(batch.values)
    with learner.precision.autocast():
        for rows in learner.micro_batches(batch):
            part = batch.select(rows)
            hidden, _ = action_states(learner.model, part)
            values[rows] = part.spread(learner.value_head(hidden).float().cpu())
    return values


def check(config: PpoConfig) -> None:
    """Refuses settings that do not work with --max-staleness 1."""
    rl = config.rl
    if not config.remote.max_staleness:
        return
    if rl.importance_cap is None:
        raise UsageError("--max-staleness 1 needs an --importance-cap, such as 2", code="stale-without-cap")
    if ALGORITHMS[rl.algorithm].has_replay:
        raise UsageError(
            f"--max-staleness 1 does not work with {rl.algorithm}, which replays episodes: pass 0", code="stale-replay"
        )
    if rl.kl_budget:
        raise UsageError(
            "--max-staleness 1 does not work with --kl-budget, which measures the last update: pass 0",
            code="stale-kl-budget",
        )
    if config.validation.eval_data and config.guard.guard == "roll-back":
        raise UsageError(
            "--max-staleness 1 does not work with rollbacks to the best --eval-data: pass --guard warn",
            code="stale-rollback",
        )


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


def build_remote_sampler(
    sampler: RoundSampler,
    local: Engine,
    learner: Learner,
    state: TrainState,
    setup: Setup,
    output: Path,
) -> RoundSampler:
    """Returns a copy of a sampler that samples on the servers of the settings, not in the `local` engine."""
    config = sampler.config
    facts = facts_of(
        config,
        base=weights.fingerprint(weights.resolve_folder(config.model.model)),
        nf4=local.grant.memory.nf4,
        layouts=local.layouts,
        setup=setup,
    )
    servers = [_server(url, config, facts=facts, local=local, output=output) for url in config.remote.rollout_server]
    say(f"episodes are sampled by {', '.join(server.check() for server in servers)}")
    is_ahead = config.remote.max_staleness > 0
    last = config.rounds(len(sampler.questions))

    def draw_ahead(number: int) -> tuple[list[Question], list[str]]:
        """Returns the questions and seeds of a round; none after the last round."""
        if number > last:
            return [], []
        return sampler.order.of_round(number, config.rl.batch_size)

    draw = draw_ahead if is_ahead else None
    engine = RemoteEngine(servers, state.save_adapter, draw)
    if is_ahead:
        state.parts["rollouts"] = engine
    critic_values = None
    if learner.value_head is not None:
        critic_values = partial(add_values, learner)
    return replace(sampler, engine=engine, add_values=critic_values)


def _server(
    url: str,
    config: PpoConfig,
    facts: dict[str, str],
    local: Engine,
    output: Path,
) -> RolloutWorker | VllmServer:
    """Asks a server what it is, and returns its client. Raises R3LiteError if it is neither a worker nor vLLM."""
    link = Link(
        url.rstrip("/"),
        remedy=REMEDY,
        seconds=config.remote.rollout_timeout,
        max_bytes=LARGEST,
        headers=bearer(TOKEN),
    )
    version = link.ask("/version", None, server="a rollout server", read=lambda reply: reply)
    if "r3lite" in version:
        return RolloutWorker(link, facts, local.layout_of)
    if "version" in version:
        return VllmServer(link, config, layout_of=local.layout_of, output=output)
    raise R3LiteError(f"{url} is neither an r3lite rollout worker nor a vLLM server", REMEDY, code="not-a-worker")
