"""Builds the parts of a run of RL: engine, learner, state of checkpoints and memory plan; warns if it cannot learn.

`assembly/reinforcement.py` and the benches call it.
"""

import copy
import statistics
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from tqdm import tqdm

from r3lite.assembly import teacher
from r3lite.assembly.inputs import fingerprints_of_rl
from r3lite.assembly.policy import Policy, Training, load_policy, warn_of_other_format
from r3lite.core import command
from r3lite.core.episode import Question
from r3lite.core.spans import Spans
from r3lite.datasets.sources import protocols_of
from r3lite.datasets.trajectories import Trajectory
from r3lite.devices.ranks import ALONE, Ranks
from r3lite.memory.plan import Plan, make_plan
from r3lite.memory.work import Workload
from r3lite.memory.workloads import rl_workload
from r3lite.models.packing import common_prefix
from r3lite.models.weights import resolve_folder
from r3lite.protocols.base import Protocol
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.protocols.transcript import Layout
from r3lite.rewards.reward import most_for_answer
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.rl.batch import Batch, Rollout
from r3lite.rl.learner import Learner
from r3lite.rollout.engine import Engine
from r3lite.rollout.sampling import Sampler
from r3lite.settings import LengthSettings, PpoConfig
from r3lite.training import optim
from r3lite.training.earlier_run import result_of_run, sft_epochs
from r3lite.training.kl_budget import KlBudget
from r3lite.training.state import Stateful, TrainState
from r3lite.training.watches import Numbers, watched

MORE_MIXED = "Raise --num-generations or --temperature, pass --refill-limit, or train on questions of other difficulty"
FEW_MIXED = 0.1  # share of the groups: with fewer that mix right and wrong answers a run learns little from answers


def build(
    config: PpoConfig,
    questions: list[Question],
    held_out: Sequence[Question] = (),
    traces: Sequence[Trajectory] = (),
    spans: Spans | None = None,
    ranks: Ranks = ALONE,
    **parts: Stateful,
) -> tuple[Engine, Learner, TrainState]:
    """The engine that samples, the learner, and the state that checkpoints hold, with `parts` in it.

    Engine and learner share one model, with the policy's adapter and the reference's. `held_out` (the questions of
    validations) and `traces` (a teacher's) are part of the data's fingerprint.
    """
    rl, temperature = config.rl, config.sampling.temperature
    protocols = protocols_of(config.protocol, config.mixture)  # a bad prompt file is refused before a download
    warn_of_start(result_of_run(config.model.model, config.model.adapter))
    warn_of_other_format(config.model.adapter, config)
    folder = resolve_folder(config.model.model)
    tokenizer = Tokenizer.load(folder, config.model.thinking)
    layouts = {name: Layout(tokenizer, protocol, config.lengths) for name, protocol in protocols.items()}
    plan = plan_memory(config, shared_by_prompts(questions, layouts), len(questions))
    algorithm = ALGORITHMS[rl.algorithm](rl, limits_of(config.lengths, protocols))
    usual = command.usual("ppo", config).lora
    critic_rate = rl.value_learning_rate if algorithm.has_critic else None
    training = Training(config.lora, usual, config.optimizer, config.common.seed, rl.has_reference, critic_rate, ranks)
    policy = load_policy(folder, config.model, config.memory, plan, training)
    policy.model.eval()  # no dropout: ratios and KL compare the policy that samples with the policy that is trained
    known = [(q.id, q.text, q.answers, *q.earlier) for q in [*questions, *held_out]]
    read = zlib.crc32(repr([*known, *traces]).encode())
    data = f"{teacher.identity(rl)}{read:08x}"
    facts = {"algorithm": rl.algorithm, "questions": len(questions)}
    adapted = {"kl": algorithm.kl} if rl.kl_target else {}
    budget = build_kl_budget(config, config.rounds(len(questions)), policy)
    if budget:
        adapted["kl_budget"] = budget
    inputs = ranks.shared(lambda: fingerprints_of_rl(config, questions, held_out, protocols))
    state = policy.train_state(config.optimizer, config.model.model, data, inputs, facts, **adapted, **parts)
    model, precision, grant, critic = policy.model, policy.precision, policy.grant, policy.critic
    layout = next(iter(layouts.values()))
    engine = Engine(model, layout, Sampler(temperature), grant, critic, precision.autocast, spans, layouts)
    adapter, vocabulary = policy.reference, tokenizer.size
    learner = Learner(
        model, vocabulary, temperature, rl, algorithm, adapter, precision, state.update, grant, critic, ranks,
        budget=budget,
    )  # fmt: skip
    return engine, learner, state


