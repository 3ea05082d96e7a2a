"""The rules of the package, read off the syntax trees: which folder may import what, and how long a function may be."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from r3lite.core.command_names import COMMANDS
from r3lite.settings.rl import Algorithm

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "r3lite"
SOURCES = sorted(PACKAGE.rglob("*.py"))
# The layers, from below. A folder imports folders of lower layers only, never others of its own layer; the folders of
# the base layer may import each other.
BASE = {"__init__", "core"}
LAYERS = (
    BASE,
    {"settings"},
    {"models", "devices", "llm", "protocols"},
    {
        "datasets",
        "retrieval",
        "rollout",
        "rewards",
        "evaluation",
        "rl",
        "training",
        "memory",
        "reports",
        "exporting",
        "serving",
        "tuning",
    },
    {"assembly"},
    {"checks"},
)
FOLDERS = set.union(*LAYERS)
ENTRY = {"__main__"}  # `python -m r3lite`: it starts commands by name
PLAIN = BASE | {"settings"}  # folders that import the standard library only, and what locks a file
TEXT_ONLY = {"protocols", "llm"}  # folders that never import torch
# What `python -m r3lite.X` runs: every module that stands in the package itself.
COMMAND_FILES = {path.stem for path in PACKAGE.glob("*.py")} - BASE - ENTRY
HEAVY = ("torch", "faiss", "google.genai", "transformers", "tokenizers", "safetensors", "huggingface_hub")


def folder_of(path: Path) -> str:
    """The folder of the package that a source file stands in, or the module itself if it stands in none."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path) -> list[tuple[int, str]]:
    """Line and dotted name of every import of a file, those inside functions too."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            lines += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports by a relative path"
            names = [node.module]
            if node.module == "r3lite":  # `from r3lite import sft` names a folder as `import r3lite.sft` does
                names = [f"r3lite.{alias.name}" for alias in node.names]
            lines += [(node.lineno, name) for name in names]
    return lines


def importable(folder: str) -> set[str]:
    """The folders that a folder, or a command, may import."""
    below: set[str] = set()
    for layer in LAYERS:
        if folder in layer:
            own_layer = BASE if layer is BASE else {folder}
            return below | own_layer
        below |= layer
    if folder in {"quickstart", *ENTRY}:
        return below | COMMAND_FILES
    return below | {folder}


def violations(path: Path) -> list[str]:
    """Imports of a file that the layers do not allow."""
    folder = folder_of(path)
    messages = []
    for line, name in imports(path):
        where = f"{path.name}:{line}: {folder} imports {name}"
        top, _, inner = name.partition(".")
        if top == "r3lite":
            target = inner.partition(".")[0] or "__init__"
            exists = (PACKAGE / target).exists() or (PACKAGE / f"{target}.py").exists()
            if exists and target not in importable(folder):
                messages.append(where)
        elif folder in PLAIN and top not in {*sys.stdlib_module_names, "filelock"}:
            messages.append(f"{where}, which is not of the standard library")
        elif folder in TEXT_ONLY and top == "torch":
            messages.append(where)
    return messages


def test_every_folder_has_a_layer():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} <= FOLDERS
    assert {folder_of(path) for path in SOURCES} <= FOLDERS | ENTRY | COMMAND_FILES
    assert set(COMMANDS) == COMMAND_FILES, "a module that no command runs, or a command without one"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    assert violations(path) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("rl/losses.py", "import r3lite.rewards.reward"),
        ("rl/losses.py", "def f():\n    from r3lite.rewards.reward import score"),
        ("models/causal_lm.py", "from r3lite.training import loop"),
        ("protocols/r3.py", "import torch"),
        ("models/causal_lm.py", "from r3lite.devices import precision"),
        ("core/answer_match.py", "from r3lite.rewards import reward"),
        ("assembly/policy.py", "from r3lite.sft import main"),
        ("core/episode.py", "from r3lite.models import causal_lm"),
        ("core/episode.py", "import numpy"),
        ("sft.py", "from r3lite import ppo"),
        ("rollout/engine.py", "from r3lite.ppo import main"),
        ("memory/plan.py", "from r3lite.checks.finding import tiny"),
        ("checks/runs.py", "from r3lite.doctor import main"),
    ],
)
def test_the_rules_catch_what_they_are_for(tmp_path, monkeypatch, file, line):
    for folder in FOLDERS - {"__init__", "settings"}:
        (tmp_path / folder).mkdir()
    for name in ("sft.py", "ppo.py", "doctor.py", file):
        (tmp_path / name).write_text(line if name == file else "", encoding="utf-8")
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    assert len(violations(tmp_path / file)) == 1


def test_no_module_imports_itself_by_way_of_others():
    """Those inside functions and for types count, too."""
    files = {
        p: p.relative_to(ROOT).with_suffix("").parts for r in ("r3lite", "bench") for p in (ROOT / r).rglob("*.py")
    }
    names = {".".join(parts).removesuffix(".__init__"): path for path, parts in files.items()}
    imported = {name: {n for n in modules(path) if n in names} - {name} for name, path in names.items()}
    assert imported["r3lite.assembly.supervised"] >= {"r3lite.models.hooks", "r3lite.training.loop"}
    graphlib.TopologicalSorter(imported).prepare()  # raises CycleError, which names them


def modules(path: Path) -> set[str]:
    """What a file imports: modules, and names of modules, which may be modules themselves."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def test_rollouts_import_no_protocol_by_name():
    """Only what is about every protocol: each other module of protocols/ is one of them, or leads to them."""
    names = [name for path in (PACKAGE / "rollout").glob("*.py") for _, name in imports(path)]
    protocols = {name.removeprefix("r3lite.protocols.") for name in names if name.startswith("r3lite.protocols")}
    assert protocols and protocols <= {"base", "layout", "tokenizer", "transcript"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_algorithms_are_known_by_name_to_their_own_folder_and_the_settings_only(path):
    """A new algorithm is a file in rl/algorithms: a comparison with a name elsewhere would have to be found again."""
    parts = path.relative_to(PACKAGE).parts
    if "algorithms" in parts or parts[0] == "settings":
        return
    names = set(get_args(Algorithm))
    assert "grpo" in names
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Compare):
            # Membership of another kind, such as `"ppo" in tables`, may be about the command of that name.
            looked_up = isinstance(node.ops[0], (ast.In, ast.NotIn)) and isinstance(node.comparators[0], ast.Name)
            compared = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and not looked_up}
            assert not compared & names, f"{path.name}:{node.lineno} compares with {compared & names}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_are_documented_and_functions_fit_on_a_screen(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "a module opens with what it owns"
    assert path.stem != "utils"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < 80, f"{node.name} does not fit on a screen"
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"bare except in line {node.lineno}"


def run_without(argv: list[str]) -> subprocess.CompletedProcess:
    """Runs a command as `python -m` does and prints, last, which heavy packages it imported."""
    code = (
        "import runpy, sys\n"
        f"sys.argv[1:] = {argv[1:]!r}\n"
        "try:\n"
        f"    runpy.run_module({argv[0]!r}, run_name='__main__')\n"
        "except SystemExit as end:\n"
        f"    print(end.code, [m for m in {HEAVY!r} if m in sys.modules])\n"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", sorted(COMMAND_FILES))
def test_help_and_usage_errors_answer_before_anything_heavy_is_imported(name):
    done = run_without([f"r3lite.{name}", "--help"])
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr
    assert f"usage: python -m r3lite.{name}" in done.stdout and "--preset" in done.stdout
    done = run_without([f"r3lite.{name}", "--presett", "x"])
    assert done.stdout.splitlines()[-1] == "2 []", done.stderr
    assert done.stderr == f"r3lite.{name}: unknown argument --presett (did you mean --preset?)\n"
