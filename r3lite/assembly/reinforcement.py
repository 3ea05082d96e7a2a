"""Reinforcement learning with retrieval in the loop: PPO, GRPO and their variants.

`RLTrainer.step` is the algorithm: sample and score episodes -> advantages and updates -> metrics. `rl_round.py` samples
and scores, `rl/learner.py` updates, with the formulas of a file in `rl/algorithms`.
"""

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from r3lite.assembly import answer_round, rl_guidance, rl_questions, rl_setup, teacher
from r3lite.assembly.local_client import client_maker
from r3lite.assembly.rl_round import Round, RoundSampler
from r3lite.assembly.samplers import sampler_of
from r3lite.assembly.teacher import Teacher
from r3lite.assembly.validation import Validation, build_validation, read_held_out
from r3lite.core import run_files
from r3lite.core.config import UsageError, flag, flat
from r3lite.core.episode import Question
from r3lite.core.files import append_jsonl
from r3lite.core.spans import NO_SPANS, Spans, Stopwatch, build_spans
from r3lite.datasets.rl_questions import read_rl_questions
from r3lite.datasets.sources import entries_of, protocols_of
from r3lite.devices.ranks import Ranks
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.rewards.judge import build_judge, missing_verdicts_note
from r3lite.rewards.registry import SEARCH_REWARDS, named_rewards, weights_change_at
from r3lite.rl import algorithms
from r3lite.rl.batch import Batch
from r3lite.rl.learner import Learner
from r3lite.settings import PpoConfig
from r3lite.settings.rollout import is_greedy
from r3lite.training import loop, metrics
from r3lite.training.guard import Guard
from r3lite.training.oversight import Oversight
from r3lite.training.run_folder import RunFolder
from r3lite.training.state import Stateful, TrainState


@dataclass(frozen=True)
class RLTrainer:
    """Takes the rounds of a run: samples episodes, scores them and learns from them.

    `guard` detects a collapse of the policy, after which the best weights may be restored (training/oversight.py).
    """

    config: PpoConfig
    total: int  # rounds of the whole run
    round_sampler: RoundSampler
    learner: Learner
    state: TrainState
    guard: Guard
    episodes_file: Path
    teacher: Teacher | None = None
    spans: Spans = NO_SPANS

    def step(self, number: int) -> tuple[dict, int]:
        """Takes one round; returns its metrics, and the number of tokens of its episodes."""
        watch = Stopwatch(self.spans)
        # The guard compares the rewards of rounds. If the rewards have other weights from this round on, it must forget
        # those of earlier rounds.
        if weights_change_at(self.config.reward, number):
            self.guard.forget_rewards()
        sampled = self.round_sampler.sample(number, watch)
        if self.round_sampler.ranks.first:
            append_jsonl(self.episodes_file, sampled.records(number))
        record = sampled.metrics()
        self.learner.algorithm.kl_multiplier.scale = self.guard.kl_scale  # a rollback may raise it
        if self.learner.budget:
            self.learner.budget.begin(number)
        record |= self._learn(number, sampled, watch)
        if self.round_sampler.judge:
            record |= self.round_sampler.judge.counts()
        record |= watch.laps  # the seconds of each stage
        # Once, after the guard's first `start_rounds` rounds, this returns their metrics; in every other round [].
        metrics_of_first_rounds = self.guard.first_rounds(record)
        if metrics_of_first_rounds:
            rl_setup.warn_of_no_reward(self.config, metrics_of_first_rounds)
        return record, sampled.token_count

    def _learn(self, number: int, sampled: Round, watch: Stopwatch) -> dict[str, float]:
        """Takes the optimizer steps of a round and returns their metrics.

        Takes no step and returns no metrics if there is no episode to learn from: if all rewards are missing, or if,
        with --refill-limit or --learn answer, all groups lack variance (with verifree: if no reward is above 0).
        """
        rollouts = sampled.rollouts(self.config.rl.failed_below)
        if not rollouts:
            return {}
        if self.teacher:
            with watch.stage("teacher"):
                # A loaded teacher adds its distributions to failed episodes. A cached one replaces failed episodes by
                # trajectories that have its distributions.
                batch = self.teacher.batch(rollouts, sampled.question_ids)
        else:
            batch = Batch.of(rollouts)
        with watch.stage("update"):
            return self.learner.learn(batch, seed=f"{self.config.common.seed}/{number}")

    def rehearse(self) -> None:
        """Runs an update on the longest episodes that a round may have, without its optimizer step."""
        make_taught_batch = None
        # A `TeacherInTurns` runs a model, so its pass is tried out, too. A `CachedTeacher` has read its distributions
        # from files.
        if isinstance(self.teacher, teacher.TeacherInTurns):
            make_taught_batch = self.teacher.batch
        rl_setup.rehearse(self.learner, make_taught_batch)

    def explain_overflow(self) -> str:
        """Runs the last micro-batch again without gradients, and returns which layer overflowed first."""
        return self.learner.explain_overflow()


