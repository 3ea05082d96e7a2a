"""The plan command, end to end: the table, plan.json, refusals, and the plan in other commands' dry runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from r3lite import collect, evaluate, plan, ppo, sft
from r3lite.assembly import answering, rl_setup
from r3lite.core.files import shipped, write_jsonl
from r3lite.core.grant import Memory
from r3lite.devices.cards import MEASURED, Speeds
from r3lite.memory.plan import UNKNOWN, announce
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.settings import EvaluateConfig, ModelSettings, PpoConfig, RLSettings
from tests.commands import NEEDED
from tests.errors import shows

QWEN = "Qwen/Qwen2.5-0.5B-Instruct"


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No model is in the cache, and the hub cannot be reached."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.chdir(tmp_path)


def planned(tmp_path, *arguments) -> dict:
    assert plan.main([*arguments, "--output", str(tmp_path)]) == 0
    return json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))


def test_the_table_and_the_file_say_the_same(tmp_path, capsys):
    memory_plan = planned(tmp_path, "--model", QWEN, "--max-length", "1024", "--device", "cpu", "--dtype", "bf16")
    assert memory_plan.keys() == {"budget_mib", "peak_mib", "fits", "phases", "chosen", "seconds"}
    assert memory_plan["budget_mib"] == 4096 and memory_plan["fits"] and 1000 < memory_plan["peak_mib"] < 4096
    assert list(memory_plan["phases"]) == ["load", "update", "save"]
    assert memory_plan["phases"]["update"]["weights"] == pytest.approx(942, abs=1)
    assert max(sum(parts.values()) for parts in memory_plan["phases"].values()) == pytest.approx(
        memory_plan["peak_mib"], abs=1
    )
    assert memory_plan["chosen"].keys() == vars(Memory()).keys()
    stdout = capsys.readouterr().out
    assert f"peak {memory_plan['peak_mib']:,.0f} MiB (update) of a budget of 4,096 MiB" in stdout
    assert f"recompute_layers {memory_plan['chosen']['recompute_layers']}" in stdout
    table = {line.split("  ")[0]: line for line in stdout.splitlines()}
    assert table["MiB"].split()[1:] == ["load", "update", "save"]
    for part, size in memory_plan["phases"]["update"].items():
        assert f"{size:,.0f}" in table[part] or f"{size + 0.05:,.0f}" in table[part]


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "reinforce++"])
@pytest.mark.parametrize("form", ["{flag} {value}", "{flag}={value}"])
def test_reinforcement_learning_takes_the_flags_of_ppo(tmp_path, algorithm, form):
    """The algorithm decides which flags there are, however it is written."""
    algorithm_flags = form.format(flag="--algorithm", value=algorithm).split()
    other_flags = ["--num-generations", "4", "--max-new-tokens", "64", "--device", "cuda", "--kl-beta", "0.1"]
    memory_plan = planned(tmp_path, *algorithm_flags, *other_flags, "--vram-budget", "3GiB")
    assert list(memory_plan["phases"]) == ["load", "sample", "score", "update", "save"]
    assert "KV cache" in memory_plan["phases"]["sample"] and memory_plan["phases"]["load"]["context"] > 0
    assert memory_plan["budget_mib"] == 3072


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_is_planned_and_dry_run(tmp_path, capsys, algorithm):
    """The reference takes a pass without gradients, and so do the trainer's own log-probabilities."""
    flags = ["--algorithm", algorithm, "--device", "cpu", "--dtype", "bf16", *NEEDED.get(algorithm, [])]
    run = [*flags, *(["--traces", "x.jsonl"] if ALGORITHMS[algorithm].has_traces else [])]
    memory_plan = planned(tmp_path, *flags)
    scoring = {"dr-grpo": [], "dapo": [], "dgpo": ["teach"]}
    assert list(memory_plan["phases"]) == ["load", "sample", *scoring.get(algorithm, ["score"]), "update", "save"]
    with_kl = planned(tmp_path, *flags, "--kl-beta", "0.1")
    assert "score" in with_kl["phases"] and memory_plan["fits"]
    assert ppo.main([*run, "--dry-run"]) == 0
    assert re.search(rf"^  algorithm +{re.escape(algorithm)}$", capsys.readouterr().out, re.M)
    assert plan.main([*flags, "--kl-beta", "0", "--kl-target", "0.1"]) == 2  # as the run would
    assert shows(capsys.readouterr().err, "setting-unused", "--kl-target", "0.1", "--kl-beta above 0")


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_a_card_that_is_elsewhere_is_planned_for_by_its_name(tmp_path, capsys, algorithm):
    flags = ["--algorithm", algorithm, "--card", "nvidia geforce rtx 3050 laptop gpu", "--max-steps", "7"]
    memory_plan = planned(tmp_path, *flags)
    assert memory_plan["budget_mib"] == 4096 - 256 and memory_plan["phases"]["update"]["context"] > 0
    stdout = capsys.readouterr().out
    seconds = memory_plan["seconds"]
    assert seconds["device"] == "RTX 3050 Laptop" and seconds["speeds_from"].startswith("https://")
    assert seconds["run"] == pytest.approx(7 * seconds["step"], rel=1e-3)
    assert sum(seconds["phases"].values()) == pytest.approx(seconds["step"], rel=1e-3)
    speeds = "from half the peak speed of the RTX 3050 Laptop"
    units = "steps" if algorithm == "sft" else "rounds"
    line = rf"^time: at most about .* for the run of 7 {units}\. Usually .*less: .* the most they may have, {speeds}$"
    assert re.search(line, stdout, re.M)
    assert planned(tmp_path, *flags, "--vram-budget", "3GiB")["budget_mib"] == 3072
    t4_plan = planned(tmp_path, *flags[:2], "--card", "T4")  # Turing multiplies no bf16
    assert t4_plan["seconds"]["device"] == "T4" and t4_plan["seconds"]["step"] < seconds["step"]


