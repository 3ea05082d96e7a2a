"""Reinforcement learning with retrieval in the loop: PPO and GRPO.

A round reads as the algorithm: rollout -> score -> advantages -> update -> log -> save. GRPO is another advantage
and another loss of the same loop.
"""

import json
import math
import random
import statistics
import sys
import time
import zlib
from pathlib import Path

from r3lite import command
from r3lite.config import UsageError
from r3lite.episode import CUT_OFF, MALFORMED, Question
from r3lite.settings import PpoConfig

POLICY, REFERENCE = "policy", "reference"
EPISODES = "episodes.jsonl"


def train(config: PpoConfig) -> None:
    # Imported after the arguments are read: torch takes seconds to load.
    import torch

    from r3lite.datasets.qa import read_questions
    from r3lite.retrieval.retriever import build_retriever
    from r3lite.rewards.judge import build_judge
    from r3lite.rewards.reward import score
    from r3lite.rl.batch import Batch, Rollout
    from r3lite.training import loop

    check(config)
    rl, seed = config.rl, config.common.seed
    run = loop.Run("ppo", config, time.strftime("runs/ppo-%Y%m%d-%H%M%S"), logs=(EPISODES,))
    questions = read_questions(config.data.data, config.data.limit, config.data.skip_bad_rows)
    retrieve = build_retriever(config.retrieval, questions, skip_bad_rows=config.data.skip_bad_rows)
    judge = build_judge(config.judge, run.output, config.reward)
    torch.manual_seed(seed)  # its state is in checkpoints, though all that is drawn has streams of its own
    engine, learner, training, grant = build(config, [q.text for q in questions])
    training.data = f"{zlib.crc32(repr([(q.id, q.text, q.answers) for q in questions]).encode()):08x}"
    training.facts = {"algorithm": rl.algorithm, "questions": len(questions)}

    def one_round(number: int) -> tuple[dict, int]:
        """Rollout, score, advantages and update; the round's metrics and the tokens it read."""
        clock = Clock()
        grant.resume()
        drawn = draw(questions, number, rl.batch_size, rl.num_generations, seed)
        sequences = grant.attempt("sample", engine.run, *drawn, retrieve)
        clock.lap("rollout")
        episodes = [s.episode() for s in sequences]
        verdicts = judge.verdicts(episodes) if judge else [None] * len(episodes)
        scored = [score(e, config.reward, v) for e, v in zip(episodes, verdicts)]
        log_episodes(run.output / EPISODES, number, episodes, scored)
        clock.lap("score")
        # A missing reward is not a zero: an episode whose judge failed teaches nothing.
        rollouts = [
            Rollout(
                s.tokens,
                s.action_mask,
                s.logprobs,
                s.values,
                list(zip(s.step_ends, paid.steps)),
                i // rl.num_generations,
            )
            for i, (s, paid) in enumerate(zip(sequences, scored))
            if paid is not None
        ]
        measured = describe(sequences, episodes, scored)
        if rollouts:
            measured |= learner.learn(Batch.of(rollouts), seed=f"{seed}/{number}")
        clock.lap("update")
        return measured | (judge.counts() if judge else {}) | clock.laps, sum(len(s.tokens) for s in sequences)

    epochs = math.ceil(config.schedule.epochs * len(questions) / rl.batch_size)
    if loop.train(run, training, config.schedule.max_steps or epochs, one_round):
        print(f"done: {run.output / 'adapter'}; what it said: {run.output / EPISODES}")


def build(config: PpoConfig, questions: list[str]) -> tuple:
    """The rollout engine, the learner, what a checkpoint holds and the memory granted: one model with two adapters."""
    from r3lite import grant as granted
    from r3lite.memory import workloads
    from r3lite.models import activation_checkpointing, lora, packing, weights
    from r3lite.models.value_head import ValueHead
    from r3lite.policy import load_base
    from r3lite.protocols.registry import build_layout
    from r3lite.protocols.tokenizer import Tokenizer
    from r3lite.rl.algorithms import ALGORITHMS
    from r3lite.rl.learner import Learner
    from r3lite.rollout.engine import Engine
    from r3lite.rollout.sampling import Sampler
    from r3lite.training import loop, optim
    from r3lite.training.out_of_memory import Grant

    folder = weights.resolve_folder(config.model.model)
    tokenizer = Tokenizer.load(folder)
    layout = build_layout(tokenizer, config.protocol, config.lengths)
    # The first and the last in order of the alphabet have in common what all have.
    ends = min(questions), max(questions)
    plan = plan_memory(config, packing.common_prefix(*(layout.prompt(question) for question in ends)))
    model, precision = load_base(folder, config.model, config.memory, plan)
    model.eval()  # no dropout: what samples, what is compared with the reference and what learns are one policy
    reference = add_adapters(model, config)
    algorithm = ALGORITHMS[config.rl.algorithm](config.rl)
    critic = ValueHead(model.config.hidden_size).to(precision.device) if algorithm.has_critic else None
    groups = [optim.Group(lora.adapter_parameters(model, POLICY), config.optimizer.learning_rate)]
    if critic:
        named = {f"value_head.{name}": p for name, p in critic.named_parameters()}
        groups.append(optim.Group(named, config.rl.value_learning_rate))
    training = loop.Training(
        optimizer=optim.adamw(groups, config.optimizer.weight_decay),
        precision=precision,
        max_grad_norm=config.optimizer.max_grad_norm,
        save_adapter=lambda to: lora.save_adapter(model, POLICY, to, config.model.model),
    )
    temperature, autocast = config.sampling.temperature, precision.autocast
    memory_now = granted.Grant(plan.memory)
    engine = Engine(model, layout, Sampler(temperature), memory_now, critic, autocast)

    def apply(memory) -> None:
        activation_checkpointing.enable(model, granted.Grant(memory))
        memory_now.memory = memory

    grant = Grant(plan, workloads.fixed(config.memory, config.sampling), apply, training)
    learner = Learner(
        model,
        tokenizer.size,
        temperature,
        config.rl,
        algorithm,
        reference,
        precision,
        training.update,
        grant,
        critic,
    )
    training.explain = learner.explain_overflow
    return engine, learner, training, grant


