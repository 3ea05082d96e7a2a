"""Sets up what answers questions: the engine with its model and memory plan, and the retriever.

Used by evaluate, ask, serve, collect, tune_prompt and rollout_worker.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from r3lite.assembly.policy import load_policy, warn_of_other_format, warn_of_short_sft
from r3lite.core.config import UsageError
from r3lite.core.episode import Episode, Retrieve
from r3lite.exporting.files import is_trained_export
from r3lite.memory.plan import Plan, make_plan
from r3lite.memory.workloads import evaluate_workload
from r3lite.models.weights import resolve_folder
from r3lite.protocols.layout import OPENINGS, Layout
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.retrieval.procedures import Finder, open_finder
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.rollout.engine import Engine
from r3lite.rollout.sampling import Sampler
from r3lite.settings import (
    AnsweringConfig,
    AskConfig,
    JudgeSettings,
    RolloutWorkerConfig,
    SamplingConfig,
    ServeConfig,
)
from r3lite.training.earlier_run import result_of_run

QUESTIONS_OF_DRY_RUN = 1000  # assumed if --limit is not set, since a dry run does not count the questions


def build_engine(
    config: SamplingConfig, questions: int, baseline: str = "none", judge: JudgeSettings | None = None
) -> Engine:
    """Returns the engine of the settings' model and adapter, its memory planned for `questions` questions.

    `baseline` is a key of OPENINGS. If `judge` has --judge local, the plan includes the judge's model beside this one.
    """
    # Prompts and plan come first, so that their errors show before a model is downloaded.
    opening = OPENINGS[baseline]
    plan = plan_memory(config, questions, judge)
    protocol = build_protocol(config.protocol, opening)
    if not opening.plain:
        warn_of_other_format(config.model.adapter, config)
        warn_of_short_sft(result_of_run(config.model.model, config.model.adapter))
    folder = resolve_folder(config.model.model)
    tokenizer = Tokenizer.load(folder, config.model.thinking)
    layout = Layout(
        tokenizer=tokenizer,
        protocol=protocol,
        lengths=config.lengths,
        opening=opening,
    )
    policy = load_policy(
        folder,
        settings=config.model,
        memory=config.memory,
        plan=plan,
    )
    sampler = Sampler(
        temperature=config.sampling.temperature,
        top_k=config.truncation.top_k_sampling,
        top_p=config.truncation.top_p,
    )
    return Engine(
        model=policy.model,
        layout=layout,
        sampler=sampler,
        grant=policy.grant,
        autocast=policy.precision.autocast,
        draft_tokens=config.sampling.draft_tokens,
    )


def plan_memory(
    config: SamplingConfig | RolloutWorkerConfig,
    questions: int,
    judge: JudgeSettings | None = None,
) -> Plan:
    """Returns the memory plan of answering `questions` questions.

    If `judge` has --judge local, the plan includes the judge's model beside this one.
    """
    # A rollout worker samples from all tokens, as RL does.
    truncates = isinstance(config, SamplingConfig) and config.truncation.truncates
    workload = evaluate_workload(
        model=config.model,
        lengths=config.lengths,
        retrieval=config.retrieval,
        questions=questions,
        draft_tokens=config.sampling.draft_tokens,
        truncates=truncates,
        judge=judge,
    )
    return make_plan(workload, config.memory, config.sampling)


def open_retriever(config: AnsweringConfig, gives_up: bool = True) -> tuple[Retrieve, Finder | None]:
    """Returns the retriever of the settings, and the finder of procedures, which is None without --procedures.

    Raises UsageError as `check_retriever` does. `gives_up` is that of `Setup`.
    """
    setup = check_retriever(config, gives_up)
    retrieve = build_retriever(setup)
    return retrieve, open_finder(config.procedures, lambda: setup.encoder)


def check_retriever(config: AnsweringConfig, gives_up: bool = True) -> Setup:
    """Checks that the retriever of the settings works without a data set; returns the setup to build it from.

    Raises UsageError if the retriever needs the questions of a data set, or an index that the settings do not name.
    """
    settings = config.retrieval
    protocol = build_protocol(config.protocol)
    if not protocol.can_search:
        settings = replace(settings, retriever="none", rerank=None)
    if settings.retriever == "golden" or settings.context == "question":
        raise UsageError(
            "--retriever golden and --context question need the questions of a data set", code="retriever-needs-data"
        )
    if settings.retriever != "none" and settings.from_questions:
        raise UsageError(
            "--index is missing: pass an index folder, or --corpus FILE, or --retriever none", code="index-missing"
        )
    setup = Setup(settings, questions=[], seed=config.common.seed, gives_up=gives_up)
    setup.check()
    return setup


def answers_in_steps(config: AskConfig | ServeConfig) -> bool:
    """Returns whether the model answers in steps, as --steps says.

    With --steps auto, it does if there is an adapter, or if the model is one that r3lite has trained: the `model/` of a
    run of `sft --no-lora`, or an export of a trained model.
    """
    if config.answers.steps != "auto":
        return config.answers.steps == "on"
    if result_of_run(config.model.model, config.model.adapter) is not None:
        return True
    return is_trained_export(Path(config.model.model))


def plain_baseline(config: AskConfig | ServeConfig) -> str:
    """Returns the baseline for a model that does not answer in steps: rag, or closed-book if there is no search."""
    if config.retrieval.retriever == "none" or not build_protocol(config.protocol).can_search:
        return "closed-book"
    return "rag"


def why_no_answer(episode: Episode, faults: Mapping[str, str]) -> str:
    """Returns why an episode has no answer: the faults of its last step, in the words of the protocol's `faults`.

    Without a step or a fault, the reason given is --max-length.
    """
    problems = []
    if episode.steps:
        problems = [faults[name] for name in episode.steps[-1].faults]
    if not problems:
        problems = ["had no room left within --max-length"]
    return f"step {len(episode.steps)} {', '.join(problems)}"