@pytest.mark.parametrize(
    ("flags", "heading"),
    [
        (["--model", QWEN], f"SFT of a LoRA adapter for {QWEN}"),
        (["--model", QWEN, "--no-lora"], f"SFT of all weights for {QWEN}"),
        (["--algorithm", "grpo"], "Reinforcement learning with grpo from a fresh adapter for "),
        (["--algorithm", "ppo", "--adapter", "runs/sft"], "Reinforcement learning with ppo from runs/sft for "),
    ],
)
def test_a_plan_names_its_stage_its_algorithm_and_its_model(capsys, flags, heading):
    assert plan.main([*flags, "--card", "T4", "--vram-budget", "9GiB"]) == 0
    assert capsys.readouterr().out.startswith(heading)


def test_a_card_that_is_not_known_is_an_error_that_names_those_that_are(capsys):
    assert plan.main(["--card", "RTX 3050 Laptp"]) == 2
    stderr = capsys.readouterr().err
    assert shows(stderr, "unknown-card", "RTX 3050 Laptp (did you mean RTX 3050 Laptop?)", "MX450, ")
    assert plan.main(["--card", "RTX 3090"]) == 2  # none of the table has this number: none is meant
    assert shows(capsys.readouterr().err, "unknown-card", "RTX 3090", "MX450, ")
    assert plan.main(["--card", "T4", "--device", "cpu"]) == 2
    assert shows(capsys.readouterr().err, "setting-unused", "--card", "T4", "--device cuda")
    assert plan.main(["--preset", "tiny", "--card", "T4"]) == 0  # the preset's CPU is that of this machine
    assert capsys.readouterr().out.startswith("SFT of a LoRA adapter for tiny on the T4 (16 GiB)\n")


