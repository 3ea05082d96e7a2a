"""Reads JSON of any origin into checked values.

`parse` reads JSON text and limits its nesting and numbers. A `Record` returns the fields of an object one by one, and
checks type and range of each. Whatever is wrong raises InvalidRecord, which names the place and the field, such as
`data.jsonl, line 3: steps[1].documents[0].title is 7, not text`. This file knows no data set and reads no file.
"""

import contextlib
import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from r3lite.core.errors import R3LiteError

MAX_DEPTH = 100  # nesting of lists and objects; recursive code such as json.dumps fails at about 1,000
WHOLE = 2**63 - 1  # the largest whole number that tensors, FAISS and other programs' JSON take
MAX_KEYS = 8  # the most keys of an object that an error lists
REQUIRED: Any = object()  # the default of a field that must be there


class InvalidRecord(R3LiteError, ValueError):
    """JSON that is not what its reader needs."""


def shown(value: Any) -> str:
    """Returns a value as an error message quotes it: on one line, shortened if it is long."""
    form = reprlib.Repr()
    form.maxstring = 60
    form.maxother = 60
    form.maxlist = 3
    form.maxdict = 3
    form.maxlevel = 2
    return form.repr(value)


def number_text(value: int | float) -> str:
    """Returns a number as text; a whole number has no decimal point.

    A table stores 1987 as 1987.0 if another row of the column has no value.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < WHOLE:
        return str(int(value))
    return str(value)


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict:
    """Returns a JSON object with these keys and values; raises InvalidRecord if a key is repeated."""
    values = dict(pairs)
    if len(values) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        duplicate = next(key for key, count in counts.items() if count > 1)
        raise InvalidRecord(f"duplicate key {shown(duplicate)}", code="duplicate-key")
    return values


def _refuse_constant(name: str) -> NoReturn:
    """Raises InvalidRecord for NaN, Infinity or -Infinity, which Python's decoder would read."""
    raise InvalidRecord(f"{name} is not a JSON number", code="not-a-json-number")


def _finite_float(text: str) -> float:
    """Returns a JSON number with a point or an exponent; raises InvalidRecord if it is too large for a float.

    Python's decoder would read 1e999 as infinity. JSON has no infinity, so a file with this value could not be read.
    """
    number = float(text)
    if math.isinf(number):
        raise InvalidRecord(f"the number {shown(text)} is too large", code="json-number-too-large")
    return number


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object_of_pairs, parse_constant=_refuse_constant, parse_float=_finite_float
)


def parse(text: str | bytes) -> Any:
    """Returns the value of a JSON text; raises InvalidRecord if it is not JSON in UTF-8, or as `parse_at` does."""
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise InvalidRecord(f"not UTF-8: {error}", code="not-utf8") from error
    start = len(text) - len(text.lstrip(" \t\r\n"))
    value, end = parse_at(text, start)
    if text[end:].strip(" \t\r\n"):
        raise InvalidRecord(f"not JSON: extra data at character {end}", code="json-trailing")
    return value


def parse_at(text: str, start: int) -> tuple[Any, int]:
    """Returns the JSON value that begins at the character `start`, and the index after the value's end.

    Raises InvalidRecord if there is none, or if the value repeats a key, is nested more than MAX_DEPTH deep, or holds
    NaN, Infinity, a number that is too large for a float, a whole number of thousands of digits, or half of a surrogate
    pair. No tokenizer and no UTF-8 file takes such a half; it can only come from an escape such as "\\ud83d".
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
        # Counting brackets is quick; the depth is computed only if there are enough of them.
        brackets = text.count("[", start, end) + text.count("{", start, end)
        if brackets > MAX_DEPTH and _depth(value) > MAX_DEPTH:
            raise RecursionError
    except InvalidRecord:
        raise
    except RecursionError:
        raise InvalidRecord(f"nested more than {MAX_DEPTH} deep", code="json-too-deep") from None
    except json.JSONDecodeError as error:
        raise InvalidRecord(f"not JSON: {error}", code="not-json") from error
    except ValueError:  # Python's limit on the digits of a whole number
        raise InvalidRecord("a number has too many digits", code="json-digits") from None
    has_escape = text.find("\\u", start, end) >= 0  # is quick; `re.search` below needs a slow slice of a large text
    if has_escape and re.search(r"\\u[dD]", text[start:end]):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise InvalidRecord(f"contains half of a surrogate pair ({half!a})", code="surrogate") from None
    return value, end


def end_of(text: str, start: int) -> int | None:
    """Returns the index after the JSON value that begins at the character `start`; None if there is none.

    The value may hold what `parse_at` refuses.
    """
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return end


def _depth(value: dict | list) -> int:
    """Returns how deep lists and objects are nested: 1 for a list or an object that holds no others."""
    children = value.values() if isinstance(value, dict) else value
    depths = [_depth(child) for child in children if isinstance(child, (dict, list))]
    return 1 + max(depths, default=0)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a record is from, and what the user can do if the record is wrong."""

    where: str  # such as `data.jsonl, line 3`; empty: errors name no place
    remedy: str = ""


