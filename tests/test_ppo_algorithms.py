"""`ppo` with each algorithm: killed or stopped and resumed, and beside the algorithm that it builds on."""

from pathlib import Path

import pytest
import torch

from r3lite import ppo
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.training import checkpoint, metrics
from tests.cold_start import SHORT, arguments, assert_same_runs, kill_after, logged

# Each algorithm with what it has of its own, and with all that is kept from round to round. So short, no answer is
# right: where groups are replaced, well-formed steps alone are paid.
VARIANTS = {
    "ppo": "--value-clip none --kl-beta 0.05 --kl-target 0.01",
    "grpo": "--old-logprobs trainer --importance-cap 2 --outcome-em 0 --outcome-f1 0 --refill-limit 2",
    "dr-grpo": "--kl-beta 0.05 --kl-estimator k2 --expand-limit 3",
    "dapo": "--outcome-em 0 --outcome-f1 0 --kl-beta 0.05 --kl-target 0.01",
    "gspo": "--update-epochs 2 --mini-batch-size 3",
    "rloo": "--kl-beta 0.05 --kl-target 0.01 --lora-plus-ratio 8",
    "reinforce++": "--kl-beta 0.05",
    "reinforce++-baseline": "--kl-beta 0.05 --kl-target 0.01",
    "luffy": "--trace-share 1 --old-logprobs trainer --kl-target 0.01",
    "exgrpo": "--outcome-em 0 --outcome-f1 1 --replay-start 0 --replay-min-outcome 0.05",
    "hybrid": "--outcome-em 0 --outcome-f1 1 --replay-start 0 --replay-min-outcome 0.05 --trace-min-outcome 1",
    "dgpo": "--teacher tiny --nf4-cache none --kl-beta 0.05 --expand-limit 3",
    "dpo": "--kl-beta 0.05 --likelihood-weight 0.5 --update-epochs 2 --mini-batch-size 3",
    "verifree": "--length-constant 32",
}


def variant(cold: Path, output: Path, name: str, *extra_flags: str) -> list[str]:
    traces = ["--traces", str(cold / "rows.jsonl")] if ALGORITHMS[name].has_traces else []
    contexts = ["--contexts", str(cold / "rows.jsonl")] if ALGORITHMS[name].learns_right_answers else []
    flags = [*SHORT.split(), *VARIANTS[name].split(), *traces, *contexts]
    return arguments(cold, output, "--algorithm", name, *flags, *extra_flags)


# A run's state is the same with these as with others, or they are killed and resumed by a test of their own below.
LIKE_OTHERS = ("dr-grpo", "rloo", "reinforce++", "gspo", "exgrpo", "hybrid")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in LIKE_OTHERS else n for n in ALGORITHMS]
)
def test_every_algorithm_stopped_and_resumed_equals_uninterrupted(cold, tmp_path, name):
    uninterrupted = variant(cold, tmp_path / "whole", name)
    resumed = variant(cold, tmp_path / "parts", name)
    assert ppo.main(uninterrupted) == 0
    assert ppo.main([*resumed, "--stop-after", "1"]) == 0
    assert ppo.main([*resumed, "--resume", "auto"]) == 0
    assert_same_runs(tmp_path / "whole", tmp_path / "parts", 2)
    first, second = logged(tmp_path / "whole", "metrics.jsonl")
    assert second["learning_rate"] == pytest.approx(first["learning_rate"] / 2) and first["grad_norm"] > 0
    if "--kl-target" in VARIANTS[name]:
        assert second["kl_beta"] == pytest.approx(0.98 * first["kl_beta"]) and first["kl_beta"] == 0.05
    assert ("refill/kept" in first) == (name in ("grpo", "dapo"))


def test_dynamic_sampling_killed_and_resumed_equals_uninterrupted(cold, tmp_path):
    """So short, many groups are paid alike. They are replaced, and all that was sampled is told."""
    flags = f"{SHORT} --max-steps 4 --save-every 2 --refill-limit 2"
    uninterrupted, resumed = ([*variant(cold, tmp_path / name, "dapo"), *flags.split()] for name in ("whole", "parts"))
    assert ppo.main(uninterrupted) == 0
    kill_after(3, resumed, tmp_path / "parts")
    assert ppo.main([*resumed, "--resume", "auto"]) == 0
    assert_same_runs(tmp_path / "whole", tmp_path / "parts", 4)
    records, episodes = (logged(tmp_path / "whole", f"{name}.jsonl") for name in ("metrics", "episodes"))
    assert sum(r["refill/attempts"] for r in records) > 0 and sum(r["refill/kept"] for r in records) > 0
    for r in records:
        round_episodes = [e for e in episodes if e["step"] == r["step"]]
        groups = [round_episodes[i : i + 3] for i in range(0, len(round_episodes), 3)]
        assert len(groups) == r["refill/groups"] and len({e["id"] for e in round_episodes}) == min(6, len(groups))
        differ = [len({sum(e["step_rewards"]) for e in group}) > 1 for group in groups]
        assert [group[0]["learned"] for group in groups] == differ and sum(differ) == r["refill/kept"]
        assert ("loss" in r) == any(differ) and r.get("frac_reward_zero_std", 0) == 0
        if r["refill/kept"] < 2:
            assert r["refill/attempts"] == 2