def test_times_are_told_only_of_a_device_whose_speeds_are_known(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    here = ["--device", "cpu", "--dtype", "fp32"]
    assert planned(tmp_path, *here)["seconds"]["speeds_from"] == "measured"
    stdout = capsys.readouterr().out
    line = (
        r"^time: at most about .* for a step; .* for [\d,]+ steps, a pass over 1,000 rows; --data or --max-steps sets "
    )
    line += r".* Usually less: this is for rows of [\d,]+ tokens, the most they may have, from this device's speed "
    assert re.search(line, stdout, re.M)
    monkeypatch.setattr("r3lite.memory.plan.speeds_of", lambda device, dtype, product: None)
    assert planned(tmp_path, *here)["seconds"] is None
    assert capsys.readouterr().out.splitlines()[-2] == f"time: {UNKNOWN}"
    planned(tmp_path, *here, "--max-steps", "7")
    assert capsys.readouterr().out.splitlines()[-2] == f"time: {UNKNOWN}. The run has 7 steps"


def test_the_length_of_a_run_is_counted_by_its_data_if_they_are_here(tmp_path, capsys):
    """A plan took --data and did not read it, and the dry run of a preset with steps did not know their number."""
    rows = [
        {"messages": [{"role": "user", "content": str(i)}, {"role": "assistant", "content": "x"}]} for i in range(9)
    ]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    write_jsonl(tmp_path / "q.jsonl", [{"id": str(i), "question": f"Who {i}?", "answer": "x"} for i in range(9)])
    (tmp_path / "exclude.jsonl").write_text('{"question": "Who 3?", "answer": "x"}\n', encoding="utf-8")
    tiny = ["--preset", "tiny", "--epochs", "2"]
    sft_flags = [*tiny, "--data", "rows.jsonl", "--batch-size", "3", "--validation-fraction", "0"]
    seconds = planned(tmp_path, *sft_flags)["seconds"]
    assert seconds["run"] == pytest.approx(6 * seconds["step"], rel=0.05)
    counted = "9 rows, 0 more held out; 6 steps of 3 rows\n"
    for output in (capsys.readouterr().out, dry_run(sft, sft_flags, capsys)):
        assert "for the run of 6 steps." in output and counted in output
    rl_flags = [*tiny, "--batch-size", "4", "--data", "q.jsonl", "--exclude", "exclude.jsonl", "--retriever", "none"]
    planned(tmp_path, *rl_flags, "--algorithm", "grpo")
    for output in (capsys.readouterr().out, dry_run(ppo, rl_flags, capsys)):
        assert "for the run of 4 rounds." in output and "8 questions; 4 rounds of 4" in output
    planned(tmp_path, "--model", QWEN, "--data", "gone.jsonl", "--card", "T4")
    assert "gone.jsonl is not here yet: its rows are not counted" in capsys.readouterr().out
    preset = dry_run(sft, ["--preset", "tiny"], capsys)
    assert "for the run of 100 steps." in preset and "not here" not in preset


def dry_run(command, flags, capsys) -> str:
    """What the dry run of a command prints."""
    assert command.main([*flags, "--dry-run"]) == 0
    return capsys.readouterr().out


def test_a_device_that_is_not_here_is_not_measured(tmp_path, capsys, monkeypatch):
    def refuse(device, dtype, product):
        raise AssertionError(device)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("r3lite.memory.plan.speeds_of", refuse)
    assert planned(tmp_path, "--device", "cuda")["seconds"] is None
    assert f"time: {UNKNOWN}; plan --card predicts it for known GPUs\n" in capsys.readouterr().out
    assert planned(tmp_path, "--card", "T4")["seconds"]["device"] == "T4"
    assert plan.main(["--card", "T5"]) == 2 and plan.main(["--vram-budget", "9MiB"]) == 1


def test_a_round_of_more_than_a_day_is_told_of_before_it_begins(capsys, monkeypatch):
    """1,024 generations of each question were begun without a word of the weeks that a round would take."""
    for generations, speed, warned in ((1024, 1e11, True), (2, 1e13, False)):
        speeds = Speeds("cpu", {"fp32": 1e11}, {"fp32": speed}, 1e-6, MEASURED)
        settings = PpoConfig(
            model=ModelSettings(device="cpu", dtype="fp32"), rl=RLSettings(num_generations=generations, batch_size=2)
        )
        monkeypatch.setattr("r3lite.memory.plan.speeds_of", lambda device, dtype, product, speeds=speeds: speeds)
        announce(rl_setup.plan_memory(settings))
        stderr = capsys.readouterr().err
        assert bool(re.search("^warning: a round is predicted to take about [0-9.]+ days", stderr, re.M)) == warned
        assert "MiB (the process takes more), fp32, " in stderr
        # A bound of less than half an hour is not told: the first round is over before it is of use.
        assert ("\ntime: at most about " in stderr) == warned
        assert ("--num-generations" in stderr) == warned
        # Nor is one for answers, which show soon how long they take; those of a server do not come all at once.
        config = EvaluateConfig(model=ModelSettings(model="tiny", device="cpu", dtype="fp32"))
        announce(answering.plan_memory(config, 100_000))
        assert "\ntime:" not in capsys.readouterr().err


def test_flags_of_the_other_algorithm_are_refused(capsys):
    assert plan.main(["--num-generations", "4"]) == 2
    assert "--num-generations" in capsys.readouterr().err
    assert plan.main(["--algorithm", "grpo", "--gradient-accumulation", "4"]) == 2
    assert "--gradient-accumulation" in capsys.readouterr().err
    assert plan.main(["--algorithm", "kto"]) == 2
    assert "kto" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "argv", "learns"),
    [
        ('[ppo]\nalgorithm = "grpo"\n', [], True),
        ("[ppo]\n", [], True),
        ('algorithm = "grpo"\n', [], True),
        ('algorithm = "grpo"\n[sft]\n[ppo]\n', [], True),
        ("[sft]\n[ppo]\n", [], False),
        ("[sft]\n", [], False),
        ("[ppo]\n", ["--algorithm", "sft"], False),
    ],
)
def test_the_algorithm_may_be_in_the_file(tmp_path, text, argv, learns):
    """The config.toml of an RL run was planned as SFT of the default model, without a word."""
    (tmp_path / "my.toml").write_text(text)
    memory_plan = planned(tmp_path, *argv, "--config", str(tmp_path / "my.toml"), "--device", "cpu", "--dtype", "bf16")
    assert ("sample" in memory_plan["phases"]) == learns