def build_kl_budget(config: PpoConfig, rounds: int, policy: Policy) -> KlBudget | None:
    """The budget of --kl-budget for a run of this many rounds."""
    if config.rl.kl_budget is None:
        return None
    s = config.optimizer
    shape = s.warmup, s.min_learning_rate, s.learning_rate_schedule
    rates = [optim.rate(number, rounds, *shape) for number in range(1, rounds + 1)]
    return KlBudget(config.rl.kl_budget, rates, policy.optimizer, policy.precision)


def shared_by_prompts(questions: Sequence[Question], layouts: Mapping[str, Layout]) -> int:
    """The length of the common prefix of all prompts in tokens: that of the first and the last in alphabetical order.

    Raises R3LiteError if one of the prompts that are encoded for this leaves no room for an answer: with several
    sources all of them, as they may be conversations of any length, else those of two questions.
    """
    if not any(question.source for question in questions):
        questions = [best(questions, key=lambda question: question.text) for best in (min, max)]
    first = last = None
    for question in questions:
        layout = layouts[question.source]
        prompt = layout.prompt(question.text, question.earlier)
        layout.check_room(question, prompt)
        first, last = min(first or prompt, prompt), max(last or prompt, prompt)
    return common_prefix(first, last)


def rehearse(learner: Learner, teach: Callable[[list[Rollout], dict[int, str]], Batch] | None) -> None:
    """Runs the update of the largest micro-batch, without its optimizer step; with a teacher, once more after its pass.

    The episodes are made up. They have the largest length, the common prefix of all prompts, and as many action tokens
    as an episode may have.
    """
    work, most = learner.grant.plan.workload, learner.vocabulary - 1
    apart, sampled = work.row_tokens - work.shared, int(work.writes)
    mask = [False] * (work.row_tokens - sampled) + [True] * sampled
    rows = [[0] * work.shared + [1 + i % most] * apart for i in range(work.step_rows)]
    longest = [Rollout.with_final_reward(row, mask, None, 0.0, 0) for row in rows]
    together = chain.from_iterable(learner.ranks.gather(learner.micro_batches(Batch.of(longest))[:1]))
    rollouts = [longest[row] for row in sorted(chain.from_iterable(together))]
    if teach:  # it scores failed episodes, which have another loss
        rollouts += [replace(rollout, failed=True) for rollout in rollouts]
    settings = replace(learner.settings, update_epochs=1, mini_batch_size=len(rollouts))
    own = {"algorithm": copy.deepcopy(learner.algorithm), "optimizer_step": lambda: (0.0, False), "budget": None}
    with learner.grant.rehearsal():
        batch = teach(rollouts, {}) if teach else Batch.of(rollouts)
        replace(learner, settings=settings, **own).learn(batch, "rehearsal")


def warn_of_start(adapter: str | None) -> None:
    """Warns if the model to start from has not or hardly been trained on the step format: RL then tends to collapse."""
    if adapter is None:
        message = "without --adapter, RL starts from a model that is not trained on the step format"
    elif (epochs := sft_epochs(adapter)) is not None and epochs < 1:
        message = f"{adapter} had only {epochs:.2f} epochs of SFT: with less than 1, RL tends to collapse"
    else:
        return
    print(f"warning: {message}", file=sys.stderr)


