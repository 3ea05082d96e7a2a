"""Estimates, before any RL, what RL could gain with an adapter: from sampled answers and the noise of gradients.

    python -m bench.headroom --adapter runs/sft --data dev.jsonl --preset hotpotqa --temperature 0.7
    ... --questions 200 --num-generations 16    # more samples
    ... --groups 0                              # without gradients

Takes the flags of r3lite.ppo that decide what is sampled. Draws --questions questions of the data by --seed. Answers
each greedily, as r3lite.evaluate does, and --num-generations times by sampling. For the first --groups questions also
computes gradients of RLOO's loss, with exact match and with recall as rewards, to see how noisy they are and whether
the two agree. Adds a run to --output and prints tables; bench/headroom_numbers.py explains the numbers.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bench import records
from bench.headroom_numbers import Answer, GradientSums, Row, gradient_summary, summary, tables
from bench.recipe_settings import name_of
from r3lite.assembly import reinforcement, rl_setup
from r3lite.assembly.rl_round import sample_on_ranks
from r3lite.assembly.validation import greedy
from r3lite.core.answer_match import answer_scores
from r3lite.core.config import check_required, flag, sections
from r3lite.core.episode import Episode, Question, Retrieve
from r3lite.core.errors import NotFinite, R3LiteError, UsageError
from r3lite.core.invocation import build_parser, resolve
from r3lite.datasets.sources import protocols_of, read_questions_of
from r3lite.devices.precision import Precision
from r3lite.devices.ranks import ALONE
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.rl.batch import Batch, Rollout
from r3lite.rl.learner import Learner
from r3lite.rollout.engine import Engine
from r3lite.rollout.sequence import Sequence as SampledSequence
from r3lite.settings import PpoConfig, RLSettings
from r3lite.training import optim

# The settings of ppo that decide what is sampled: whole sections, and single settings of other sections.
SAMPLING_SECTIONS = ("model", "memory", "data", "mixture", "retrieval", "protocol", "lengths", "sampling", "lora")
SAMPLING_SETTINGS = ("preset", "config", "seed", "batch_size", "num_generations", "micro_batch_size")


@dataclass(frozen=True)
class Options:
    """The flags of this bench that ppo does not have."""

    questions: int  # number of questions that are drawn
    groups: int  # number of questions that also give gradients
    output: Path


@dataclass(frozen=True)
class Group:
    """The N sampled episodes of a question, and their rewards."""

    rollouts: list[Rollout]  # without rewards
    rewards: dict[str, list[float]]  # [N] by kind of reward: em, recall


@dataclass(frozen=True)
class Sampled:
    """The answers of all questions, and the episodes of the first ones."""

    rows: list[Row]  # one for each question
    groups: list[Group]  # one for each of the first questions
    failures: int  # number of questions that are left out because the retriever failed


def parse(argv: Sequence[str] | None) -> tuple[PpoConfig, Options]:
    """Returns the settings of ppo, and the options of this bench.

    Raises UsageError for a flag of ppo that has no effect on what is sampled.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--questions", type=int, default=100, metavar="N", help="questions that are drawn [100]")
    parser.add_argument(
        "--groups", type=int, default=32, metavar="G", help="of these, questions that give gradients; 0: none [32]"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/headroom.json"), help="JSON file to add a run to")
    options, ppo_flags = parser.parse_known_args(argv)
    if options.questions < 1:
        raise UsageError(f"--questions is {options.questions}; it must be at least 1", code="below-least")
    if options.groups < 0 or options.groups % 2 or options.groups > options.questions:
        wrong = f"--groups is {options.groups}; it must be even, to be halved, and at most --questions"
        raise UsageError(f"{wrong}, {options.questions}", code="too-few-questions")
    config = resolve("ppo", PpoConfig(), ppo_flags)
    sampling = {name for section in SAMPLING_SECTIONS for name in vars(sections(config)[section])}
    passed = vars(build_parser("ppo", PpoConfig()).parse_known_args(ppo_flags)[0])
    for name in passed:
        if name not in sampling.union(SAMPLING_SETTINGS):
            raise UsageError(f"{flag(name)} has no effect on what is sampled: remove it", code="setting-unused")
    config.check_settings("ppo")
    check_required(config)
    if config.lora.no_lora:
        raise UsageError("--no-lora has no adapter, whose gradients are measured: remove it", code="no-lora-gradients")
    reinforcement.check(config)
    return config, options


def probe(config: PpoConfig, options: Options) -> dict:
    """Samples answers, computes gradients, and returns the record of the run."""
    rl = RLSettings(
        algorithm="rloo",
        kl_beta=0.0,
        batch_size=config.rl.batch_size,
        num_generations=config.rl.num_generations,
        micro_batch_size=config.rl.micro_batch_size,
    )
    config = replace(config, rl=rl)
    questions = read_questions_of(config.data, config.mixture)
    protocols = protocols_of(config.protocol, config.mixture)
    searched_questions = [question for question in questions if protocols[question.source].can_search] or questions
    setup = Setup(config.retrieval, searched_questions, config.common.seed, skip_bad_rows=config.data.skip_bad_rows)
    retrieve = build_retriever(setup)
    engine, learner, state = rl_setup.build_learning(config, questions)
    run = described(config, learner.precision)
    drawn_questions = draw(questions, options.questions, config.common.seed)
    start = time.monotonic()
    sampled = sample_all(engine, drawn_questions, retrieve, config=config, group_count=options.groups)
    run |= {"sampling_seconds": round(time.monotonic() - start, 1), "retrieval_failures": sampled.failures}
    run["summary"] = summary(sampled.rows, config.common.seed)
    if sampled.groups:
        start = time.monotonic()
        parameters = list(optim.parameters(state.optimizer).values())
        run["gradient"] = {"groups": len(sampled.groups)} | gradients(learner, parameters, sampled.groups)
        run["gradient_seconds"] = round(time.monotonic() - start, 1)
    run["rows"] = [asdict(row) for row in sampled.rows]
    return run


def described(config: PpoConfig, precision: Precision) -> dict:
    """Returns the conditions and settings of a run, as its record has them."""
    adapter = name_of(config.model.adapter) if config.model.adapter else "no adapter"
    model = name_of(config.model.model)
    return records.provenance(precision) | {
        "section": f"{model}, {adapter}",
        "model": model,
        "adapter": adapter,
        "data": name_of_data(config),
        "preset": config.common.preset,
        "encoder": name_of(config.retrieval.encoder),
        "seed": config.common.seed,
        "num_generations": config.rl.num_generations,
        "temperature": config.sampling.temperature,
    }


def name_of_data(config: PpoConfig) -> str:
    """Returns the name of the file of --data, its name on the hub, or the names of the [[sources]] of --config."""
    data = config.data.data
    if data is None:
        return ", ".join(entry["name"] for entry in config.mixture.sources)
    return Path(data).name if Path(data).exists() else data


def draw(questions: Sequence[Question], count: int, seed: int) -> list[Question]:
    """Returns `count` questions drawn at random by a seed, or all of them in random order if there are fewer."""
    return random.Random(f"{seed}/headroom").sample(questions, min(count, len(questions)))


def sample_all(
    engine: Engine, questions: Sequence[Question], retrieve: Retrieve, config: PpoConfig, group_count: int
) -> Sampled:
    """Returns the greedy answer and the samples of each question; `--batch-size` questions are sampled at a time.

    The first `group_count` questions that the retriever does not fail on become groups.
    """
    count = config.rl.num_generations
    greedy_engine = greedy(engine)
    rows: list[Row] = []
    groups: list[Group] = []
    failures = 0
    starts = range(0, len(questions), config.rl.batch_size)
    for start in ALONE.with_progress(starts, "sampling", "blocks of questions"):
        block = list(questions[start : start + config.rl.batch_size])
        greedy_sequences = sample_on_ranks(
            greedy_engine, ALONE, greedy_engine.run, block, ["greedy"] * len(block), retrieve
        )
        repeated = [question for question in block for _ in range(count)]
        seeds = [f"{config.common.seed}/headroom/{start + i // count}/{i % count}" for i in range(len(repeated))]
        samples = sample_on_ranks(engine, ALONE, engine.run, repeated, seeds, retrieve)
        for i, question in enumerate(block):
            group = samples[i * count : (i + 1) * count]
            answers = [answer_of(sequence.episode()) for sequence in group]
            greedy_answer = answer_of(greedy_sequences[i].episode())
            if greedy_answer is None or None in answers:
                failures += 1
                continue
            if len(groups) < group_count:
                groups.append(group_of(group, answers, number=len(groups)))
            rows.append(Row(question.id, greedy_answer, answers))
    if not rows:
        raise R3LiteError("the retriever failed on every question", "Fix that, and try again.", code="retriever-failed")
    even = len(groups) // 2 * 2  # the two halves must be equally large; failures may have left an odd number
    return Sampled(rows, groups[:even], failures)


def answer_of(episode: Episode) -> Answer | None:
    """Returns the answer of an episode; None if the retriever failed, because then it must not be scored."""
    if episode.failure:
        return None
    return Answer(episode.prediction, answer_scores(episode)[0], episode.recall)


def group_of(sequences: Sequence[SampledSequence], answers: Sequence[Answer], number: int) -> Group:
    """Returns the episodes of question `number` with their rewards by exact match and by recall.

    Recall is 0 for all of them if the question has no gold paragraphs.
    """
    rollouts = [Rollout(sequence, [], number) for sequence in sequences]
    em = [answer.em for answer in answers]
    recall = [answer.recall or 0.0 for answer in answers]
    return Group(rollouts, {"em": em, "recall": recall})


def gradients(learner: Learner, parameters: Sequence[torch.nn.Parameter], groups: Sequence[Group]) -> dict:
    """Computes the gradients of all groups for each reward, and returns their summary.

    Every second group belongs to the second half.
    """
    sums = {"em": GradientSums(), "recall": GradientSums()}
    for number, group in enumerate(ALONE.with_progress(groups, "gradients", "groups")):
        for name, reward_sums in sums.items():
            gradient = group_gradient(learner, parameters, rollouts=group.rollouts, rewards=group.rewards[name])
            reward_sums.add(number % 2, gradient)
    return gradient_summary(sums)


def group_gradient(
    learner: Learner, parameters: Sequence[torch.nn.Parameter], rollouts: Sequence[Rollout], rewards: Sequence[float]
) -> Tensor | None:
    """Returns the gradient [P] in fp64 of RLOO's loss of a group with these rewards; None if the rewards are equal.

    The learner computes it as for an update, but takes no optimizer step.
    """
    if len(set(rewards)) == 1:
        return None
    rewarded = []
    for rollout, reward in zip(rollouts, rewards, strict=True):
        mask = rollout.record.action_mask
        last_sampled = len(mask) - 1 - mask[::-1].index(True)  # the token that gets the reward
        rewarded.append(replace(rollout, token_rewards=[(last_sampled, reward)]))
    batch = learner.algorithm.with_advantages(Batch.of(rewarded))
    for parameter in parameters:
        parameter.grad = None
    learner.grant.run_within_memory("update", learner.add_gradients, batch)
    gradient = torch.cat([parameter.grad.flatten().cpu().double() for parameter in parameters])
    for parameter in parameters:
        parameter.grad = None
    if learner.precision.scaler is not None:
        gradient /= learner.precision.scaler.get_scale()
    if not gradient.isfinite().all():
        raise NotFinite(
            "the gradient of a group is not finite", "Pass --dtype bf16 or fp32.", code="gradients-not-finite"
        )
    return gradient


def main(argv: Sequence[str] | None = None) -> int:
    try:
        config, options = parse(argv)
        records.read(options.output)  # fails before the work if the file has something else than runs
        run = probe(config, options)
        records.add(options.output, run)
    except UsageError as error:
        print(f"bench.headroom: {error}", file=sys.stderr)
        return 2
    except R3LiteError as error:
        print(f"\nbench.headroom stopped: {error}", file=sys.stderr)
        return 1
    print("\n" + tables(run))
    print(f"\nadded to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
