"""Results on disk: a JSON file and a Markdown file of one machine, in sections that are measured apart."""

import json
import platform
import time
from pathlib import Path

import torch


def machine(device: str) -> str:
    """What results are comparable on; the day is each section's own."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def keep(stem: Path, title: str, label: str, section: str, note: str, records: list[dict]) -> None:
    """Writes a section in the place of an earlier one; the others stay where they are of the same machine."""
    path = stem.with_suffix(".json")
    before = json.loads(path.read_text()) if path.exists() else {}
    sections = before["sections"] if before.get("machine") == label else {}
    sections[section] = {"date": time.strftime("%Y-%m-%d"), "note": note, "records": records}
    stem.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"machine": label, "sections": sections}, indent=1) + "\n")
    parts = [f"# {title}", label]
    for name, found in sections.items():
        parts += [f"## {name}", f"{found['date']}. {found['note']}", table(found["records"])]
    stem.with_suffix(".md").write_text("\n\n".join(parts) + "\n")


def table(records: list[dict]) -> str:
    """A Markdown table of records; those that lack a column have an empty cell."""
    columns = columns_of(records)
    return "\n".join([head(columns), *(row(record, columns) for record in records)])


def columns_of(records: list[dict]) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record))


def head(columns: list[str]) -> str:
    titles = [name.replace("_per_second", "/s").replace("_", " ") for name in columns]
    return "| " + " | ".join(titles) + " |\n" + "|---" * len(columns) + "|"


def row(record: dict, columns: list[str]) -> str:
    cells = [record.get(name, "") for name in columns]
    return "| " + " | ".join(" / ".join(map(str, c)) if isinstance(c, list) else str(c) for c in cells) + " |"
