"""Sets up a run of reinforcement learning: its engine, its learner, what its checkpoints hold, and its memory plan.

`ppo` runs what is built here, and the benches measure it.
"""

import copy
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from tqdm import tqdm

from r3lite.assembly import teacher
from r3lite.assembly.policy import Training, load_policy, warn_of_other_format
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
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.protocols.transcript import Layout
from r3lite.rewards.reward import most_for_answer
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.rl.batch import Batch, Rollout
from r3lite.rl.learner import Learner
from r3lite.rollout.engine import Engine
from r3lite.rollout.sampling import Sampler
from r3lite.settings import PpoConfig
from r3lite.training.earlier_run import made_by_run, sft_epochs
from r3lite.training.guard import Guard
from r3lite.training.state import Stateful, TrainState
from r3lite.training.watches import Numbers, watched


def build(
    config: PpoConfig,
    questions: list[Question],
    held_out: Sequence[Question] = (),
    traces: Sequence[Trajectory] = (),
    spans: Spans | None = None,
    ranks: Ranks = ALONE,
    **parts: Stateful,
) -> tuple[Engine, Learner, TrainState]:
    """The engine that samples, the learner and what a checkpoint holds, with further `parts` of it.

    They work on one model with two adapters. `held_out` are the questions of validations, `traces` a teacher's.
    """
    rl, temperature = config.rl, config.sampling.temperature
    protocols = protocols_of(config.protocol, config.mixture)  # a bad prompt file is refused before a download
    warn_of_start(made_by_run(config.model.model, config.model.adapter))
    warn_of_other_format(config.model.adapter, config)
    folder = resolve_folder(config.model.model)
    tokenizer = Tokenizer.load(folder, config.model.thinking)
    layouts = {name: Layout(tokenizer, protocol, config.lengths) for name, protocol in protocols.items()}
    plan = plan_memory(config, shared_by_prompts(questions, layouts), len(questions))
    algorithm = ALGORITHMS[rl.algorithm](rl, config.lengths)
    usual = command.usual("ppo", config).lora
    critic_rate = rl.value_learning_rate if algorithm.has_critic else None
    training = Training(config.lora, usual, config.optimizer, config.common.seed, rl.kl_beta > 0, critic_rate, ranks)
    policy = load_policy(folder, config.model, config.memory, plan, training)
    policy.model.eval()  # no dropout: what samples, what is compared with the reference and what learns are one policy
    known = [(q.id, q.text, q.answers, *q.earlier) for q in [*questions, *held_out]]
    read = zlib.crc32(repr([*known, *traces]).encode())
    data = f"{teacher.identity(rl)}{read:08x}"
    facts = {"algorithm": rl.algorithm, "questions": len(questions)}
    adapted = {"kl": algorithm.kl} if rl.kl_target else {}
    state = policy.train_state(config.optimizer, config.model.model, data, facts, **adapted, **parts)
    model, precision, grant, critic = policy.model, policy.precision, policy.grant, policy.critic
    layout = next(iter(layouts.values()))
    engine = Engine(model, layout, Sampler(temperature), grant, critic, precision.autocast, spans, layouts)
    learner = Learner(
        model,
        tokenizer.size,
        temperature,
        rl,
        algorithm,
        policy.reference,
        precision,
        state.update,
        grant,
        critic,
        ranks,
    )
    return engine, learner, state


def shared_by_prompts(questions: Sequence[Question], layouts: Mapping[str, Layout]) -> int:
    """How many tokens the prompts of all questions begin with alike: what the first and the last have in common in
    alphabetical order, all have.

    Prompts of several sources are looked at one by one, and refused if one leaves no room for an answer: conversations
    may be of any length.
    """
    if not any(question.source for question in questions):
        texts = [question.text for question in questions]
        first, last = (layouts[""].prompt(text) for text in (min(texts), max(texts)))
        return common_prefix(first, last)
    first = last = None
    for question in questions:
        layout = layouts[question.source]
        prompt = layout.prompt(question.text, question.earlier)
        layout.check_room(question, prompt)
        first, last = min(first or prompt, prompt), max(last or prompt, prompt)
    return common_prefix(first, last)


