"""Checks of errors by their codes: a sentence may be rewritten, the failure and the values that it names may not."""

import contextlib
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def raises(kind: type[Exception] | tuple[type[Exception], ...], code: str, *values: object) -> Iterator:
    """The block must raise an error of this kind and code, whose text names the values."""
    with pytest.raises(kind) as info:
        yield info
    assert info.value.code == code, info.value
    text = str(info.value)
    missing = [value for value in values if str(value) not in text]
    assert missing == [], text
