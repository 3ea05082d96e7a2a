"""SFT: the loss and what it falls on, batches, learning in every precision, and resuming to the bit."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from r3lite import sft
from r3lite.core import run_files
from r3lite.core.episode import Step
from r3lite.core.files import write_jsonl
from r3lite.core.invocation import with_values
from r3lite.core.records import Record, Source
from r3lite.datasets.sources import read_data
from r3lite.datasets.trajectories import read_rows
from r3lite.protocols.r3 import R3
from r3lite.protocols.registry import PROTOCOLS, build_protocol
from r3lite.settings import ProtocolSettings
from r3lite.training import checkpoint, metrics
from r3lite.training.earlier_run import QUESTIONS_FILE, demonstrated, question_hash
from tests.cold_start import assert_same_runs
from tests.errors import shows

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = ("Abo", "Bela", "Cato", "Dana", "Edo", "Fila", "Gora", "Hino", "Ilo", "Jara")


def trajectory(i: int) -> dict:
    """A question of one hop, with a document that has the answer and one that has not."""
    name = NAMES[i % len(NAMES)] + "o" * (i // len(NAMES))  # no two rows ask the same
    town = NAMES[(3 * i + 1) % len(NAMES)] + "town"
    query = f"Where was {name} born?"
    documents = [
        {"id": "1", "title": name, "text": f"{name} was born in {town}."},
        {"id": "2", "title": "Z", "text": "SECRET"},
    ]
    steps = [
        {"analysis": f"I need to find out: {query}", "query": query, "documents": documents[: 1 + i % 2]},
        {"analysis": f"{query} {town}." + " This gives the answer." * (i % 3), "answer": town},
    ]
    return {"id": f"q{i}", "question": query, "answers": [town], "steps": steps, "source": "gold"}


def write_tokenizer(folder: Path) -> None:
    """A small byte-level BPE tokenizer with Qwen's markup."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=380, initial_alphabet=alphabet, show_progress=False)
    steps = [Step.from_json(Record(step, Source(""))) for i in range(20) for step in trajectory(i)["steps"]]
    tokenizer.train_from_iterator(
        [R3("{question}", "{documents}").render(step, 1) for step in steps],
        trainer,
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "pad_token": "<|endoftext|>"}))


@pytest.fixture
def toy(tmp_path, small_model, write_folder):
    """A model folder whose embedding is padded beyond the tokenizer, as Qwen's is, and 20 short trajectories."""
    folder = write_folder(small_model(vocab_size=400, num_hidden_layers=2), tmp_path / "model")
    write_tokenizer(folder)
    write_jsonl(tmp_path / "rows.jsonl", map(trajectory, range(20)))
    (tmp_path / "init.txt").write_text("{question}")
    (tmp_path / "step.txt").write_text("{documents}")
    files = {"model": folder, "data": "rows.jsonl", "init-prompt": "init.txt", "step-prompt": "step.txt"}
    arguments = [a for name, path in files.items() for a in (f"--{name}", str(tmp_path / path))]
    return [*arguments, "--dtype", "fp32", "--device", "cpu"]


# Dropout on, so that resuming without the random stream would show.
SHORT = ["--batch-size", "2", "--gradient-accumulation", "2", "--lora-dropout", "0.1", "--learning-rate", "5e-3"]


def log(output: Path) -> list[dict]:
    return metrics.read(output / run_files.METRICS)


def test_rows_of_one_question_are_not_split_between_training_and_validation(toy, tmp_path):
    """Sampled trajectories of one question share its answer: a model is not validated on what it was shown."""
    write_jsonl(tmp_path / "twice.jsonl", [trajectory(i) for i in range(20)] * 2)
    settings = {"data": str(tmp_path / "twice.jsonl"), "validation_fraction": 0.25}
    _, rows, validation = read_data(with_values(sft.SftConfig(), settings))
    assert (len(rows[""]), len(validation[""])) == (30, 10)
    assert not {r.id for r in rows[""]} & {r.id for r in validation[""]}
    *_, capped = read_data(with_values(sft.SftConfig(), settings | {"validation_rows": 5}))
    assert len(capped[""]) == 4
    _, rows, none = read_data(with_values(sft.SftConfig(), settings | {"validation_rows": 0}))
    assert (len(rows[""]), len(none[""])) == (40, 0)


