"""The rewards by name, and their weights.

A reward is a plain function: one of `parts.py`, whose parameters are flags of the command line, another built-in one,
or a user's own, named as `package.module:function`. It takes an episode, and the judge's verdict if it has a parameter
named `verdict`. A config can set its other parameters. It returns

- a number, the reward of the last step;
- or a list of numbers, one per step;
- or None, a missing reward: it is not 0, and the episode is left out of the means and of the update.

Weights may change during training: the curriculum of R-Search (arXiv 2506.08352) first rewards format more, and then
right answers.
"""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from r3lite.core.config import UsageError
from r3lite.core.episode import Episode
from r3lite.core.errors import R3LiteError, nearest
from r3lite.core.records import shown
from r3lite.rewards import answers, formats, judged, parts, searching, tasks, texts
from r3lite.rewards.verdict import Verdict
from r3lite.settings import RewardSettings
from r3lite.settings.rewards import FIRST_WEIGHT, RewardEntry

RewardFunction = Callable[..., float | list[float] | None]
# The rewards whose parameters are flags. They are used without being named; --rewards cannot name them.
FLAGGED: dict[str, RewardFunction] = {
    "format": parts.well_formed,
    "process": parts.process,
    "search": parts.search,
    "outcome": parts.outcome,
}
# The rewards that can only be used with a step format that has searches.
SEARCH_REWARDS = (
    searching.gold_recall,
    searching.gold_precision,
    searching.information_gain,
    searching.search_count,
    searching.search_excess,
    judged.relevance,
    judged.query_rationality,
)
REWARDS: dict[str, RewardFunction] = {
    function.__name__: function
    for function in (
        answers.exact_match,
        answers.answer_f1,
        answers.contains_gold,
        answers.rouge_l,
        answers.rouge_l_levels,
        answers.hop_weighted,
        formats.strict_format,
        formats.approximate_format,
        formats.all_tags,
        formats.tag_share,
        formats.valid_plan,
        *SEARCH_REWARDS,
        judged.judged_answer,
        judged.coherence,
        texts.length_penalty,
        texts.language_penalty,
        texts.keyword_overlap,
        texts.logical_connectors,
        tasks.coding,
        tasks.function_calling,
        tasks.chat,
        tasks.combined,
    )
}
# The built-in rewards for the answer itself. A user's own function always counts as one, too: it may reward the answer.
ANSWER_REWARDS = (
    answers.exact_match,
    answers.answer_f1,
    answers.contains_gold,
    answers.rouge_l,
    answers.rouge_l_levels,
    answers.hop_weighted,
    judged.judged_answer,
    tasks.coding,
    tasks.function_calling,
    tasks.chat,
    tasks.combined,
)
LARGEST_REWARD = 1e15  # sums of squared rewards, which learning computes, must be finite in fp32
VERDICT = "verdict"  # the name of the parameter that gets the judge's verdict
# The types that a parameter may have: those in the same line as the type of its default. The text is for the error.
KINDS = (
    ((bool,), "true or false"),
    ((int, float), "a number"),
    ((str,), "text"),
    ((list, tuple), "a list"),
)


