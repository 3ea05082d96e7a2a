"""Runs are added and never replaced, with what they ran on, and shown with ranges over all of them."""

import json
import subprocess

import pytest
import torch

from bench import memory, options, profile, records, throughput
from bench.records import NOT_RECORDED, Bench
from r3lite.core.errors import R3LiteError
from r3lite.devices.precision import Precision
from tests.errors import raises

BENCH = Bench("speed", "Speed", keys=("contest", "contestant"), figures=("tokens_per_second", "exponent"))
ON = {"commit": "abc", "processor": "chip", "threads": 2, "precision": "fp32", "versions": {"torch": "2.13"}}
FP32 = Precision(torch.float32, torch.device("cpu"))


def a_run(date: str, speed: float, section: str = "decode", **changes) -> dict:
    rows = [{"contest": "a", "contestant": "r3lite", "tokens_per_second": speed}]
    return {"section": section, "date": date, **ON, "note": "5 repeats.", "records": rows} | changes


def recorded_runs(folder) -> list[dict]:
    return json.loads((folder / "speed-cpu.json").read_text())["runs"]


def test_runs_are_added_and_none_is_replaced(tmp_path):
    for run in (a_run("1", 10.0), a_run("2", 30.0), a_run("2", 7.0, "sft"), a_run("3", 20.0)):
        records.keep(tmp_path, "cpu", BENCH, run)
    rows = [(run["section"], run["date"], run["records"][0]["tokens_per_second"]) for run in recorded_runs(tmp_path)]
    assert rows == [("decode", "1", 10.0), ("decode", "2", 30.0), ("sft", "2", 7.0), ("decode", "3", 20.0)]
    text = (tmp_path / "speed-cpu.md").read_text()
    assert "| a | r3lite | fp32 | chip | 2 | 3 | 10.0 to 30.0 |" in text and "Over all 3 runs" in text
    assert "| a | r3lite | fp32 | chip | 2 | 1 | 7.0 |" in text and "Over all 1 runs" in text
    assert [f"| a | r3lite | {speed} |" in text for speed in (10.0, 30.0, 20.0, 7.0)] == [True] * 4
    assert text.index("### decode, 3") < text.index("### decode, 2") < text.index("### decode, 1")


def test_a_run_that_goes_on_is_one_run(tmp_path):
    run = a_run("1", 10.0)
    records.keep(tmp_path, "cpu", BENCH, run)
    run["records"].append({"contest": "b", "contestant": "r3lite", "tokens_per_second": 5.0})
    records.keep(tmp_path, "cpu", BENCH, run)
    assert [len(run["records"]) for run in recorded_runs(tmp_path)] == [2]


def test_a_run_that_goes_on_after_another_was_added_is_one_run(tmp_path):
    """A way of hours is stopped, another is begun beside it, and the first one goes on."""
    for run in (a_run("1", 10.0), a_run("2", 30.0), a_run("1", 20.0)):
        records.keep(tmp_path, "cpu", BENCH, run)
    assert [(run["date"], run["records"][0]["tokens_per_second"]) for run in recorded_runs(tmp_path)] == [
        ("2", 30.0),
        ("1", 20.0),
    ]


def test_ranges_are_of_runs_under_the_same_conditions():
    on = [{}, {"precision": "bf16"}, {"processor": "other"}, {"threads": 1}, {"commit": "def"}]
    runs = [a_run(str(i), float(i), **changes) for i, changes in enumerate(on)]
    ranges = records.ranges(BENCH, runs)
    assert sum(row["runs"] for row in ranges) == len(runs)  # none is left out
    assert [(row["runs"], row["tokens_per_second"]) for row in ranges] == [
        (2, "0.0 to 4.0"), (1, "1.0"), (1, "2.0"), (1, "3.0")
    ]  # fmt: skip


def test_what_a_run_ran_on_is_recorded_and_shown(monkeypatch):
    provenance = records.provenance(Precision(torch.bfloat16, torch.device("cpu")))
    assert provenance["precision"] == "bf16" and provenance["threads"] == torch.get_num_threads()
    assert provenance["versions"]["torch"] == torch.__version__ and set(provenance["versions"]) == set(records.PACKAGES)
    assert provenance["processor"] and provenance["date"].endswith("Z")
    line = records.conditions(a_run("1", 1.0))
    assert line == "Commit abc; precision fp32; chip, threads 2; torch 2.13."
    old = records.conditions(a_run("1", 1.0, commit=NOT_RECORDED, committed_in="def"))
    assert old.startswith("Commit not recorded (committed in def);")


def test_a_package_that_is_not_there_is_said_to_be_so():
    assert records.version("no-such-package-as-this") == "not installed"


def test_the_commit_says_when_the_tree_differs_from_it(tmp_path):
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)
        return done.stdout.decode().strip()

    assert records.commit(tmp_path) == "not in git"
    git("init", "-q")
    (tmp_path / "bench" / "results").mkdir(parents=True)
    code, result = tmp_path / "code.py", tmp_path / "bench" / "results" / "speed-cpu.json"
    for path in (code, result):
        path.write_text("1")
    git("add", "-A")
    git("commit", "-qm", "a")
    result.write_text("2")  # a run writes its results: they are not what is measured
    assert records.commit(tmp_path) == git("rev-parse", "HEAD")
    code.write_text("2")
    assert records.commit(tmp_path) == git("rev-parse", "HEAD") + "+dirty"


def test_the_precision_is_the_devices_own_unless_told(monkeypatch):
    parse = options.parser(None).parse_args
    for has_bf16, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("r3lite.devices.precision._cpu_has_fast_bf16", lambda has=has_bf16: has)
        assert options.precision(parse(["--device", "cpu"])).dtype == dtype
        assert options.precision(parse(["--device", "cpu", "--dtype", "bf16"])).dtype == torch.bfloat16


def test_a_file_of_another_layout_is_refused_and_left(tmp_path):
    path = tmp_path / "speed-cpu.json"
    path.write_text('{"machine": "x", "sections": {}}')
    with raises(R3LiteError, "bad-record", "runs"):
        records.keep(tmp_path, "cpu", BENCH, a_run("1", 1.0))
    assert path.read_text() == '{"machine": "x", "sections": {}}'


@pytest.mark.parametrize("bench", [throughput.SPEED, memory.MEMORY, profile.TIME], ids=lambda bench: bench.name)
def test_committed_tables_are_those_of_the_committed_runs(bench):
    paths = sorted(options.RESULTS.glob(f"{bench.name}-*.json"))
    assert paths
    for path in paths:
        runs = records.read(path)
        assert path.with_suffix(".md").read_text(encoding="utf-8") == records.markdown(bench, runs)
        wanted = {"section", "note", "records", *records.provenance(FP32)}
        assert all(wanted <= set(run) <= wanted | {"committed_in"} for run in runs)
