"""The run folder: whose it is, what it is compared with on a resume, and what happens if it cannot be written."""

import dataclasses
import errno
import json
import os
from unittest.mock import Mock

import pytest
from safetensors import SafetensorError

from r3lite.core import run_files
from r3lite.core.config import flat
from r3lite.core.earlier_output import changes
from r3lite.core.errors import R3LiteError
from r3lite.core.files import sole_writer
from r3lite.core.invocation import with_values
from r3lite.settings import PpoConfig
from r3lite.training import checkpoint, loop
from r3lite.training.run_folder import RunFolder
from tests.errors import raises
from tests.training.test_loop import Toy, ToyConfig, run


def contents(folder) -> dict:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_folder_in_which_another_process_writes_is_refused_before_it_is_read(tmp_path, monkeypatch):
    """Two runs at once both ended well, with one metrics.jsonl."""
    run(Toy(), output=str(tmp_path / "out"), stop_after=2)
    contents_before = contents(tmp_path)
    monkeypatch.setattr(checkpoint, "newest_valid", lambda *_: pytest.fail("it was read"))
    with sole_writer(tmp_path / "out"):
        for settings in ({"resume": "auto", "output": str(tmp_path / "out")}, {"resume": str(tmp_path / "out")}):
            with raises(R3LiteError, "output-in-use", "pid", os.getpid()) as error:
                RunFolder("sft", with_values(ToyConfig(), settings), "unused")
            assert "pass another output" in error.value.remedy
    assert contents(tmp_path) == contents_before


def test_a_run_keeps_its_folder_to_its_end_and_a_refusal_gives_it_back(tmp_path):
    config = with_values(ToyConfig(), {"output": str(tmp_path / "out")})
    with RunFolder("sft", config, "unused"), raises(R3LiteError, "output-in-use"):
        RunFolder("sft", config, "unused")
    assert not (tmp_path / "out").exists()  # nothing was written
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.md").write_text("")
    for resume in (None, None, "auto"):
        with raises(R3LiteError, "output-not-empty", "notes.md") as error:
            RunFolder("sft", with_values(config, {"resume": resume}), "unused")
        assert "--resume auto" not in str(error.value)  # no run is there
    for table, is_continued in (("[sft]\n", True), ("[evaluate]\n", False)):  # of this command, and of another
        (tmp_path / "out" / "config.toml").write_text(table)
        with raises(R3LiteError, "output-not-empty") as error:
            RunFolder("sft", config, "unused")
        assert ("Pass --resume auto" in error.value.remedy) == is_continued


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
def test_a_link_as_output_is_written_through(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "new" / "folder")
    assert run(Toy(), output=str(tmp_path / "link"))
    assert (tmp_path / "link").is_symlink() and (tmp_path / "new" / "folder" / "summary.json").exists()


# What --resume auto may begin afresh


@pytest.mark.parametrize("files", [["config.toml", "scores.json"], ["index.faiss"], ["metrics.jsonl"], ["adapter"]])
def test_resume_auto_does_not_begin_in_a_folder_of_something_else(tmp_path, files):
    """An evaluation's config.toml was replaced."""
    for name in files:
        (tmp_path / name).write_text("[evaluate]\ntop_k = 3\n")
    contents_before = contents(tmp_path)
    with pytest.raises(R3LiteError, match=r"is not a run of sft: .* has no \[sft\]|is not an empty folder"):
        run(Toy(), output=str(tmp_path), resume="auto")
    assert contents(tmp_path) == contents_before


def test_resume_auto_begins_afresh_in_a_folder_of_the_same_run_only(tmp_path):
    with pytest.raises(ZeroDivisionError):
        toy = Toy()
        toy.before_update = lambda number: 1 / 0
        run(toy, output=str(tmp_path), seed=3)
    contents_before = contents(tmp_path)
    with raises(R3LiteError, "other-run", "sft", "learning_rate (was 0.01, is 0.5), seed (was 3, is 0"):
        run(Toy(), output=str(tmp_path), resume="auto", learning_rate=0.5)
    assert contents(tmp_path) == contents_before
    assert run(Toy(), output=str(tmp_path), resume="auto", seed=3)


