"""Reinforcement learning end to end on the tiny checkpoint: real retrieval, real rewards, exact resuming."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from r3lite import ppo
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.training import checkpoint
from tests.cold_start import adapter, arguments, logged, same


@pytest.fixture(scope="module")
def finished(cold):
    """An uninterrupted PPO run of four rounds, with the KL penalty."""
    assert ppo.main(arguments(cold, cold / "whole", "--kl-beta", "0.05")) == 0
    return cold / "whole"


def test_the_run_folder_holds_what_was_said_and_why_it_was_paid(finished):
    episodes = logged(finished, "episodes.jsonl")
    assert len(episodes) == 4 * 2 * 3 and {e["step"] for e in episodes} == {1, 2, 3, 4}
    keys = {"id", "question", "answers", "prediction", "steps", "finish", "rewards"}
    assert all(keys <= e.keys() and {"format", "process", "outcome"} <= e["rewards"].keys() for e in episodes)
    for e in episodes:
        assert sum(e["step_rewards"]) == pytest.approx(sum(e["rewards"][k] for k in ("format", "process", "outcome")))
    assert any(s.get("documents") for e in episodes for s in e["steps"])  # the retriever was asked, and answered
    assert len({sum(e["step_rewards"]) for e in episodes}) > 2  # some were paid more than others
    assert {"config.toml", "metrics.jsonl", "summary.json", "adapter", "checkpoint-4"} <= {
        p.name for p in finished.iterdir()
    }


def test_metrics_have_the_names_that_users_know(finished):
    records = logged(finished, "metrics.jsonl")
    names = (
        "step reward reward_std frac_reward_zero_std rewards/format/mean rewards/outcome/mean kl entropy loss "
        "grad_norm clip_ratio/low_mean clip_ratio/high_mean completions/mean_length completions/clipped_ratio "
        "num_tokens step_time learning_rate peak_memory_mib tokens_per_second value_loss explained_variance "
        "sampling/sampling_logp_difference/mean sampling/sampling_logp_difference/max "
        "sampling/outside_clip_first_epoch"
    )
    assert all(set(names.split()) <= r.keys() for r in records) and [r["step"] for r in records] == [1, 2, 3, 4]
    assert records[0]["kl"] == pytest.approx(0, abs=1e-3) and records[-1]["kl"] > 0


def test_what_is_trained_moves_and_what_is_frozen_does_not(finished, cold):
    before, after = adapter(cold / "sft"), adapter(finished)
    assert before.keys() == after.keys() and any(not torch.equal(before[k], after[k]) for k in before)
    state = safetensors.torch.load_file(finished / "checkpoint-4" / "weights.safetensors")
    assert state.keys() == after.keys() | {"value_head.weight", "value_head.bias"}
    assert state["value_head.weight"].abs().sum() > 0


def test_stopped_and_resumed_equals_uninterrupted(finished, cold, tmp_path):
    run = arguments(cold, tmp_path / "run", "--kl-beta", "0.05")
    assert ppo.main([*run, "--stop-after", "2"]) == 0
    assert not (tmp_path / "run" / "summary.json").exists()
    assert ppo.main([*run, "--resume", "auto"]) == 0
    same(finished, tmp_path / "run")


def kill_after(step: int, arguments: list[str], output: Path) -> None:
    """Starts a run and kills it when a step is logged; its end may come before, if it is the last."""
    command = [sys.executable, "-m", "r3lite.ppo", *arguments]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])})
    log = output / "metrics.jsonl"
    while not (log.exists() and len(log.read_text().splitlines()) >= step):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_killed_between_checkpoints_and_resumed_equals_uninterrupted(finished, cold, tmp_path):
    run = [*arguments(cold, tmp_path / "run", "--kl-beta", "0.05"), "--save-every", "2"]
    kill_after(3, run, tmp_path / "run")  # step 2 is saved, step 3 is not
    assert ppo.main([*run, "--resume", "auto"]) == 0
    same(finished, tmp_path / "run")


def test_grpo_is_the_same_loop_without_a_critic(cold, tmp_path):
    run = arguments(cold, tmp_path / "run", "--algorithm", "grpo", "--kl-beta", "0.05", "--max-steps", "2")
    assert ppo.main([*run, "--dtype", "fp32"]) == 0
    records = logged(tmp_path / "run", "metrics.jsonl")
    assert all("value_loss" not in r and 0 <= r["frac_reward_zero_std"] <= 1 for r in records)
    # Sampler and trainer agree but for rounding, in every round: what is sampled from is what was learned.
    assert all(0 < r["sampling/sampling_logp_difference/max"] < 1e-3 for r in records)
    assert all(r["sampling/outside_clip_first_epoch"] == 0 for r in records)  # one mini-batch a round
    state = safetensors.torch.load_file(tmp_path / "run" / "checkpoint-2" / "weights.safetensors")
    assert not any(k.startswith("value_head") for k in state)


# Each algorithm with what it has of its own, and with all that is kept from round to round.
VARIANTS = {
    "ppo": "--value-clip none --kl-beta 0.05 --kl-target 0.01",
    "grpo": "--old-logprobs trainer --importance-cap 2 --refill-limit 2",
    "dr-grpo": "--kl-beta 0.05 --kl-estimator k2",
    "dapo": "--kl-beta 0.05 --kl-target 0.01",
    "gspo": "--update-epochs 2 --mini-batch-size 3",
    "rloo": "--kl-beta 0.05 --kl-target 0.01",
    "reinforce++": "--kl-beta 0.05",
    "dgpo": "--teacher tiny --nf4-cache none --kl-beta 0.05",
}
SHORT = "--max-steps 2 --max-new-tokens 64 --max-hops 1 --warmup 0 --learning-rate-schedule linear"


def variant(cold: Path, output: Path, name: str) -> list[str]:
    return arguments(cold, output, "--algorithm", name, *SHORT.split(), *VARIANTS[name].split())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_stopped_and_resumed_equals_uninterrupted(cold, tmp_path, name):
    whole, parts = variant(cold, tmp_path / "whole", name), variant(cold, tmp_path / "parts", name)
    assert ppo.main(whole) == 0
    assert ppo.main([*parts, "--stop-after", "1"]) == 0
    assert ppo.main([*parts, "--resume", "auto"]) == 0
    same(tmp_path / "whole", tmp_path / "parts", 2)
    first, second = logged(tmp_path / "whole", "metrics.jsonl")
    assert second["learning_rate"] == pytest.approx(first["learning_rate"] / 2) and first["grad_norm"] > 0
    if "--kl-target" in VARIANTS[name]:
        assert second["kl_beta"] == pytest.approx(0.98 * first["kl_beta"]) and first["kl_beta"] == 0.05
    assert ("refill/kept" in first) == (name in ("grpo", "dapo"))


def test_dynamic_sampling_killed_and_resumed_equals_uninterrupted(cold, tmp_path):
    """So short, many groups are paid alike. They are replaced, and all that was sampled is told."""
    flags = f"{SHORT} --max-steps 3 --save-every 2 --refill-limit 2"
    whole, parts = ([*variant(cold, tmp_path / name, "dapo"), *flags.split()] for name in ("whole", "parts"))
    assert ppo.main(whole) == 0
    kill_after(3, parts, tmp_path / "parts")
    assert ppo.main([*parts, "--resume", "auto"]) == 0
    same(tmp_path / "whole", tmp_path / "parts", 3)
    records, episodes = (logged(tmp_path / "whole", f"{name}.jsonl") for name in ("metrics", "episodes"))
    assert sum(r["refill/attempts"] for r in records) > 0 and sum(r["refill/kept"] for r in records) > 0
    for r in records:
        mine = [e for e in episodes if e["step"] == r["step"]]
        groups = [mine[i : i + 3] for i in range(0, len(mine), 3)]
        assert len(groups) == r["refill/groups"] and len({e["id"] for e in mine}) == min(6, len(groups))
        differ = [len({sum(e["step_rewards"]) for e in group}) > 1 for group in groups]
        assert [group[0]["learned"] for group in groups] == differ and sum(differ) == r["refill/kept"]
        assert ("loss" in r) == any(differ) and r.get("frac_reward_zero_std", 0) == 0
        if r["refill/kept"] < 2:
            assert r["refill/attempts"] == 2


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_trains(cold, tmp_path, dtype):
    """fp16 goes through the gradient scaler on a CPU too; its first steps may be skipped, not lost."""
    run = arguments(
        cold, tmp_path / "run", "--dtype", dtype, "--max-steps", "2", "--algorithm", "grpo", "--num-generations", "4"
    )
    assert ppo.main(run) == 0
    records = logged(tmp_path / "run", "metrics.jsonl")
    assert all(r["loss"] is not None for r in records) and all(
        p.dtype == torch.float32 for p in adapter(tmp_path / "run").values()
    )
    if dtype == "fp16":
        assert "skipped_steps" in records[-1]


def test_in_fp16_stopped_and_resumed_equals_uninterrupted(cold, tmp_path, monkeypatch):
    """The loss scale is part of a checkpoint: begun anew it would skip steps that were not skipped."""
    too_large = functools.partial(torch.amp.GradScaler, init_scale=2.0**24)
    monkeypatch.setattr(torch.amp, "GradScaler", too_large)
    half = "--dtype fp16 --max-steps 2 --kl-beta 0.05 --update-epochs 3 --num-generations 2 --max-new-tokens 16"
    whole, parts = (arguments(cold, tmp_path / name, *half.split()) for name in ("whole", "parts"))
    assert ppo.main(whole) == 0
    assert ppo.main([*parts, "--stop-after", "1"]) == 0
    assert ppo.main([*parts, "--resume", "auto"]) == 0
    same(tmp_path / "whole", tmp_path / "parts", 2)
    saved, skipped = checkpoint.read(tmp_path / "parts" / "checkpoint-2"), logged(tmp_path / "parts", "metrics.jsonl")
    first, last = (record["skipped_steps"] for record in skipped)
    assert 0 < first <= last
    assert saved.state["precision"]["scaler"]["scale"] == 2.0 ** (24 - last)
    assert {tensor.dtype for tensor in saved.tensors["weights"].values()} == {torch.float32}


def test_a_missing_reward_is_left_out_and_not_a_zero(cold, tmp_path, monkeypatch, capsys):
    """The judge fails on every second episode: they are in the log without rewards, and in no mean."""
    from r3lite.rewards import judge, reward

    class Flaky:
        missing = 3

        def verdicts(self, episodes):
            return [
                reward.Verdict(True, (reward.StepVerdict(1.0, 1.0),) * len(e.steps)) if i % 2 else None
                for i, e in enumerate(episodes)
            ]

        def counts(self):
            return {"judge/failures": 3}

    monkeypatch.setattr(judge, "build_judge", lambda *_: Flaky())
    paid = [
        "--outcome-judge",
        "1",
        "--outcome-em",
        "0",
        "--outcome-f1",
        "0",
        "--process-recall",
        "0",
        "--format-reward",
        "0",
    ]
    assert ppo.main(arguments(cold, tmp_path / "run", *paid, "--max-steps", "1")) == 0
    episodes, (record,) = logged(tmp_path / "run", "episodes.jsonl"), logged(tmp_path / "run", "metrics.jsonl")
    assert [e["rewards"] is None for e in episodes] == [True, False] * 3
    answered = [bool(e["prediction"]) for e in episodes[1::2]]
    assert record["reward"] == pytest.approx(sum(answered) / 3) and record["missing_rewards"] == 3
    assert record["judge/failures"] == 3
    assert "3 verdicts of the judge are missing" in capsys.readouterr().out


def test_a_run_whose_judge_stops_answering_stops_and_can_be_resumed(cold, tmp_path, gemini, answers, capsys):
    """With a few calls a round it ended as if all were well, having learned nothing."""

    def script(body):
        steps = len(json.loads(body["contents"][0]["parts"][0]["text"])["steps"])
        opinions = [{"step": k + 1, "relevance": 0.5, "coherence": 0.5} for k in range(steps)]
        good = len(gemini.requests) <= 3
        return answers.said(json.dumps({"answer_is_right": True, "steps": opinions}) if good else "oops")

    gemini.script, run = script, tmp_path / "run"
    judged = ["--judge", "gemini", "--judge-base-url", gemini.url, "--judge-concurrency", "1", "--outcome-judge", "1"]
    judged += ["--learning-rate", "1e-9"]  # the model goes on answering: without an answer no judge is asked
    assert ppo.main(arguments(cold, run, *judged, "--max-steps", "30")) == 1
    records = logged(run, "metrics.jsonl")
    assert 0 < records[-1]["judge/failure_ratio"] < 1 and records[-1]["judge/missing"] > 0
    told = capsys.readouterr().err
    assert "calls of the judge failed: " in told and f"step {records[-1]['step']} is saved; go on with" in told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--data is missing"),
        (["--data", "x", "--temperature", "0"], "--temperature 0 always"),
        (["--dry-run", "--algorithm", "grpo", "--num-generations", "1"], "--num-generations is 1"),
        (["--dry-run", "--least-searches", "3", "--max-hops", "2"], "--least-searches is 3, and --max-hops 2 allows"),
    ],
)
def test_settings_that_cannot_work_are_refused(arguments, says, capsys):
    assert ppo.main(arguments) == 2 and says in capsys.readouterr().err


def test_truncated_sampling_is_refused_in_rl(capsys):
    """The recorded log-probs are those of the whole distribution; what is sampled must be as well."""
    assert ppo.main(["--top-p", "0.9"]) == 2 and "--top-p" in capsys.readouterr().err