def test_a_run_keeps_hashes_of_the_questions_that_it_trains_on(toy, tmp_path):
    """Not those held out, nor the questions themselves; it is there as soon as the run begins."""
    rows = [trajectory(i) for i in range(10)]  # of ten questions
    talk = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    write_jsonl(tmp_path / "rows.jsonl", [*rows, {"id": "talk", "messages": talk}])
    output = tmp_path / "run"
    arguments = [*SHORT, "--validation-fraction", "0.2", "--max-steps", "2", "--output", str(output)]
    assert sft.main([*toy, *arguments, "--stop-after", "1"]) == 0
    settings = {"data": str(tmp_path / "rows.jsonl"), "validation_fraction": 0.2}
    _, trained, held_out = read_data(with_values(sft.SftConfig(), settings))
    text = (output / QUESTIONS_FILE).read_text()
    assert json.loads(text) == {"hashes": sorted(question_hash(r.question) for r in trained[""] if hasattr(r, "steps"))}
    assert held_out[""] and len(demonstrated(output)) < 10 and "Where" not in text
    write_jsonl(tmp_path / "talks.jsonl", [{"id": str(i), "messages": talk} for i in range(4)])
    talks = [*toy, *SHORT, "--data", str(tmp_path / "talks.jsonl"), "--max-steps", "1"]
    assert sft.main([*talks, "--output", str(tmp_path / "talks")]) == 0
    assert not (tmp_path / "talks" / QUESTIONS_FILE).exists()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_it_learns_in_every_precision_on_the_cpu(toy, tmp_path, dtype):
    output = tmp_path / "run"
    arguments = [*SHORT, "--dtype", dtype, "--max-steps", "25", "--validate-every", "10"]
    arguments += ["--validation-fraction", "0.2"]
    assert sft.main([*toy, *arguments, "--output", str(output)]) == 0
    records = log(output)
    assert records[-1]["loss"] < 0.5 * records[0]["loss"]
    validated = {r["step"]: r["eval_loss"] for r in records if "eval_loss" in r}
    assert list(validated) == [10, 20, 25]
    assert validated[25] < validated[10]
    assert all(r["perplexity"] == pytest.approx(math.exp(r["loss"])) for r in records)
    assert records[-1]["eval_perplexity"] == pytest.approx(math.exp(validated[25]))
    assert ("skipped_steps" in records[-1]) == (dtype == "fp16")
    keys = {"step", "loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "step_time", "tokens_per_second"}
    assert keys | {"peak_memory_mib"} <= records[0].keys()
    assert (output / "adapter" / "adapter_model.safetensors").exists()
    assert json.loads((output / "summary.json").read_text())["rows"] == 16


FP32_AND_BYTES = {torch.float32, torch.uint8}  # weights and moments, whatever the base is in; random states


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_left_and_resumed_equals_uninterrupted_to_the_bit(toy, tmp_path, dtype):
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    arguments = [*toy, *SHORT, "--dtype", dtype, "--epochs", "2", "--validate-every", "3"]
    assert sft.main([*arguments, "--output", str(uninterrupted)]) == 0
    assert sft.main([*arguments, "--output", str(parts), "--stop-after", "4"]) == 0
    assert not (parts / "adapter").exists()
    assert sft.main(["--config", str(parts / "config.toml"), "--resume", "auto"]) == 0
    assert_same_runs(uninterrupted, parts, total=10)
    saved = checkpoint.read(parts / "checkpoint-10")
    assert {tensor.dtype for tensors in saved.tensors.values() for tensor in tensors.values()} == FP32_AND_BYTES
    assert bool(saved.state["precision"]["scaler"]) == (dtype == "fp16")


def start(arguments: list[str]) -> subprocess.Popen:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "r3lite.sft", *arguments]
    return subprocess.Popen(command, cwd=Path(__file__).parent.parent, stderr=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen, condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.002)


