"""The guard's decisions on series of metrics made by hand, on noise, and on real runs that were healthy."""

import json
import random
import statistics
from pathlib import Path

import pytest

from r3lite.core.errors import R3LiteError
from r3lite.settings import GuardSettings
from r3lite.training.guard import Guard, standard_error
from r3lite.training.watches import right_likelihood

HEALTHY = {
    "malformed_ratio": 0.04,
    "completions/clipped_ratio": 0.01,
    "queries/blank_ratio": 0.0,
    "queries/repeated_ratio": 0.05,
    "searches": 2.0,
    "completions/mean_length": 150.0,
    "completions/repeated_ngrams": 0.4,
    "entropy": 0.3,
    "kl": 0.02,
    "frac_reward_zero_std": 0.1,
    "reward": 0.8,
    "reward_std": 0.4,
    "rewards/f1/mean": 0.5,
    "completions/right": 30,
    "logps/right": -0.05,
}
USUAL = GuardSettings()
RIGHT = [1.0] * 32 + [0.0] * 32  # F1 of each of 64 questions
REAL = Path(__file__).parent / "healthy_rounds.jsonl"


def alarms(rounds: list[dict], settings: GuardSettings = USUAL, episodes: int = 64) -> dict[int, str]:
    """The steps at which a guard raises an alarm, with the limit; each round has what differs from a healthy one."""
    guard = Guard(settings, episodes)
    limits = {}
    for step, changes in enumerate(rounds, 1):
        alarm = guard.check(step, HEALTHY | changes)
        if alarm:
            limits[step] = alarm.limit
    return limits


# Each limit, with a round beyond it and one within it.
LIMITS = [
    ("guard_malformed", {"malformed_ratio": 0.36}, {"malformed_ratio": 0.33}),  # 0.05 at the start, 0.3 more allowed
    ("guard_malformed", {"completions/clipped_ratio": 0.4}, {"completions/clipped_ratio": 0.2}),
    ("guard_queries", {"queries/blank_ratio": 0.31}, {"queries/blank_ratio": 0.29}),
    ("guard_queries", {"queries/repeated_ratio": 0.36}, {"queries/repeated_ratio": 0.34}),
    ("guard_searches", {"searches": 0.66}, {"searches": 0.67}),  # a third of 2
    ("guard_searches", {"searches": 6.1}, {"searches": 5.9}),
    ("guard_length", {"completions/mean_length": 451}, {"completions/mean_length": 449}),
    ("guard_length", {"completions/mean_length": 49}, {"completions/mean_length": 51}),
    ("guard_repetition", {"completions/repeated_ngrams": 0.66}, {"completions/repeated_ngrams": 0.64}),
    ("guard_entropy_rise", {"entropy": 1.21}, {"entropy": 1.19}),
    ("guard_entropy_fall", {"entropy": 0.0059}, {"entropy": 0.0061}),
    ("guard_kl", {"kl": 0.101}, {"kl": 0.099}),
    ("guard_right_likelihood", {"logps/right": -0.26}, {"logps/right": -0.24}),
    ("guard_variance", {"frac_reward_zero_std": 1.0, "reward": 0.3}, {"frac_reward_zero_std": 0.9, "reward": 0.3}),
]


@pytest.mark.parametrize(("limit", "beyond", "within"), LIMITS)
def test_each_limit_is_crossed_after_five_rounds_and_not_before_it(limit, beyond, within):
    healthy = [{}] * 5
    assert alarms(healthy + [beyond] * 4) == {}
    assert alarms(healthy + [beyond] * 5) == {10: limit}
    assert alarms(healthy + [within] * 20) == {}
    assert alarms(healthy + [beyond] * 5, GuardSettings(**{limit: None})) == {}
    assert alarms(healthy + [beyond] * 5, GuardSettings(guard="off")) == {}


def test_a_round_within_the_limit_begins_the_count_anew_and_a_limit_is_told_once():
    bad = {"malformed_ratio": 0.9}
    assert alarms([{}] + [bad] * 4 + [{}] + [bad] * 4) == {}
    assert alarms([{}] + [bad] * 30) == {6: "guard_malformed"}
    assert alarms([{}] + [bad] * 6 + [{}] + [bad] * 6) == {6: "guard_malformed", 13: "guard_malformed"}
    assert alarms([{}] + [bad] * 2, GuardSettings(guard_patience=2)) == {3: "guard_malformed"}