def plan_memory(config: PpoConfig, shared: int = 0):
    """The memory plan of a round whose episodes all reach --max-length, and begin with `shared` tokens alike."""
    from r3lite.memory import workloads
    from r3lite.rl.algorithms import ALGORITHMS

    shape = config.rl, config.lora, config.lengths, config.retrieval, shared
    workload = workloads.rl_workload(config.model, *shape, critic=ALGORITHMS[config.rl.algorithm].has_critic)
    return workloads.make_plan(workload, config.memory, config.sampling)


def check(config: PpoConfig) -> None:
    """Refuses settings that contradict each other; UsageError says which."""
    from r3lite.rl.algorithms import ALGORITHMS

    if config.sampling.temperature == 0:
        raise UsageError("--temperature 0 always says the same; RL learns from differences: pass 1, or a little less")
    ALGORITHMS[config.rl.algorithm](config.rl)


def add_adapters(model, config: PpoConfig) -> str | None:
    """Switches the policy's adapter on; returns the name of the reference: the adapter it starts from, or the base."""
    from r3lite.models import lora

    reference = None
    if config.model.adapter:
        lora.load_adapter(model, POLICY, config.model.adapter, trainable=True)
        if config.rl.kl_beta:
            lora.load_adapter(model, REFERENCE, config.model.adapter, trainable=False)
            reference = REFERENCE
    else:
        print(
            "warning: without --adapter, RL starts from a model that was never taught the step format", file=sys.stderr
        )
        s = config.lora
        lora.add_adapter(
            model, POLICY, s.lora_r, s.lora_alpha, s.lora_dropout, s.lora_targets, s.rslora, config.common.seed
        )
    lora.set_adapter(model, POLICY)
    return reference


def draw(
    questions: list[Question], number: int, size: int, generations: int, seed: int
) -> tuple[list[Question], list[str]]:
    """The episodes of a round: each of its questions `generations` times, and a seed for each episode.

    Questions come in an order shuffled anew in each epoch. All follows from the seed and the round's number, so that
    a resumed run needs no memory of it.
    """
    drawn, seeds = [], []
    for i in range((number - 1) * size, number * size):
        order = list(range(len(questions)))
        random.Random(f"{seed}/epoch {i // len(order)}").shuffle(order)
        for k in range(generations):
            drawn.append(questions[order[i % len(order)]])
            seeds.append(f"{seed}/{i}/{k}")
    return drawn, seeds


def log_episodes(path: Path, number: int, episodes: list, scored: list) -> None:
    """Appends what the model said in a round and what it was paid for it."""
    lines = []
    for episode, paid in zip(episodes, scored):
        rewards = (
            {"rewards": None, "step_rewards": None}
            if paid is None
            else {"rewards": paid.parts, "step_rewards": paid.steps}
        )
        lines.append(json.dumps({"step": number, **episode.to_json(), **rewards}, ensure_ascii=False) + "\n")
    with open(path, "a", encoding="utf-8", newline="\n") as file:
        file.writelines(lines)


def describe(sequences: list, episodes: list, scored: list) -> dict[str, float]:
    """Metrics of a round's episodes, under TRL's names where it has one; missing rewards are left out of the means."""
    lengths = [sum(s.action_mask) for s in sequences]
    steps = [step for e in episodes for step in e.steps]
    paid = [p for p in scored if p is not None]
    totals = [sum(p.steps) for p in paid]
    measured = {
        "reward": statistics.fmean(totals) if totals else None,
        "reward_std": statistics.pstdev(totals) if totals else None,
        "missing_rewards": len(scored) - len(paid),
        "completions/mean_length": statistics.fmean(lengths),
        "completions/clipped_ratio": statistics.fmean(e.finish == CUT_OFF for e in episodes),
        "malformed_ratio": statistics.fmean(e.finish == MALFORMED for e in episodes),
        "format_adherence": statistics.fmean(not step.faults for step in steps),
        "searches": statistics.fmean(e.searches for e in episodes),
    }
    for name in sorted({name for p in paid for name in p.parts}):
        known = [p.parts[name] for p in paid if p.parts.get(name) is not None]  # no recall without gold paragraphs
        if known:
            measured[f"rewards/{name}/mean"] = statistics.fmean(known)
    return measured


class Clock:
    """Seconds of each stage of a round, as `time/<stage>`."""

    def __init__(self):
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.laps[f"time/{stage}"], self._last = now - self._last, now


def main(argv: list[str] | None = None) -> int:
    def plan(config: PpoConfig) -> str:
        check(config)
        return f"\nMemory, for episodes of {config.lengths.max_length} tokens\n{plan_memory(config).table()}"

    return command.run("ppo", PpoConfig(), train, argv, plan)


if __name__ == "__main__":
    sys.exit(main())
