"""Builds the parts of a run of RL: engine, learner, state of checkpoints, memory plan. Warns if the run cannot learn.

`assembly/reinforcement.py` and the benches call it.
"""

import copy
import statistics
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import MappingProxyType

from tqdm import tqdm

from r3lite.assembly import teacher
from r3lite.assembly.inputs import fingerprints_of_rl
from r3lite.assembly.policy import (
    Policy,
    Training,
    load_policy,
    remedy_of_format,
    warn_of_other_format,
    warn_of_short_sft,
)
from r3lite.core.episode import Question
from r3lite.core.spans import NO_SPANS, Spans
from r3lite.core.token_record import TokenRecord
from r3lite.datasets.sources import protocols_of
from r3lite.datasets.trajectories import Trajectory
from r3lite.devices.ranks import ALONE, Ranks
from r3lite.memory.plan import Plan, make_plan
from r3lite.memory.shrinking import memory_plan_of
from r3lite.memory.work import Workload
from r3lite.memory.workloads import rl_workload
from r3lite.models.packing import common_prefix
from r3lite.models.weights import resolve_folder
from r3lite.protocols.base import Protocol
from r3lite.protocols.layout import Layout
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.rewards.reward import highest_outcome
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.rl.batch import Batch, Rollout
from r3lite.rl.learner import Learner
from r3lite.rollout.engine import Engine
from r3lite.rollout.sampling import Sampler
from r3lite.settings import LengthSettings, PpoConfig
from r3lite.training import optim
from r3lite.training.earlier_run import result_of_run, sft_length
from r3lite.training.kl_budget import KlBudget
from r3lite.training.state import Stateful, TrainState
from r3lite.training.watches import Numbers, watched

FEW_MIXED = 0.1  # if fewer groups than this share mix right and wrong answers, a run learns little from its answers


def build_learning(
    config: PpoConfig,
    questions: list[Question],
    held_out: Sequence[Question] = (),
    traces: Sequence[Trajectory] = (),
    spans: Spans = NO_SPANS,
    ranks: Ranks = ALONE,
    parts: Mapping[str, Stateful] = MappingProxyType({}),
) -> tuple[Engine, Learner, TrainState]:
    """Returns the engine that samples, the learner, and the state that checkpoints hold, with `parts` in it.

    Engine and learner share one model, with the policy's adapter and the reference's. `held_out` (the questions of
    validations) and `traces` (episodes of a teacher) are part of the data's fingerprint.
    """
    rl = config.rl
    # Prompt files are read first, so that a bad one is refused before a model is downloaded.
    protocols = protocols_of(config.protocol, config.mixture)
    warn_of_little_sft(result_of_run(config.model.model, config.model.adapter))
    warn_of_other_format(config.model.adapter, config)
    folder = resolve_folder(config.model.model)
    tokenizer = Tokenizer.load(folder, config.model.thinking)
    layouts = {name: Layout(tokenizer, protocol, config.lengths) for name, protocol in protocols.items()}
    plan = plan_memory(config, shared=common_prompt_tokens(questions, layouts), questions=len(questions))
    algorithm = ALGORITHMS[rl.algorithm](rl, limits_of(config.lengths, protocols))
    training = Training(
        lora=config.lora,
        optimizer=config.optimizer,
        seed=config.common.seed,
        set_by_user=config.set_by_user,
        keep_reference=rl.has_reference,
        critic_learning_rate=rl.value_learning_rate if algorithm.has_critic else None,
        ranks=ranks,
    )
    policy = load_policy(folder, config.model, memory=config.memory, plan=plan, training=training)
    policy.model.eval()  # no dropout: ratios and KL compare the policy that samples with the policy that is trained
    controllers: dict[str, Stateful] = {}  # further parts of checkpoints
    if rl.kl_target:
        controllers["kl"] = algorithm.kl_multiplier
    budget = build_kl_budget(config, config.rounds(len(questions)), policy)
    if budget:
        controllers["kl_budget"] = budget
    inputs = ranks.from_first(lambda: fingerprints_of_rl(config, questions, held_out, protocols=protocols))
    state = policy.train_state(
        config.optimizer,
        config.model.model,
        data=teacher.identity(rl) + data_fingerprint(questions, held_out, traces),  # without a teacher, the first is ""
        inputs=inputs,
        facts={"algorithm": rl.algorithm, "questions": len(questions)},
        **controllers,
        **parts,
    )
    engine = Engine(
        policy.model,
        layout=layouts[""],  # that of --format
        sampler=Sampler(config.sampling.temperature),
        grant=policy.grant,
        value_head=policy.critic,
        autocast=policy.precision.autocast,
        spans=spans,
        layouts=layouts,
        draft_tokens=config.sampling.draft_tokens,
    )
    learner = Learner(
        policy.model,
        vocabulary=tokenizer.size,
        temperature=config.sampling.temperature,
        settings=rl,
        algorithm=algorithm,
        reference=policy.reference,
        precision=policy.precision,
        optimizer_step=state.update,
        grant=policy.grant,
        value_head=policy.critic,
        ranks=ranks,
        budget=budget,
    )
    return engine, learner, state


