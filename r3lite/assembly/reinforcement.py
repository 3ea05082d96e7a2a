"""Reinforcement learning with retrieval in the loop: PPO, GRPO and their variants.

`RLTrainer.step` is the algorithm: sample and score episodes -> advantages and updates -> metrics. `rl_round.py` samples
and scores, `rl/learner.py` updates, with the formulas of a file in `rl/algorithms`.
"""

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from r3lite.assembly import answer_round, rl_guidance, rl_questions, rl_setup, teacher
from r3lite.assembly.answer_round import AnswerSampler
from r3lite.assembly.local_client import client_maker
from r3lite.assembly.rl_guidance import Guidance
from r3lite.assembly.rl_round import RoundSampler
from r3lite.assembly.teacher import Teacher
from r3lite.assembly.validation import build_validation, read_held_out
from r3lite.core import command
from r3lite.core.config import UsageError, flag, flat
from r3lite.core.errors import R3LiteError
from r3lite.core.files import append_jsonl
from r3lite.core.spans import Spans, Stopwatch, build_spans
from r3lite.datasets.sources import entries_of, protocols_of, read_questions_of
from r3lite.devices.ranks import Ranks
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.rewards.judge import build_judge, note_on
from r3lite.rewards.registry import SEARCHING, named_rewards, weights_change_at
from r3lite.rl import algorithms
from r3lite.rl.batch import Batch
from r3lite.rl.learner import Learner
from r3lite.settings import PpoConfig
from r3lite.settings.rollout import is_greedy
from r3lite.training import loop, metrics
from r3lite.training.guard import Guard
from r3lite.training.oversight import Oversight
from r3lite.training.run_folder import RunFolder
from r3lite.training.state import TrainState

EPISODES = "episodes.jsonl"


@dataclass(frozen=True)
class RLTrainer:
    """Takes the rounds of a run: samples episodes, scores them and learns from them."""

    config: PpoConfig
    total: int  # rounds
    sampler: RoundSampler
    learner: Learner
    state: TrainState
    guard: Guard
    episodes_file: Path
    teacher: Teacher | None = None
    spans: Spans | None = None

    def step(self, number: int) -> tuple[dict, int]:
        """One round; returns its metrics, and how many tokens its episodes have."""
        watch = Stopwatch(self.spans)
        if weights_change_at(self.config.reward, number):
            self.guard.forget_rewards()
        sampled = self.sampler.sample(number, watch)
        if self.sampler.ranks.first:
            append_jsonl(self.episodes_file, sampled.records(number))
        record = sampled.metrics()
        self.learner.algorithm.kl.scale = self.guard.kl_scale
        if self.learner.budget:
            self.learner.budget.begin(number, self.guard.rollbacks)
        if rollouts := sampled.rollouts(self.config.rl.failed_below):
            if self.teacher:
                with watch.stage("teacher"):
                    batch = self.teacher.batch(rollouts, sampled.questions)
            else:
                batch = Batch.of(rollouts)
            with watch.stage("update"):
                record |= self.learner.learn(batch, seed=f"{self.config.common.seed}/{number}")
        judge = self.sampler.judge
        record |= (judge.counts() if judge else {}) | watch.laps
        if rounds := self.guard.first_rounds(record):
            rl_setup.warn_of_no_reward(self.config, rounds)
        return record, sampled.token_count

    def rehearse(self) -> None:
        """Runs an update on the longest episodes that a round may have, without its optimizer step."""
        in_turns = isinstance(self.teacher, teacher.TeacherInTurns)  # a cached one has no pass
        rl_setup.rehearse(self.learner, self.teacher.batch if in_turns else None)

    def explain_overflow(self) -> str:
        """Which layer overflowed first in the last micro-batch."""
        return self.learner.explain_overflow()