@pytest.mark.parametrize("text", ["algorithm = ", "ppo = 3", "algorithm = 3", "[ppo]\nlearning_rat = 1"])
def test_a_malformed_file_is_a_usage_error(tmp_path, capsys, text):
    (tmp_path / "my.toml").write_text(text)
    assert plan.main(["--config", str(tmp_path / "my.toml")]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("r3lite.plan: ") and "my.toml" in stderr and stderr.count("\n") == 1
    assert plan.main(["--config"]) == 2


def test_a_folder_and_the_shipped_model_are_planned_from_their_config(tmp_path, small_model, write_folder):
    tiny_plan = planned(tmp_path, "--model", "tiny", "--dtype", "fp32", "--device", "cpu")
    folder = write_folder(small_model(vocab_size=1024, hidden_size=512), tmp_path / "model")
    (folder / "model.safetensors").unlink()  # sizes are enough
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((shipped("checkpoints", "tiny") / name).read_bytes())
    folder_plan = planned(tmp_path, "--model", str(folder), "--dtype", "fp32", "--device", "cpu")
    weights = [memory_plan["phases"]["update"]["weights"] for memory_plan in (tiny_plan, folder_plan)]
    assert weights[0] == pytest.approx(4 * 2.6e6 / 2**20, rel=0.02) and weights[0] != weights[1]


def test_a_model_that_is_not_known_offline_is_an_error_with_a_remedy(capsys):
    assert plan.main(["--model", "someone/some-model"]) == 1
    stderr = capsys.readouterr().err
    assert "r3lite.plan stopped: " in stderr and "someone/some-model" in stderr and "Traceback" not in stderr


def test_what_does_not_fit_is_refused_with_remedies(tmp_path, capsys):
    tight = ["--model", QWEN, "--quantize", "none", "--vram-budget", "900MiB", "--device", "cpu", "--dtype", "bf16"]
    assert plan.main([*tight, "--output", str(tmp_path)]) == 1
    stderr = capsys.readouterr().err
    assert re.search(r"stopped: this run needs at least 1,\d\d\d MiB, but the budget is 900 MiB", stderr)
    assert "--quantize nf4; or " in stderr
    needed = re.search(r"--vram-budget (\d+MiB)", stderr)[1]
    assert not (tmp_path / "plan.json").exists()
    assert plan.main([*tight, "--vram-budget", needed]) == 0
    assert plan.main([*tight, "--quantize", "nf4"]) == 0


@pytest.mark.parametrize("budget", ["lots", "4", "-1GiB"])
def test_a_bad_budget_is_a_clear_error(budget, capsys):
    assert plan.main([f"--vram-budget={budget}"]) == 2
    stderr = capsys.readouterr().err
    assert shows(stderr, "bad-memory-size", "--vram-budget", budget) and "4GiB" in stderr


def test_dry_runs_print_the_plan(capsys):
    small = ["--model", QWEN, "--device", "cpu", "--dtype", "bf16", "--dry-run"]
    questions = str(shipped("data", "world") / "train.jsonl")
    for main, phases, data in (
        (sft.main, ["load", "update", "save"], ["--data", "some/name,subset,train"]),
        (ppo.main, ["load", "sample", "score", "update", "save"], ["--data", questions]),
        (evaluate.main, ["load", "sample"], ["--data", questions]),
        (evaluate.main, ["load", "sample"], ["--limit", "2"]),
    ):
        assert main([*small, *data]) == 0
        stdout = capsys.readouterr().out
        assert re.search(r"^MiB +" + " +".join(phases) + "$", stdout, re.MULTILINE)
        assert re.search(r"^peak [\d,]+ MiB .* of a budget of 4,096 MiB$", stdout, re.MULTILINE)
        assert "vram_budget" in stdout  # the settings, too
    assert sft.main([*small, "--data", "some/name,subset,train", "--vram-budget", "100MiB"]) == 1
    assert "It would fit with" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["--algorithm", "ppo", "--help"], ["--no-such-flag", "1"]])