def test_a_log_that_a_shell_keeps_in_the_folder_is_not_in_the_way_of_resume_auto(tmp_path):
    (tmp_path / "log.txt").write_text("")
    assert run(Toy(), output=str(tmp_path), resume="auto")


def test_changes_of_settings_are_told_but_for_the_free_ones():
    config = with_values(ToyConfig(), {"seed": 4, "save_every": 7})
    earlier_settings = json.loads(json.dumps(flat(ToyConfig())))
    assert changes(earlier_settings, config) == "seed (was 0, is 4)"
    assert changes(earlier_settings, config, {"seed"}) == ""


def test_an_earlier_version_s_run_goes_on_though_the_default_of_a_judge_it_does_not_ask_has_changed():
    earlier_settings = json.loads(json.dumps(flat(PpoConfig()))) | {"judge_model": "gemini-2.5-flash"}
    del earlier_settings["judge_temperature"]  # which that version did not have
    assert changes(earlier_settings, PpoConfig()) == ""
    judged_config = with_values(PpoConfig(), {"judge": "gemini", "judge_temperature": 0.5})
    differences = changes(earlier_settings | {"judge": "gemini"}, judged_config)
    assert differences == (
        "judge_model (was gemini-2.5-flash, is gemini-3.5-flash-lite), judge_temperature (was None, is 0.5)"
    )


@pytest.mark.parametrize("link", ["latest", "checkpoint-99", "."])
def test_a_link_to_a_checkpoint_is_that_of_its_run(tmp_path, monkeypatch, link):
    """The folder of the link was taken for the run's: it got the files, and lost those of other programs."""
    assert not run(Toy(), output=str(tmp_path / "runs" / "x"), stop_after=2, save_every=1)
    inside = tmp_path / "runs" / "x" / "checkpoint-2"
    home = tmp_path / "home"
    home.mkdir()
    if link == ".":
        monkeypatch.chdir(inside)
    else:
        monkeypatch.chdir(home)
        (home / link).symlink_to(inside)
    assert not run(Toy(), resume=link, stop_after=3, save_every=1)
    assert [path.name for path in home.iterdir()] == [link] * (link != ".")
    assert (tmp_path / "runs" / "x" / "checkpoint-3").is_dir()


# What a resumed run is compared with


def resumed(folder, base) -> bool:
    config = with_values(ToyConfig(), {"output": str(folder), "model": str(base), "resume": "auto", "stop_after": 2})
    with RunFolder("sft", config, "unused") as run_folder:
        return loop.train(run_folder, Toy())


def test_a_base_that_was_changed_in_place_is_refused(tmp_path):
    """The run went on, with an adapter for other weights."""
    base, output = tmp_path / "base", tmp_path / "out"
    base.mkdir()
    (base / "model.safetensors").write_bytes(bytes(100))
    resumed(output, base)
    resumed(output, base)
    (base / "model.safetensors").write_bytes(bytes(99) + b"x")
    contents_before = contents(output)
    with raises(R3LiteError, "base-changed", "base") as error:
        resumed(output, base)
    assert "--adapter" in error.value.remedy and contents(output) == contents_before


def test_a_checkpoint_of_an_earlier_version_has_no_fingerprint_and_is_resumed(tmp_path, monkeypatch):
    read = checkpoint.read

    def old(folder):
        loaded = read(folder)
        return dataclasses.replace(loaded, state={k: v for k, v in loaded.state.items() if k != "base"})

    (tmp_path / "base").mkdir()
    resumed(tmp_path / "out", tmp_path / "base")
    (tmp_path / "base" / "config.json").write_text("{}")
    monkeypatch.setattr(checkpoint, "read", old)
    assert not resumed(tmp_path / "out", tmp_path / "base")
    assert list(checkpoint.folders_by_step(tmp_path / "out")) == [2, 3, 4]


