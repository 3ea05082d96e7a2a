"""Reinforcement learning end to end on the tiny checkpoint: real retrieval, real rewards, exact resuming."""

import functools
import json

import pytest
import safetensors.torch
import torch

from r3lite import ppo
from r3lite.training import checkpoint
from tests.cold_start import adapter, arguments, assert_same_runs, kill_after, logged
from tests.errors import shows
from tests.fake_gemini import text_reply


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


def test_what_is_trained_moves_and_what_is_frozen_is_not_saved(finished, cold):
    sft_adapter = adapter(cold / "sft")
    rl_adapter = adapter(finished)
    assert sft_adapter.keys() == rl_adapter.keys() and any(
        not torch.equal(sft_adapter[k], rl_adapter[k]) for k in sft_adapter
    )
    state = safetensors.torch.load_file(finished / "checkpoint-4" / "weights.safetensors")
    assert state.keys() == rl_adapter.keys() | {"value_head.weight", "value_head.bias"}
    assert state["value_head.weight"].abs().sum() > 0
    assert all(tensor.isfinite().all() for tensor in (*rl_adapter.values(), *state.values()))


def test_stopped_and_resumed_equals_uninterrupted(finished, cold, tmp_path):
    run = arguments(cold, tmp_path / "run", "--kl-beta", "0.05")
    assert ppo.main([*run, "--stop-after", "2"]) == 0
    assert not (tmp_path / "run" / "summary.json").exists()
    assert ppo.main([*run, "--resume", "auto"]) == 0
    assert_same_runs(finished, tmp_path / "run")


def test_b_has_its_own_learning_rate(cold, tmp_path):
    """One optimizer step from one adapter: A moves as without LoRA+, B eight times as far."""
    moves = []
    for ratio in ("1", "8"):
        output = tmp_path / ratio
        flags = ["--max-steps", "1", "--lora-plus-ratio", ratio, "--dtype", "fp32"]
        assert ppo.main(arguments(cold, output, *flags, "--algorithm", "grpo", "--warmup", "0")) == 0
        sft_adapter = adapter(cold / "sft")
        rl_adapter = adapter(output)
        moves.append({name: rl_adapter[name] - sft_adapter[name] for name in sft_adapter})
    for name, one in moves[0].items():
        factor = 8 if "lora_B" in name else 1
        assert one.abs().max() > 0 and (moves[1][name] - factor * one).abs().max() < 1e-5


def test_killed_between_checkpoints_and_resumed_equals_uninterrupted(finished, cold, tmp_path):
    run = [*arguments(cold, tmp_path / "run", "--kl-beta", "0.05"), "--save-every", "2"]
    kill_after(3, run, tmp_path / "run")  # step 2 is saved, step 3 is not
    assert ppo.main([*run, "--resume", "auto"]) == 0
    assert_same_runs(finished, tmp_path / "run")


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


def test_streamed_layers_change_no_bit_of_grpo(cold, tmp_path):
    """Two layers take turns on the device: episodes, metrics and adapter are those of a base in NF4 that is all there,
    if its layers are recomputed, too."""
    grpo = "--algorithm grpo --kl-beta 0.05 --max-steps 2 --nf4-cache none --recompute-layers 4"
    for name, flags in (("streamed", ["--stream-layers"]), ("whole", ["--quantize", "nf4"])):
        assert ppo.main(arguments(cold, tmp_path / name, *grpo.split(), *flags)) == 0
    assert_same_runs(tmp_path / "streamed", tmp_path / "whole", 2)
    sft_adapter, resident_adapter, streamed_adapter = (
        adapter(run) for run in (cold / "sft", tmp_path / "whole", tmp_path / "streamed")
    )
    assert all(torch.equal(resident_adapter[name], streamed_adapter[name]) for name in sft_adapter)
    assert any(not torch.equal(resident_adapter[name], sft_adapter[name]) for name in sft_adapter)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_trains(cold, tmp_path, dtype):
    """fp16 goes through the gradient scaler on a CPU too; its first steps may be skipped, not lost."""
    run = arguments(
        cold, tmp_path / "run", "--dtype", dtype, "--max-steps", "2", "--algorithm", "grpo", "--num-generations", "4"
    )
    assert ppo.main(run) == 0
    records = logged(tmp_path / "run", "metrics.jsonl")
    sft_adapter = adapter(cold / "sft")
    rl_adapter = adapter(tmp_path / "run")
    assert all(r["loss"] is not None for r in records)
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in rl_adapter.values())
    assert any(not torch.equal(rl_adapter[name], sft_adapter[name]) for name in sft_adapter)
    if dtype == "fp16":
        assert records[-1]["skipped_steps"] < 2