def test_expanded_episodes_killed_and_resumed_equal_uninterrupted(cold, tmp_path):
    """They go on from a step that brought a new gold paragraph, and all before it is as it was."""
    flags = "--algorithm dapo --max-steps 4 --save-every 2 --refill-limit 1 --expand-limit 4 --warmup 0"
    uninterrupted, resumed = (arguments(cold, tmp_path / name, *flags.split()) for name in ("whole", "parts"))
    assert ppo.main(uninterrupted) == 0
    kill_after(3, resumed, tmp_path / "parts")
    assert ppo.main([*resumed, "--resume", "auto"]) == 0
    assert_same_runs(tmp_path / "whole", tmp_path / "parts", 4)
    records, episodes = (logged(tmp_path / "whole", f"{name}.jsonl") for name in ("metrics", "episodes"))
    assert sum(r["expand/episodes"] for r in records) > 0
    for r in records:
        assert r["expand/zero_std_after"] <= r["expand/zero_std_before"] and r["expand/episodes"] <= 4
        round_episodes = [e for e in episodes if e["step"] == r["step"]]
        grown = [e for e in round_episodes if "expanded" in e]
        assert len(grown) == r["expand/episodes"]
        for e in grown:
            origin, steps = round_episodes[e["expanded"]["from"]], e["expanded"]["steps"]
            assert e["steps"][:steps] == origin["steps"][:steps] and origin["rewards"]["em"] < 1
            assert e["id"] == origin["id"] and e["learned"] == origin["learned"] and origin["steps"][steps - 1]["query"]
            assert 0 < e["rewards"]["recall"] >= origin["rewards"]["recall"]


# More rounds than questions, so that what succeeded may be asked again.
REPLAYED = "--max-steps 4 --save-every 2 --max-hops 2 --limit 4"


# hybrid has the traces of the one and the replays of the other.
@pytest.mark.parametrize("name", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("luffy", "exgrpo")), "hybrid"])
def test_off_policy_runs_killed_and_resumed_equal_uninterrupted(cold, tmp_path, name):
    """The replay buffer is in the checkpoint: begun anew, it would have nothing to replay."""
    uninterrupted, resumed = (
        variant(cold, tmp_path / folder, name, *REPLAYED.split()) for folder in ("whole", "parts")
    )
    assert ppo.main(uninterrupted) == 0
    kill_after(3, resumed, tmp_path / "parts")
    assert ppo.main([*resumed, "--resume", "auto"]) == 0
    assert_same_runs(tmp_path / "whole", tmp_path / "parts", 4)
    reference, restored = (checkpoint.read(tmp_path / folder / "checkpoint-4") for folder in ("whole", "parts"))
    assert reference.state["kept"] == restored.state["kept"] and reference.tensors.keys() == restored.tensors.keys()
    records = logged(tmp_path / "whole", "metrics.jsonl")
    assert ("replay" in reference.tensors) == (name != "luffy")
    if name != "luffy":
        assert all(r["off_policy/replays"] <= 1 for r in records) and len(reference.tensors["replay"]) % 3 == 0
        assert all(
            torch.equal(tensor, restored.tensors["replay"][key]) for key, tensor in reference.tensors["replay"].items()
        )
    if name == "exgrpo":
        assert sum(r["off_policy/replays"] for r in records) > 0
    else:
        assert sum(r["off_policy/traces"] for r in records) > 0
    used = [r for r in records if r["off_policy/token_share"]]
    assert all(0 < r["off_policy/shaped_ratio"] < 1 and r["off_policy/logp"] < 0 for r in used)


def test_without_its_traces_or_replays_an_algorithm_is_what_it_builds_on(cold, tmp_path):
    """To the bit: luffy without traces and exgrpo that replays nothing are grpo, hybrid without traces is exgrpo."""

    def run(folder: str, name: str, flags: str) -> Path:
        traces = ["--traces", str(cold / "rows.jsonl")] if ALGORITHMS[name].has_traces else []
        run_flags = [*SHORT.split(), *flags.split(), "--max-hops", "2", "--limit", "4", "--outcome-f1", "1", *traces]
        assert ppo.main(arguments(cold, tmp_path / folder, "--algorithm", name, *run_flags)) == 0
        return tmp_path / folder

    def equal(first_run: Path, second_run: Path, total: int = 2) -> None:
        first, second = (checkpoint.read(path / f"checkpoint-{total}").tensors for path in (first_run, second_run))
        for group in checkpoint.GROUPS:
            assert all(torch.equal(tensor, second[group][name]) for name, tensor in first[group].items())
        for one_record, other_record in zip(
            logged(first_run, "metrics.jsonl"), logged(second_run, "metrics.jsonl"), strict=True
        ):
            shared = metrics.repeatable(one_record).keys() & metrics.repeatable(other_record).keys()
            assert {"loss", "kl", "entropy", "grad_norm", "reward"} <= shared
            assert {k: one_record[k] for k in shared} == {k: other_record[k] for k in shared}

    grpo = run("grpo", "grpo", "--kl-beta 0.05")
    equal(grpo, run("luffy", "luffy", "--trace-share 0"))
    equal(grpo, run("exgrpo", "exgrpo", "--replay-start 1"))
    replays = "--max-steps 4 --replay-start 0 --replay-min-outcome 0.05"
    exgrpo = run("replaying", "exgrpo", replays)
    assert sum(r["off_policy/replays"] for r in logged(exgrpo, "metrics.jsonl")) > 0
    equal(exgrpo, run("hybrid", "hybrid", f"--trace-share 0 {replays}"), 4)