def test_help_and_usage_errors_do_not_wait_for_torch(arguments):
    """Importing torch takes seconds; a question about flags is answered at once."""
    code = "import sys; from r3lite import plan; print(plan.main(sys.argv[1:]), 'torch' in sys.modules)"
    code = code.replace("plan.main(sys.argv[1:])", "attempt(plan.main)")
    attempt = "def attempt(main):\n    try:\n        return main(sys.argv[1:])\n    except SystemExit as error:\n"
    attempt += "        return error.code or 0\n"
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", attempt + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(root)})
    assert done.stdout.splitlines()[-1] == ("2 False" if "--no-such-flag" in arguments else "0 False"), done.stderr
    if "--help" in arguments:
        assert "--vram-budget" in done.stdout
        assert ("--num-generations" in done.stdout) == ("ppo" in arguments)


def test_a_teacher_of_3b_in_nf4_fits_beside_a_policy_of_half_a_billion(tmp_path):
    """In 4 GiB, loaded for the pass that reads the failed episodes; from a cache it takes nothing."""
    flags = ["--algorithm", "dgpo", "--device", "cuda", "--card", "RTX 3050 Laptop", "--vram-budget", "4GiB"]
    turns = planned(tmp_path, *flags, "--teacher", "Qwen/Qwen2.5-3B-Instruct")
    assert turns["fits"] and 1900 < turns["phases"]["teach"]["teacher"] < 2000
    assert turns["phases"]["teach"]["weights"] == turns["phases"]["update"]["weights"]
    assert turns["seconds"]["phases"]["teach"] > turns["seconds"]["phases"]["update"] / 3
    cached = planned(tmp_path, *flags, "--teacher-logprobs", "folder")
    assert "teach" not in cached["phases"] and cached["fits"]


def test_what_a_cache_of_log_probabilities_takes_is_told_beforehand(capsys):
    flags = ["--teacher-logprobs", "folder", "--data", "rows.jsonl", "--model", "Qwen/Qwen2.5-3B-Instruct"]
    assert collect.main([*flags, "--device", "cuda", "--max-length", "2048", "--teacher-top", "64", "--dry-run"]) == 0
    stdout = capsys.readouterr().out
    assert re.search(r"^chosen: nf4 True", stdout, re.M) and re.search(r"^MiB +load +score$", stdout, re.M)
    assert "on disk: at most 1,000 MiB for 1,000 trajectories" in stdout  # 1,000 x 2,048 x 64 x 8 bytes
