"""Reinforcement learning with retrieval in the loop: PPO, GRPO and their variants.

`RLTrainer.step` reads as the algorithm: rollout -> score -> advantages and update -> log. What an algorithm computes
is in `rl/algorithms`, a file each.
"""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from r3lite import command
from r3lite.config import UsageError
from r3lite.episode import CUT_OFF, Episode, Question, Retrieve
from r3lite.settings import PpoConfig

if TYPE_CHECKING:  # torch is loaded after the arguments are read, so that --help answers at once
    from r3lite.rewards.judge import Judge
    from r3lite.rewards.reward import Scored
    from r3lite.rl.batch import Rollout
    from r3lite.rl.learner import Learner
    from r3lite.rollout.engine import Engine
    from r3lite.rollout.sequence import Sequence
    from r3lite.training.guard import Guard
    from r3lite.training.state import TrainState

EPISODES = "episodes.jsonl"


class RLTrainer:
    """Takes the rounds of a run: episodes are sampled, paid and learned from."""

    def __init__(
        self,
        config: PpoConfig,
        questions: list[Question],
        engine: "Engine",
        retrieve: Retrieve,
        judge: "Judge | None",
        learner: "Learner",
        state: "TrainState",
        guard: "Guard",
        episodes_file: Path,
    ):
        self.config, self.questions, self.engine, self.retrieve = config, questions, engine, retrieve
        self.judge, self.learner, self.state, self.guard = judge, learner, state, guard
        self.episodes_file = episodes_file
        self.total = config.rounds(len(questions))

    def step(self, number: int) -> tuple[dict, int]:
        """One round; its metrics, and how many tokens its episodes have."""
        from r3lite.datasets.order import questions_of_round
        from r3lite.files import append_jsonl
        from r3lite.rewards.rounds import episode_records, round_metrics, turns_of
        from r3lite.rl.batch import Batch
        from r3lite.training.metrics import Stopwatch

        rl, seed, watch = self.config.rl, self.config.common.seed, Stopwatch()
        questions, seeds = questions_of_round(self.questions, number, rl.batch_size, rl.num_generations, seed)
        sequences = self.learner.grant.attempt("sample", self.engine.run, questions, seeds, self.retrieve)
        watch.lap("rollout")
        episodes = [sequence.episode() for sequence in sequences]
        scored = self.score(episodes)
        watch.lap("score")
        kept, told = None, {}
        if rl.refill_limit:
            sequences, scored, kept, told = self.refill(number, sequences, scored)
            episodes = [sequence.episode() for sequence in sequences]
            watch.lap("refill")
        append_jsonl(self.episodes_file, episode_records(number, episodes, scored, kept, rl.num_generations))
        metrics = round_metrics(episodes, scored, [turns_of(s.tokens, s.action_mask) for s in sequences]) | told
        self.learner.algorithm.kl.scale = self.guard.kl_scale
        if rollouts := rewarded_rollouts(sequences, scored, rl.num_generations, kept):
            metrics |= self.learner.learn(Batch.of(rollouts), seed=f"{seed}/{number}")
        watch.lap("update")
        counts = self.judge.counts() if self.judge else {}
        return metrics | counts | watch.laps, sum(len(s.tokens) for s in sequences)

    def refill(
        self, number: int, sequences: "list[Sequence]", scored: "list[Scored | None]"
    ) -> "tuple[list[Sequence], list[Scored | None], set[int], dict[str, float]]":
        """All episodes of the round with those that replace groups without variance, what they are paid, which groups
        are learned from, and metrics."""
        from r3lite.datasets.order import questions_of_refill
        from r3lite.rl.refill import refill

        rl, seed, used = self.config.rl, self.config.common.seed, {s.question.id for s in sequences}

        def paid(sequences, scored):
            return [((s, p), p and p.total) for s, p in zip(sequences, scored, strict=True)]

        def more(attempt: int, groups: int):
            drawn = questions_of_refill(self.questions, number, attempt, groups, rl.num_generations, seed, used)
            sequences = self.learner.grant.attempt("sample", self.engine.run, *drawn, self.retrieve)
            used.update(s.question.id for s in sequences)
            return paid(sequences, self.score([s.episode() for s in sequences]))

        done = refill(paid(sequences, scored), more, rl.num_generations, rl.refill_limit)
        sequences, scored = map(list, zip(*done.episodes, strict=True))
        return sequences, scored, done.kept, done.metrics

    def score(self, episodes: list[Episode]) -> "list[Scored | None]":
        """What each episode is paid; None, a missing reward, if a judge was needed and failed."""
        from r3lite.rewards.reward import score

        verdicts = self.judge.verdicts(episodes) if self.judge else [None] * len(episodes)
        return [score(e, self.config.reward, v) for e, v in zip(episodes, verdicts, strict=True)]

    def explain_overflow(self) -> str:
        """Which layer overflowed first in the last micro-batch."""
        return self.learner.explain_overflow()