def data_fingerprint(
    questions: Sequence[Question],
    held_out: Sequence[Question],
    traces: Sequence[Trajectory],
) -> str:
    """Returns a checksum of the data that a run reads, in hexadecimal digits."""
    records: list = []
    for question in [*questions, *held_out]:
        records.append((question.id, question.text, question.answers, *question.earlier))
    checksum = zlib.crc32(repr([*records, *traces]).encode())
    return f"{checksum:08x}"


def build_kl_budget(config: PpoConfig, rounds: int, policy: Policy) -> KlBudget | None:
    """Returns the budget of --kl-budget for a run of this many rounds; None without it."""
    if config.rl.kl_budget is None:
        return None
    optimizer = config.optimizer
    rate_shares = []  # the scheduled learning rates of all rounds, as shares of the peak
    for number in range(1, rounds + 1):
        rate_share = optim.rate_share(
            number,
            rounds,
            warmup=optimizer.warmup,
            floor=optimizer.min_learning_rate,
            schedule=optimizer.learning_rate_schedule,
        )
        rate_shares.append(rate_share)
    return KlBudget(config.rl.kl_budget, rate_shares, policy.optimizer, precision=policy.precision)


def common_prompt_tokens(questions: Sequence[Question], layouts: Mapping[str, Layout]) -> int:
    """Returns how many first tokens all prompts of a run have in common, rounded down as by `common_prefix`.

    If prompts are sorted by their token ids, all begin with what the first and the last have in common. With
    [[sources]] all prompts are encoded for this, since they may be conversations of any length. Without [[sources]] two
    are enough: those of the first and the last question in the order of the questions' texts.

    Raises R3LiteError if one of the encoded prompts leaves no room for an answer.
    """
    if not any(question.source for question in questions):
        first_question = min(questions, key=lambda question: question.text)
        last_question = max(questions, key=lambda question: question.text)
        questions = [first_question, last_question]
    first = last = None
    for question in questions:
        layout = layouts[question.source]
        prompt = layout.prompt(question.text, question.earlier)
        layout.check_room(question, prompt)
        first = prompt if first is None else min(first, prompt)
        last = prompt if last is None else max(last, prompt)
    return common_prefix(first, last)