def test_in_fp16_stopped_and_resumed_equals_uninterrupted(cold, tmp_path, monkeypatch):
    """The loss scale is part of a checkpoint: begun anew it would skip steps that were not skipped."""
    too_large = functools.partial(torch.amp.GradScaler, init_scale=2.0**24)
    monkeypatch.setattr(torch.amp, "GradScaler", too_large)
    half = "--dtype fp16 --max-steps 2 --kl-beta 0.05 --update-epochs 3 --num-generations 2 --max-new-tokens 16"
    uninterrupted, resumed = (arguments(cold, tmp_path / name, *half.split()) for name in ("whole", "parts"))
    assert ppo.main(uninterrupted) == 0
    assert ppo.main([*resumed, "--stop-after", "1"]) == 0
    assert ppo.main([*resumed, "--resume", "auto"]) == 0
    assert_same_runs(tmp_path / "whole", tmp_path / "parts", 2)
    saved, skipped = checkpoint.read(tmp_path / "parts" / "checkpoint-2"), logged(tmp_path / "parts", "metrics.jsonl")
    first, last = (record["skipped_steps"] for record in skipped)
    assert 0 < first <= last
    assert saved.state["precision"]["scaler"]["scale"] == 2.0 ** (24 - last)
    assert {tensor.dtype for tensor in saved.tensors["weights"].values()} == {torch.float32}


def test_a_missing_reward_is_left_out_and_not_a_zero(cold, tmp_path, monkeypatch, capsys):
    """The judge fails on every second episode: they are in the log without rewards, and in no mean."""
    from r3lite.assembly import reinforcement
    from r3lite.rewards.verdict import StepVerdict, Verdict

    class Flaky:
        missing = 3

        def verdicts(self, episodes):
            return [
                Verdict(True, (StepVerdict(1.0, 1.0),) * len(e.steps)) if i % 2 else None
                for i, e in enumerate(episodes)
            ]

        def counts(self):
            return {"judge/failures": 3}

    monkeypatch.setattr(reinforcement, "build_judge", lambda *_, **__: Flaky())
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
        "1",
    ]
    assert ppo.main(arguments(cold, tmp_path / "run", *paid, "--max-steps", "1")) == 0
    episodes, (record,) = logged(tmp_path / "run", "episodes.jsonl"), logged(tmp_path / "run", "metrics.jsonl")
    assert [e["rewards"] is None for e in episodes] == [True, False] * 3
    assert [e["rewards"]["outcome"] for e in episodes[1::2]] == [bool(e["prediction"]) for e in episodes[1::2]]
    rewards = [sum(e["step_rewards"]) for e in episodes[1::2]]
    assert any(rewards)  # else with zeros for the others the mean would be the same
    assert record["reward"] == pytest.approx(sum(rewards) / 3) and record["missing_rewards"] == 3
    assert record["judge/failures"] == 3
    assert "3 verdicts of the judge are missing" in capsys.readouterr().out


def test_stopped_and_resumed_with_the_hybrid_retriever_equals_uninterrupted(cold, tmp_path):
    for name, flags in (("whole", [[]]), ("parts", [["--stop-after", "1"], ["--resume", "auto"]])):
        run = arguments(cold, tmp_path / name, "--retriever", "hybrid", "--max-steps", "2")
        assert [ppo.main([*run, *extra_flags]) for extra_flags in flags] == [0] * len(flags)
    assert_same_runs(tmp_path / "whole", tmp_path / "parts", 2)
    episodes = logged(tmp_path / "whole", "episodes.jsonl")
    assert any(s.get("documents") for e in episodes if e["step"] == 2 for s in e["steps"])


@pytest.mark.parametrize("flags", [["--retriever", "lexical"], ["--retriever", "golden", "--noise-rate", "0.5"]])
def test_other_retrievers_bring_documents_to_a_rollout(cold, tmp_path, flags):
    run_arguments = arguments(cold, tmp_path / "run", *flags, "--max-steps", "2")
    if "golden" in flags:  # which searches no index
        del run_arguments[run_arguments.index("--index") : run_arguments.index("--index") + 2]
    assert ppo.main(run_arguments) == 0
    episodes = logged(tmp_path / "run", "episodes.jsonl")
    documents = [d for e in episodes for s in e["steps"] for d in s.get("documents", ())]
    assert documents and all(set(d) == {"id", "title", "text"} for d in documents)