@dataclass(frozen=True)
class NamedReward:
    """A reward function with its weight and its parameters."""

    name: str
    weight: float
    function: RewardFunction
    parameters: dict[str, Any]
    takes_verdict: bool

    @property
    def pays_answer(self) -> bool:
        """True if this counts as a reward for the answer and its weight is not 0.

        A name with a colon is that of a user's own function.
        """
        return self.weight != 0 and (self.function in ANSWER_REWARDS or ":" in self.name)

    def step_rewards(self, episode: Episode, verdict: Verdict | None) -> list[float] | None:
        """Returns the weighted reward of each step; None if the reward is missing.

        Raises R3LiteError if the function fails or returns a value that is no reward.
        """
        step_count = len(episode.steps)
        if step_count == 0:
            return []
        value = self._value(episode, verdict)
        if value is None:
            return None
        if isinstance(value, (list, tuple)):
            by_step = list(value)
        else:
            by_step = [0.0] * (step_count - 1) + [value]
        # The rewards with flags are not checked here: `EpisodeReward` refuses a step's sum that is too large.
        if self.name not in FLAGGED and not _are_rewards(by_step, step_count):
            cause = f"the reward {self.name} returned {shown(value)} for an episode of {step_count} steps"
            limit = f"a number of at most {LARGEST_REWARD:.0e}"
            remedy = f"It must return {limit}, a list of one per step, or None if it is missing."
            raise R3LiteError(f"{cause} (question {episode.question.id})", remedy, code="reward-invalid")
        return [self.weight * float(reward) for reward in by_step]

    def _value(self, episode: Episode, verdict: Verdict | None) -> Any:
        """Returns what the function returns. Raises R3LiteError if the function raises."""
        arguments = dict(self.parameters)
        if self.takes_verdict:
            arguments[VERDICT] = verdict
        try:
            return self.function(episode, **arguments)
        except Exception as error:
            # Frame 0 is the call above. Frame 1 is the line of the user's function, unless the call itself failed.
            frames = traceback.extract_tb(error.__traceback__)[:2]
            place = frames[-1]
            cause = f"the reward {self.name} failed on question {episode.question.id}: {type(error).__name__}: {error}"
            raise R3LiteError(cause, f"Fix {place.filename}, line {place.lineno}.", code="reward-failed") from error


def _are_rewards(values: list, step_count: int) -> bool:
    """Returns True if there is one number per step, none of them NaN or larger than LARGEST_REWARD."""
    if len(values) != step_count:
        return False
    return all(isinstance(value, Real) and abs(value) <= LARGEST_REWARD for value in values)


def rewards_of(settings: RewardSettings) -> list[NamedReward]:
    """Returns all rewards of the settings: those with flags and those of `--rewards`, with their parameters checked.

    They are added up in this order, `outcome` last; another order would change the last bit of a sum. `search` is left
    out if its weights are 0. Raises the errors of `named_rewards`.
    """
    flagged = {name: _flagged(name, settings) for name in FLAGGED}
    outcome = flagged.pop("outcome")
    if not settings.search_bonus and not settings.idle_query_penalty:
        del flagged["search"]
    return [*flagged.values(), *named_rewards(settings), outcome]


def _flagged(name: str, settings: RewardSettings) -> NamedReward:
    """Returns the reward `name` of FLAGGED. Its parameters have the values of the settings with the same names."""
    function = FLAGGED[name]
    names = list(inspect.signature(function).parameters)[1:]  # without the episode
    flags = {flag: getattr(settings, flag) for flag in names if flag != VERDICT}
    return NamedReward(
        name,
        weight=1.0,
        function=function,
        parameters=flags,
        takes_verdict=VERDICT in names,
    )


def named_rewards(settings: RewardSettings) -> list[NamedReward]:
    """Returns the rewards that `--rewards` names, with their parameters checked.

    Raises UsageError for a name or a parameter that does not exist, R3LiteError if a user's module cannot be imported.
    """
    return [_named(entry) for entry in settings.rewards or ()]


def _named(entry: RewardEntry) -> NamedReward:
    """Returns the reward of an entry of `--rewards`, which has a name, a weight and perhaps parameters."""
    name = entry["name"]
    function = _load(name)
    try:
        all_parameters = list(inspect.signature(function).parameters.values())[1:]  # without the episode
    except (TypeError, ValueError):  # not callable, or written in C
        raise UsageError(
            f"the reward {name} is {shown(function)}, not a function of an episode", code="reward-not-function"
        ) from None
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    # The default of each parameter that can be set, by its name; Parameter.empty if it has none.
    settable = {parameter.name: parameter.default for parameter in all_parameters if parameter.kind in by_keyword}
    takes_verdict = VERDICT in settable
    settable.pop(VERDICT, None)
    parameters = {key: value for key, value in entry.items() if key not in ("name", "weight", FIRST_WEIGHT)}
    for key, value in parameters.items():
        if key not in settable:
            choice = f"choose from {', '.join(settable)}" if settable else "it has none"
            raise UsageError(
                f"the reward {name} has no parameter {key!r}{nearest(key, settable)}; {choice}",
                code="reward-parameter-unknown",
            )
        _check_kind(f"{key} of the reward {name}", value, settable[key])
    for key, default in settable.items():
        if default is inspect.Parameter.empty and key not in parameters:
            raise UsageError(f"the reward {name} needs the parameter {key}", code="reward-parameter-missing")
    return NamedReward(
        name,
        weight=entry["weight"],
        function=function,
        parameters=parameters,
        takes_verdict=takes_verdict,
    )