def train(config: PpoConfig, ranks: Ranks) -> None:
    """Runs RL in its run folder, from the first round or from a checkpoint."""
    check(config)
    if config.remote.rollout_server and ranks.size > 1:
        raise UsageError(
            "--rollout-server needs a run in one process: start it without torchrun", code="workers-with-processes"
        )
    output = time.strftime("runs/ppo-%Y%m%d-%H%M%S")
    with RunFolder("ppo", config, output, logs=(run_files.EPISODES,), ranks=ranks) as run:
        trainer, validation = build_trainer(config, run=run, ranks=ranks)
        oversight = Oversight(
            run=run,
            state=trainer.state,
            guard=trainer.guard,
            settings=config.validation,
            total=trainer.total,
            validation=validation,
            spans=trainer.spans,
            penalizes_kl=config.rl.kl_beta > 0 and trainer.learner.algorithm.kl_in is not None,
        )
        with closing(trainer.round_sampler.engine):
            completed = loop.train(run, trainer, oversight=oversight, spans=trainer.spans)
        if completed and ranks.first:
            ending = rl_setup.ending_of(config, metrics.read(run.output / run_files.METRICS))
            adapter = run.output / "adapter"
            answers = f"answers: {trainer.episodes_file}{missing_verdicts_note(trainer.round_sampler.judge)}"
            print(f"{ending}: {adapter}{oversight.note()}; {answers}")


def build_trainer(config: PpoConfig, run: RunFolder, ranks: Ranks) -> tuple[RLTrainer, Validation | None]:
    """Reads the data of a run and loads its models; returns its trainer, and its validation if it has one."""
    questions, demonstrations = read_rl_questions(config)
    rl_questions.check(config, questions)
    retrieval = retrieval_setup(config, questions)
    retrieve = build_retriever(retrieval)
    spans = build_spans(config.tracking.track_spans) if ranks.first else NO_SPANS
    judge = None
    if ranks.first:
        make_client = client_maker(config.model, config.memory)
        judge = build_judge(config.judge, run.output, reward=config.reward, make_client=make_client, spans=spans)
    # RL draws nothing from torch's global generator. But checkpoints save its state, which must be equal in equal runs.
    torch.manual_seed(config.common.seed)
    guard = Guard(config.guard, config.episodes_of_round)
    held_out = read_held_out(config, questions)
    traces = rl_guidance.traces_of(config)  # episodes of a teacher
    replay = rl_guidance.build_buffer(config)
    parts: dict[str, Stateful] = {"guard": guard}  # further parts of checkpoints
    if replay:
        parts["replay"] = replay
    engine, learner, state = rl_setup.build_learning(
        config,
        questions,
        held_out=held_out,
        traces=traces,
        spans=spans,
        ranks=ranks,
        parts=parts,
    )
    validation = build_validation(config, held_out, engine=engine, retrieve=retrieve, ranks=ranks)
    guidance = rl_guidance.build_guidance(
        config,
        questions,
        traces=traces,
        replay=replay,
        layout=engine.layout,
        judge=judge,
        ranks=ranks,
        mean_entropies=learner.mean_entropies,
    )
    teacher_of_run = teacher.build_teacher(config, learner, tokenizer=engine.layout.tokenizer, questions=questions)
    # RoundSampler or, with --learn answer, another class whose further fields are set already.
    sampler_class = sampler_of(config, questions, demonstrations, engine=engine, learner=learner)
    round_sampler = sampler_class(
        config=config,
        questions=questions,
        engine=engine,
        retrieve=retrieve,
        judge=judge,
        guidance=guidance,
        cache=retrieval.query_cache,
        ranks=ranks,
    )
    if config.remote.rollout_server:
        from r3lite.assembly import remote_rollouts

        round_sampler = remote_rollouts.build_remote_sampler(
            round_sampler,
            local=engine,
            learner=learner,
            state=state,
            setup=retrieval,
            output=run.output,
        )
    trainer = RLTrainer(
        config=config,
        total=config.rounds(len(questions)),
        round_sampler=round_sampler,
        learner=learner,
        state=state,
        guard=guard,
        episodes_file=run.output / run_files.EPISODES,
        teacher=teacher_of_run,
        spans=spans,
    )
    return trainer, validation