def rehearse(
    learner: Learner,
    make_taught_batch: Callable[[list[Rollout], dict[int, str]], Batch] | None,
) -> None:
    """Tries out whether memory suffices for an update on the largest micro-batch, without its optimizer step.

    The episodes are made up. They have the largest length, a common prefix as long as that of all prompts, and the most
    action tokens of an episode. `make_taught_batch` runs a teacher's pass over failed episodes (see
    `TeacherInTurns.batch`), and failed copies of the episodes are added for it. None: no teacher runs a model.
    """
    longest = _longest_rollouts(learner)
    # Of each rank its first micro-batch, a list of row numbers; a rank without rows has none.
    rank_micro_batches = learner.micro_batches(Batch.of(longest))[:1]
    micro_batches = chain.from_iterable(learner.ranks.gather(rank_micro_batches))
    rollouts = [longest[row] for row in sorted(chain.from_iterable(micro_batches))]
    if make_taught_batch:
        rollouts += [replace(rollout, failed=True) for rollout in rollouts]
    rehearsing = replace(
        learner,
        settings=replace(learner.settings, update_epochs=1, mini_batch_size=len(rollouts)),
        algorithm=copy.deepcopy(learner.algorithm),  # a copy, since its state (a KL controller's) must not change
        optimizer_step=lambda: (0.0, False),  # the norm of the gradients, and whether the step was skipped
        budget=None,
    )
    with learner.grant.rehearsal():
        if make_taught_batch:
            batch = make_taught_batch(rollouts, {})
        else:
            batch = Batch.of(rollouts)
        rehearsing.learn(batch, seed="rehearsal")


def _longest_rollouts(learner: Learner) -> list[Rollout]:
    """Returns the longest episodes that a round may have, of made-up tokens that differ after their common prefix."""
    workload = memory_plan_of(learner.grant).workload
    action_tokens = int(workload.writes)  # of each episode
    action_mask = [False] * (workload.row_tokens - action_tokens) + [True] * action_tokens
    different_tokens = workload.row_tokens - workload.shared
    rollouts = []
    for i in range(workload.step_rows):
        token = 1 + i % (learner.vocabulary - 1)  # not 0, the token of the common prefix
        tokens = [0] * workload.shared + [token] * different_tokens
        record = TokenRecord(tokens=tokens, action_mask=action_mask)
        rollouts.append(Rollout.with_final_reward(record, reward=0.0, group=0))
    return rollouts


def warn_of_little_sft(adapter: str | None) -> None:
    """Warns if the model to start from had no SFT on the step format, or hardly any: RL then tends to collapse.

    `adapter` may also be the model of a run of `sft --no-lora`; None: neither is given.
    """
    if adapter is None:
        message = "without --adapter, RL starts from a model that is not trained on the step format"
        print(f"warning: {message}", file=sys.stderr)
        return
    length = sft_length(adapter)
    if length is not None and length.epochs < 1:
        message = f"{adapter} had only {length.epochs:.2f} epochs of SFT: with less than 1, RL tends to collapse"
        print(f"warning: {message}", file=sys.stderr)
        return
    warn_of_short_sft(adapter)


def warn_of_no_reward(config: PpoConfig, rounds: Sequence[Numbers]) -> None:
    """Warns if the rewards of the first rounds give nothing to learn from, or hardly anything."""
    message = no_reward(config, rounds, "the first ") or few_mixed(config, rounds)
    if message:
        tqdm.write(f"warning: {message} (episodes.jsonl)", file=sys.stderr)


def ending_of(config: PpoConfig, records: Sequence[dict]) -> str:
    """Returns the words before the adapter's folder in the last message of a run, from the records of all rounds.

    They are "done", or the reason why there was nothing to learn from.
    """
    rounds = [watched(record) for record in records if "reward" in record]
    message = no_reward(config, rounds, "all ")
    if not message:
        return "done"
    return f"the rewards gave no training signal: {message}\nadapter, which has learned nothing from its answers"