def rewarded_rollouts(
    sequences: "list[Sequence]", scored: "list[Scored | None]", generations: int, kept: set[int] | None = None
) -> "list[Rollout]":
    """Episodes in numbers, of all groups or of those in `kept`.

    One whose judge failed is left out: a missing reward is not a zero, and teaches nothing.
    """
    from r3lite.rl.batch import Rollout

    return [
        Rollout(
            s.tokens, s.action_mask, s.logprobs, s.values, list(zip(s.step_ends, paid.steps)), i // generations,
            cut_off=s.finish == CUT_OFF,
        )
        for i, (s, paid) in enumerate(zip(sequences, scored, strict=True))
        if paid is not None and (kept is None or i // generations in kept)
    ]  # fmt: skip


def train(config: PpoConfig) -> None:
    # Imported after the arguments are read: torch takes seconds to load.
    import torch

    from r3lite import rl_setup
    from r3lite.datasets.qa import read_questions
    from r3lite.retrieval.retriever import build_retriever
    from r3lite.retrieval.setup import Setup
    from r3lite.rewards.judge import build_judge, note_on
    from r3lite.training import loop
    from r3lite.training.guard import Guard
    from r3lite.training.oversight import Oversight
    from r3lite.training.run_folder import RunFolder
    from r3lite.validation import build_validation, read_held_out

    check(config)
    with RunFolder("ppo", config, time.strftime("runs/ppo-%Y%m%d-%H%M%S"), logs=(EPISODES,)) as run:
        questions = read_questions(config.data.data, config.data.limit, config.data.skip_bad_rows)
        setup = Setup(config.retrieval, questions, config.common.seed, skip_bad_rows=config.data.skip_bad_rows)
        retrieve = build_retriever(setup)
        judge = build_judge(config.judge, run.output, config.reward)
        torch.manual_seed(config.common.seed)  # its state is in checkpoints; all that is drawn has its own streams
        guard, held_out = Guard(config.guard, config.episodes_of_round), read_held_out(config, questions)
        engine, learner, state = rl_setup.build(config, questions, held_out, guard=guard)
        validation = build_validation(config, held_out, engine, retrieve)
        trainer = RLTrainer(config, questions, engine, retrieve, judge, learner, state, guard, run.output / EPISODES)
        oversight = Oversight(run, state, guard, config.validation, trainer.total, validation)
        if loop.train(run, trainer, oversight):
            told = f"done: {run.output / 'adapter'}{oversight.note()}; what it said: {run.output / EPISODES}"
            print(told + note_on(judge))


def check(config: PpoConfig) -> None:
    """Refuses settings that contradict each other; UsageError says which."""
    from r3lite.rl import algorithms

    if config.sampling.temperature == 0:
        raise UsageError("--temperature 0 always says the same; RL learns from differences: pass 1, or a little less")
    if (least := config.reward.least_searches) > config.lengths.max_hops:
        raise UsageError(f"--least-searches is {least}, and --max-hops {config.lengths.max_hops} allows fewer")
    algorithms.check(config.rl, command.usual("ppo", config).rl, config.lengths)


def main(argv: list[str] | None = None) -> int:
    def plan(config: PpoConfig) -> str:
        from r3lite.rl_setup import plan_memory

        check(config)
        told, held_out = plan_memory(config).table(), config.validation
        if held_out.eval_data:
            told += f"\n\nValidation on up to {held_out.eval_questions} questions of {held_out.eval_data}, before the "
            told += f"first round, every {held_out.eval_every} and after the last; its time is not in the prediction"
        return f"\nMemory, for episodes of {config.lengths.max_length} tokens\n{told}"

    return command.run("ppo", PpoConfig(), train, argv, plan)


if __name__ == "__main__":
    sys.exit(main())
