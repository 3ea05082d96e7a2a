"""A command: what it must be given, its exit codes, signals, dry runs, and places it cannot write to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from r3lite import rollout_worker
from r3lite.core import command
from r3lite.core.config import input_path, kinds_of, sections
from r3lite.core.environment import CACHE_CAPACITY, CACHES, spare_the_machine
from r3lite.core.errors import R3LiteError
from r3lite.core.exit_status import Terminated
from r3lite.core.files import write_json
from tests.commands import CONFIGS, Everything


def run(work, *argv: str) -> int:
    return command.Command("sft", Everything(), work)(list(argv))


def raising(error):
    def work(config):
        raise error

    return work


@pytest.fixture(autouse=True)
def signals():
    """`command.run` takes SIGTERM over; give it back."""
    import signal

    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sft", "--data is missing: pass trajectories (see `python -m r3lite.collect`) or conversations"),
        ("ppo", "--data is missing: pass a question file in any supported format, or name,subset,split"),
    ],
)
def test_what_must_be_given_is_asked_for_before_the_work_and_not_for_a_dry_run(capsys, name, message):
    default, table = CONFIGS[name]
    assert command.Command(name, default, raising(AssertionError()), table=table)([]) == 2
    assert capsys.readouterr().err == f"r3lite.{name}: {message}\n"
    assert command.Command(name, default, raising(AssertionError()), table=table)(["--dry-run"]) == 0


SEEN_BY_TORCH = """
import os, sys
from r3lite.core import command
from r3lite import ppo
from r3lite.settings import PpoConfig
assert "torch" not in sys.modules

class Finder:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))