def test_work_that_is_divided_otherwise_is_told(tmp_path, capsys):
    """A smaller --vram-budget divided it otherwise without a word."""
    run(Toy(), output=str(tmp_path), stop_after=2)
    run(Toy(), output=str(tmp_path), stop_after=2, resume="auto")
    assert "warning" not in capsys.readouterr().err
    toy = Toy()
    toy.step_log.load_state_dict = lambda state: toy.step_log.steps.append("other")
    run(toy, output=str(tmp_path), stop_after=1, resume="auto")
    message = "the memory settings are not those of the checkpoint (step_log.steps [1, 2, 3, 4] -> ['other']): "
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("line", ["hello", '{"loss": 1}', '{"step": "x"}'])
def test_a_foreign_line_in_the_log_is_refused_and_nothing_is_changed(tmp_path, line):
    """The log was cut there, and the records that followed were lost."""
    run(Toy(), output=str(tmp_path), stop_after=4)
    log = tmp_path / run_files.METRICS
    first, remaining_lines = log.read_text().split("\n", 1)
    log.write_text(f"{first}\n{line}\n{remaining_lines}")
    contents_before = contents(tmp_path)
    with raises(R3LiteError, "foreign-line", "2", "a training run"):
        run(Toy(), resume=str(tmp_path / "checkpoint-3"))
    assert contents(tmp_path) == contents_before


def test_a_checkpoint_without_what_the_run_needs_is_refused(tmp_path):
    toy = Toy()
    toy.state.parts = {}
    run(toy, output=str(tmp_path), stop_after=2)
    with raises(R3LiteError, "checkpoint-state-absent", "step_log"):
        run(Toy(), output=str(tmp_path), resume="auto")


# A full disk


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [FULL, SafetensorError("No space left on device")])
@pytest.mark.parametrize(("artifact", "calls"), [("the checkpoint of step 3", 0), ("the adapter", 3)])
def test_what_cannot_be_written_is_told_with_a_remedy(tmp_path, artifact, calls, error):
    toy = Toy()
    calls_left = [calls]

    def save_adapter(folder):
        calls_left[0] -= 1
        if calls_left[0] < 0:
            raise error

    toy.state.save_adapter = save_adapter
    with raises(R3LiteError, "run-unwritable", artifact, "No space left") as excinfo:
        run(toy, output=str(tmp_path))
    assert "--resume auto" in excinfo.value.remedy


def test_an_error_of_the_disk_within_a_step_tells_how_to_go_on(tmp_path, capsys):
    """As of episodes.jsonl, which the steps of RL write."""
    toy = Toy()
    toy.before_update = Mock(side_effect=lambda number: None if number < 5 else (_ for _ in ()).throw(FULL))
    with pytest.raises(OSError, match="No space left"):
        run(toy, output=str(tmp_path))
    assert (
        f"saved step 3; continue with: python -m r3lite.sft --config {tmp_path / 'config.toml'} --resume auto\n"
        in capsys.readouterr().err
    )


class Reads(Toy):
    """A toy that reads a file."""

    def __init__(self, **inputs: str):
        super().__init__()
        self.state.inputs = inputs


def test_a_run_whose_inputs_have_changed_is_refused_and_not_touched(tmp_path):
    run(Reads(prompts="a", corpus="b"), output=str(tmp_path), stop_after=2)
    contents_before = contents(tmp_path)
    with raises(R3LiteError, "inputs-changed", "corpus") as error:
        run(Reads(prompts="a", corpus="c"), output=str(tmp_path), resume="auto")
    assert "Restore it" in error.value.remedy and contents(tmp_path) == contents_before
    # What only one of the two versions of r3lite knows of is taken to be the same.
    assert run(Reads(corpus="b", encoder="d"), output=str(tmp_path), resume="auto")