LONG = [*SHORT, "--max-steps", "20", "--save-every", "6", "--gradient-accumulation", "4", "--keep-checkpoints", "9"]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on Windows")
def test_killed_between_checkpoints_and_resumed_equals_uninterrupted_to_the_bit(toy, tmp_path):
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    process = start([*toy, *LONG, "--output", str(parts)])
    wait_for(process, lambda: len(log(parts)) == 8)
    process.kill()
    process.communicate()
    assert max(checkpoint.folders_by_step(parts)) == 6
    assert 8 <= len(log(parts)) < 12
    assert sft.main([*toy, *LONG, "--output", str(parts), "--resume", "auto"]) == 0
    assert sft.main([*toy, *LONG, "--output", str(uninterrupted)]) == 0
    assert_same_runs(uninterrupted, parts, total=20)


def test_a_run_goes_on_with_streamed_layers_or_without_to_the_same_bits(toy, small_model, write_folder, tmp_path):
    """Half a run on a small card may go on on a large one: streaming changes no number."""
    sizes = {"vocab_size": 400, "hidden_size": 128, "intermediate_size": 192}
    write_folder(small_model(**sizes), tmp_path / "model")
    uninterrupted, parts, cache = tmp_path / "whole", tmp_path / "parts", tmp_path / "cache"
    arguments = [*toy, "--batch-size", "2", "--max-steps", "6", "--lora-dropout", "0.1", "--nf4-cache", str(cache)]
    assert sft.main([*arguments, "--quantize", "nf4", "--recompute-layers", "3", "--output", str(uninterrupted)]) == 0
    streamed, plain = ["--stream-layers"], ["--quantize", "nf4"]
    arguments += ["--resume", "auto", "--output", str(parts)]
    assert sft.main([*arguments, *streamed, "--stop-after", "2"]) == 0
    assert sft.main([*arguments, *plain, "--stop-after", "2"]) == 0
    assert [r["step"] for r in log(parts)] == [1, 2, 3, 4]
    assert sft.main([*arguments, *streamed]) == 0
    assert_same_runs(uninterrupted, parts, 6)


@pytest.mark.skipif(os.name == "nt", reason="no SIGTERM to a process on Windows")
def test_sigterm_saves_and_exits_143(toy, tmp_path):
    output = tmp_path / "run"
    process = start([*toy, *LONG, "--output", str(output)])
    wait_for(process, lambda: len(log(output)) >= 2)
    process.terminate()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143, stderr
    newest = checkpoint.newest_valid(output)
    assert checkpoint.read(newest).step == len(log(output)) < 20
    assert f"--config {output / 'config.toml'} --resume auto" in stderr


def test_it_goes_on_from_the_adapter_of_a_run(toy, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    arguments = [*toy, *SHORT, "--max-steps", "25"]
    assert sft.main([*arguments, "--output", str(first)]) == 0
    assert sft.main([*arguments, "--output", str(second), "--adapter", str(first)]) == 0
    assert log(second)[0]["loss"] < 0.7 * log(first)[0]["loss"]


def test_conversations_are_trained_on_too(toy, tmp_path):
    talk = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "In Abotown, as we know."}]
    write_jsonl(tmp_path / "talk.jsonl", [{"messages": talk}] * 4)
    arguments = ["--data", str(tmp_path / "talk.jsonl"), "--max-steps", "2", "--output", str(tmp_path / "run")]
    assert sft.main([*toy, *SHORT, *arguments]) == 0
    assert log(tmp_path / "run")[1]["loss"] < log(tmp_path / "run")[0]["loss"]