class Record:
    """A JSON object. Its methods return one field each, checked for a type.

    For a field that is absent or null they return the `default`, or raise InvalidRecord if no default is given. Other
    keys of the object are ignored: data sets have more than a reader needs.
    """

    __slots__ = ("path", "source", "values")

    def __init__(self, values: Any, source: Source, path: str = ""):
        """`path` leads to a nested object and begins the names of its fields in errors, such as `steps[1].`"""
        self.values = values
        self.source = source
        self.path = path
        if not isinstance(values, dict):
            subject = f"{path[:-1]} is {shown(values)}, " if path else ""
            raise self.error(f"{subject}not a JSON object")

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def error(self, problem: str) -> InvalidRecord:
        """Returns, and does not raise, an exception with the place of this record, the problem and the remedy."""
        cause = f"{self.source.where}: {problem}" if self.source.where else problem
        return InvalidRecord(cause, self.source.remedy, code="bad-record")

    def wrong(self, key: str, wanted: str) -> InvalidRecord:
        """Returns the exception for a field that is absent, or is not what is wanted, such as `text`."""
        value = self.values.get(key)
        if value is None:
            return self.error(f"{self.path}{key} is missing{self.keys_in_words()}")
        return self.error(f"{self.path}{key} is {shown(value)}, not {wanted}")

    def keys_in_words(self) -> str:
        """Returns which keys the object has, for an error about one that it lacks; "" if all its fields are null."""
        keys = [shown(key) for key in self.values if key in self]
        if not keys:
            return ""
        if len(keys) > MAX_KEYS:
            keys = [*keys[:MAX_KEYS], "..."]
        return f"; its keys are {', '.join(keys)}"

    def first(self, *keys: str) -> str:
        """Returns the first of several alternative keys that has a value here; the first key if none has."""
        return next((key for key in keys if key in self), keys[0])

    def _field(self, key: str, default: Any, kind: type, wanted: str) -> Any:
        """Returns a field, which must be of type `kind`; if it is absent or null, returns the default."""
        value = self.values.get(key)
        if value is None and default is not REQUIRED:
            return default
        if not isinstance(value, kind):
            raise self.wrong(key, wanted)
        return value

    def text(self, key: str, default: Any = REQUIRED, blank: bool = False) -> str:
        """Returns a text that is not blank, unless `blank` allows that."""
        value = self._field(key, default, kind=str, wanted="text")
        if not blank and key in self and not value.strip():
            raise self.error(f"{self.path}{key} is blank")
        return value

    def identifier(self, key: str, default: Any = REQUIRED) -> str:
        """Returns an identifier: text that is not blank, or a whole number as text."""
        value = self.values.get(key)
        if value is None or isinstance(value, str):
            return self.text(key, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(self.whole(key, low=-WHOLE))
        raise self.wrong(key, "text or a whole number")

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        """Returns true or false; 0 and 1 are refused."""
        return self._field(key, default, kind=bool, wanted="true or false")

    def whole(self, key: str, default: Any = REQUIRED, low: int = 0, high: int = WHOLE) -> int:
        """Returns a whole number from `low` to `high`."""
        value = self.values.get(key)
        if type(value) is int and low <= value <= high:  # isinstance(True, int) would hold
            return value
        if value is None and default is not REQUIRED:
            return default
        wanted = "a whole number"
        if low > -WHOLE:
            wanted += f" from {low} to {high:,}" if high < WHOLE else f" of at least {low}"
        raise self.wrong(key, wanted)

    def number(
        self, key: str, default: Any = REQUIRED, low: float = -math.inf, high: float = math.inf, above: bool = False
    ) -> float:
        """Returns a finite number from `low` to `high`; with `above`, greater than `low`."""
        value = self.values.get(key)
        if value is None and default is not REQUIRED:
            return default
        number = math.nan  # for anything that is no number
        if not isinstance(value, (bool, str)):
            with contextlib.suppress(TypeError, OverflowError):
                number = float(value)
        is_too_low = number <= low if above else number < low
        if math.isfinite(number) and not is_too_low and number <= high:
            return number
        bounds = []
        if low > -math.inf:
            bounds.append(f"{'above' if above else 'of at least'} {low:g}")
        if high < math.inf:
            bounds.append(f"of at most {high:g}")
        limits = " and ".join(bounds)
        raise self.wrong(key, f"a finite number {limits}".strip())

    def choice(self, key: str, among: Iterable[str], default: Any = REQUIRED) -> str:
        """Returns a text that is one of those in `among`."""
        wanted = f"one of {', '.join(among)}"
        value = self._field(key, default, kind=str, wanted=wanted)
        if key in self and value not in among:
            raise self.wrong(key, wanted)
        return value

    def parsed(self, key: str) -> Any:
        """Returns a value of any type; if it is text, returns the JSON value that the text holds.

        A column of a table has one type, and may store lists and objects as text. Blank text and null stay as they are.
        """
        value = self.values.get(key)
        if not isinstance(value, str) or not value.strip():
            return value
        try:
            return parse(value)
        except InvalidRecord as error:
            raise self.error(f"{self.path}{key}: {error.cause}") from error

    def items(self, key: str, default: Any = REQUIRED) -> list:
        """Returns a list of anything."""
        return self._field(key, default, kind=list, wanted="a list")

    def texts(self, key: str, default: Any = REQUIRED) -> tuple[str, ...]:
        """Returns a list of texts as a tuple; a single text is refused."""
        texts = self._field(key, default, kind=list, wanted="a list of texts")
        if not all(isinstance(text, str) for text in texts):
            raise self.wrong(key, "a list of texts")
        return tuple(texts)

    def record(self, key: str) -> "Record":
        """Returns the object under a key; an empty one if the key is absent or null."""
        values = self.values.get(key)
        if values is None:
            values = {}
        return Record(values, self.source, path=f"{self.path}{key}.")

    def records(self, key: str, default: Any = REQUIRED, minimum: int = 0) -> list["Record"]:
        """Returns a list of objects, `minimum` of them or more."""
        objects = self.items(key, default)
        if len(objects) < minimum:
            raise self.wrong(key, f"a list of at least {minimum} objects")
        return [Record(values, self.source, path=f"{self.path}{key}[{i}].") for i, values in enumerate(objects)]
