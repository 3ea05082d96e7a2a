"""The log: what is in a line, and what is left of it after a kill and a resume."""

import errno
import math
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from r3lite.core import run_files
from r3lite.core.errors import R3LiteError
from r3lite.training import metrics
from tests.errors import raises

STATUS = Path("/proc/self/status")


def logged(output, records, total=10):
    log = metrics.MetricsLog(output, 0, total, "sft")
    for record in records:
        log.write(record)
    log.sync()
    log.close()


def test_a_record_is_one_line_and_one_progress_line(tmp_path, capsys):
    record = {"step": 3, "loss": 1.25, "grad_norm": 0.5, "learning_rate": 2e-4, "tokens_per_second": 99.6, "extra": 7}
    logged(tmp_path, [record], total=3)
    assert metrics.read(tmp_path / run_files.METRICS) == [record]
    assert capsys.readouterr().err.strip() == "sft 3/3  loss 1.2500  grad_norm 0.5  lr 0.0002  100 tok/s"


@pytest.mark.parametrize(("device", "label"), [("cpu", "process"), ("cuda", "tensors"), ("mps", "process")])
def test_the_progress_line_says_whose_memory_it_shows(tmp_path, capsys, device, label):
    """Beside a plan of 228 MiB it showed 724, which are the process's, as if the plan were wrong."""
    memory_kind = metrics.memory_kind(torch.device(device))
    log = metrics.MetricsLog(tmp_path, 0, 1, "sft", memory_kind=memory_kind)
    log.write({"step": 1, "loss": 1.0, "peak_memory_mib": 724.4})
    log.close()
    assert capsys.readouterr().err == f"sft 1/1  loss 1.0000  {label} 724 MiB\n"


def test_away_from_a_terminal_a_long_run_prints_about_twenty_lines(tmp_path, capsys):
    logged(tmp_path, [{"step": n, "loss": 0.0} for n in range(1, 401)], total=400)
    lines = capsys.readouterr().err.splitlines()
    assert len(metrics.read(tmp_path / run_files.METRICS)) == 400
    assert len(lines) == 21
    assert lines[0].startswith("sft 1/400")
    assert lines[-1].startswith("sft 400/400")


def times_left(total: int, seconds: list[float], done: int = 0) -> list[float]:
    """What a clock tells after each step of a run that goes on from step `done`, and whose steps take so long."""
    wall_time = [100.0]
    clock = metrics.Clock(lambda: wall_time[0])
    estimates = []
    for number, taken in enumerate(seconds, done + 1):
        wall_time[0] += taken
        estimates.append(clock.end_step(total - number))
    return estimates


def test_the_time_left_is_the_mean_of_the_steps_so_far_without_the_first():
    assert times_left(10, [30, 2, 4, 3]) == [270, 8 * 2, 7 * 3, 6 * 3]
    assert times_left(10, [30, 2, 4], done=5) == [4 * 30, 3 * 2, 2 * 3]  # resumed: what came before took other times
    assert times_left(2, [30, 2])[-1] == 0


@pytest.mark.parametrize("done", [0, 100])
def test_after_a_tenth_of_a_run_the_time_left_is_right_to_15_percent(done):
    """A slow first step, uneven rows, and a checkpoint with an evaluation of 20 s every 10 steps."""
    total = 300
    seconds = [2.0 + n % 3 + (20 if n % 10 == 0 else 0) for n in range(total - done)]
    seconds[0] = 60.0
    estimates = times_left(total, seconds, done)
    for taken in range(total // 10, total - done - 30):
        assert estimates[taken - 1] == pytest.approx(sum(seconds[taken:]), rel=0.15), taken


def test_the_progress_line_tells_the_time_left(tmp_path, capsys, monkeypatch):
    ticks = iter([0.0, 50.0, 60.0])
    monkeypatch.setattr(metrics, "Clock", lambda clock=metrics.Clock: clock(lambda: next(ticks)))
    logged(tmp_path, [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.0}], total=9)
    assert capsys.readouterr().err.splitlines() == [
        "sft 1/9  loss 1.0000  ETA 06:40",
        "sft 2/9  loss 1.0000  ETA 01:10",
    ]


def test_what_came_before_the_first_step_is_not_in_the_time_left(tmp_path, capsys, monkeypatch):
    """A validation of 100 s was counted as a part of every step."""
    ticks = iter([0.0, 100.0, 110.0])
    monkeypatch.setattr(metrics, "Clock", lambda clock=metrics.Clock: clock(lambda: next(ticks)))
    log = metrics.MetricsLog(tmp_path, 0, 7, "ppo")
    log.write({"step": 0, "eval/f1": 0.5})
    log.write({"step": 1})
    assert "ETA 01:00" in capsys.readouterr().err
    log.close()