def train(config: PpoConfig, ranks: Ranks) -> None:
    """Runs RL in its run folder, from the first round or from a checkpoint."""
    check(config)
    if config.remote.rollout_server and ranks.size > 1:
        raise UsageError("--rollout-server needs a run in one process: start it without torchrun")
    output = time.strftime("runs/ppo-%Y%m%d-%H%M%S")
    with ExitStack() as ending, RunFolder("ppo", config, output, (EPISODES,), ranks) as run:
        questions = read_questions_of(config.data, config.mixture)
        rl_questions.warn_of_questions(config, questions)
        if config.rl.expand_limit and not any(question.gold for question in questions):
            cause = "--expand-limit needs gold paragraphs, but no question of --data or [[sources]] has any"
            raise R3LiteError(cause, "Remove it, or train on questions with supporting facts.")
        answer_round.check_questions(config, questions)
        protocols = protocols_of(config.protocol, config.mixture)
        asking = [question for question in questions if protocols[question.source].searches] or questions
        setup = Setup(config.retrieval, asking, config.common.seed, skip_bad_rows=config.data.skip_bad_rows)
        retrieve = build_retriever(setup)
        spans = build_spans(config.tracking) if ranks.first else None
        make_client = client_maker(config.model, config.memory)
        judge = build_judge(config.judge, run.output, config.reward, make_client, spans) if ranks.first else None
        torch.manual_seed(config.common.seed)  # checkpoints keep its state; all random draws have their own streams
        guard, held_out = Guard(config.guard, config.episodes_of_round), read_held_out(config, questions)
        traces, replay = rl_guidance.read(config), rl_guidance.build_buffer(config)
        parts = {"guard": guard} | ({"replay": replay} if replay else {})
        engine, learner, state = rl_setup.build(config, questions, held_out, traces, spans, ranks, **parts)
        validation = build_validation(config, held_out, engine, retrieve, ranks)
        by_question = {}
        if traces:
            by_question = ranks.shared(lambda: rl_guidance.usable(traces, config, questions, engine.layout, judge))
        guidance = None
        if by_question or replay:
            by_id = {question.id: question for question in questions}
            guidance = Guidance(config, by_id, by_question, replay, learner.mean_entropies)
        teacher_model = teacher.build(config, learner, engine.layout.tokenizer, questions)
        sampler_type = AnswerSampler if config.rl.learn == "answer" else RoundSampler
        sampler = sampler_type(config, questions, engine, retrieve, judge, guidance, setup.query_cache, ranks)
        if config.remote.rollout_server:
            from r3lite.assembly import remote_rollouts

            sampler = remote_rollouts.build(sampler, learner, state, setup, run.output)
            ending.callback(sampler.sampler.engine.close)
        rounds, file = config.rounds(len(questions)), run.output / EPISODES
        trainer = RLTrainer(config, rounds, sampler, learner, state, guard, file, teacher_model, spans)
        oversight = Oversight(
            run,
            state=state,
            guard=guard,
            settings=config.validation,
            total=trainer.total,
            validation=validation,
            spans=spans,
            penalizes_kl=config.rl.kl_beta > 0,
        )
        if loop.train(run, trainer, oversight, spans) and ranks.first:
            ended = rl_setup.outcome_of(config, metrics.read(run.output / metrics.FILE))
            print(f"{ended}: {run.output / 'adapter'}{oversight.note()}; answers: {file}{note_on(judge)}")


def check(config: PpoConfig) -> None:
    """Raises UsageError if settings contradict each other."""
    if is_greedy(config.sampling.temperature):
        cause = f"--temperature is {config.sampling.temperature:g}: all episodes of a question would be the same"
        raise UsageError(f"{cause}; pass 1, or a little less")
    named = named_rewards(config.reward)
    names = [entry["name"] for entry in entries_of(config.data, config.mixture)] or [""]
    protocols = protocols_of(config.protocol, config.mixture)
    # If a step may have several queries, hops do not limit them.
    chosen = [protocols[name] for name in names]
    one_query = all(p.most_queries == 1 and not p.names_sources for p in chosen)  # names_sources: of a graph
    if one_query and (least := config.reward.least_searches) > config.lengths.max_hops:
        raise UsageError(f"--least-searches is {least}; it must be at most --max-hops, {config.lengths.max_hops}")
    if not any(protocols[name].searches for name in names):
        what = "no source has" if config.mixture.sources else f"--format {config.protocol.format} does not have"
        if idle := [reward.name for reward in named if reward.function in SEARCHING]:
            raise UsageError(f"--rewards has {idle[0]}, which needs searches, but {what} any")
    for name in ("traces", "teacher_logprobs"):
        if config.mixture.sources and flat(config)[name]:
            raise UsageError(f"{flag(name)} needs --data, without [[sources]]")
    algorithms.check(config.rl, command.usual("ppo", config).rl, config.lengths)
    rl_guidance.check(config)
    answer_round.check(config)
    if config.remote.rollout_server:
        from r3lite.assembly import remote_rollouts

        remote_rollouts.check(config)
