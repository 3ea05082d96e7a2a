"""`sft --no-lora`: it learns, resumes to the bit, and writes a model that other commands take."""

import json
from pathlib import Path

import pytest
import torch

from r3lite import ask, export, ppo, sft
from r3lite.assembly import supervised
from r3lite.core import run_files
from r3lite.core.errors import R3LiteError
from r3lite.core.files import write_jsonl
from r3lite.exporting import chats
from r3lite.models import full_tuning, lora
from r3lite.models.weights import load_model, resolve_folder
from r3lite.settings import common
from r3lite.training import checkpoint, metrics
from tests.errors import raises, shows
from tests.test_sft import toy  # noqa: F401 (a fixture)

FULL = ["--no-lora", "--batch-size", "2", "--learning-rate", "2e-3"]


def log(output: Path) -> list[dict]:
    return metrics.read(output / run_files.METRICS)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_it_learns_and_writes_the_model_that_it_trained(toy, tmp_path, dtype, capsys):  # noqa: F811
    output = tmp_path / "run"
    arguments = [*FULL, "--dtype", dtype, "--max-steps", "30", "--validate-every", "30", "--validation-fraction", "0.2"]
    assert sft.main([*toy, *arguments, "--output", str(output)]) == 0
    records = log(output)
    assert records[-1]["loss"] < 0.5 * records[0]["loss"]
    assert not (output / "adapter").exists() and not (output / "checkpoint-30" / "adapter").exists()
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["model"], summary["model_step"]) == ("model", 30) and "adapter" not in summary
    assert f"wrote the model to {output / 'model'}" in capsys.readouterr().out
    trained = checkpoint.read(output / "checkpoint-30").tensors["weights"]
    model = load_model(output / "model", {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype], "cpu")
    assert all(torch.equal(trained[name], p) for name, p in model.named_parameters())
    # What the run validated is what the next command begins with.
    next_flags = [
        "--model",
        str(output / "model"),
        "--dtype",
        dtype,
        "--validation-fraction",
        "0.2",
        "--validate-every",
        "1",
    ]
    next_flags += ["--learning-rate", "1e-30", "--max-steps", "1", "--output", str(tmp_path / "next")]
    assert sft.main([*toy, *next_flags]) == 0
    assert log(tmp_path / "next")[0]["eval_loss"] == pytest.approx(records[-1]["eval_loss"], rel=1e-2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_left_and_resumed_equals_uninterrupted_to_the_bit(toy, tmp_path, dtype):  # noqa: F811
    uninterrupted = tmp_path / "whole"
    resumed = tmp_path / "parts"
    arguments = [*toy, *FULL, "--dtype", dtype, "--max-steps", "8"]
    assert sft.main([*arguments, "--output", str(uninterrupted)]) == 0
    assert sft.main([*arguments, "--output", str(resumed), "--stop-after", "3"]) == 0
    assert not (resumed / "model").exists()
    assert sft.main(["--config", str(resumed / "config.toml"), "--resume", "auto"]) == 0
    assert [metrics.repeatable(r) for r in log(uninterrupted)] == [metrics.repeatable(r) for r in log(resumed)]
    one, two = (checkpoint.read(output / "checkpoint-8") for output in (uninterrupted, resumed))
    for group, tensors in one.tensors.items():
        assert tensors.keys() == two.tensors[group].keys()
        assert all(torch.equal(tensors[name], two.tensors[group][name]) for name in tensors)
    files = sorted(path.name for path in (uninterrupted / "model").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    for name in files:
        assert (uninterrupted / "model" / name).read_bytes() == (resumed / "model" / name).read_bytes()
    codes = {str(tensor.dtype) for name, tensor in one.tensors["optimizer"].items() if "mlp" in name}
    assert "torch.uint8" in codes


def test_all_rows_of_a_step_are_one_pass(toy, tmp_path, monkeypatch):  # noqa: F811
    """A second pass would compute its gradients with weights that the first has changed."""
    passes = []
    micro_batches = supervised.SFTTrainer.micro_batches
    monkeypatch.setattr(
        supervised.SFTTrainer,
        "micro_batches",
        lambda self, rows: passes.append(micro_batches(self, rows)) or passes[-1],
    )
    arguments = [*FULL, "--batch-size", "5", "--max-steps", "2", "--validation-rows", "0"]
    assert sft.main([*toy, *arguments, "--output", str(tmp_path / "run")]) == 0
    assert [[len(group) for group in groups] for groups in passes] == [[5], [5]]


def test_a_step_of_several_passes_is_refused(toy, tmp_path, monkeypatch, capsys):  # noqa: F811
    """With gradient_accumulation at the top of a config file, each pass took an optimizer step."""
    file = tmp_path / "all.toml"
    file.write_text("gradient_accumulation = 4\n", encoding="utf-8")
    arguments = [*toy, *FULL, "--max-steps", "1", "--config", str(file), "--output", str(tmp_path / "run")]
    assert sft.main(arguments) == 2
    stderr = capsys.readouterr().err
    assert shows(stderr, "setting-unused", "--gradient-accumulation", "4", "a run without --no-lora")
    assert f"(in {file} it may stand in the table of another command)" in stderr
    # As of a run that an earlier version began.
    monkeypatch.setattr(common, "check_used", lambda *settings: None)
    assert sft.main(arguments) == 1
    assert shows(capsys.readouterr().err, "no-lora-passes", "8", "4")


def test_memory_that_runs_out_after_weights_have_changed_is_not_tried_again(toy, tmp_path, monkeypatch, capsys):  # noqa: F811
    apply_last = full_tuning.FullTuning.apply_last

    def out_of_memory(full):
        apply_last(full)
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(full_tuning.FullTuning, "apply_last", out_of_memory)
    assert sft.main([*toy, *FULL, "--max-steps", "2", "--output", str(tmp_path / "run")]) == 1
    stderr = capsys.readouterr().err
    assert shows(stderr, "memory-mid-update") and "--resume auto" in stderr
    assert not checkpoint.folders_by_step(tmp_path / "run")


REFUSED = {
    "--lora-r 4": "--lora-r is 4",
    "--gradient-accumulation 4": "--gradient-accumulation is 4",
    "--quantize nf4": "--quantize is nf4",
    "--recompute-layers 1": "--recompute-layers is 1",
    "--micro-batch-tokens 64": "--micro-batch-tokens is 64",
    "--adapter x": "--adapter is x",
    "--lora-plus-ratio 4": "--lora-plus-ratio is 4",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_settings_of_lora_beside_it_are_refused_by_name(flags, capsys):
    assert sft.main(["--no-lora", "--data", "x", "--dry-run", *flags.split()]) == 2
    assert REFUSED[flags] in capsys.readouterr().err


def test_rl_trains_adapters_only(capsys):
    assert ppo.main(["--no-lora", "--data", "x", "--dry-run"]) == 2
    assert shows(capsys.readouterr().err, "no-lora-sft-only")


def test_what_it_cannot_train_is_refused(toy, tmp_path, capsys):  # noqa: F811
    assert sft.main([*toy, *FULL, "--dtype", "fp16", "--output", str(tmp_path / "run")]) == 1
    assert shows(capsys.readouterr().err, "no-lora-fp16")


@pytest.fixture
def model(toy, tmp_path) -> Path:  # noqa: F811
    """The model of a run of one step."""
    assert sft.main([*toy, *FULL, "--max-steps", "1", "--output", str(tmp_path / "run")]) == 0
    return tmp_path / "run" / "model"


def test_a_run_named_in_the_wrong_place_names_the_way_to_its_model(model):
    for adapter in (model.parent, model):
        with raises(R3LiteError, "model-not-adapter") as refused:
            lora.read_base(adapter)
        assert refused.value.remedy == f"Pass --model {model}."
    with raises(R3LiteError, "run-not-model") as refused:
        resolve_folder(str(model.parent))
    assert refused.value.remedy == f"Pass --model {model}."


def test_ask_and_export_know_how_the_model_was_trained(model, toy, tmp_path, capsys, monkeypatch):  # noqa: F811
    """As of an adapter: its prompts had no worked example, which a model that is no run's opens with."""
    prompts = [word for i, word in enumerate(toy) if "prompt" in toy[i - i % 2]]
    short = ["--max-new-tokens", "4", "--retriever", "none", "--question", "Who?", *prompts, "--device", "cpu"]
    mismatch = "was trained on --worked-example False (here True)"
    untrained = "was not trained on the step format"
    for flags, wrong in ((["--worked-example"], True), ([], False)):
        capsys.readouterr()
        assert ask.main(["--model", str(model), *short, *flags]) == 0
        stderr = capsys.readouterr().err
        assert (f"{model} {mismatch}" in stderr) == wrong and untrained not in stderr
    assert ask.main(["--model", toy[1], *short]) == 0
    stderr = capsys.readouterr().err
    assert untrained in stderr and mismatch not in stderr
    # The toy has a qwen2 model with a tokenizer of its own, whose export is refused (tests/protocols).
    monkeypatch.setattr(chats, "other_class", lambda *_: None)
    export_flags = ["--form", "folder", "--weights", "fp32", "--prompts", "0", "--output", str(tmp_path / "export")]
    assert export.main(["--model", str(model), *export_flags]) == 0
    assert mismatch not in capsys.readouterr().err
    one, two = (load_model(folder, torch.float32, "cpu").state_dict() for folder in (model, tmp_path / "export"))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    card = (tmp_path / "export" / "README.md").read_text()
    assert f"The model {model.name}, with all weights trained" in card and "learning_rate 0.002" in card
    assert "lora" not in card.lower().replace("r3lite", "")


def test_adapters_are_trained_on_the_model(model, toy, tmp_path):  # noqa: F811
    arguments = ["--model", str(model), *toy[2:], "--max-steps", "1"]
    assert sft.main([*arguments, "--output", str(tmp_path / "adapter")]) == 0
    write_jsonl(tmp_path / "questions.jsonl", [{"id": "1", "question": "Where was Abo born?", "answers": ["Belatown"]}])
    rounds = ["--adapter", str(tmp_path / "adapter"), "--algorithm", "grpo", "--batch-size", "1"]
    rounds += ["--num-generations", "2", "--mini-batch-size", "2", "--max-new-tokens", "4", "--retriever", "none"]
    data = ["--data", str(tmp_path / "questions.jsonl"), "--output", str(tmp_path / "rl")]
    assert ppo.main([*arguments, *rounds, *data]) == 0
    assert lora.read_base(tmp_path / "rl") == (str(model), lora.read_base(tmp_path / "adapter")[1])
