"""What ppo says when the first rounds of a run give it nothing to learn from."""

import json

import pytest

from r3lite.assembly.policy import warn_of_short_sft
from r3lite.assembly.rl_setup import ending_of, limits_of, warn_of_little_sft, warn_of_no_reward
from r3lite.core.files import write_json, write_jsonl
from r3lite.core.invocation import with_values
from r3lite.protocols.registry import build_protocol
from r3lite.settings import LengthSettings, PpoConfig, ProtocolSettings
from r3lite.training.earlier_run import QUESTIONS_FILE, SftLength, demonstrated, sft_length
from r3lite.training.guard import Guard

NONE = {"rewards/outcome/mean": 0.0, "malformed_ratio": 0.5, "completions/clipped_ratio": 0.25}
NONE |= {"frac_reward_zero_std": 0.5}
SOME = NONE | {"rewards/outcome/mean": 0.1}
EQUAL = SOME | {"frac_reward_zero_std": 1.0}


def warnings_of(capsys, *records: dict, **settings) -> str:
    """What is said over rounds of 16 episodes; the first two have the 32 that count."""
    settings = {"batch_size": 2, "num_generations": 8, "algorithm": "grpo"} | settings
    config = with_values(PpoConfig(), settings)
    guard = Guard(config.guard, config.episodes_of_round)
    for step, record in enumerate(records, 1):
        if rounds := guard.first_rounds(record):
            warn_of_no_reward(config, rounds)
        guard.check(step, record)
    return capsys.readouterr().err


def test_a_start_that_is_paid_for_no_answer_is_told_once(capsys):
    stderr = warnings_of(capsys, NONE, NONE, NONE, NONE)
    assert stderr.startswith("warning: no answer in the first 2 rounds was rewarded, and 75% of the episodes are mal")
    assert stderr.count("\n") == 1 and "Malformed: run SFT first, and pass" in stderr and "--max-new-tokens" in stderr
    assert warnings_of(capsys, NONE) == ""  # 16 episodes say too little
    assert "in the first round was" in warnings_of(capsys, NONE, batch_size=4)


def test_a_start_from_an_adapter_is_not_told_to_run_sft_first(tmp_path, capsys):
    """After three steps of SFT it said so, and also that the format might be another one."""
    (tmp_path / "config.toml").write_text("[sft]\n", encoding="utf-8")
    for steps, expected in (
        (3, f"{tmp_path} had only 3 steps of SFT; train it for longer"),
        (30, "or pass the --format"),
    ):
        write_jsonl(tmp_path / "metrics.jsonl", [{"step": steps, "epoch": 1.0}])
        stderr = warnings_of(capsys, NONE, NONE, adapter=str(tmp_path))
        advice = {3: "", 30: f"train {tmp_path} for longer in SFT, "}[steps]
        assert f"Malformed: {advice}{expected}" in stderr and ("--format" in stderr) == (steps == 30)
        for warn in (warn_of_little_sft, warn_of_short_sft):
            warn(str(tmp_path))
            assert ("had only 3 steps of SFT: it may hardly know" in capsys.readouterr().err) == (steps == 3)


