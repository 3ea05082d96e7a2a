"""`python -m r3lite`, which lists the commands and runs them."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from r3lite.__main__ import listing, main
from r3lite.core.command_names import ALIASES, COMMANDS

ROOT = Path(__file__).parent.parent


def started(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_every_command_is_listed_with_a_line():
    lines = listing().splitlines()
    assert [line.split()[0] for line in lines[2:-2]] == [*COMMANDS, *ALIASES]
    assert all(len(line.split()) > 4 and len(line) <= 130 for line in lines[2:-2])


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_without_a_command_it_lists_them(argv, capsys):
    assert main(argv) == 0 and capsys.readouterr().out == listing() + "\n"


def test_the_list_imports_nothing_heavy():
    code = "import sys; from r3lite.__main__ import main; main([]); print({'torch', 'faiss'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


@pytest.mark.parametrize(
    ("name", "nearest"), [("retrive", " (did you mean retrieve?)"), ("xyz", ""), ("--data", ""), ("__main__", "")]
)
def test_an_unknown_command_is_one_line_with_the_nearest_name(name, nearest, capsys):
    assert main([name, "--data", "x"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"r3lite: unknown command {name!r}; choose from sft, ")
    assert captured.err.endswith(f"quickstart{nearest}\n")


@pytest.mark.parametrize("arguments", [["--help"], ["--corpu", "x"], []])
def test_a_command_is_the_same_either_way(arguments):
    package = started("r3lite", "index", *arguments)
    module = started("r3lite.index", *arguments)
    assert (package.returncode, package.stdout, package.stderr) == (module.returncode, module.stdout, module.stderr)
    assert package.returncode == (0 if arguments == ["--help"] else 2)


def test_rl_is_another_name_of_ppo():
    rl = started("r3lite", "rl", "--help")
    ppo = started("r3lite.ppo", "--help")
    assert (rl.returncode, rl.stdout, rl.stderr) == (0, ppo.stdout, "")


def test_the_console_script_is_this_function():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts == {"r3lite": "r3lite.__main__:main"}


def test_a_reader_that_leaves_early_is_no_traceback():
    if os.name != "posix":
        pytest.skip("needs POSIX pipes")
    reading, writing = os.pipe()
    os.close(reading)
    argv = [sys.executable, "-m", "r3lite"]
    done = subprocess.run(argv, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
