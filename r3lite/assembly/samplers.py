"""Chooses the sampler of a run's rounds: of whole episodes, or of ends of contexts for --learn answer."""

from collections.abc import Callable
from functools import partial

from r3lite.assembly.answer_contexts import contexts_of
from r3lite.assembly.answer_likelihood import LikelihoodSampler
from r3lite.assembly.answer_round import AnswerSampler
from r3lite.assembly.rl_round import RoundSampler
from r3lite.core.episode import Question
from r3lite.datasets.rl_questions import Demonstrations
from r3lite.rl.learner import Learner
from r3lite.rollout.engine import Engine
from r3lite.settings import PpoConfig


def sampler_of(
    config: PpoConfig,
    questions: list[Question],
    demonstrations: Demonstrations,
    engine: Engine,
    learner: Learner,
) -> Callable[..., RoundSampler]:
    """Returns the class of a run's sampler, to be called with the fields of RoundSampler.

    The further fields of the classes for --learn answer are set already. `demonstrations` are those of --contexts.
    """
    if config.rl.learn != "answer":
        return RoundSampler
    contexts = None
    if config.rl.contexts:
        contexts = contexts_of(questions, demonstrations, engine.layouts)
    if not learner.algorithm.learns_right_answers:
        return partial(AnswerSampler, contexts=contexts)
    policy_logprobs = partial(learner.run_on_all_ranks, learner.policy_logprobs)
    return partial(LikelihoodSampler, contexts=contexts, policy_logprobs=policy_logprobs)