def sft_run(run, steps, epochs, **settings):
    """Writes the folder of a run of SFT, with a record halfway."""
    run.mkdir()
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    (run / "config.toml").write_text("\n".join(["[sft]", *lines, ""]), encoding="utf-8")
    halfway = {"step": steps // 2, "epoch": epochs / 2}
    write_jsonl(run / "metrics.jsonl", [halfway, {"step": steps, "epoch": epochs}])


def test_sft_in_stages_counts_as_one(tmp_path, capsys):
    """After 315 steps and 80 more, it was told that 0.23 epochs of SFT are too few."""
    first, second = tmp_path / "first", tmp_path / "second"
    sft_run(first, 315, 1.0, adapter="none", model="base")
    sft_run(second, 80, 0.23, adapter=str(first), model="base")
    assert sft_length(second / "adapter") == SftLength(395, 1.23)
    assert sft_length(second / "checkpoint-40") == SftLength(355, 1.115)
    warn_of_little_sft(str(second))
    assert capsys.readouterr().err == ""


def test_stages_that_train_all_weights_count_too(tmp_path):
    """Their results are models, not adapters."""
    first, second = tmp_path / "first", tmp_path / "second"
    sft_run(first, 100, 0.5, adapter="none", model="base", no_lora=True)
    sft_run(second, 60, 0.25, adapter="none", model=str(first / "model"), no_lora=True)
    assert sft_length(second / "model") == SftLength(160, 0.75)
    write_json(first / QUESTIONS_FILE, {"hashes": ["a"]})
    write_json(second / QUESTIONS_FILE, {"hashes": ["b"]})
    assert demonstrated(second / "model") == {"a", "b"}


def test_groups_with_equal_rewards_are_told_to_algorithms_that_compare_them(capsys):
    assert warnings_of(capsys, EQUAL, EQUAL).startswith(
        "warning: in the first 2 rounds the answers of each group are all"
    )
    assert "the episodes of each group are all rewarded alike" in warnings_of(capsys, EQUAL, EQUAL, outcome_em=0.0)
    assert warnings_of(capsys, EQUAL, EQUAL, algorithm="ppo") == ""


@pytest.mark.parametrize("settings", [{"algorithm": "dgpo"}, {"algorithm": "luffy"}, {"learn": "answer"}])
def test_refills_are_advised_only_to_runs_that_take_them(capsys, settings):
    """All were told to pass --refill-limit, which these refuse."""
    unmixed = SOME | {"groups/mixed": 0.0}
    assert "or --temperature, pass --refill-limit, or train" in warnings_of(capsys, unmixed, unmixed)
    assert "or --temperature, or train" in warnings_of(capsys, unmixed, unmixed, **settings)


def test_few_groups_that_mix_right_and_wrong_are_told_once(capsys):
    """Rounds without any were not told of: differences of recall alone counted as something to learn from."""
    unmixed = SOME | {"groups/mixed": 0.0}
    mixed = SOME | {"groups/mixed": 0.25}
    unknown = SOME
    stderr = warnings_of(capsys, unmixed, unmixed, unmixed)
    assert stderr.startswith("warning: in the first 2 rounds only 0% of the groups mix right and wrong answers. Raise")
    assert stderr.count("\n") == 1
    # A mean of one in eight is enough.
    assert warnings_of(capsys, unmixed, mixed) == warnings_of(capsys, unknown, unknown) == ""
    assert warnings_of(capsys, unmixed, unmixed, algorithm="ppo") == ""
    assert warnings_of(capsys, unmixed, unmixed, outcome_em=0.0) == ""
    assert ending_of(with_values(PpoConfig(), {"algorithm": "grpo"}), [{"step": 1, "reward": 0.1} | unmixed]) == "done"


@pytest.mark.parametrize("records", [(SOME, NONE), (NONE, SOME), (SOME, EQUAL), ({}, {})])
def test_a_start_that_can_be_learned_from_is_not(capsys, records):
    """Without any metric of rewards, all of them are missing, which is told elsewhere."""
    assert warnings_of(capsys, *records) == ""


def test_what_is_not_to_be_paid_for_its_answers_is_not_told_that_it_was_not(capsys):
    assert warnings_of(capsys, NONE, NONE, outcome_em=0.0, outcome_f1=0.0) == ""


def test_a_run_whose_rounds_all_earned_nothing_is_not_done():
    """33 rounds of zero reward ended with "done"."""
    config = with_values(PpoConfig(), {"algorithm": "grpo"})
    baseline = {"step": 0, "eval/f1": 0.0}
    unrewarded, rewarded = ({"step": 1, "reward": 0.1} | record for record in (NONE, SOME))
    ending = ending_of(config, [baseline, *[unrewarded] * 33])
    assert (
        "done" not in ending
        and "gave no training signal" in ending
        and "no answer in all 33 rounds was rewarded" in ending
    )
    assert ending_of(config, [baseline, *[unrewarded] * 32, rewarded]) == ending_of(config, [baseline]) == "done"


def test_a_run_of_answers_whose_contexts_were_all_left_out_is_not_done():
    """It ended with "done": a round of such contexts trains on nothing, and has no frac_reward_zero_std."""
    config = with_values(PpoConfig(), {"algorithm": "grpo", "learn": "answer"})
    right = {"reward": 1.0, "rewards/outcome/mean": 1.0}
    ending = ending_of(config, [{"step": 1, **right, "contexts/zero_std": 1.0}])
    assert "the answers of each group are all rewarded alike" in ending
    assert ending_of(config, [{"step": 1, **right, "contexts/zero_std": 0.75, "frac_reward_zero_std": 0.0}]) == "done"


def test_an_episode_without_searches_has_two_turns_at_most():
    """Its length penalty began, and its constant was, where no episode of --format solution ever is."""
    searching, direct = (build_protocol(ProtocolSettings(format=name)) for name in ("r3", "solution"))
    lengths = LengthSettings(max_hops=3, max_new_tokens=100)
    assert limits_of(lengths, {"": searching, "chat": direct}) is lengths and lengths.most_sampled == 500
    assert limits_of(lengths, {"": direct}).most_sampled == 200