def warn_of_no_reward(config: PpoConfig, rounds: Sequence[Numbers]) -> None:
    """Warns if the rewards of the first rounds give nothing to learn from, or hardly anything."""
    if message := no_reward(config, rounds, "the first ") or few_mixed(config, rounds):
        tqdm.write(f"warning: {message} (episodes.jsonl)", file=sys.stderr)


def outcome_of(config: PpoConfig, records: Sequence[dict]) -> str:
    """The last line of a run: "done", or why its rewards gave nothing to learn from, by the records of all rounds."""
    message = no_reward(config, [watched(record) for record in records if "reward" in record], "all ")
    if not message:
        return "done"
    return f"the rewards gave no training signal: {message}\nadapter, which has learned nothing from its answers"


def no_reward(config: PpoConfig, rounds: Sequence[Numbers], which: str) -> str:
    """Why the rewards of rounds give nothing to learn from, or ""; `which` is "all " or "the first "."""
    seen = rounds_in_words(rounds, which)
    if not rounds:
        return ""
    if most_for_answer(config.reward) and all(numbers["outcome"] == 0 for numbers in rounds):
        lost = sum(numbers["malformed"] for numbers in rounds) / len(rounds)
        return (
            f"no answer in {seen} was rewarded, and {lost:.0%} of the episodes are malformed or cut off. Malformed: "
            "run SFT first, or pass the adapter's --format and prompts. Cut off: raise --max-new-tokens or "
            "--max-length. Wrong answers: check whether the retriever finds them"
        )
    if ALGORITHMS[config.rl.algorithm].has_groups and all(numbers["variance"] == 1 for numbers in rounds):
        what = "answers" if most_for_answer(config.reward) else "episodes"
        return (
            f"in {seen} the {what} of each group are all rewarded alike, so {config.rl.algorithm} learns nothing from "
            f"them. {MORE_MIXED}"
        )
    return ""


def few_mixed(config: PpoConfig, rounds: Sequence[Numbers]) -> str:
    """That hardly any group of the first rounds mixes right and wrong answers, or ""."""
    shares = [numbers["mixed"] for numbers in rounds if numbers.get("mixed") is not None]
    if not shares or not most_for_answer(config.reward) or not ALGORITHMS[config.rl.algorithm].has_groups:
        return ""
    mean = statistics.fmean(shares)
    if mean >= FEW_MIXED:
        return ""
    seen = rounds_in_words(rounds, "the first ")
    return f"in {seen} only {mean:.0%} of the groups mix right and wrong answers. {MORE_MIXED}"


def rounds_in_words(rounds: Sequence[Numbers], which: str) -> str:
    """Such as "the first 2 rounds"; `which` as in `no_reward`."""
    return f"{which}{len(rounds)} rounds" if len(rounds) > 1 else "the first round"


def limits_of(lengths: LengthSettings, protocols: Mapping[str, Protocol]) -> LengthSettings:
    """The limits of episodes of these protocols: without a search among them there are no retrievals."""
    if any(protocol.searches for protocol in protocols.values()):
        return lengths
    return replace(lengths, max_hops=0)


def plan_memory(config: PpoConfig, shared: int = 0, questions: int | None = None) -> Plan:
    """The memory plan of a round whose episodes all reach --max-length, and begin with `shared` tokens alike."""
    return make_plan(round_workload(config, shared, questions), config.memory, config.sampling)


def round_workload(config: PpoConfig, shared: int = 0, questions: int | None = None) -> Workload:
    """The work of such a round, for the memory plan; `questions` are those of the run, if their number is known."""
    algorithm = ALGORITHMS[config.rl.algorithm](config.rl, config.lengths)
    return rl_workload(
        config, shared, config.rounds(questions), critic=algorithm.has_critic,
        ratios_first=algorithm.has_episode_ratios, off_policy=algorithm.max_off_policy, replays=algorithm.has_replay,
    )  # fmt: skip
