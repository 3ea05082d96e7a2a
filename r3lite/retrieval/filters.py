"""Which passages of a corpus or an index are searched: those whose metadata, id or title fit conditions."""

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from tqdm import tqdm

from r3lite.core.bars import BRIEF
from r3lite.core.episode import Document, folded
from r3lite.core.errors import R3LiteError, nearest
from r3lite.settings.retrieval import CONDITION

SHOWN = 20  # fields that an error names
ORDERS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


@dataclass(frozen=True)
class Condition:
    """What a field must be: `key`, a sign (=, !=, or one of ORDERS) and a value."""

    key: str
    sign: str
    wanted: str

    def value(self, document: Document) -> str | float | bool | None:
        """That of the field in a passage; None if it has none."""
        return (dict(document.metadata) | {"id": document.id, "title": document.title}).get(self.key)

    def fits(self, value: str | float | bool) -> bool:
        """Numbers are compared as such, and texts in any letter case; `*` in `=` and `!=` stands for any text."""
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        try:
            wanted, found = (float(self.wanted), value) if number else (folded(self.wanted), folded(str(value)))
        except ValueError:
            raise R3LiteError(f"--filter: {self.key} is a number", f"Compare it with one, not {self.wanted}.") from None
        if self.sign in ORDERS:
            return ORDERS[self.sign](found, wanted)
        same = found == wanted if number else _pattern(wanted).fullmatch(found) is not None
        return same == (self.sign == "=")


@cache
def _pattern(wanted: str) -> re.Pattern:
    """What matches a text in which each `*` stands for any text."""
    return re.compile(".*".join(map(re.escape, wanted.split("*"))))


def fitting(conditions: Sequence[str], documents: Sequence[Document]) -> np.ndarray:
    """Of each passage, whether it has the field of every condition and fits it: bool [N].

    Raises R3LiteError if no passage has a field, which is then misspelled, or if none fits.
    """
    parsed = [Condition(*CONDITION.fullmatch(text.strip()).groups()) for text in conditions]
    fit, known = np.zeros(len(documents), bool), {"id", "title"}
    for place, document in enumerate(tqdm(documents, "filtering passages", unit="", **BRIEF)):
        values = [condition.value(document) for condition in parsed]
        known.update(key for key, _ in document.metadata)
        fit[place] = all(v is not None and c.fits(v) for c, v in zip(parsed, values, strict=True))
    for text, condition in zip(conditions, parsed, strict=True):
        if condition.key not in known:
            cause = f"--filter {text}: no passage has the field {condition.key!r}{nearest(condition.key, known)}"
            raise R3LiteError(cause, f"There are {', '.join(sorted(known)[:SHOWN])}.")
    if not fit.any():
        raise R3LiteError(f"no passage fits --filter {', '.join(conditions)}", "Ask for less.")
    return fit
