"""What is told of a machine: of its driver by a program that may be missing, broken, or say little."""

import platform
import shutil
import socket
import subprocess

import pytest
import torch

from r3lite.devices import machine

TOLD = {"driver": "580.95", "power_state": "P8", "watts": "3.1", "watts_limit": "35.0", "celsius": "41"}


@pytest.fixture
def answers(monkeypatch):
    """Makes nvidia-smi answer with a line, or raise; returns what it is asked."""

    def make(line: str = "", status: int = 0, error: Exception | None = None) -> list[list[str]]:
        commands = []

        def run(command, **options):
            commands.append(command)
            if error:
                raise error
            return subprocess.CompletedProcess(command, status, line, "")

        monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr(machine.subprocess, "run", run)
        return commands

    return make


def test_the_driver_is_asked_of_one_card_and_what_it_does_not_tell_is_left_out(answers):
    commands = answers("580.95, P8, 3.1, 35.0, [N/A], [Not Supported], 41, 120\n580.95, P0, 1, 1, 1, 1, 1, 1\n")
    assert machine.ask_driver("1") == TOLD | {"used_mib": "120"}
    assert "--id=1" in commands[0] and "driver_version,pstate," in " ".join(commands[0])


@pytest.mark.parametrize(
    "answer",
    [
        {"line": "No devices were found\n"},
        {"line": "580.95, P8, 3.1, 35.0, 210, 2100, 41, 120\n", "status": 9},
        {"line": ""},
        {"error": subprocess.TimeoutExpired("nvidia-smi", 20)},
        {"error": PermissionError(13, "Permission denied")},
    ],
)
def test_a_driver_that_does_not_answer_is_no_error(answers, answer):
    answers(**answer)
    assert machine.ask_driver() == {}


def test_a_missing_program_is_no_error(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert machine.ask_driver() == {}


def test_this_machine_is_described_and_its_name_is_not(monkeypatch):
    uname = platform.uname()._replace(node="alices-laptop")
    monkeypatch.setattr(platform, "uname", lambda: uname)
    monkeypatch.setattr(socket, "gethostname", lambda: "alices-laptop")
    assert platform.node() == "alices-laptop"
    facts = machine.describe(torch.device("cpu"), {})
    assert facts["card"] is None and facts["threads"] == torch.get_num_threads() and facts["torch"] == torch.__version__
    assert facts["default_dtype"] in ("fp32", "bf16") and (facts["memory_mib"] is None or facts["memory_mib"] > 100)
    assert "alices-laptop" not in str(facts)
    assert list(machine.lines(facts)) == ["system", "processor", "PyTorch", "device"]


def test_a_card_is_told_with_its_memory_and_power():
    sizes = {"total_mib": 3897, "free_mib": 3600, "pins_memory": False}
    card = {"name": "NVIDIA GeForce GTX 1650", "capability": "7.5", **sizes, "told": TOLD}
    here = {"system": "Linux", "processor": "a processor", "cores": 8, "threads": 8, "memory_mib": None, "card": card}
    here |= {"python": "3.12", "torch": "2.13", "cuda": "13.0", "device": "cuda", "default_dtype": "fp16"}
    lines = machine.lines(here)
    assert lines["processor"] == "a processor, 8 cores, 8 threads used"
    assert lines["GPU"] == "NVIDIA GeForce GTX 1650, compute capability 7.5"
    assert lines["GPU memory"] == "3,897 MiB, 3,600 free; host memory cannot be pinned, so offloading is slower"
    assert lines["driver"] == "580.95, P8, 3.1 of 35.0 W, 41 C"


def test_memory_that_cannot_be_pinned_is_found_out(monkeypatch):
    def refuse(*size, pin_memory):
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr(torch, "empty", refuse)
    assert machine._pins_memory() is False
