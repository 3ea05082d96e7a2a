"""Validation and rollback on the tiny model: numbers that do not change, a forced collapse, exact resuming.

The world is small, so that a round takes a second: SFT has taught the model to answer every question with "there",
which is right for two of three.
"""

import json
from pathlib import Path

import pytest
import torch

from r3lite import ppo, sft
from r3lite.rl.learner import Learner
from r3lite.rollout.engine import Engine
from r3lite.training import checkpoint
from tests.cold_start import adapter, assert_same_runs, logged

FLAGS = "--preset tiny --dtype fp32 --retriever none --batch-size 4 --num-generations 8 --mini-batch-size 16 "
FLAGS += "--update-epochs 1 --max-new-tokens 32 --max-length 128 --max-steps 4 --save-every 1 --warmup 0 --kl-beta 0.01"
# It breaks the model in the first round; the second round shows it, and then the rate is harmless.
COLLAPSE = "--learning-rate 0.1 --min-learning-rate 1 --guard-patience 1 --guard-rate-factor 1e-5 "
COLLAPSE += "--guard-kl none --guard-entropy-rise none"
TAUGHT = "--preset tiny --dtype fp32 --validation-fraction 0 --learning-rate 3e-3"


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Questions for training and validation, prompts, and an adapter that answers them."""
    folder = tmp_path_factory.mktemp("world")
    for name, text in (("init", "{question}"), ("step", "{documents}")):
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    for name, numbers in (("train", range(12)), ("eval", range(12, 24))):
        rows = [{"id": str(i), "question": f"Where is {i}?", "answer": "there" if i % 3 else "here"} for i in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    answer = "Step 1:\nThe problem analysis: I know.\nThe final answer: there"
    rows = [[("user", f"Where is {i}?"), ("assistant", answer)] for i in range(24)]
    lines = (json.dumps({"messages": [{"role": r, "content": c} for r, c in row]}) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    data = ["--data", str(folder / "rows.jsonl"), "--output", str(folder / "sft")]
    assert sft.main([*TAUGHT.split(), "--max-steps", "24", *data, *prompts(folder)]) == 0
    return folder


def prompts(world: Path) -> list[str]:
    return [x for name in ("init", "step") for x in (f"--{name}-prompt", str(world / f"{name}.txt"))]


def run(world: Path, output: Path, *extra_flags: str, validated: bool = True) -> int:
    flags = ["--data", str(world / "train.jsonl"), "--adapter", str(world / "sft"), "--output", str(output)]
    if validated:
        flags += ["--eval-data", str(world / "eval.jsonl"), "--eval-every", "2"]
    return ppo.main([*FLAGS.split(), *prompts(world), *flags, *extra_flags])


def rounds(output: Path) -> dict[int, dict]:
    return {record["step"]: record for record in logged(output, "metrics.jsonl")}


def own_numbers(record: dict) -> dict:
    """The metrics of the training itself: no speeds, nothing of validation and guard."""
    measured = ("step_time", "tokens_per_second", "peak_memory_mib")
    return {k: v for k, v in record.items() if k not in measured and not k.startswith(("time/", "eval/", "guard/"))}


def test_the_numbers_of_training_are_the_same_with_and_without_validation(world, tmp_path):
    assert run(world, tmp_path / "with") == run(world, tmp_path / "without", validated=False) == 0
    validated = rounds(tmp_path / "with")
    unvalidated = rounds(tmp_path / "without")
    assert list(validated) == [0, 1, 2, 3, 4] and list(unvalidated) == [1, 2, 3, 4]
    assert all(own_numbers(validated[step]) == own_numbers(unvalidated[step]) for step in unvalidated)
    keys = {"eval/em", "eval/f1", "eval/format_adherence", "eval/searches", "eval/unfinished_ratio"}
    assert all(keys <= validated[step].keys() for step in (0, 2, 4)) and not keys & (
        validated[1].keys() | validated[3].keys()
    )
    assert validated[0]["eval/f1"] == pytest.approx(8 / 12)
    checkpoints = [checkpoint.read(tmp_path / name / "checkpoint-4").tensors for name in ("with", "without")]
    for group in checkpoint.GROUPS:
        assert all(torch.equal(t, checkpoints[1][group][k]) for k, t in checkpoints[0][group].items())


@pytest.fixture(scope="module")
def collapsed(world):
    assert run(world, world / "collapsed", *COLLAPSE.split()) == 0
    return world / "collapsed"


def test_a_forced_collapse_is_rolled_back_and_ends_as_good_as_the_best(collapsed):
    records = rounds(collapsed)
    assert records[1]["malformed_ratio"] + records[1]["completions/clipped_ratio"] < 0.2
    assert records[2]["malformed_ratio"] + records[2]["completions/clipped_ratio"] > 0.9
    assert {s: r["guard/alarm"] for s, r in records.items() if "guard/alarm" in r} == {2: "guard_malformed"}
    assert records[2]["eval/f1"] == 0
    assert records[3]["learning_rate"] == pytest.approx(1e-6) and records[3]["kl"] < 1e-3 < records[2]["kl"]
    assert records[4]["guard/rollbacks"] == 1
    best = max(r["eval/f1"] for r in records.values() if "eval/f1" in r)
    assert records[4]["eval/f1"] >= best - 0.02
    summary = json.loads((collapsed / "summary.json").read_text(encoding="utf-8"))
    assert records[summary["adapter_step"]]["eval/f1"] == best
    best_adapter, final_adapter = (adapter(collapsed / name) for name in (f"checkpoint-{summary['adapter_step']}", "."))
    assert all(torch.equal(t, final_adapter[k]) for k, t in best_adapter.items())


@pytest.mark.parametrize("stop", ["1", "2", "3"])
def test_stopped_before_or_after_a_rollback_and_resumed_equals_uninterrupted(collapsed, world, tmp_path, stop):
    assert run(world, tmp_path / "run", *COLLAPSE.split(), "--stop-after", stop) == 0
    if stop == "2":  # the weights are those of step 0 again
        start_weights, rolled_back_weights = (
            checkpoint.read(tmp_path / "run" / f"checkpoint-{n}").tensors["weights"] for n in (0, 2)
        )
        assert all(torch.equal(t, rolled_back_weights[k]) for k, t in start_weights.items())
    assert run(world, tmp_path / "run", *COLLAPSE.split(), "--resume", "auto") == 0
    assert_same_runs(collapsed, tmp_path / "run")


def test_a_run_that_goes_on_collapsing_stops_with_the_reason_and_leaves_the_best_adapter(world, tmp_path, capsys):
    hopeless = COLLAPSE.replace("1e-5", "1").split()
    assert run(world, tmp_path / "run", *hopeless, "--guard-rollbacks", "0") == 1
    stderr = capsys.readouterr().err
    assert "after 0 rollbacks and stops with the weights of step 0 (validation F1 0.667)" in stderr
    assert "The best adapter, of step 0 (validation F1 0.667), is in" in stderr and "--guard off" in stderr
    start, final = adapter(world / "sft"), adapter(tmp_path / "run")
    assert all(torch.equal(t, final[k]) for k, t in start.items())
    assert ppo.main(["--config", str(tmp_path / "run" / "config.toml"), "--resume", "auto", "--guard", "off"]) == 0


@pytest.fixture
def nan_after_two(monkeypatch):
    """Weights that are nan once two rounds were learned from."""
    learned, learn = [], Learner.learn

    def broken(self, batch, seed):
        metrics = learn(self, batch, seed)
        learned.append(seed)
        if len(learned) == 2:
            next(p for p in self.model.parameters() if p.requires_grad).data.fill_(float("nan"))
        return metrics

    monkeypatch.setattr(Learner, "learn", broken)


@pytest.mark.parametrize(("every", "at"), [("2", 2), ("3", 3)])  # a validation finds it, or the next round
def test_weights_that_are_nan_are_rolled_back(world, tmp_path, nan_after_two, capsys, every, at):
    assert run(world, tmp_path / "run", "--eval-every", every) == 0
    records = rounds(tmp_path / "run")
    assert {s: r["guard/alarm"] for s, r in records.items() if "guard/alarm" in r} == {at: "not_finite"}
    assert f"step {at}: question " in (stderr := capsys.readouterr().err) and "logits are not finite: " in stderr
    assert "to step 0 (validation F1 0.667), learning rate x 0.25" in stderr
    assert records[4]["guard/rollbacks"] == 1 and records[4]["eval/f1"] is not None
    assert all(torch.isfinite(t).all() for t in adapter(tmp_path / "run").values())


def test_a_validation_that_could_not_retrieve_chooses_no_checkpoint(world, tmp_path, monkeypatch, capsys):
    """Its questions without documents once counted as answered badly, and the run as collapsing.

    The last validation lacks only questions that are answered badly, so that the F1 of the others is the best of all.
    """
    answer, validations = Engine.run, []

    def failing(self, questions, seeds, retrieve):
        sequences = answer(self, questions, seeds, retrieve)
        if seeds[0] == "greedy":
            validations.append(len(sequences))
            for sequence in sequences:
                if sequence.question.answers[0] in {2: ("here", "there"), 3: ("here",)}.get(len(validations), ()):
                    sequence.failure = "no reply"
        return sequences

    monkeypatch.setattr(Engine, "run", failing)
    assert run(world, tmp_path / "run") == 0
    records = rounds(tmp_path / "run")
    assert "eval/retrieval_failures" not in records[0] and records[0]["eval/f1"] == pytest.approx(8 / 12)
    assert records[2]["eval/retrieval_failures"] == 12 and "eval/f1" not in records[2]
    assert records[4]["eval/retrieval_failures"] == 4 and records[4]["eval/f1"] > records[0]["eval/f1"]
    assert json.loads((tmp_path / "run/summary.json").read_text(encoding="utf-8"))["adapter_step"] == 0
    stderr = capsys.readouterr().err
    assert "step 2: the retriever failed on 12 validation questions; it is ignored" in stderr


def test_without_validation_weights_that_are_nan_end_the_run(world, tmp_path, nan_after_two, capsys):
    assert run(world, tmp_path / "run", validated=False) == 1
    stderr = capsys.readouterr().err
    assert "the model's logits are not finite: " in stderr and "Pass --dtype bf16 or --dtype fp32" in stderr


def test_other_validation_questions_are_refused_on_resume(world, tmp_path, capsys):
    """The best F1 so far is that of the questions that it was measured on."""
    rows = (world / "eval.jsonl").read_text(encoding="utf-8")
    eval_file = tmp_path / "eval.jsonl"
    eval_file.write_text(rows, encoding="utf-8")
    flags = ["--eval-data", str(eval_file), "--stop-after", "1", "--resume", "auto"]
    assert run(world, tmp_path / "run", *flags) == 0 and "trained on" not in capsys.readouterr().err
    eval_file.write_text(rows.replace("there", "where"), encoding="utf-8")
    assert run(world, tmp_path / "run", *flags) == 1
    assert "the data have changed since the run started" in capsys.readouterr().err


def test_validation_questions_that_are_trained_on_are_warned_of(world, tmp_path, capsys):
    assert run(world, tmp_path / "run", "--eval-data", str(world / "train.jsonl"), "--stop-after", "1") == 0
    assert "warning: 12 of 12 questions of --eval-data are also trained on" in capsys.readouterr().err


def test_an_adapter_of_less_than_one_pass_is_warned_of(world, tmp_path, capsys):
    """24 steps of 8 rows are 8 passes over the 24 rows; 2 are two thirds of one."""
    assert run(world, tmp_path / "run", "--max-steps", "1", validated=False) == 0
    assert "epochs of SFT" not in capsys.readouterr().err
    data = ["--data", str(world / "rows.jsonl"), "--output", str(tmp_path / "sft")]
    assert sft.main([*TAUGHT.split(), "--max-steps", "2", "--save-every", "1", *data, *prompts(world)]) == 0
    for adapter_of, share in (("sft", "0.67"), ("sft/adapter", "0.67"), ("sft/checkpoint-1", "0.33")):
        name = str(tmp_path / adapter_of)
        output = tmp_path / f"run-{share}-{len(name)}"
        assert run(world, output, "--adapter", name, "--max-steps", "1", validated=False) == 0
        assert f"warning: {name} had only {share} epochs of SFT" in capsys.readouterr().err


def test_a_run_from_an_adapter_of_other_prompts_whose_answers_are_all_wrong_says_both(world, tmp_path, capsys):
    short = ["--max-steps", "1", "--temperature", "0.2"]
    assert run(world, tmp_path / "good", *short, validated=False) == 0
    stderr = capsys.readouterr().err
    assert "was trained on" not in stderr and "was rewarded" not in stderr
    rows, data = (world / "train.jsonl").read_text(encoding="utf-8"), tmp_path / "train.jsonl"
    data.write_text(rows.replace('"there"', '"x"').replace('"here"', '"y"'), encoding="utf-8")
    other_flags = ["--data", str(data), "--system-prompt", "Be brief."]
    assert run(world, tmp_path / "run", *short, *other_flags, validated=False) == 0
    stderr = capsys.readouterr().err
    assert f"warning: {world / 'sft'} was trained on --system-prompt none (here Be brief.)" in stderr
    assert "warning: no answer in the first round was rewarded" in stderr