def test_limits_that_are_crossed_together_are_told_one_after_the_other():
    """The second one was never told: its count had passed the number of rounds."""
    both = {"malformed_ratio": 0.9, "queries/blank_ratio": 0.9}
    limits = alarms([{}] + [both] * 8)
    assert limits == {6: "guard_malformed", 7: "guard_queries"}


def test_the_start_is_as_many_rounds_as_have_32_episodes():
    """With few episodes a round, the first one alone says too little."""
    start = [{"malformed_ratio": 0.0}] + [{"malformed_ratio": 0.4}] * 3  # 0.3 in the mean, and 0.01 cut off
    assert alarms(start + [{"malformed_ratio": 0.55}] * 9, episodes=8) == {}
    assert alarms(start + [{"malformed_ratio": 0.61}] * 9, episodes=8) == {9: "guard_malformed"}


def test_small_changes_of_small_numbers_are_no_collapse():
    """Four times an entropy of 0.04 is what a healthy run may have, and so is a tenth of 0.4 searches."""
    assert alarms([{"entropy": 0.04}] + [{"entropy": 0.2}] * 9) == {}
    assert alarms([{"searches": 0.4}] + [{"searches": 0.04}] * 9) == {}
    assert alarms([{"completions/mean_length": 12}] + [{"completions/mean_length": 40}] * 9) == {}


def test_equal_rewards_are_no_collapse_if_they_are_the_best_or_were_so_from_the_start():
    solved = {"frac_reward_zero_std": 1.0, "reward": 1.5}
    assert alarms([{}] * 5 + [solved] * 9) == {}
    assert alarms([{"frac_reward_zero_std": 1.0, "reward": 0.5 - i / 100} for i in range(20)]) == {}


def test_what_a_round_lacks_is_not_watched():
    """Without a reference there is no KL, and a round whose judge failed has no rewards and no entropy."""
    missing = {"kl": None, "entropy": None, "reward": None, "reward_std": None, "rewards/f1/mean": None}
    assert alarms([missing] * 20) == {}
    assert alarms([{}] * 5 + [missing | {"malformed_ratio": 0.9}] * 5) == {10: "guard_malformed"}


def test_where_few_are_right_the_likelihood_is_that_of_eight_in_several_rounds():
    """(2 x -0.6 + 6 x -0.2) / 8 = -0.3; the oldest round is not needed."""
    rounds = [{"right": n, "right_likelihood": x} for n, x in ((3, -5.0), (6, -0.2), (0, None), (2, -0.6))]
    assert right_likelihood(rounds) == pytest.approx(-0.3) and right_likelihood(rounds[2:]) is None

    few_right = {"completions/right": 3, "logps/right": -0.1}
    fallen = few_right | {"logps/right": -0.5}
    none_right = {"completions/right": 0, "logps/right": None}
    # The start is known in the third round: -0.1. Then (-0.1 x 6 - 0.5 x 3) / 9 = -0.23, -0.37, and -0.5 for good.
    assert alarms([few_right] * 3 + [fallen] * 6, GuardSettings(guard_right_likelihood=0.25)) == {
        9: "guard_right_likelihood"
    }
    assert alarms([few_right] * 3 + [fallen] * 5 + [none_right] * 9, GuardSettings(guard_right_likelihood=0.25)) == {}
    assert alarms([few_right] * 2 + [none_right] * 4 + [fallen] * 20) == {}  # no start was known before it fell


def test_reward_up_and_f1_down_is_reward_hacking():
    def rounds(reward: float, f1: float) -> list[dict]:
        return [{}] * 5 + [{"reward": reward, "rewards/f1/mean": f1}] * 15

    assert alarms(rounds(1.0, 0.3)) != {} and set(alarms(rounds(1.0, 0.3)).values()) == {"guard_hacking"}
    assert alarms(rounds(1.0, 0.45)) == {}  # F1 within its noise
    assert alarms(rounds(0.6, 0.3)) == {}  # worse, but not for a higher reward


# Validations


def validated(*f1s: list[float], settings: GuardSettings = USUAL) -> dict[int, str]:
    guard = Guard(settings, 64)
    limits = {}
    guard.take_validation(0, RIGHT)
    for step, each in enumerate(f1s, 1):
        if alarm := guard.check(step, HEALTHY, each):
            limits[step] = alarm.limit
    return limits