def retrieval_setup(config: PpoConfig, questions: list[Question]) -> Setup:
    """Returns the setup of the retriever for the questions whose protocols search; for all if no protocol does."""
    protocols = protocols_of(config.protocol, config.mixture)
    searching_questions = [question for question in questions if protocols[question.source].can_search]
    return Setup(
        config.retrieval,
        searching_questions or questions,  # a retriever is built even if nothing searches, perhaps of their paragraphs
        config.common.seed,
        skip_bad_rows=config.data.skip_bad_rows,
    )


def check(config: PpoConfig) -> None:
    """Raises UsageError if settings contradict each other."""
    if is_greedy(config.sampling.temperature):
        cause = f"--temperature is {config.sampling.temperature:g}: all episodes of a question would be the same"
        raise UsageError(f"{cause}; pass 1, or a little less", code="greedy-samples")
    check_searches(config)
    for name in ("traces", "teacher_logprobs"):
        if config.mixture.sources and flat(config)[name]:
            raise UsageError(f"{flag(name)} needs --data, without [[sources]]", code="setting-with-sources")
    algorithms.check(config.rl, config.set_by_user, config.lengths)
    rl_guidance.check(config)
    answer_round.check(config)
    if config.remote.rollout_server:
        from r3lite.assembly import remote_rollouts

        remote_rollouts.check(config)


def check_searches(config: PpoConfig) -> None:
    """Raises UsageError if a reward needs searches and no protocol of the run has any.

    Also raises it if --least-searches asks for more searches than an episode can have.
    """
    rewards = named_rewards(config.reward)
    # Without [[sources]] the only protocol is that of --format, which `protocols_of` has under the empty name.
    names = [entry["name"] for entry in entries_of(config.data, config.mixture)] or [""]
    protocols = protocols_of(config.protocol, config.mixture)
    protocols_in_use = [protocols[name] for name in names]
    # --max-hops limits the number of steps that search. That is the number of searches if no step has more than one.
    one_search_a_step = all(
        protocol.most_queries == 1 and not protocol.searches_by_graph for protocol in protocols_in_use
    )
    least_searches = config.reward.least_searches
    if one_search_a_step and least_searches > config.lengths.max_hops:
        raise UsageError(
            f"--least-searches is {least_searches}; it must be at most --max-hops, {config.lengths.max_hops}",
            code="searches-beyond-hops",
        )
    if any(protocol.can_search for protocol in protocols_in_use):
        return
    searching_rewards = [reward.name for reward in rewards if reward.function in SEARCH_REWARDS]
    if searching_rewards:
        reason = f"--format {config.protocol.format} does not have any"
        if config.mixture.sources:
            reason = "no source has any"
        raise UsageError(
            f"--rewards has {searching_rewards[0]}, which needs searches, but {reason}",
            code="reward-without-searches",
        )
