"""Every command that README and the documents show: each is understood, and each runs on small stand-ins for its files.

A command runs as it is written, but with the tiny model and hashing in place of what would be downloaded, and for one
step. What needs the network or a person is named in ELSEWHERE.
"""

import importlib
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from r3lite.core.config import sections
from r3lite.core.files import shipped
from r3lite.core.invocation import resolve
from r3lite.export import ExportConfig
from r3lite.report import ReportConfig
from tests.commands import CONFIGS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "SKILL.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SETTINGS = {name: default for name, (default, _) in CONFIGS.items()} | {
    "report": ReportConfig(),
    "export": ExportConfig(),
}
# Words of commands that are run elsewhere, or nowhere, with the reason.
ELSEWHERE = {
    "...": "a part of a command",
    "r3lite.prepare": "downloads a data set: tests/test_prepare.py",
    "r3lite.quickstart": "trains for minutes: tests/test_quickstart.py and .ci/run",
    "r3lite.doctor": "takes minutes: tests/test_doctor.py",
    "r3lite.serve": "runs until it is stopped: tests/test_tutorial.py",
    "r3lite.rollout_worker": "runs until it is stopped: tests/test_remote_rollouts.py",
    "http://HOST:8100": "needs a worker: tests/test_remote_rollouts.py",
    "--serve": "runs until it is stopped: tests/retrieval",
    "--push": "asks the hub: tests/exporting",
    "gemini": "asks Gemini: tests/test_tune_prompt.py",
    "teacher": "asks Gemini, or scores by a larger model: tests/test_collect_teacher.py, tests/test_teacher.py",
    "qdrant://here:6333/wikipedia": "needs a server: tests/retrieval",
    "self": "needs a model that answers some questions: tests/test_collect_self.py",
    "--help": "tests/test_command.py",
}
# What is changed: less of everything, and nothing that would be downloaded.
TINY = {"--model": "tiny", "--dtype": "fp32", "--device": "cpu", "--encoder": "hashing"}
SMALL = {
    "sft": {"--max-steps": "1", "--validation-rows": "0"},
    "ppo": {"--max-steps": "1", "--batch-size": "2", "--max-new-tokens": "32"},
    "evaluate": {"--limit": "2", "--max-new-tokens": "32"},
    "collect": {"--limit": "6"},
    "ask": {"--max-new-tokens": "32"},
}
QUESTIONS = [
    *("train.jsonl", "dev.jsonl", "test.jsonl", "dev.json", "train.json", "questions.jsonl", "my-questions.jsonl"),
    *("hotpotqa/train.jsonl", "hotpotqa/dev.jsonl", "hotpotqa/test.jsonl", "hotpotqa/rl.jsonl", "FILE"),
    *("data/world/train.jsonl", "data/world/dev.jsonl"),
]
ROWS = [
    *("gold.jsonl", "own.jsonl", "runs/own.jsonl", "rows.jsonl", "steps.jsonl"),
    *("trajectories.jsonl", "tags.jsonl", "rag.jsonl"),
]
RUN_NAMES = ("sft", "ppo", "grpo", "self", "mixed-sft", "rag-sft", "seed-0", "seed-1", "quickstart-20261123-101500/sft")
RUNS = [f"runs/{name}" for name in RUN_NAMES]
PASSAGES = ["passages.jsonl", "a.jsonl", "b.jsonl", "more.jsonl", "FILE.jsonl", "data/world/corpus.jsonl"]
PROCEDURE = {"description": "How to find who signed a lease", "steps": [{"action": "Search for the lease"}]}
FORMAT = """kind = "headings"
step = "Round"
prompt = "Think, then look up or answer. {question}"
documents_prompt = "Found: {documents} Now Round {step}."
"""