def _check_kind(parameter: str, value: Any, default: Any) -> None:
    """Raises UsageError if the value of a parameter is of another kind than its default, see KINDS.

    Any value is right for a default of a type that KINDS does not have, such as None.
    """
    for types, description in KINDS:
        if isinstance(default, types):
            is_stray_bool = isinstance(value, bool) and bool not in types  # a bool is an int in Python
            if is_stray_bool or not isinstance(value, types):
                raise UsageError(f"{parameter} is {value!r}; it must be {description}", code="wrong-type")
            return


def _load(name: str) -> RewardFunction:
    """Returns the function of a name. Imports the module of a user's function.

    The module is looked for in the current folder first, as `python -m` does; the folder stays in sys.path.
    """
    if ":" not in name:
        if name not in REWARDS:
            advice = "see docs/rewards.md, or pass your own as package.module:function"
            raise UsageError(f"unknown reward {name!r}{nearest(name, REWARDS)}; {advice}", code="unknown-reward")
        return REWARDS[name]
    module_name, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(
                f"the reward {name}: no module {error.name} in {os.getcwd()} or installed", code="reward-module-absent"
            ) from None
        cause = f"the module of the reward {name} cannot be imported: {type(error).__name__}: {error}"
        raise R3LiteError(cause, "Fix the module.", code="reward-module-broken") from error
    if not hasattr(module, function):
        raise UsageError(
            f"{module_name} has no {function}{nearest(function, vars(module))}", code="reward-function-absent"
        )
    return getattr(module, function)


def needs_verdict(settings: RewardSettings) -> bool:
    """Returns True if `outcome_judge` or `process_judge` is above 0, or if a named reward takes a verdict."""
    if settings.outcome_judge > 0 or settings.process_judge > 0:
        return True
    return any(reward.takes_verdict for reward in named_rewards(settings))


def settings_of_round(settings: RewardSettings, number: int) -> RewardSettings:
    """Returns the settings with the weights of round `number`, from 1 on.

    With a curriculum of N rounds, a reward that has a `first_weight` has the weight share * weight + (1 - share) *
    first_weight in round n. `share` is 1 after round N. Up to round N it is 0 (--curriculum-switch hard) or (n - 1) / N
    (linear).
    """
    if not settings.rewards:
        return settings
    rounds = settings.curriculum_rounds
    if number > rounds:
        share = 1.0
    elif settings.curriculum_switch == "linear":
        share = (number - 1) / rounds
    else:
        share = 0.0
    rewards = []
    for entry in settings.rewards:
        round_entry = {key: value for key, value in entry.items() if key != FIRST_WEIGHT}
        if FIRST_WEIGHT in entry:
            round_entry["weight"] = share * entry["weight"] + (1 - share) * entry[FIRST_WEIGHT]
        rewards.append(RewardEntry(round_entry))
    return replace(settings, rewards=tuple(rewards))


def metrics_of_weights(settings: RewardSettings, number: int) -> dict[str, float]:
    """Returns, as metrics, the weights in round `number` of the rewards with a first weight; none without a
    curriculum."""
    if not settings.rewards or not settings.curriculum_rounds:
        return {}
    round_entries = settings_of_round(settings, number).rewards
    metrics = {}
    for entry, round_entry in zip(settings.rewards, round_entries, strict=True):
        if FIRST_WEIGHT in entry:
            metrics[f"rewards/{entry['name']}/weight"] = round_entry["weight"]
    return metrics


def weights_change_at(settings: RewardSettings, number: int) -> bool:
    """Returns True if round `number` has other weights than round `number` - 1."""
    return number > 1 and metrics_of_weights(settings, number) != metrics_of_weights(settings, number - 1)