def fewer(n: int) -> list[float]:
    """RIGHT with n answers fewer."""
    return [0.0] * n + RIGHT[n:]


def test_a_drop_of_validation_f1_counts_if_it_is_large_sure_and_seen_twice():
    """Of 64 answers 16 fewer are right: 0.25 less, and the standard error of the differences is 0.0546."""
    assert standard_error([1.0] * 16 + [0.0] * 48) == pytest.approx(0.0545545, abs=1e-6)
    assert validated(fewer(16), fewer(16)) == {2: "guard_f1_drop"}
    assert validated(fewer(16), RIGHT, fewer(16), RIGHT) == {}
    assert validated(fewer(6), fewer(6)) == {}  # 0.094
    assert validated(fewer(16), fewer(16), settings=GuardSettings(guard_f1_drop=0.3)) == {}
    assert validated(fewer(16), fewer(16), settings=GuardSettings(guard_f1_drop=None)) == {}


def test_a_drop_within_the_noise_of_the_questions_is_no_collapse():
    """0.125 less, but 12 answers are better and 20 worse: the standard error is 0.0875, and two of them are 0.175."""
    noisy = [0.0] * 20 + [1.0] * 12 + [1.0] * 12 + [0.0] * 20
    assert statistics.fmean(noisy) == 0.375 and standard_error([a - b for a, b in zip(RIGHT, noisy)]) > 0.08
    assert validated(noisy, noisy, noisy) == {}


def test_the_best_of_many_validations_was_lucky_and_a_drop_must_be_larger():
    """0.125 less is 3.0 standard errors of 0.0417: more than 2 after one validation, less than 3.5 after ten."""
    assert validated(fewer(8), fewer(8)) == {2: "guard_f1_drop"}
    assert validated(*[RIGHT] * 9, fewer(8), fewer(8)) == {}
    assert validated(*[RIGHT] * 9, fewer(16), fewer(16)) == {11: "guard_f1_drop"}


def test_a_drop_is_told_with_the_reward_if_that_rose():
    def alarm_message(*rewards: float) -> str:
        guard = Guard(GuardSettings(), 64)
        for step, reward in enumerate(rewards, 1):
            alarm = guard.check(step, HEALTHY | {"reward": reward}, RIGHT if step == 1 else fewer(16))
        return alarm.message

    fell = "validation F1 fell from 0.500 to 0.250"
    assert alarm_message(0.8, 0.7, 0.6) == f"{fell}, 2 validations in a row"
    assert alarm_message(0.8, 1.0, 1.2) == f"{fell} while the reward rose from 0.800 to 1.000, 2 validations in a row"


def test_the_best_validation_is_the_first_of_equal_ones():
    guard = Guard(GuardSettings(), 64)
    for step, each in enumerate([fewer(3), RIGHT, fewer(1), RIGHT[::-1], fewer(2)]):
        guard.check(step, HEALTHY, each)
    assert guard.best.step == 1 and guard.best.f1 == 0.5


def test_a_rollback_begins_the_counts_anew_and_scales_rate_and_kl():
    guard, bad = Guard(GuardSettings(guard_rate_factor=0.5, guard_kl_factor=3.0), 64), {"malformed_ratio": 0.9}
    for step in range(1, 7):
        alarm = guard.check(step, HEALTHY | (bad if step > 1 else {}))
    assert alarm.limit == "guard_malformed" and (guard.rate_scale, guard.kl_scale) == (1, 1)
    guard.rolled_back()
    assert (guard.rate_scale, guard.kl_scale) == (0.5, 3.0)
    assert not any(guard.check(step, HEALTHY | bad) for step in range(7, 11))
    assert guard.check(11, HEALTHY | bad).limit == "guard_malformed"  # compared with the first rounds of the run still


def test_what_is_told_has_the_figures():
    guard = Guard(GuardSettings(), 64)
    message = [guard.check(step, HEALTHY | ({"malformed_ratio": 0.9} if step > 1 else {})) for step in range(1, 7)][
        -1
    ].message
    assert message == "91% of the episodes are malformed or cut off (5% at the start), 5 rounds in a row"


