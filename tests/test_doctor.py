"""The doctor: a line for each check, whatever becomes of it, and a file that can be sent without a thought."""

import json
import os
import platform
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from r3lite import doctor
from r3lite.checks import registry
from r3lite.checks.finding import Finding, judged, skipped
from r3lite.checks.registry import Check
from r3lite.checks.report import hider, hider_of_process
from r3lite.checks.speeds import measured_speeds
from r3lite.core.errors import R3LiteError
from r3lite.core.files import sole_writer
from r3lite.devices import cards, speed
from r3lite.devices.cards import MEASURED, Speeds
from r3lite.models.linear import linear
from tests.errors import shows

CPU = torch.device("cpu")
FP32 = ["--device", "cpu", "--dtype", "fp32"]


def sound(precision) -> Finding:
    return judged(True, "as it should be", figure=1 / 3, lost=float("nan"))


def broken(precision) -> Finding:
    return judged(False, "2 is not 3", "Count again.")


def raising(precision) -> Finding:
    raise ValueError("no such number\nand more of it")


def out_of_memory(precision) -> Finding:
    print("warning: memory is short")
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")


def absent(precision) -> Finding:
    return skipped("it is not here")


@pytest.fixture
def checks(monkeypatch, tmp_path):
    """Has the doctor make these checks, in an own home, where speeds are known without measuring."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    bandwidth, flops = {"fp32": 1e10, "bf16": 8e9}, {"fp32": 5e10, "bf16": 123e9}
    speeds = Speeds(cards.device_name(CPU), bandwidth, flops, 4e-6, MEASURED)
    monkeypatch.setattr(speed, "measure", lambda device, product: speeds)

    def make(*functions) -> None:
        monkeypatch.setattr(registry, "CHECKS", tuple(Check(f.__name__, "a thing", f) for f in functions))

    make(sound)
    return make


def report(path: Path) -> dict:
    """The file, which must be JSON that every reader takes: without nan."""

    def refuse(constant):
        raise AssertionError(constant)

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def test_each_check_is_a_line_and_one_that_raises_has_failed_while_the_others_go_on(checks, tmp_path, capsys):
    checks(sound, raising, absent, out_of_memory, broken, sound)
    assert doctor.main([*FP32, "--output", str(tmp_path / "d.json")]) == 1
    captured = capsys.readouterr()
    lines = [line.rstrip() for line in captured.out.split("correctness\n")[1].split("\n\n")[0].splitlines()]
    assert lines[0] == "ok sound               as it should be"
    assert lines[1] == "!! raising             ValueError: no such number"
    assert "report it with doctor.json" in lines[2]
    assert lines[3] == "-- absent              it is not here"
    assert lines[4].startswith("!! out_of_memory       OutOfMemoryError: CUDA out of memory.")
    assert [line.strip() for line in lines[5:7]] == [
        "Close other programs that use the GPU.",
        "warning: memory is short",
    ]
    assert lines[7] == "!! broken              2 is not 3" and lines[8].strip() == "Count again."
    assert lines[9].startswith("ok sound") and lines[10].startswith("-- beside the tensors")
    assert "Traceback" not in captured.out + captured.err
    assert shows(captured.err, "checks-failed", "3", "8", "raising, out_of_memory, broken")


def test_the_file_has_all_that_was_printed(checks, tmp_path, capsys):
    checks(sound, raising)
    path = tmp_path / "of" / "mine.json"
    assert doctor.main([*FP32, "--output", str(path)]) == 1
    diagnosis = report(path)
    assert diagnosis.keys() == {"r3lite", "ok", "seconds", "dtype", "machine", "speeds", "checks"}
    assert not diagnosis["ok"] and diagnosis["dtype"] == "fp32" and diagnosis["machine"]["torch"] == torch.__version__
    speeds, passed, failed, beside = diagnosis["checks"]
    assert (speeds["name"], passed["state"], failed["state"], beside["state"]) == ("speeds", "ok", "failed", "skipped")
    assert passed["measured"] == {"figure": 0.333333, "lost": None}
    assert failed["told"] == "ValueError: no such number" and failed["remedy"]
    assert failed["where"][-1].startswith("elsewhere:") and failed["where"][0].startswith("r3lite/checks/report.py:")
    out = capsys.readouterr().out
    assert all(entry["told"].split(";")[0] in out for entry in diagnosis["checks"])


def test_all_is_well_and_speeds_are_reported(checks, tmp_path, capsys):
    assert doctor.main(FP32) == 0
    path = tmp_path / ".cache" / "r3lite" / "doctor.json"
    assert report(path)["ok"] and report(path)["speeds"] == asdict(speed.measure(CPU, linear))
    out = " ".join(capsys.readouterr().out.split())
    assert "memory 10 GB/s; products fp32 50, bf16 123 GFLOPS; kernel launch 4.0 us" in out


def test_speeds_that_cannot_be_measured_are_a_failure(checks, monkeypatch, tmp_path, capsys):
    def refuse(device, product):
        raise RuntimeError("no clock")

    monkeypatch.setattr(speed, "measure", refuse)
    assert doctor.main(FP32) == 1
    assert "!! speeds              RuntimeError: no clock" in capsys.readouterr().out
    assert report(tmp_path / ".cache" / "r3lite" / "doctor.json")["speeds"] is None


def test_fp16_that_is_slower_than_fp32_on_a_card_is_said(checks, monkeypatch):
    speeds = Speeds("card", {"fp32": 1e11, "fp16": 1e11}, {"fp32": 3e12, "fp16": 2e12}, 4e-6, MEASURED)
    monkeypatch.setattr(speed, "measure", lambda device, product: speeds)
    monkeypatch.setattr(speed, "host_copy_speed", lambda device, pinned: 6e9 if pinned else 3e9)
    message = measured_speeds(torch.device("cuda"), []).message
    assert message.endswith(
        "from the host 3.0 GB/s, pinned 6.0; fp16 is slower than fp32: if a run fits in memory, pass --dtype fp32"
    )


def test_a_dry_run_lists_the_checks_and_makes_none(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(registry, "CHECKS", tuple(Check(c.name, c.about, raising) for c in registry.CHECKS))
    monkeypatch.setattr(speed, "measure", raising)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert doctor.main(["--dry-run"]) == 0
    lines = capsys.readouterr().out.split("Checks\n")[1].splitlines()
    assert [line.strip().split("  ")[0] for line in lines] == [
        "speeds", *(check.name for check in registry.CHECKS), registry.BESIDE[0]
    ]  # fmt: skip
    assert not (tmp_path / ".cache").exists()


def test_an_interruption_is_not_a_finding(checks):
    def stopped(precision):
        raise KeyboardInterrupt

    checks(stopped)
    assert doctor.main(FP32) == 130


USER, HOST, PROJECT, HIDDEN = "zoe_planted", "zoes-planted-laptop", "Planted Thesis", "planted-tmp"


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """A home, a working folder, a temporary folder and a machine with names that none may read."""
    home = tmp_path / USER
    for name, folder in {"work": home / PROJECT, "tmp": home / HIDDEN}.items():
        folder.mkdir(parents=True)
        monkeypatch.setattr(tempfile, "tempdir", str(folder)) if name == "tmp" else monkeypatch.chdir(folder)
    for variable in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(variable, str(home))
    for variable in ("USER", "LOGNAME", "USERNAME", "LNAME"):
        monkeypatch.setenv(variable, USER)
    monkeypatch.setattr(platform, "node", lambda: f"{HOST}.planted.example")
    return home


def assert_nothing_planted(text: str) -> None:
    assert [word for word in ("planted", "thesis", "zoe", str(Path.home()).lower()) if word in text.lower()] == []


def test_no_path_and_no_name_of_the_user_is_told(planted, checks, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(planted))
    inside = planted / PROJECT / "weights of mine.safetensors"

    def missing(precision):
        print(f"warning: {inside}: nothing is there")
        raise FileNotFoundError(2, "No such file or directory", str(inside))

    def unreadable(precision):
        raise R3LiteError(
            f"{planted / 'model' / 'config.json'} cannot be read",
            f"Ask {USER} on {HOST} about {inside}.",
            code="broken",
        )

    def windows(precision):
        return judged(False, rf"C:\Users\{USER}\{HIDDEN}\x.bin is locked, and 'D:\{PROJECT}\y z.bin' is not there")

    def relative(precision):
        raise OSError(f"[Errno 2] '../{PROJECT}/rows of mine.jsonl'")

    checks(missing, unreadable, windows, relative)
    assert doctor.main(FP32) == 1
    captured = capsys.readouterr()
    path = planted / ".cache" / "r3lite" / "doctor.json"
    content = path.read_text(encoding="utf-8")
    assert_nothing_planted(content)
    assert_nothing_planted(captured.out.replace(str(path), "") + captured.err)
    messages = [entry["told"] for entry in report(path)["checks"]]
    assert messages[1] == "FileNotFoundError: [Errno 2] No such file or directory: <path>"
    assert messages[2] == "<path> cannot be read"
    assert messages[3] == "<path> is locked, and <path> is not there"


@pytest.mark.parametrize(
    "text",
    [
        "15.8 GB/s; products",
        "it isn't 3 MB/s, it's 4",
        "see https://pytorch.org/get-started/locally/",
        "O(T^2)",
        "2 of 3",
        "a/b",
        "causal: flash",
    ],
)
def test_what_is_not_a_path_stays(text):
    assert hider(["/home/zoe"], ["zoe"])(text) == text


@pytest.mark.parametrize(
    "path",
    [
        "file:///mnt/thesis/x.bin",
        "./thesis/x.bin",
        "../thesis/x.bin",
        "runs/thesis/x.bin",
        "//server/thesis",
        "'a b/c'",
    ],
)
def test_paths_of_any_form_are_hidden(path):
    assert hider([], [])(f"{path} is locked, it's {path}") == "<path> is locked, it's <path>"


def test_a_path_behind_a_colon_is_hidden():
    assert hider([], [])("cannot read:/mnt/thesis/x.bin") == "cannot read:<path>"


def test_a_user_without_a_home_has_paths_to_hide_all_the_same(monkeypatch):
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert hider_of_process()("~ 3 MB in /mnt/x") == "~ 3 MB in <path>"


def test_the_real_checks_on_a_cpu(planted, capsys):
    """All of them, in fp32; what they print and write names nobody."""
    assert doctor.main([*FP32, "--output", "found.json"]) == 0, capsys.readouterr().out
    captured = capsys.readouterr()
    diagnosis = report(planted / PROJECT / "found.json")
    assert_nothing_planted(captured.out + captured.err + json.dumps(diagnosis))
    states = {entry["name"]: entry["state"] for entry in diagnosis["checks"]}
    assert list(states) == ["speeds", *(check.name for check in registry.CHECKS), registry.BESIDE[0]]
    skips = {"logits in 16 bits", "graphs", "training", "beside the tensors"}
    assert {name for name, state in states.items() if state == "skipped"} - {"card"} == skips
    assert diagnosis["speeds"]["name"] == cards.device_name(CPU)
    assert [name for name in os.listdir(planted / HIDDEN) if name.startswith("r3lite")] == []  # no folder is left over


def test_the_cache_is_told_and_cleared_and_what_else_is_there_stays(checks, tmp_path, capsys):
    checks(sound)
    folder = tmp_path / ".cache" / "r3lite"
    for name in ("big-nf4-0a1b/model.safetensors", "small-gguf-22/config.json", "web/1.json", ".x-nf4-1.7.part/a"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(bytes(1_000_000))
    (folder / "mine.txt").write_text("x")
    assert doctor.main(FP32) == 0
    kinds = "4 MB in ~/.cache/r3lite: NF4 weights, GGUF tokenizers, web results, what was not finished"
    assert f"{kinds}; --clear-cache deletes it" in " ".join(capsys.readouterr().out.split())
    assert doctor.main(["--clear-cache"]) == 0
    assert capsys.readouterr().out == f"deleted {kinds}\n"
    assert sorted(path.name for path in folder.iterdir()) == ["doctor.json", "mine.txt"]
    assert doctor.main(["--clear-cache"]) == 0
    assert capsys.readouterr().out == "deleted 0 MB in ~/.cache/r3lite: nothing\n"


def test_a_part_of_the_cache_that_is_being_written_is_not_deleted(checks, tmp_path, capsys):
    place = tmp_path / ".cache" / "r3lite" / "big-nf4-0a1b"
    place.mkdir(parents=True)
    with sole_writer(place, folder=False):
        assert doctor.main(["--clear-cache"]) == 1
    assert "another process" in capsys.readouterr().err and place.exists()


def test_weights_that_are_just_being_cached_are_not_deleted(checks, tmp_path, capsys):
    """They were: their writer holds the lock of what it writes, not that of the part that it writes first."""
    place = tmp_path / ".cache" / "r3lite" / "big-nf4-0a1b"
    part = place.with_name(f".{place.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    with sole_writer(place, folder=False):
        assert doctor.main(["--clear-cache"]) == 1
    assert "another process" in capsys.readouterr().err and part.exists()
    assert doctor.main(["--clear-cache"]) == 0
    assert list(place.parent.iterdir()) == []


def test_a_folder_as_output_is_refused_before_the_checks(checks, tmp_path, capsys):
    """It was refused after them, by the name of a temporary file, and the report was lost."""
    checks(sound)
    assert doctor.main([*FP32, "--output", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert shows(printed.err, "not-a-file", f"--output {tmp_path} is a folder") and printed.out == ""
