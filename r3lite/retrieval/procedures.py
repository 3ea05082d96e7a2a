"""Procedures: instructions for a kind of case, step by step, in a JSON file; and the search for the one that fits a
question.

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
from r3lite.core.files import parse_at_place, read_text
from r3lite.core.records import Record, Source
from r3lite.retrieval.encoder import Encoder, HashingEncoder
from r3lite.settings import ProcedureSettings

TRIGGER = 10.0  # added to a score for a trigger that is in the text
PRIORITY = 0.5  # added for each unit of priority
REMEDY = "See docs/procedures.md; check the file with python -m r3lite.procedures --procedures FILE."


@dataclass(frozen=True)
class Procedure:
    """Instructions for a kind of case."""

    name: str
    description: str
    trigger: str
    category: str
    priority: float
    steps: tuple[dict[str, str], ...]  # each has an `action`, and a `condition` if it is not always done

    @cached_property
    def triggers(self) -> list[str]:
        """The words and phrases of `trigger`, folded, one by one."""
        phrases = [folded(part) for part in self.trigger.split(",")]
        return [phrase for phrase in phrases if phrase]

    def score(self, text: str) -> float:
        """Returns TRIGGER for each of its triggers that a text contains as whole words, plus PRIORITY for each unit of
        priority; 0 if the text contains none, however high the priority."""
        words = folded(text)
        count = sum(_contains(words, phrase) for phrase in self.triggers)
        if count == 0:
            return 0.0
        return TRIGGER * count + PRIORITY * self.priority

    def text(self) -> str:
        """Returns the text that the model reads."""
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
        return Procedure(
            name=record.text("name"),
            description=record.text("description"),
            priority=record.number("priority", default=0.0, low=0.0),
            trigger=record.text("trigger", "", blank=True),
            category=record.text("category", "", blank=True),
            steps=tuple(_step(step) for step in steps),
        )


def _step(record: Record) -> dict[str, str]:
    step = {"action": record.text("action")}
    condition = record.text("condition", "", blank=True)
    if condition:
        step["condition"] = condition
    return step


def _contains(text: str, phrase: str) -> bool:
    """Returns True if a text contains a phrase as whole words."""
    if phrase not in text:  # most phrases are absent, and this test is faster than the pattern
        return False
    return re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text) is not None


def read_procedures(path: str | Path) -> list[Procedure]:
    """Returns the procedures of a file, which has a list or a single one, or of all such *.json files of a folder.

    Hidden files are left out: on some disks macOS writes one beside each file, such as ._a.json. Raises R3LiteError if
    a procedure is not valid, if two have the same name, or if there is no such file.
    """
    files = [path]
    if Path(path).is_dir():
        files = [file for file in sorted(Path(path).glob("*.json")) if not file.name.startswith(".")]
    if not files:
        raise R3LiteError(f"the folder {path} has no *.json file", REMEDY, code="no-procedure-files")
    by_name: dict[str, Procedure] = {}
    for file in files:
        value = parse_at_place(file, REMEDY, read_text(file, REMEDY))
        if isinstance(value, dict):
            value = [value]
        content = Record({"procedures": value}, Source(str(file), REMEDY))
        for record in content.records("procedures"):
            procedure = Procedure.from_json(record)
            name = folded(procedure.name)
            if name in by_name:
                raise record.error(f"two procedures are named {procedure.name}")
            by_name[name] = procedure
    return list(by_name.values())


def to_json(procedures: list[Procedure]) -> str:
    return json.dumps(list(map(asdict, procedures)), ensure_ascii=False, indent=2) + "\n"


class Finder:
    """Finds the procedure that fits a question: by triggers or, if the text has none, by the nearest description."""

    def __init__(self, procedures: list[Procedure], encoder: Encoder | None, floor: float):
        """Takes an `encoder` of descriptions; without one, only triggers count.

        `floor` is the lowest cosine of a description that fits.
        """
        self.procedures = procedures
        self.encoder = encoder
        self.floor = floor
        self.vectors = None
        if encoder and procedures:
            descriptions = [Document("", procedure.name, procedure.description) for procedure in procedures]
            self.vectors = encoder.encode_passages(descriptions, lambda n: None)

    def scores(self, text: str) -> list[float]:
        """Returns the score of each procedure's triggers."""
        return [procedure.score(text) for procedure in self.procedures]

    def cosines(self, text: str) -> np.ndarray:
        """Returns the cosine of each procedure's description with a text."""
        query = self.encoder.encode_queries([text])[0]
        products = self.vectors @ query
        # Encoders for the dot product do not normalize their vectors; with others the products are cosines already.
        if self.encoder.settings.get("similarity") != "dot":
            return products
        lengths = np.linalg.norm(self.vectors, axis=1) * np.linalg.norm(query)
        return products / lengths

    def find(self, text: str) -> Procedure | None:
        """Returns the procedure of the highest score, the first of equal ones; None if even that one does not fit."""
        if not self.procedures:
            return None
        scores = self.scores(text)
        threshold = TRIGGER  # a score below it is 0: no trigger is in the text
        if self.vectors is not None and max(scores) < TRIGGER:
            scores = self.cosines(text)
            threshold = self.floor
        best = int(np.argmax(scores))
        return self.procedures[best] if scores[best] >= threshold else None

    def with_procedure(self, question: Question) -> Question:
        """Returns the question with the procedure that fits it; unchanged if none fits."""
        procedure = self.find(question.text)
        if procedure is None:
            return question
        return replace(question, procedure=procedure.text())


def open_finder(
    settings: ProcedureSettings,
    load_encoder: Callable[[], Encoder | None],
) -> Finder | None:
    """Returns the finder of the settings; None if they name no file.

    `load_encoder` returns the encoder of queries; None for hashing, which is then fitted to the descriptions.
    """
    if settings.procedures is None:
        return None
    procedures = read_procedures(settings.procedures)
    description_encoder = None
    if settings.procedures_by != "triggers":
        descriptions = (f"{procedure.name} {procedure.description}" for procedure in procedures)
        description_encoder = load_encoder() or HashingEncoder.fit(descriptions)
    return Finder(procedures, description_encoder, settings.procedures_floor)