def test_an_overflow_in_fp16_names_the_layer(toy, tmp_path, capsys, small_model, write_folder):
    model = small_model(vocab_size=400, num_hidden_layers=2)
    model.model.layers[1].mlp.down_proj.weight.mul_(3e4)
    write_folder(model, tmp_path / "model")
    arguments = ["--dtype", "fp16", "--max-steps", "30", "--output", str(tmp_path / "run")]
    assert sft.main([*toy, *SHORT, *arguments]) == 1
    stderr = capsys.readouterr().err
    assert "model.layers.1 was the first layer to give inf or nan" in stderr
    assert "Pass --dtype bf16" in stderr


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [[], ["--cuda-graphs"], ["--cuda-graphs", "--recompute-layers", "2"]])
def test_it_learns_in_fp16_on_a_card(toy, tmp_path, capsys, flags):
    arguments = [*toy, *SHORT, "--device", "cuda", "--dtype", "fp16", "--max-steps", "25", *flags]
    assert sft.main([*arguments, "--output", str(tmp_path / "run")]) == 0
    assert "without CUDA graphs" not in capsys.readouterr().err
    records = log(tmp_path / "run")
    assert records[-1]["loss"] < 0.5 * records[0]["loss"]
    assert records[-1]["skipped_steps"] < 5 and records[-1]["peak_memory_mib"] > 0
    saved = checkpoint.read(tmp_path / "run" / "checkpoint-25")
    assert saved.state["precision"]["scaler"]["scale"] >= 1
    assert {tensor.dtype for tensor in saved.tensors["weights"].values()} == {torch.float32}


def test_the_plan_and_the_errors_of_the_command_line(toy, tmp_path, capsys):
    assert sft.main([*toy, *SHORT, "--dry-run"]) == 0
    stdout = capsys.readouterr().out
    assert "19 rows, 1 more held out; 5 steps of 4 rows" in stdout
    assert "warning: 19 rows make only 5 steps of 4, " in stdout and "(30 steps or more)" in stdout
    for enough in (["--epochs", "6.4"], ["--max-steps", "5"]):  # 31 steps; and a length that the user has chosen
        assert sft.main([*toy, *SHORT, *enough, "--dry-run"]) == 0
        assert "warning: " not in capsys.readouterr().out
    assert sft.main(["--dry-run", "--data", "some/name,subset,train"]) == 0  # without a download
    assert sft.main(["--model", "x"]) == 2
    assert "--data is missing" in capsys.readouterr().err
    assert sft.main([*toy, "--data", str(tmp_path / "none.jsonl"), "--output", str(tmp_path / "run")]) == 1
    assert "none.jsonl" in capsys.readouterr().err
    (tmp_path / "bad.jsonl").write_text('{"question": "Where?"}\n')
    assert sft.main([*toy, "--data", str(tmp_path / "bad.jsonl")]) == 1
    assert "bad.jsonl, line 1" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()  # a start that failed leaves nothing in the way of the next


def test_the_prompt_files_are_read_once(toy, tmp_path, monkeypatch):
    """A file that was edited between two readings gave rows that were checked in one wording and trained on in
    another."""
    load, read = R3.load, []
    monkeypatch.setitem(PROTOCOLS, "r3", lambda settings: read.append(settings) or load(settings))
    assert sft.main([*toy, *SHORT, "--max-steps", "1", "--output", str(tmp_path / "run")]) == 0
    assert len(read) == 1


def test_other_rows_under_the_same_name_are_not_resumed(toy, tmp_path, capsys):
    arguments = [*toy, *SHORT, "--output", str(tmp_path / "run")]
    assert sft.main([*arguments, "--stop-after", "1"]) == 0
    write_jsonl(tmp_path / "rows.jsonl", map(trajectory, reversed(range(20))))
    assert len(read_rows(tmp_path / "rows.jsonl", build_protocol(ProtocolSettings()))) == 20
    assert sft.main([*arguments, "--resume", "auto"]) == 1
    assert shows(capsys.readouterr().err, "data-changed")