def rehearse(learner: Learner) -> None:
    """Learns from as many of the longest episodes as go through the model together, but for the optimizer's step.

    Their prompts begin alike, as far as is known; documents leave room for as many sampled tokens as there may be.
    """
    work, most = learner.grant.plan.workload, learner.vocabulary - 1
    apart, sampled = work.row_tokens - work.shared, int(work.writes)
    mask = [False] * (work.row_tokens - sampled) + [True] * sampled
    rows = [[0] * work.shared + [1 + i % most] * apart for i in range(work.step_rows)]
    longest = Batch.of([Rollout.paid_at_end(row, mask, None, 0.0, 0) for row in rows])
    together = chain.from_iterable(learner.ranks.gather(learner.micro_batches(longest)[:1]))
    batch = longest.rows(sorted(chain.from_iterable(together)))
    settings = replace(learner.settings, update_epochs=1, mini_batch_size=work.step_rows)
    own = {"algorithm": copy.deepcopy(learner.algorithm), "optimizer_step": lambda: (0.0, False)}
    with learner.grant.rehearsal():
        replace(learner, settings=settings, **own).learn(batch, "rehearsal")


def warn_of_start(adapter: str | None) -> None:
    """Warns of a model that does not know the step format, or not well: RL from there tends to collapse."""
    if adapter is None:
        message = "without --adapter, RL starts from a model that is not trained on the step format"
    elif (epochs := sft_epochs(adapter)) is not None and epochs < 1:
        message = f"{adapter} had only {epochs:.2f} epochs of SFT: with less than 1, RL tends to collapse"
    else:
        return
    print(f"warning: {message}", file=sys.stderr)


def warn_of_no_reward(config: PpoConfig, guard: Guard, record: dict) -> None:
    """Warns after the first rounds, the last of which is `record`, if they give a run nothing to learn from."""
    rounds = [*guard.first, watched(record)] if guard.rounds + 1 == guard.start_rounds else []
    if message := no_reward(config, rounds, "the first "):
        tqdm.write(f"warning: {message} (episodes.jsonl)", file=sys.stderr)


def outcome_of(config: PpoConfig, records: Sequence[dict]) -> str:
    """What the end of a run says of it, by the records of all its rounds: whether there was anything to learn from."""
    message = no_reward(config, [watched(record) for record in records if "reward" in record], "all ")
    if not message:
        return "done"
    return f"the rewards gave no training signal: {message}\nadapter, which has learned nothing from its answers"


def no_reward(config: PpoConfig, rounds: Sequence[Numbers], which: str) -> str:
    """Why rounds gave a run nothing to learn from; empty if they did. `which` of its rounds they are."""
    seen = f"{which}{len(rounds)} rounds" if len(rounds) > 1 else "the first round"
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
        return (
            f"in {seen} the rewards of each group are all equal, so {config.rl.algorithm} learns nothing. Raise "
            "--num-generations or --temperature, pass --refill-limit, or train on other questions"
        )
    return ""


def plan_memory(config: PpoConfig, shared: int = 0, questions: int | None = None) -> Plan:
    """The memory plan of a round whose episodes all reach --max-length, and begin with `shared` tokens alike."""
    return make_plan(round_workload(config, shared, questions), config.memory, config.sampling)


def round_workload(config: PpoConfig, shared: int = 0, questions: int | None = None) -> Workload:
    """What such a round computes, of a run over so many questions if that is known."""
    algorithm = ALGORITHMS[config.rl.algorithm](config.rl, config.lengths)
    return rl_workload(
        config, shared, config.rounds(questions), critic=algorithm.has_critic,
        ratios_first=algorithm.has_episode_ratios, off_policy=algorithm.most_off_policy, replays=algorithm.has_replay,
    )  # fmt: skip
