"""Procedures: what to do in a kind of case, step by step, in a JSON file; that which fits a question is found for it.

Owns the file's form: a list of objects of `name`, `description`, `trigger` (words and phrases with commas between),
`category`, `priority` and `steps`, each an `action` with or without a `condition`.
"""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from r3lite.core.episode import Document, Question, folded
from r3lite.core.errors import R3LiteError
from r3lite.core.files import read_text, within
from r3lite.core.records import Record, Source
from r3lite.retrieval.encoder import Encoder, HashingEncoder
from r3lite.settings import ProcedureSettings

TRIGGER, PRIORITY = 10.0, 0.5  # what a trigger that is there and a unit of priority add to a score
REMEDY = "See docs/procedures.md; check the file with python -m r3lite.procedures --procedures FILE."


@dataclass(frozen=True)
class Procedure:
    """What to do in a kind of case."""

    name: str
    description: str
    trigger: str
    category: str
    priority: float
    steps: tuple[dict[str, str], ...]  # each an `action`, and the `condition` of it if it is not always done

    @cached_property
    def triggers(self) -> list[str]:
        return [phrase for part in self.trigger.split(",") if (phrase := folded(part))]

    def score(self, text: str) -> float:
        """TRIGGER for each of its triggers that stands in a text as whole words, plus PRIORITY for each unit of
        priority; 0 if there is none, however high its priority."""
        words = folded(text)
        there = sum(_stands_in(phrase, words) for phrase in self.triggers)
        return TRIGGER * there + PRIORITY * self.priority if there else 0.0

    def text(self) -> str:
        """As the model reads it."""
        lines = [f"Procedure: {self.name}. {self.description}"]
        for number, step in enumerate(self.steps, 1):
            condition = f" (condition: {step['condition']})" if "condition" in step else ""
            lines.append(f"{number}. {step['action']}{condition}")
        return "\n".join(lines)

    @staticmethod
    def from_json(record: Record) -> "Procedure":
        steps = record.records("steps")
        if not steps:
            raise record.error(f"{record.path}steps is empty")
        name, description, priority = (
            record.text("name"),
            record.text("description"),
            record.number("priority", 0.0, 0.0),
        )
        trigger, category = (record.text(key, "", blank=True) for key in ("trigger", "category"))
        pairs = [(step.text("action"), step.text("condition", "", blank=True)) for step in steps]
        actions = tuple({"action": action} | ({"condition": when} if when else {}) for action, when in pairs)
        return Procedure(name, description, trigger, category, priority, actions)


def _stands_in(phrase: str, words: str) -> bool:
    """Whether a phrase stands in a text as whole words. Most do not stand in it at all, and need no pattern."""
    return phrase in words and bool(re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", words))


def read_procedures(path: str | Path) -> list[Procedure]:
    """The procedures of a file, which holds a list or a single one, or of all such *.json files of a folder.

    Hidden files are left out: macOS writes one, such as ._a.json, beside each on some disks. Raises R3LiteError if a
    procedure is not valid.
    """
    files = [path]
    if Path(path).is_dir():
        files = [file for file in sorted(Path(path).glob("*.json")) if not file.name.startswith(".")]
    if not files:
        raise R3LiteError(f"the folder {path} has no *.json file", REMEDY)
    found: dict[str, Procedure] = {}
    for file in files:
        value = within(file, REMEDY, read_text(file, REMEDY))
        listed = Record({"procedures": [value] if isinstance(value, dict) else value}, Source(str(file), REMEDY))
        for record in listed.records("procedures"):
            procedure = Procedure.from_json(record)
            if found.setdefault(folded(procedure.name), procedure) is not procedure:
                raise record.error(f"two procedures are named {procedure.name}")
    return list(found.values())


def to_json(procedures: list[Procedure]) -> str:
    return json.dumps(list(map(asdict, procedures)), ensure_ascii=False, indent=2) + "\n"


class Finder:
    """Finds the procedure that fits a question: by triggers, and where none is there by the nearest description."""

    def __init__(self, procedures: list[Procedure], encoder: Encoder | None, floor: float):
        """Without an `encoder`, triggers alone count."""
        self.procedures, self.encoder, self.floor = procedures, encoder, floor
        described = [Document("", p.name, p.description) for p in procedures]
        self.vectors = encoder.encode_passages(described, lambda n: None) if encoder and procedures else None

    def scores(self, text: str) -> list[float]:
        """The score of each procedure's triggers."""
        return [procedure.score(text) for procedure in self.procedures]

    def cosines(self, text: str) -> np.ndarray:
        """The cosine of each procedure's description with a text."""
        query = self.encoder.encode_queries([text])[0]
        products = self.vectors @ query
        if self.encoder.settings.get("similarity") != "dot":
            return products
        return products / (np.linalg.norm(self.vectors, axis=1) * np.linalg.norm(query))

    def find(self, text: str) -> Procedure | None:
        """The procedure of the highest score; of equal ones the first of the file."""
        if not self.procedures:
            return None
        found, least = self.scores(text), TRIGGER
        if self.vectors is not None and max(found) < TRIGGER:
            found, least = self.cosines(text), self.floor
        best = int(np.argmax(found))
        return self.procedures[best] if found[best] >= least else None

    def before(self, question: Question) -> Question:
        """The question with the procedure that fits it."""
        found = self.find(question.text)
        return replace(question, procedure=found.text()) if found else question


def open_finder(settings: ProcedureSettings, encoder: Callable[[], Encoder | None]) -> Finder | None:
    """The finder of the settings; None if they name no file. `encoder` loads that of queries, None if it is hashing."""
    if settings.procedures is None:
        return None
    procedures = read_procedures(settings.procedures)
    made = None
    if settings.procedures_by != "triggers":
        made = encoder() or HashingEncoder.fit(f"{p.name} {p.description}" for p in procedures)
    return Finder(procedures, made, settings.procedures_floor)
