"""Run folders as the commands write them, made by hand."""

import json

import pytest


def jsonl(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def run_folder(tmp_path):
    """Writes a run's folder of files by name; lists become JSON lines, and dictionaries JSON."""

    def write(name: str, command: str = "ppo", **files):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.toml").write_text(f'[{command}]\nseed = 0\nmodel = "tiny"\n', encoding="utf-8")
        for stem, content in files.items():
            suffix = "jsonl" if isinstance(content, list) else "json"
            text = jsonl(content) if isinstance(content, list) else json.dumps(content)
            (folder / f"{stem}.{suffix}").write_text(text, encoding="utf-8")
        return folder

    return write


def episode(id: str = "q", step: int = 1, **overrides) -> dict:
    document = {"id": "d1", "title": "Rome", "text": "Rome is in Italy."}
    steps = [{"analysis": "Where?", "query": "Rome", "documents": [document]}, {"analysis": "So.", "answer": "Italy"}]
    about = {"step": step, "id": id, "question": f"Where is {id}?", "answers": ["Italy"], "prediction": "Italy"}
    return about | {"steps": steps, "finish": "answered", "rewards": {"em": 1.0, "recall": None}} | overrides


def entry(value: float) -> dict:
    return {"value": value, "low": value - 0.1, "high": value + 0.1}