def test_an_episode_whose_retriever_failed_is_left_out_and_the_run_goes_on(cold, tmp_path, monkeypatch, capsys):
    """Any error of the retriever ended a run of hours."""
    from r3lite.retrieval.index import PassageIndex

    search = PassageIndex.search
    query_batches = []

    def sometimes(self, queries, k, own_places=None):
        query_batches.append(queries)
        if query_batches[0][0] in queries:  # the first of all queries fails, whatever it is asked with
            raise RuntimeError("can't allocate memory")
        return search(self, queries, k, own_places)

    monkeypatch.setattr(PassageIndex, "search", sometimes)
    assert ppo.main(arguments(cold, tmp_path / "run", "--max-steps", "2")) == 0
    episodes, records = logged(tmp_path / "run", "episodes.jsonl"), logged(tmp_path / "run", "metrics.jsonl")
    failed = [e for e in episodes if e.get("failure") == "RuntimeError: can't allocate memory"]
    assert 0 < len(failed) < len(episodes) and all(e["rewards"] is None for e in failed)
    assert all(record["retrieval_failures"] == record["missing_rewards"] for record in records)
    assert sum(record["retrieval_failures"] for record in records) == len(failed)
    assert capsys.readouterr().err.count("the retriever failed: RuntimeError: can't allocate memory") == 1


def test_a_run_whose_judge_stops_answering_stops_and_can_be_resumed(cold, tmp_path, gemini, capsys):
    """With a few calls a round it ended as if all were well, having learned nothing."""

    def script(body):
        steps = len(json.loads(body["contents"][0]["parts"][0]["text"])["steps"])
        opinions = [{"step": k + 1, "relevance": 0.5, "coherence": 0.5, "rationality": 0.5} for k in range(steps)]
        good = len(gemini.requests) <= 3
        return text_reply(json.dumps({"answer_is_right": True, "steps": opinions}) if good else "oops")

    gemini.script, run = script, tmp_path / "run"
    judged = ["--judge", "gemini", "--judge-base-url", gemini.url, "--judge-concurrency", "1", "--outcome-judge", "1"]
    judged += ["--learning-rate", "1e-9"]  # the model goes on answering: without an answer no judge is asked
    assert ppo.main(arguments(cold, run, *judged, "--max-steps", "30")) == 1
    records = logged(run, "metrics.jsonl")
    assert 0 < records[-1]["judge/failure_ratio"] < 1 and records[-1]["judge/missing"] > 0
    stderr = capsys.readouterr().err
    assert (
        "calls of the judge failed: " in stderr
        and f"saved step {records[-1]['step']}; continue with: python -m r3lite.ppo --config" in stderr
    )


SEARCH_SETTINGS = [
    ["--least-searches", "1"], ["--search-bonus", "0.1"], ["--idle-query-penalty", "0.5"], ["--process-recall", "0.3"],
    ["--process-judge", "0.2"], ["--algorithm", "grpo", "--expand-limit", "4"],
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--data is missing"),
        (["--data", __file__, "--temperature", "0"], "--temperature is 0: all episodes"),
        (["--data", __file__, "--temperature", "1e-6"], "--temperature is 1e-06: all episodes"),
        (["--dry-run", "--algorithm", "grpo", "--num-generations", "1"], "--num-generations is 1"),
        (["--dry-run", "--least-searches", "3", "--max-hops", "2"], "--least-searches is 3; it must be at most"),
        *(
            (
                ["--dry-run", "--format", "solution", *flags],
                f"{' is '.join(flags[-2:])}, but has no effect here: it needs a --format that searches",
            )
            for flags in SEARCH_SETTINGS
        ),
        (
            ["--dry-run", "--expand-limit", "4"],
            "--expand-limit is 4, but has no effect with --algorithm ppo: it needs one of grpo",
        ),
        (
            ["--dry-run", "--algorithm", "grpo", "--expand-limit", "4", "--retriever", "none"],
            "--retriever other than none",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(arguments, says, capsys):
    assert ppo.main(arguments) == 2 and says in capsys.readouterr().err


def test_questions_without_gold_paragraphs_cannot_be_expanded(tmp_path, capsys):
    (tmp_path / "data.jsonl").write_text('{"id": "1", "question": "Who?", "answer": "me"}\n', encoding="utf-8")
    flags = ["--data", str(tmp_path / "data.jsonl"), "--output", str(tmp_path / "run"), "--algorithm", "grpo"]
    assert ppo.main([*flags, "--preset", "tiny", "--expand-limit", "4"]) == 1
    assert shows(capsys.readouterr().err, "expand-without-paragraphs")


def test_truncated_sampling_is_refused_in_rl(capsys):
    """The recorded log-probs are those of the whole distribution; what is sampled must be as well."""
    assert ppo.main(["--top-p", "0.9"]) == 2 and "--top-p" in capsys.readouterr().err
