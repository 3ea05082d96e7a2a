"""The tutorial's blocks: each command is one that is there, and all of them run, one after the other."""

import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from r3lite.core.invocation import resolve
from r3lite.export import ExportConfig
from r3lite.report import ReportConfig
from tests.commands import CONFIGS

PAGE = Path(__file__).parent.parent / "docs" / "tutorial.md"
SETTINGS = {section: defaults for defaults, section in CONFIGS.values()} | {
    "report": ReportConfig(),
    "export": ExportConfig(),
}
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
LINES = [line for kind, block in BLOCKS if kind == "bash" for line in block.splitlines()]


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_every_command_of_the_tutorial_is_understood(line):
    python, module, name, *arguments = shlex.split(line)
    assert (python, module) == ("python", "-m")
    name = name.removeprefix("r3lite.")
    resolve(name, SETTINGS[name], arguments)


def test_the_script_that_writes_the_notes_runs_twice(tmp_path, monkeypatch):
    """The second time, the folder of the notes was a FileExistsError."""
    monkeypatch.chdir(tmp_path)
    (script,) = (block for kind, block in BLOCKS if kind == "python")
    first = None
    for _ in range(2):
        exec(script, {})
        files = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert first in (None, files) and {"B.md", "my-train.jsonl", "public.jsonl"} <= files.keys()
        first = files


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def page_of(arguments: list[str], environment: dict, folder: Path) -> str:
    """What a server says at / once it answers; it is stopped then, as by SIGTERM."""
    port = free_port()
    server = subprocess.Popen([*arguments, "--port", str(port)], cwd=folder, env=environment)
    try:
        for _ in range(120):
            assert server.poll() is None, "the server ended by itself"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as reply:
                    return reply.read().decode()
            except OSError:
                time.sleep(0.5)
        raise AssertionError("the server does not answer")
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.slow
def test_the_whole_tutorial_runs(tmp_path):
    """Seven minutes on one core. What the text tells of a command's output is there."""
    environment = os.environ | {"PYTHONPATH": str(PAGE.parent.parent)}
    outputs = {}
    for kind, block in BLOCKS:
        commands = [["-c", block]] if kind == "python" else [shlex.split(line)[1:] for line in block.splitlines()]
        for command in commands:
            arguments = [sys.executable, *command]
            if "r3lite.serve" in command:
                assert "<html" in page_of(arguments, environment, tmp_path)
                continue
            run = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert run.returncode == 0, f"{command}\n{run.stdout}\n{run.stderr}"
            outputs[" ".join(command[1:3])] = run.stdout
    assert "J.md#" in outputs["r3lite.retrieve --index"] and "\nanswer: " in outputs["r3lite.ask --preset"]
    assert "exact match" in outputs["r3lite.evaluate --compare"]
    first = (tmp_path / "my-train.jsonl").read_text(encoding="utf-8").splitlines()[0]
    assert first in PAGE.read_text(encoding="utf-8")
    for name in ("runs/report.html", "my-model/model.safetensors", "runs/rl/episodes.jsonl"):
        assert (tmp_path / name).exists()