sys.meta_path.insert(0, Finder)
command.Command("ppo", PpoConfig(), lambda config: __import__("torch"))(["--data", "hotpotqa"])
"""


@pytest.mark.parametrize(
    ("variables", "set_to"), [({}, "1000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None"), ({"GOMP_SPINCOUNT": "7"}, "7")]
)
def test_before_torch_is_loaded_waiting_threads_are_told_to_sleep_soon(variables, set_to):
    env = {name: x for name, x in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run([sys.executable, "-c", SEEN_BY_TORCH], env=env | variables, capture_output=True, text=True)
    assert done.stdout.strip() == set_to, done.stderr


def test_few_compiled_products_are_kept_unless_the_user_has_said_how_many(monkeypatch):
    first, second = CACHES
    monkeypatch.setattr(os, "environ", {first: "7"})
    spare_the_machine()
    assert os.environ[first] == "7" and os.environ[second] == CACHE_CAPACITY


def test_exit_codes(capsys):
    assert run(lambda config: None) == 0
    assert run(raising(R3LiteError("the disk is full", "Make room.", code="broken"))) == 1
    assert run(raising(KeyboardInterrupt())) == 130
    assert run(raising(Terminated())) == 143
    assert run(lambda config: None, "--lora-r", "x") == 2
    error = capsys.readouterr().err
    assert "r3lite.sft stopped: the disk is full\n  Make room.\n" in error and "Traceback" not in error
    assert error.splitlines()[-1] == "r3lite.sft: lora_r is 'x'; it must be a whole number"


def test_sigterm_reaches_the_work_as_an_exception():
    import os
    import signal

    def work(config):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("SIGTERM did not arrive")

    if os.name != "posix":
        pytest.skip("needs POSIX signals")
    assert run(work) == 143


def test_a_dry_run_prints_what_was_resolved_and_does_nothing(capsys):
    assert run(raising(AssertionError()), "--dry-run", "--lora-r", "3") == 0
    out = capsys.readouterr().out
    assert "LoRA adapter" in out
    assert any(line.split() == ["lora_r", "3"] for line in out.splitlines())


def test_a_dry_run_begins_with_what_differs_and_what_is_missing(tmp_path, capsys):
    (tmp_path / "my.toml").write_text("[sft]\nlora_alpha = 3.0\n", encoding="utf-8")
    argv = [
        "--config",
        str(tmp_path / "my.toml"),
        "--preset",
        "tiny",
        "--limit",
        "2",
        "--data",
        "gone.jsonl",
        "--dry-run",
    ]
    assert run(raising(AssertionError()), *argv) == 0
    lines = capsys.readouterr().out.splitlines()
    end = lines.index("")
    differing = [line.split(maxsplit=2) for line in lines[1:end] if line.startswith(" ")]
    assert lines[0] == "Differs from the defaults"
    assert ["limit", "2", "(on the command line)"] in differing
    assert ["lora_alpha", "3.0", "(in the command's table of the file --config)"] in differing
    assert ["model", "tiny", "(by the preset or another setting)"] in differing
    assert "lora_targets" not in {name for name, *_ in differing}
    assert lines[end - 1] == "missing: --data gone.jsonl: no such file"
    assert run(raising(AssertionError()), "--data", "hotpotqa,train", "--dry-run") == 0
    assert "missing" not in capsys.readouterr().out


def test_a_mistyped_input_is_told_before_the_work_with_the_nearest_name(tmp_path, capsys, monkeypatch):
    """A mistyped adapter was planned for minutes first."""
    for name in ("sft", "lr=1e-4"):
        write_json(tmp_path / "runs" / name / "adapter" / "adapter_config.json", {})
    (tmp_path / "train.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    nearest = f"did you mean {Path('runs', 'sft')}?"
    assert run(raising(AssertionError()), "--data", "train.jsonl", "--adapter", "runs/stf") == 1
    stderr = capsys.readouterr().err
    assert f"r3lite.sft stopped: --adapter runs/stf: no such run ({nearest})\n" in stderr
    assert "Pass a run folder" in stderr
    assert run(lambda config: None, "--data", "train.jsonl", "--adapter", "runs/sft") == 0
    serve = command.Command("serve", CONFIGS["serve"][0], lambda config: None)
    assert serve(["--adapters", "runs/sft,rl=runs/sft,base"]) == 0
    assert serve(["--adapters", "runs/sft,rl=runs/rl"]) == 1
    assert "--adapters runs/rl: no such run" in capsys.readouterr().err
    assert serve(["--adapter", "runs/lr=1e-4", "--adapters", "runs/lr=1e-4,rl=runs/lr=1e-4"]) == 0
    assert serve(["--adapters", "rl=runs/lr=1e-5"]) == 1
    assert "--adapters runs/lr=1e-5: no such run" in capsys.readouterr().err
    assert run(lambda config: None, "--data", "trian.jsonl", "--dry-run") == 0
    assert "missing: --data trian.jsonl: no such file (did you mean train.jsonl?)\n" in capsys.readouterr().out
    collect = command.Command("collect", CONFIGS["collect"][0], lambda config: None)
    assert collect(["--data", "train.jsonl", "--exclude", "hotpotqa,validation"]) == 1
    stderr = capsys.readouterr().err
    assert "--exclude validation: no such file" in stderr and 'exclude = ["hotpotqa,validation"]' in stderr


def test_a_folder_of_runs_or_of_something_else_is_no_adapter(tmp_path, capsys, monkeypatch):
    """`ask --adapter runs` began to download the default model before it looked into the folder."""
    monkeypatch.chdir(tmp_path)
    ask = command.Command("ask", CONFIGS["ask"][0], lambda config: None)
    for run_folder in ("runs/sft", "runs/world/ppo", "runs/left/checkpoint-5"):
        write_json(Path(run_folder, "adapter", "adapter_config.json"), {})
        assert ask(["--adapter", run_folder]) == ask(["--adapter", f"{run_folder}/adapter"]) == 0
    assert ask(["--adapter", "runs/left"]) == 0  # the newest checkpoint's
    write_json(Path("runs/full/model/config.json"), {})
    assert ask(["--adapter", "runs/full"]) == 0  # a model, which is told apart when its base is looked for
    Path("notes").mkdir()
    capsys.readouterr()
    assert ask(["--adapter", "runs"]) == ask(["--adapter", "notes"]) == 1
    stderr = capsys.readouterr().err
    runs = ", ".join(str(Path(name)) for name in ("runs/left/checkpoint-5", "runs/sft", "runs/world/ppo"))
    assert f"r3lite.ask stopped: --adapter runs has no adapter; runs in it: {runs}\n  Pass a run folder" in stderr
    assert "--adapter notes has no adapter (adapter_config.json)\n" in stderr
    assert ask(["--adapter", "runs", "--dry-run"]) == 0
    assert "missing: --adapter runs has no adapter; runs in it: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "flag", "mistyped", "right"),
    [
        ("ask", "index", "my-indx", "my-index"),
        ("serve", "corpus", "corpsu.jsonl", "corpus.jsonl"),
        ("index", "documents", "my-foldr", "my-folder"),
        ("ppo", "init-prompt", "promt.txt", "prompt.txt"),
        ("ppo", "source-index", "News=my-indx", "my-index"),
    ],
)
def test_every_kind_of_input_is_told_before_the_work(tmp_path, capsys, monkeypatch, name, flag, mistyped, right):
    """`ask --index my-indx` loaded torch for half a minute, and did not name the folder beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / right).mkdir()
    default, table = CONFIGS[name]
    arguments = [f"--{flag}", mistyped]
    if name == "ppo":
        arguments += ["--data", "hotpotqa,train"]
    if flag == "source-index":
        arguments += ["--format", "dag"]
    assert command.Command(name, default, raising(AssertionError()), table=table)(arguments) == 1
    error = capsys.readouterr().err
    missing = mistyped.rpartition("=")[2]
    assert f"r3lite.{name} stopped: --{flag} {missing}: no such " in error and f"(did you mean {right}?)" in error


