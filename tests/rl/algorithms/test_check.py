"""What the algorithms refuse: a setting is used, or refused with the reason, and never dropped in silence."""

import re

import pytest

from r3lite.core.config import UsageError
from r3lite.core.invocation import resolve, to_toml
from r3lite.rl import algorithms
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.settings import PpoConfig
from tests.commands import NEEDED
from tests.errors import raises


def check(*flags: str) -> None:
    config = resolve("ppo", PpoConfig(), list(flags))
    algorithms.check(config.rl, config.set_by_user, config.lengths)


@pytest.mark.parametrize("preset", ["laptop-4gb", "tiny", "search-r1"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_goes_with_every_preset(algorithm, preset):
    """What a preset sets for others is not asked for."""
    check("--algorithm", algorithm, "--preset", preset, *NEEDED.get(algorithm, []))


GIVEN = {
    "gamma": "0.9",
    "gae_lambda": "0.9",
    "value_clip": "none",
    "value_coefficient": "0.5",
    "value_learning_rate": "0.5",
    "refill_limit": "7",
    "expand_limit": "7",
    "overlong_filter": "on",
    "overlong_penalty": "0.5",
    "overlong_cache": "0.5",
    "length_constant": "7",
    "traces": "x.jsonl",
    "trace_share": "0.7",
    "trace_min_outcome": "0.7",
    "replay_size": "7",
    "replay_share": "0.7",
    "replay_min_outcome": "0.7",
    "replay_start": "0.7",
    "shaping_gamma": "0.7",
    "likelihood_weight": "0.5",
    "failed_below": "0.5",
    "teacher": "a",
    "teacher_adapter": "a",
    "teacher_quantize": "none",
    "teacher_top": "7",
    "teacher_weight": "0.5",
    "teacher_logprobs": "a",
}


def test_all_that_only_some_read_is_tried_below():
    assert set(GIVEN) == {name for cls in ALGORITHMS.values() for name in cls.own_settings}


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_an_algorithm_does_not_read_is_refused(algorithm, name):
    value, flag = GIVEN[name], "--" + name.replace("_", "-")
    if name == "overlong_filter" and algorithm == "dapo":
        value = "off"
    needed = [] if name == "teacher_logprobs" else NEEDED.get(algorithm, [])
    flags = ["--algorithm", algorithm, *needed, flag, value]
    if name in ALGORITHMS[algorithm].own_settings:
        check(*flags)
        return
    readers = ", ".join(reader for reader, cls in ALGORITHMS.items() if name in cls.own_settings)
    with pytest.raises(UsageError) as error:
        check(*flags)
    assert f", but has no effect with --algorithm {algorithm}: it needs one of {readers}" in str(error.value)
    assert str(error.value).startswith(f"{flag} is ")


def test_a_file_counts_as_asked_for(tmp_path):
    (tmp_path / "my.toml").write_text('[ppo]\nalgorithm = "grpo"\ngae_lambda = 0.9\n', encoding="utf-8")
    with raises(UsageError, "algorithm-option-unused", "--gae-lambda is 0.9", "grpo", "ppo"):
        check("--config", str(tmp_path / "my.toml"))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--kl-beta 0 --kl-target 0.1", "--kl-target needs a --kl-beta above 0"),
        ("--kl-budget 0.001 --kl-target 0.1", "--kl-target and --kl-budget would both steer the same KL"),
        ("--algorithm dgpo --teacher-logprobs a --kl-budget 0.001", "pass --teacher, or no --kl-budget"),
        ("--algorithm grpo --kl-estimator k1", "--kl-estimator k1 has a mean gradient of 0 in the loss of grpo"),
        ("--importance-cap 2", "also needs --old-logprobs trainer"),
        *((f"--algorithm {name} --num-generations 1", f"--num-generations is 1, but {name.upper()} compares episodes")
          for name, cls in ALGORITHMS.items() if cls.has_groups),
        ("--algorithm dgpo", "pass --teacher MODEL, or --teacher-logprobs FOLDER"),
        ("--algorithm dgpo --teacher a --teacher-logprobs b", "dgpo needs one teacher"),
        ("--algorithm dpo --kl-beta 0", "dpo needs a --kl-beta above 0"),
        ("--algorithm dpo --kl-estimator k3", "--kl-estimator has no use with --algorithm dpo"),
        ("--algorithm dpo --kl-target 0.1", "--kl-target has no use with --algorithm dpo"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_with_the_reason(flags, says):
    with pytest.raises(UsageError, match=re.escape(says)):
        check(*flags.split())


@pytest.mark.parametrize(
    "flags",
    [
        "--kl-target 0.1",
        "--kl-beta 0 --kl-budget 0.001",
        "--algorithm dgpo --teacher a --kl-budget 0.001",
        "--algorithm gspo --importance-cap 2",
        "--old-logprobs trainer --importance-cap 2",
        "--algorithm grpo --kl-estimator k2",
        "--algorithm rloo --kl-estimator k3",
        "--algorithm reinforce++ --num-generations 1",
        "--value-clip none",
    ],
)
def test_what_fits_together_is_taken(flags):
    check(*flags.split())


def test_the_same_settings_are_never_refused_when_they_come_from_a_run(tmp_path):
    """The config.toml of a run names every setting; only what differs from the preset was asked for."""
    for name in ALGORITHMS:
        flags = ["--algorithm", name, "--preset", "tiny", *NEEDED.get(name, [])]
        config = resolve("ppo", PpoConfig(), flags)
        (tmp_path / "config.toml").write_text(to_toml(config, "ppo"), encoding="utf-8")
        flags = ["--config", str(tmp_path / "config.toml")]
        check(*flags)
        assert resolve("ppo", PpoConfig(), flags).rl == config.rl
