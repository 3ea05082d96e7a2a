"""The core path that docs/architecture.md lists: it has an end, and SFT and GRPO run without what plugs into it."""

import json
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from tests.cold_start import arguments, logged

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "r3lite"
MAP = ROOT / "docs" / "architecture.md"
FILES = 25
TOKENS = 30_000
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
# Folders and files of the package that training must do without.
OPTIONAL = {
    "the web retrievers": ("retrieval.web", "retrieval.remote"),
    "qdrant": ("retrieval.qdrant",),
    "serving": ("serving", "serve"),
    "reports": ("reports", "report"),
    "exporting": ("exporting", "export"),
    "tuning": ("tuning", "tune_prompt"),
    "procedures": ("retrieval.procedures", "procedures"),
    "tracking": ("training.tracking",),
    "checks": ("checks", "doctor"),
}
# Runs commands while the modules that are named cannot be imported; prints, last, which of them were asked for.
SCRIPT = """
import importlib, json, sys

class Blocked:
    names, asked = json.loads(sys.argv[1]), []

    def find_spec(self, name, path=None, target=None):
        if any(name == blocked or name.startswith(blocked + ".") for blocked in self.names):
            self.asked.append(name)
            raise ModuleNotFoundError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
for module, arguments in json.loads(sys.argv[2]):
    try:
        status = importlib.import_module(f"r3lite.{module}").main(arguments)
    except ImportError as error:
        status = str(error)
    if status:
        break
print(json.dumps({"status": status, "asked": Blocked.asked}))
"""


def core_path() -> list[str]:
    """The files of the section's numbered list, in reading order."""
    section = MAP.read_text(encoding="utf-8").partition("## The core path\n")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. `([\w/]+\.py)`: \w", section, re.M)


def count_tokens(path: Path) -> int:
    """Tokens of Python without comments, docstrings and layout: unlike lines, packing does not lower their number."""
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type != tokenize.ENCODING]
    code = [token for token in tokens if token.type not in LAYOUT]
    docstrings = [t for t in code if t.type == tokenize.STRING and t.line.lstrip().startswith(('"""', 'r"""'))]
    return len(code) - len(docstrings)


def run_blocked(names: list[str], commands: list[tuple[str, list[str]]]) -> dict:
    blocked = json.dumps([f"r3lite.{name}" for name in names])
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, "-c", SCRIPT, blocked, json.dumps(commands)]
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"told": done.stdout + done.stderr}


def test_the_core_path_is_short_enough_to_be_read():
    listed = core_path()
    section = MAP.read_text(encoding="utf-8").partition("## The core path\n")[2].partition("\n## ")[0]
    assert len(listed) == len(re.findall(r"^\d+\. ", section, re.M)) == len(set(listed)) > 15
    assert len(listed) <= FILES
    tokens = {name: count_tokens(PACKAGE / name) for name in listed}
    assert sum(tokens.values()) <= TOKENS, f"{sum(tokens.values())} tokens: {tokens}"


def test_the_core_path_has_sft_grpo_and_retrieval_and_nothing_optional():
    listed = core_path()
    assert {"assembly/supervised.py", "rl/algorithms/grpo.py", "retrieval/retriever.py"} <= set(listed)
    optional = tuple(name.replace(".", "/") for names in OPTIONAL.values() for name in names)
    assert [name for name in listed if name.removesuffix(".py").startswith(optional)] == []


@pytest.fixture(scope="module")
def trained(cold, tmp_path_factory) -> tuple[Path, dict]:
    """Two steps of SFT and a round of GRPO with retrieval, with all that is optional blocked."""
    folder = tmp_path_factory.mktemp("core")
    sft = ["--preset", "tiny", "--limit", "16", "--max-steps", "2", "--validation-fraction", "0"]
    sft += ["--data", str(cold / "rows.jsonl"), "--output", str(folder / "sft")]
    grpo = arguments(cold, folder / "grpo", "--algorithm", "grpo", "--max-steps", "1")
    names = [name for names in OPTIONAL.values() for name in names]
    return folder, run_blocked(names, [("sft", sft), ("ppo", grpo)])


def test_sft_and_grpo_run_with_all_that_is_optional_blocked(trained):
    folder, result = trained
    assert result["status"] == 0, result["told"]
    for name, steps in (("sft", 2), ("grpo", 1)):
        assert [record["step"] for record in logged(folder / name, "metrics.jsonl")] == list(range(1, steps + 1))
        assert (folder / name / "adapter" / "adapter_model.safetensors").exists()
    episodes = logged(folder / "grpo", "episodes.jsonl")
    assert len(episodes) == 6
    assert any(step.get("documents") for e in episodes for step in e["steps"])  # the retriever was asked, and answered


@pytest.mark.parametrize("feature", OPTIONAL)
def test_training_asks_for_nothing_optional(trained, feature):
    """Not even in a `try`, which would hide it."""
    names = OPTIONAL[feature]
    for name in names:
        path = PACKAGE / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists(), f"{name} is gone: the test looks for nothing"
    imports = trained[1]["asked"]
    assert [name for name in imports if name.removeprefix("r3lite.").startswith(names)] == []


def test_what_is_blocked_cannot_be_imported():
    result = run_blocked(["retrieval.web"], [("retrieval.web", [])])
    assert result["status"] == "r3lite.retrieval.web is blocked" and result["asked"] == ["r3lite.retrieval.web"]