def test_a_guard_goes_on_from_its_state():
    generator = random.Random(0)
    changes = (("malformed_ratio", (0.0, 0.9)), ("logps/right", (-0.05, -0.1, -0.9)))
    rounds = [HEALTHY | {name: generator.choice(values) for name, values in changes} for _ in range(200)]
    guard = Guard(GuardSettings(guard_patience=3), 64)
    raised = []
    for step, record in enumerate(rounds, 1):
        each = fewer(generator.randrange(20)) if step % 5 == 0 else None
        restored = Guard(GuardSettings(guard_patience=3), 64)
        restored.load_state_dict(json.loads(json.dumps(guard.state_dict())))
        raised.append(guard.check(step, record, each))
        assert restored.check(step, record, each) == raised[-1] and restored.state_dict() == guard.state_dict()
        if raised[-1]:
            guard.rolled_back()
    assert any(raised) and guard.rollbacks == sum(map(bool, raised))


# Healthy runs


@pytest.mark.parametrize("seed", range(20))
def test_the_noise_of_64_episodes_raises_no_alarm(seed):
    """200 rounds of a run that neither learns nor collapses, with a validation every tenth."""
    generator, guard = random.Random(seed), Guard(GuardSettings(), 64)

    def share(p: float) -> float:
        return statistics.fmean(generator.random() < p for _ in range(64))

    guard.take_validation(0, [float(generator.random() < 0.5) for _ in range(64)])
    for step in range(1, 201):
        noisy = {"malformed_ratio": share(0.1), "queries/repeated_ratio": share(0.1), "rewards/f1/mean": share(0.4)}
        noisy |= {"searches": generator.gauss(2, 0.3), "completions/mean_length": generator.gauss(150, 25)}
        noisy |= {"entropy": 0.05 * 2 ** generator.gauss(0, 0.5), "reward": share(0.4) + 0.3, "kl": share(0.05)}
        right = [generator.gauss(-0.3, 0.15) for _ in range(64) if generator.random() < 0.1]
        noisy |= {"completions/right": len(right), "logps/right": statistics.fmean(right) if right else None}
        each = [float(generator.random() < 0.5) for _ in range(64)] if step % 10 == 0 else None
        assert guard.check(step, HEALTHY | noisy, each) is None


@pytest.mark.parametrize(
    ("run", "count", "episodes"), [("ppo", 24, 64), ("grpo", 12, 32), ("reinforce++-baseline", 24, 64)]
)
def test_real_healthy_runs_raise_no_alarm(run, count, episodes):
    """The tiny model on the sample world, whose F1 doubled: two of the quickstart, and GRPO as in docs/collapse.md."""
    records = [json.loads(line) for line in REAL.read_text(encoding="utf-8").splitlines()]
    rounds, guard = [record for record in records if record["run"] == run], Guard(GuardSettings(), episodes)
    assert len(rounds) == count
    assert [guard.check(record["step"], record) for record in rounds] == [None] * count


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"rounds": "many"}, "rounds"),
        ({"first": [3]}, r"first\[0\]"),
        ({"recent": None}, "recent"),
        ({"peak": [{"f1": "high"}]}, r"peak\[0\]\.f1"),
        ({"beyond": {"guard_kl": -1}}, "beyond.guard_kl"),
        ({"best": {"step": 1, "each": ["0"], "reward": None}}, "best.each"),
        ({"best": {"step": 1, "each": []}}, "best.each"),
    ],
)
def test_a_state_that_is_none_is_refused(broken, message):
    guard = Guard(USUAL, 64)
    guard.check(1, HEALTHY, RIGHT)
    with pytest.raises(R3LiteError, match=message):
        Guard(USUAL, 64).load_state_dict(json.loads(json.dumps(guard.state_dict())) | broken)


def test_rewards_of_other_weights_are_not_compared():
    """At a curriculum's switch the reward fell by half: that all of it is learned was told as a loss of variance."""
    learned = {"frac_reward_zero_std": 1.0, "reward": 0.4}
    for forgets, alarm_step in ((False, 11), (True, None)):
        guard = Guard(USUAL, 64)
        each = {}
        for step, changes in enumerate([{}] * 5 + [learned] * 6, 1):
            if step == 6 and forgets:
                guard.take_validation(5, RIGHT)
                guard.forget_rewards()
                assert guard.best.reward is guard.best_reward is guard.peak is None
            alarm = guard.check(step, HEALTHY | changes)
            each |= {step: alarm.limit} if alarm else {}
        assert each == ({alarm_step: "guard_variance"} if alarm_step else {})