def test_what_is_not_a_number_is_null_because_json_has_no_nan(tmp_path):
    logged(tmp_path, [{"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "eval_loss": None}])
    assert metrics.read(tmp_path / run_files.METRICS) == [
        {"step": 1, "loss": None, "grad_norm": None, "eval_loss": None}
    ]
    assert "NaN" not in (tmp_path / run_files.METRICS).read_text()


def test_a_resumed_run_cuts_what_it_will_write_again(tmp_path, capsys):
    """A run killed at step 5 whose checkpoint is of step 3 had steps 4 and 5 twice in its log."""
    path = tmp_path / run_files.METRICS
    logged(tmp_path, [{"step": n, "loss": n / 3} for n in range(1, 6)])
    assert len(metrics.read_up_to(path, 9)) == 5
    capsys.readouterr()
    with open(path, "ab") as file:
        file.write('{"step": 6, "text": "é'.encode()[:-1])  # torn by a kill, inside a character
    assert [r["step"] for r in metrics.read(path)] == [1, 2, 3, 4, 5]
    assert metrics.read_up_to(path, 3) == [{"step": n, "loss": n / 3} for n in (1, 2, 3)]
    assert "metrics.jsonl: ignoring the incomplete last line" in capsys.readouterr().err
    assert metrics.read(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("line", ["hello", "[1]", "{}", '{"loss": 1}', '{"step": "2"}', '{"step": true}', "[" * 10_000])
@pytest.mark.parametrize("end", ["", "\n"])
def test_a_line_that_is_no_record_is_refused_and_never_dropped(tmp_path, line, end):
    """Reading ended at such a line, and what followed it was lost when the log was written anew."""
    logged(tmp_path, [{"step": 1}])
    with open(tmp_path / run_files.METRICS, "a") as file:
        file.write(f"{line}{end}")
    for read in (metrics.read, lambda path: metrics.read_up_to(path, 1)):
        with raises(R3LiteError, "foreign-line", "2", "a training run"):
            read(tmp_path / run_files.METRICS)


def test_a_line_of_unusual_characters_is_one_line(tmp_path):
    """Text of the web holds U+2028, at which str.splitlines would have torn the log, and the cut lost the rest."""
    records = [{"step": n, "text": "a\u2028b\x85c\nd"} for n in (1, 2, 3)]
    logged(tmp_path, records)
    assert metrics.read_up_to(tmp_path / run_files.METRICS, 2) == records[:2]


@pytest.mark.parametrize("broken", ["write", "flush", "close"])
def test_a_full_disk_is_an_error_with_a_remedy(tmp_path, broken):
    log = metrics.MetricsLog(tmp_path, 0, 10, "sft")
    with log.file:
        log.file = Mock(wraps=log.file)
        getattr(log.file, broken).side_effect = OSError(errno.ENOSPC, "No space left on device")
        with raises(R3LiteError, "metrics-unwritable", "metrics.jsonl", "No space left") as error:
            log.write({"step": 1})
            log.close()
    assert "--resume auto" in error.value.remedy


@pytest.mark.skipif(not STATUS.exists(), reason="reads the memory that this process has now from Linux")
def test_peak_memory_rises_and_never_falls():
    device = torch.device("cpu")
    peak_before = metrics.peak_memory_mib(device)
    resident = int(re.search(r"VmRSS:\s*(\d+) kB", STATUS.read_text(encoding="utf-8"))[1]) / 1024
    assert resident > 10
    size = math.ceil(peak_before - resident) + 64  # MiB
    tensor = torch.ones(size, 1 << 18)
    peak_with_tensor = metrics.peak_memory_mib(device)
    del tensor
    # The kernel counts pages per thread and adds up late.
    assert peak_before + 60 < peak_with_tensor < peak_before + 70
    assert metrics.peak_memory_mib(device) > peak_with_tensor - 1


def test_clocks_and_gauges_are_told_apart_from_what_must_repeat():
    record = {
        "step": 1,
        "loss": 2.0,
        "step_time": 0.1,
        "time/rollout": 0.2,
        "tokens_per_second": 3.0,
        "peak_memory_mib": 1.0,
        "queries/cached_ratio": 0.5,
    }
    assert metrics.repeatable(record) == {"step": 1, "loss": 2.0}


def test_perplexity_by_hand():
    record = metrics.with_perplexity({"step": 1, "loss": math.log(8), "grad_norm": 1.0})
    assert record == {"step": 1, "loss": math.log(8), "grad_norm": 1.0, "perplexity": pytest.approx(8.0)}
    record = metrics.with_perplexity({"loss": 0.0, "eval_loss": 1000.0})
    assert record == {"loss": 0.0, "eval_loss": 1000.0, "perplexity": 1.0, "eval_perplexity": math.inf}
    assert math.isnan(metrics.with_perplexity({"loss": math.nan})["perplexity"])
