"""One rank of the tests: runs the commands that it reads from its standard input, each with what the test changes.

A line is {"command", "arguments", "port", "changes"}; the exit status of the command is written to standard output.
`changes` names functions of this file, which patch the package in this process while the command runs.
"""

import contextlib
import faulthandler
import importlib
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator

import pytest
import torch

from r3lite.assembly.supervised import SFTTrainer
from r3lite.core.errors import R3LiteError
from r3lite.devices.cards import MEASURED, Speeds
from r3lite.devices.ranks import Group
from r3lite.rewards import reward
from r3lite.rl.advantages import whiten
from r3lite.rl.learner import Learner
from r3lite.rollout.engine import Engine
from r3lite.training import optim
from r3lite.training.state import TrainState

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
Patch = pytest.MonkeyPatch


def paid(patch: Patch) -> None:
    """A random model's episodes are all wrong: here each is paid by what it says, so that there is a gradient."""

    def score(episode, *_):
        drawn = zlib.crc32(repr([episode.question.id, *episode.steps]).encode()) % 4 / 3
        return reward.EpisodeReward([drawn] + [0.0] * (len(episode.steps) - 1), {"em": 0.0})

    patch.setattr(reward, "score", score)


def seldom_paid(patch: Patch) -> None:
    """As `paid`, but in a third of the groups all are paid alike, which are then replaced."""
    paid(patch)
    drawn = reward.score

    def score(episode, *_):
        if zlib.crc32(episode.question.id.encode()) % 3 == 0:
            return reward.EpisodeReward([0.0] * len(episode.steps), {"em": 0.0})
        return drawn(episode)

    patch.setattr(reward, "score", score)


def rehearsed(patch: Patch) -> None:
    """The largest pass is rehearsed on a CPU, too."""
    patch.setattr("r3lite.training.loop.REHEARSED", ("cpu",))


@contextlib.contextmanager
def undivided(ranks: Group) -> Iterator[None]:
    """What is worked on meanwhile is the rank's own."""
    ranks.rows_of_rank = lambda lengths: list(range(len(lengths)))
    try:
        yield
    finally:
        del ranks.rows_of_rank


def mean_of_local_means(patch: Patch) -> None:
    """Each rank's gradients are of the mean over its own tokens, and the ranks' are averaged: the usual mistake."""
    add_gradients = SFTTrainer.add_gradients

    def local(self, rows):
        local_rows = [rows[i] for i in self.ranks.rows_of_rank([len(row.tokens) for row in rows])]
        with undivided(self.ranks):
            loss_parts = add_gradients(self, local_rows)
        for parameter in optim.parameters(self.state.optimizer).values():
            parameter.grad /= SIZE
        return {name: share / SIZE for name, share in loss_parts.items()}

    patch.setattr(SFTTrainer, "add_gradients", local)


def count_of_local_tokens(patch: Patch) -> None:
    """The weights of a mini-batch's tokens are made of the rank's own rows."""
    add_gradients = Learner.add_gradients

    def local(self, batch):
        local_batch = batch.select(self.ranks.rows_of_rank([len(row) for row in batch.token_rows()]))
        with undivided(self.ranks):
            return add_gradients(self, local_batch)

    patch.setattr(Learner, "add_gradients", local)


def seeds_of_ranks(patch: Patch) -> None:
    """Random streams belong to ranks."""
    run = Engine.run

    def local(self, questions, seeds, *arguments):
        return run(self, questions, [f"rank {RANK}/{i}" for i in range(len(seeds))], *arguments)

    patch.setattr(Engine, "run", local)


def critic_of_each_rank(patch: Patch) -> None:
    """The gradients of the critic are not summed."""
    sum_gradients = Group.sum_gradients

    def update(self):
        parameters = optim.parameters(self.optimizer)
        sum_gradients(self.ranks, [p for name, p in parameters.items() if not name.startswith("value_head")])
        return self.precision.step(self.optimizer, parameters.values(), self.max_grad_norm)

    patch.setattr(TrainState, "update", update)


def whitened_on_each_rank(patch: Patch) -> None:
    """Advantages get mean 0 and variance 1 over the rank's own episodes."""

    def local(x, mask):
        is_local = torch.arange(len(x)) % SIZE == RANK
        return torch.where(is_local[:, None], whiten(x, mask & is_local[:, None]), whiten(x, mask & ~is_local[:, None]))

    patch.setattr("r3lite.rl.algorithms.ppo.whiten", local)
    patch.setattr(Learner, "micro_batches", lambda self, batch: [self.ranks.rows_of_rank([1] * len(batch))])


def last_rank_runs_out_of_memory(patch: Patch) -> None:
    """Once, on one rank alone, when it has computed a part."""
    loss, calls = {of: of.loss for of in (SFTTrainer, Learner)}, []

    def failing(of):
        def call(self, rows):
            calls.append(rows)
            if RANK == SIZE - 1 and len(calls) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 1 has too little.")
            return loss[of](self, rows)

        return call

    for of in loss:
        patch.setattr(of, "loss", failing(of))


def another_version_on_the_last_rank(patch: Patch) -> None:
    if RANK == SIZE - 1:
        patch.setattr("r3lite.__version__", "9.9")


def another_base_on_the_last_rank(patch: Patch) -> None:
    if RANK == SIZE - 1:
        patch.setattr("r3lite.training.run_folder.folder_fingerprint", lambda folder: "another")


def other_weights_on_the_last_rank(patch: Patch) -> None:
    if RANK == SIZE - 1:
        fingerprint = TrainState.weights_fingerprint
        patch.setattr(TrainState, "weights_fingerprint", lambda self: fingerprint(self) + 1)


def other_data_on_the_last_rank(patch: Patch) -> None:
    if RANK == SIZE - 1:
        patch.setattr("r3lite.assembly.supervised.fingerprint", lambda rows: "other")


def bad_data_on_the_last_rank(patch: Patch) -> None:
    """Which comes to it while the others are already waiting."""

    def read(config):
        time.sleep(1)
        raise R3LiteError("rows.jsonl, line 3: no messages", "Mend the line.", code="broken")

    if RANK == SIZE - 1:
        patch.setattr("r3lite.assembly.supervised.read_data", read)


def masks_are_noted(patch: Patch) -> None:
    """Each rank prints what its dropout has drawn."""
    step = SFTTrainer.step

    def noted(self, number):
        print(f"rank {RANK} step {number} draws {torch.rand(1).item()}", file=sys.__stderr__)
        return step(self, number)

    patch.setattr(SFTTrainer, "step", noted)


def run(job: dict) -> int:
    os.environ["MASTER_PORT"] = str(job["port"])
    dtypes = ("fp32", "fp16", "bf16")
    speeds = Speeds("device of tests", dict.fromkeys(dtypes, 1e10), dict.fromkeys(dtypes, 1e11), 1e-6, MEASURED)
    with Patch.context() as patch, contextlib.redirect_stdout(sys.stderr):
        patch.setattr("r3lite.memory.plan.speeds_of", lambda device, dtype, product: speeds)
        for name in job["changes"]:
            globals()[name](patch)
        try:
            return importlib.import_module(f"r3lite.{job['command']}").main(job["arguments"])
        finally:
            faulthandler.cancel_dump_traceback_later()  # a command that failed would end this process by it
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