def commands(path: Path) -> list[list[str]]:
    """The words of each command in a page's blocks, without `python -m` and comments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    matches = (re.search(r"-m (r3lite\..*)", line) for line in lines)
    return [shlex.split(line[1], comments=True) for line in matches if line]


ALL = [(path.name, words) for path in PAGES for words in commands(path)]
RUNNABLE = [
    (page, words) for page, words in ALL if page != "tutorial.md" and not any(word in ELSEWHERE for word in words)
]


def write_configs(folder: Path) -> None:
    """Writes the TOML files that the pages show with their names in the first line."""
    for path in PAGES:
        for name, block in re.findall(r"^```toml\n# (\S+\.toml): (.*?)^```$", path.read_text("utf-8"), re.M | re.S):
            (folder / name).write_text(f"# {block}", encoding="utf-8")


def default_settings(name: str, arguments: list[str]) -> object:
    """The settings of a command before it is given any."""
    return SETTINGS["plan of RL" if name == "plan" and "--algorithm" in arguments else name]


def test_the_pages_are_read():
    assert len(ALL) > 70 and len(RUNNABLE) > 45
    used = {word for _, words in ALL for word in words}
    assert set(ELSEWHERE) <= used


@pytest.mark.parametrize(("page", "words"), ALL)
def test_a_command_of_a_page_is_understood(page, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    write_configs(tmp_path)
    name, *arguments = [word for word in words if word != "..."]
    name = name.removeprefix("r3lite.")
    if "--help" not in arguments:
        defaults = default_settings(name, arguments)
        assert type(resolve(name, defaults, arguments)) is type(defaults)


@pytest.fixture(scope="session")
def desk(tmp_path_factory, cold):
    """A folder with all the files that the pages' commands name."""
    folder = tmp_path_factory.mktemp("desk")
    world = shipped("data", "world")
    lines = (world / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    corpus = (world / "corpus.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    rows = (cold / "rows.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)

    def put(name: str, text: str) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")

    for i, name in enumerate(QUESTIONS):  # other questions in each, as --exclude may leave none
        chunk = lines[12 * i : 12 * i + 12]
        put(name, "".join(chunk) if name.endswith("l") or name == "FILE" else f"[{','.join(chunk)}]")
    for i, name in enumerate(ROWS):
        put(name, "".join(rows[8 * i : 8 * i + 8]))
    first = 12 * QUESTIONS.index("hotpotqa/train.jsonl")
    put("runs/gold.jsonl", "".join(rows[first : first + 12]))  # demonstrations of that file's questions, for --contexts
    for i, name in enumerate(PASSAGES):
        named = "".join(json.dumps({"id": id, "title": id, "text": id}) + "\n" for id in ("id1", "id2"))
        put(name, named * (name == "a.jsonl") + "".join(corpus[20 * i : 20 * i + 20]))
    for name in RUNS:
        shutil.copytree(cold / "sft", folder / name)
    for name in ("my-index", "index"):
        shutil.copytree(cold / "index", folder / name)
    put("my-folder/lease.md", "# Lease\n\nThe lease of the mill was signed by Ann Dahl in 1901.\n")
    for name in ("mine", "more"):
        put(f"{name}.json", json.dumps([PROCEDURE | {"name": name}]))
    put(
        "talk.jsonl", '{"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]}\n'
    )
    put("mine.toml", FORMAT)
    put("questions.csv", "question,answer\nWho signed the lease of the mill?,Ann Dahl\n")
    write_configs(folder)
    put("turn.txt", "Round 1:\nWhat is known?\nThe retrieval query: Who?\n")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("page", "words"), RUNNABLE)
def test_a_command_of_a_page_runs(page, words, desk, monkeypatch, capfd):
    name, *arguments = words
    name = name.removeprefix("r3lite.")
    settings = sections(default_settings(name, arguments)).values()
    flags = {f"--{field.replace('_', '-')}" for part in settings for field in vars(part)}
    reads = name == "report" or "--compare" in arguments or (name == "procedures" and "--match" not in arguments)
    small = SMALL.get(name, {})
    for flag, value in ({} if reads else TINY | small).items():
        if flag in arguments and flag in small:  # the page's own 12 rounds of 120 episodes take 10 minutes
            arguments[arguments.index(flag) + 1] = value
        elif flag in flags and flag not in arguments and not (flag == "--device" and "--card" in arguments):
            arguments += [flag, value]
    monkeypatch.chdir(desk)
    if "--output" in arguments and not {"--add", "--delete"} & set(arguments):
        output = Path(arguments[arguments.index("--output") + 1])
        shutil.rmtree(output) if output.is_dir() else output.unlink(missing_ok=True)
    status = importlib.import_module(f"r3lite.{name}").main(arguments)
    assert status == 0, capfd.readouterr().err