def no_reward(config: PpoConfig, rounds: Sequence[Numbers], quantifier: str) -> str:
    """Returns why the rewards of rounds give nothing to learn from, or "".

    `quantifier` stands before the number of rounds: "all " or "the first ".
    """
    if not rounds:
        return ""
    period = rounds_in_words(rounds, quantifier)
    pays_answers = highest_outcome(config.reward) > 0
    if pays_answers and all(numbers["outcome"] == 0 for numbers in rounds):
        # The watched quantity "malformed" counts episodes that are cut off, too.
        lost_share = sum(numbers["malformed"] for numbers in rounds) / len(rounds)
        return (
            f"no answer in {period} was rewarded, and {lost_share:.0%} of the episodes are malformed or cut off. "
            f"Malformed: {remedy_of_format(config.model)}. Cut off: raise --max-new-tokens or --max-length. Wrong "
            "answers: check whether the retriever finds them"
        )
    # The watched quantity "variance" is the share of the groups without variance.
    if ALGORITHMS[config.rl.algorithm].has_groups and all(numbers["variance"] == 1 for numbers in rounds):
        rewarded = "answers" if pays_answers else "episodes"
        return (
            f"in {period} the {rewarded} of each group are all rewarded alike, so {config.rl.algorithm} learns nothing "
            f"from them. {remedy_of_few_mixed(config)}"
        )
    return ""


def few_mixed(config: PpoConfig, rounds: Sequence[Numbers]) -> str:
    """Returns a message if hardly any group of the first rounds mixes right and wrong answers, else ""."""
    algorithm = ALGORITHMS[config.rl.algorithm]
    # An algorithm that learns right answers needs no group that mixes right and wrong ones.
    if not highest_outcome(config.reward) or not algorithm.has_groups or algorithm.learns_right_answers:
        return ""
    shares = [numbers["mixed"] for numbers in rounds if numbers.get("mixed") is not None]
    if not shares:
        return ""
    mean = statistics.fmean(shares)
    if mean >= FEW_MIXED:
        return ""
    period = rounds_in_words(rounds, "the first ")
    return f"in {period} only {mean:.0%} of the groups mix right and wrong answers. {remedy_of_few_mixed(config)}"


def remedy_of_few_mixed(config: PpoConfig) -> str:
    """Returns what a user can do so that more groups mix right and wrong answers.

    Leaves out --refill-limit if a run with these settings would refuse it.
    """
    refills = ""
    if "refill_limit" in ALGORITHMS[config.rl.algorithm].own_settings and config.rl.learn == "episode":
        refills = "pass --refill-limit, "
    return f"Raise --num-generations or --temperature, {refills}or train on questions of other difficulty"


def rounds_in_words(rounds: Sequence[Numbers], quantifier: str) -> str:
    """Returns words such as "the first 2 rounds"; `quantifier` as in `no_reward`."""
    if len(rounds) == 1:
        return "the first round"
    return f"{quantifier}{len(rounds)} rounds"


def limits_of(lengths: LengthSettings, protocols: Mapping[str, Protocol]) -> LengthSettings:
    """Returns `lengths` as they hold for episodes of these protocols: no retrievals if no protocol can search."""
    if any(protocol.can_search for protocol in protocols.values()):
        return lengths
    return replace(lengths, max_hops=0)


def plan_memory(config: PpoConfig, shared: int = 0, questions: int | None = None) -> Plan:
    """Returns the memory plan of a round whose episodes all reach --max-length and begin with `shared` equal tokens.

    `questions` is the number of the run's questions; None: not known.
    """
    workload = round_workload(config, shared, questions)
    return make_plan(workload, config.memory, config.sampling)


def round_workload(config: PpoConfig, shared: int = 0, questions: int | None = None) -> Workload:
    """Returns the work of a round; the arguments are those of `plan_memory`."""
    algorithm = ALGORITHMS[config.rl.algorithm](config.rl, config.lengths)
    return rl_workload(
        config,
        shared,
        config.rounds(questions),
        critic=algorithm.has_critic,
        off_policy=algorithm.max_off_policy,
        replays=algorithm.has_replay,
        right_answers=algorithm.learns_right_answers,
    )
