"""What a command refuses before its work, its dry run refuses, too, in the same words, and writes nothing."""

import importlib
from pathlib import Path

import pytest

from r3lite.core.files import write_json, write_jsonl, write_text

REFUSED = [
    ("sft", "--data talk.jsonl --output notes", "holds a.txt"),
    ("sft", "--data talk.jsonl --output scores", "not the folder of a run that can be continued: pass another"),
    ("ppo", "--data plain.jsonl --output new", "there is nothing to search"),
    ("ppo", "--data plain.jsonl --retriever none --output notes", "holds a.txt"),
    ("ppo", "--data plain.jsonl --index notes --output new", "notes is not an index"),
    ("evaluate", "--data plain.jsonl --output new", "there is nothing to search"),
    ("evaluate", "--data plain.jsonl --retriever none --output scores", "already has an evaluation"),
    ("evaluate", "--data plain.jsonl --retriever none --output notes", "holds a.txt"),
    ("collect", "--data plain.jsonl --output talk.jsonl", "exists and is not empty"),
    ("collect", "--source documents --output new.jsonl", "--index is missing"),
    ("index", "--corpus corpus.jsonl --output notes", "is not an index: it holds a.txt"),
    ("quickstart", "--output notes", "exists and is not an empty folder"),
    ("export", "--model tiny", "--output is missing"),
    ("export", "--model tiny --output notes", "already exists"),
    ("prepare", "--data plain.jsonl --output notes", "is not an empty folder"),
    (
        "tune_prompt",
        "--judge local --data plain.jsonl --eval-data plain.jsonl --output notes",
        "is not an empty folder",
    ),
    ("retrieve", "--data plain.jsonl --output measured", "already has a recall.json"),
    ("retrieve", "--serve --retriever golden", "--serve does not work"),
    ("ask", "who?", "--index is missing"),
    ("ask", "who? --index notes", "notes is not an index"),
    ("serve", "--port 0", "--index is missing"),
]
NEEDS_PRESET = ("sft", "ppo", "evaluate", "collect", "tune_prompt", "ask", "serve")


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with questions without paragraphs, and outputs that hold something."""
    monkeypatch.chdir(tmp_path)
    write_jsonl("plain.jsonl", [{"question": "Who?", "answer": "Ann"}])
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ann"}]
    write_jsonl("talk.jsonl", [{"messages": messages}] * 2)
    write_jsonl("corpus.jsonl", [{"id": "1", "title": "Ann", "text": "Ann is a friend."}])
    write_text("notes/a.txt", "mine")
    write_text("scores/config.toml", "[evaluate]\n")
    write_json("scores/scores.json", {})
    write_json("measured/recall.json", {})
    return tmp_path


def contents(folder: Path) -> dict:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(("name", "flags", "cause"), REFUSED)
def test_a_dry_run_refuses_what_the_run_refuses(desk, capsys, name, flags, cause):
    """`ppo --dry-run` without an index passed, and so did one whose output was another run's."""
    contents_before = contents(desk)
    main = importlib.import_module(f"r3lite.{name}").main
    argv = flags.split()
    if name in NEEDS_PRESET:
        argv += ["--preset", "tiny"]
    status = main([*argv, "--dry-run"])
    error = capsys.readouterr().err.strip().splitlines()
    assert contents(desk) == contents_before
    assert status in (1, 2) and cause in "\n".join(error)
    assert main(argv) == status
    assert capsys.readouterr().err.strip().splitlines()[-len(error) :] == error


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("sft", "--data talk.jsonl --output new/run"),
        ("ppo", "--data plain.jsonl --retriever none --output new"),
        ("ppo", "--data not-yet.jsonl --index not-yet --output new"),
        ("evaluate", "--data plain.jsonl --retriever none --output new"),
        ("ask", "who? --index not-yet"),
    ],
)
def test_a_dry_run_of_what_may_begin_passes_and_leaves_nothing(desk, capsys, name, flags):
    contents_before = contents(desk)
    main = importlib.import_module(f"r3lite.{name}").main
    assert main([*flags.split(), "--preset", "tiny", "--dry-run"]) == 0
    assert "peak " in capsys.readouterr().out
    assert contents(desk) == contents_before
