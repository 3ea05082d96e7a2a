"""Checks of errors by their codes: a sentence may be rewritten, the failure and the values that it names may not."""

import contextlib
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TEXTS = Path(__file__).parent / "error_texts.json"


@contextlib.contextmanager
def raises(kind: type[Exception] | tuple[type[Exception], ...], code: str, *values: object) -> Iterator:
    """The block must raise an error of this kind and code, whose text names the values."""
    with pytest.raises(kind) as info:
        yield info
    assert info.value.code == code, info.value
    text = str(info.value)
    missing = [value for value in values if str(value) not in text]
    assert missing == [], text


def shows(output: str, code: str, *values: object) -> bool:
    """Tells whether what a command wrote has the text of an error with this code, and names the values in it.

    The text is that of the snapshot, error_texts.json; where it has `{}`, anything may stand.
    """
    for text in _texts()[code]:
        pattern = re.escape(text).replace(re.escape("{}"), "(?s:.*?)")
        # Commands indent the remedy; `explained` adds a reason to the cause.
        pattern = pattern.replace(re.escape("\n"), r"[^\n]*\n  ")
        match = re.search(f"{pattern}[^\n]*", output)
        if match and all(str(value) in match[0] for value in values):
            return True
    return False


@functools.cache
def _texts() -> dict[str, list[str]]:
    return json.loads(TEXTS.read_text(encoding="utf-8"))