def test_every_input_says_what_to_pass_instead():
    """One that does not is found missing only when it is read."""
    silent = set()
    for default, _ in CONFIGS.values():
        for section in sections(default).values():
            for setting, kind in kinds_of(type(section)).items():
                path_trait = input_path(kind)
                if path_trait and not path_trait.remedy:
                    silent.add(setting)
    assert silent == {"procedures"}  # `procedures --add` writes that file


def test_a_worker_does_not_need_the_adapter_that_the_config_of_the_run_names(tmp_path, monkeypatch):
    """The run sends it; a worker with the same --config stopped, as it was not on its machine."""
    (tmp_path / "run.toml").write_text('[ppo]\nadapter = "runs/elsewhere"\n', encoding="utf-8")
    served = []
    monkeypatch.setattr("r3lite.assembly.rollout_service.serve", served.append)
    assert rollout_worker.main(["--config", str(tmp_path / "run.toml")]) == 0
    assert served[0].model.adapter == "runs/elsewhere"


@pytest.mark.parametrize("name", ["collect", "evaluate", "index", "plan", "quickstart", "retrieve"])
def test_an_output_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path, capsys, name):
    """`--output FILE/x` was a traceback."""
    (tmp_path / "file").write_text("")

    def work(config):
        (Path(config.common.output) / "scores.json").parent.mkdir(parents=True)

    default, table = CONFIGS[name]
    here = str(tmp_path / "file")
    needs = {"collect": ["--data", here], "evaluate": ["--data", here], "retrieve": ["--data", here]}
    needs["index"] = ["--corpus", here]
    argv = ["--output", str(tmp_path / "file" / "x"), *needs.get(name, [])]
    assert command.Command(name, default, work, table=table)(argv) == 1
    first, second = capsys.readouterr().err.strip().splitlines()
    assert first.startswith(f"r3lite.{name} stopped: ") and str(tmp_path / "file") in first
    assert "--output" in second


def test_an_error_of_the_network_is_not_taken_for_one_of_a_path():
    with pytest.raises(ConnectionError):
        run(raising(ConnectionError("the server hung up")))


def test_a_reader_that_leaves_early_is_no_traceback():
    """`sft --dry-run | head -1` ended in a BrokenPipeError."""
    if os.name != "posix":
        pytest.skip("needs POSIX pipes")
    reading, writing = os.pipe()
    os.close(reading)
    argv = [sys.executable, "-m", "r3lite.collect", "--dry-run"]
    done = subprocess.run(argv, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
