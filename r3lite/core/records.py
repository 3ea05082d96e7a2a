"""JSON of any origin made into typed values: the one place that decides what a field may be.

`parse` reads JSON text within bounds, and a `Record` gives the fields of an object one by one, each by its type and
range. Whatever is wrong raises InvalidRecord, which names the place and the field, such as
`data.jsonl, line 3: steps[1].documents[0].title is 7, not text`. Knows no data set and no file.
"""

import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from r3lite.core.errors import R3LiteError

MAX_DEPTH = 100  # of nested lists and objects: recursive code such as json.dumps fails at about 1,000
WHOLE = 2**63 - 1  # the largest whole number that tensors, FAISS and other programs' JSON take
REQUIRED: Any = object()  # the default of a field that must be there


class InvalidRecord(R3LiteError, ValueError):
    """JSON that is not what its reader needs."""


def shown(value: Any) -> str:
    """A value as an error message quotes it: on one line, and not long."""
    form = reprlib.Repr()
    form.maxstring = form.maxother = 60
    form.maxlist = form.maxdict = 3
    form.maxlevel = 2
    return form.repr(value)


def number_text(value: int | float) -> str:
    """A number as text, a whole one without a point: a table stores 1987 as 1987.0 if another row has no value."""
    if isinstance(value, float) and value.is_integer() and abs(value) < WHOLE:
        return str(int(value))
    return str(value)


def _object(pairs: list[tuple[str, Any]]) -> dict:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise InvalidRecord(f"duplicate key {shown(twice)}")
    return made


def _constant(name: str) -> NoReturn:
    raise InvalidRecord(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)


def parse(text: str | bytes) -> Any:
    """The value of a JSON text; raises InvalidRecord if it is not JSON in UTF-8, or beyond what `parse_at` takes."""
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise InvalidRecord(f"not UTF-8: {error}") from error
    start = len(text) - len(text.lstrip(" \t\r\n"))
    value, end = parse_at(text, start)
    if text[end:].strip(" \t\r\n"):
        raise InvalidRecord(f"not JSON: extra data at character {end}")
    return value


def parse_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at a character, and where it ends.

    Raises InvalidRecord if there is none, or if it repeats a key, is nested more than MAX_DEPTH deep, or holds NaN,
    Infinity, a whole number of thousands of digits or half of a surrogate pair (which no tokenizer and no UTF-8 file
    takes; only an escape such as "\\ud83d" can bring one in).
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
        brackets = text.count("[", start, end) + text.count("{", start, end)
        if brackets > MAX_DEPTH and _depth(value) > MAX_DEPTH:
            raise RecursionError
    except InvalidRecord:
        raise
    except RecursionError:
        raise InvalidRecord(f"nested more than {MAX_DEPTH} deep") from None
    except json.JSONDecodeError as error:
        raise InvalidRecord(f"not JSON: {error}") from error
    except ValueError:  # Python's limit on the digits of a whole number
        raise InvalidRecord("a number has too many digits") from None
    if text.find("\\u", start, end) >= 0 and re.search(r"\\u[dD]", text[start:end]):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise InvalidRecord(f"contains half of a surrogate pair ({error.object[error.start]!a})") from None
    return value, end


def end_of(text: str, start: int) -> int | None:
    """Where the JSON value ends that begins at a character, whatever it holds; None if it is not JSON."""
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def _depth(value: Any) -> int:
    """How deep lists and objects are nested in each other."""
    children = value.values() if isinstance(value, dict) else value
    return 1 + max((_depth(child) for child in children if isinstance(child, (dict, list))), default=0)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a record is from, such as `data.jsonl, line 3`, and what its user can do if it is wrong."""

    where: str
    remedy: str = ""


class Record:
    """A JSON object whose fields are taken by type.

    A field that is absent or null is the `default`, or an error if none is given. Keys that nobody takes are ignored:
    data sets have more than a reader needs.
    """

    __slots__ = ("path", "source", "values")

    def __init__(self, values: Any, source: Source, path: str = ""):
        self.values, self.source, self.path = values, source, path
        if not isinstance(values, dict):
            raise self.error(f"{path[:-1]} is {shown(values)}, not a JSON object" if path else "not a JSON object")

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def error(self, problem: str) -> InvalidRecord:
        """An exception with the place of this record, the problem and the remedy."""
        return InvalidRecord(f"{self.source.where}: {problem}" if self.source.where else problem, self.source.remedy)

    def wrong(self, key: str, wanted: str) -> InvalidRecord:
        """The exception for a field that is not what is wanted, such as `text`."""
        value = self.values.get(key)
        if value is None:
            return self.error(f"{self.path}{key} is missing")
        return self.error(f"{self.path}{key} is {shown(value)}, not {wanted}")

    def first(self, *keys: str) -> str:
        """The first of several spellings of a key that is there; if none is, the first spelling."""
        return next((key for key in keys if self.values.get(key) is not None), keys[0])

    def _field(self, key: str, default: Any, kind: type, wanted: str) -> Any:
        """A field of a type, or if it is absent or null the default."""
        value = self.values.get(key)
        if value is None and default is not REQUIRED:
            return default
        if not isinstance(value, kind):
            raise self.wrong(key, wanted)
        return value

    def text(self, key: str, default: Any = REQUIRED, blank: bool = False) -> str:
        """A text that is not blank, unless `blank` allows that."""
        value = self._field(key, default, str, "text")
        if not blank and key in self and not value.strip():
            raise self.error(f"{self.path}{key} is blank")
        return value

    def identifier(self, key: str, default: Any = REQUIRED) -> str:
        """A name: text that is not blank, or a whole number."""
        value = self.values.get(key)
        if value is None or isinstance(value, str):
            return self.text(key, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(self.whole(key, low=-WHOLE))
        raise self.wrong(key, "text or a whole number")

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        return self._field(key, default, bool, "true or false")

    def whole(self, key: str, default: Any = REQUIRED, low: int = 0, high: int = WHOLE) -> int:
        value = self.values.get(key)
        if type(value) is int and low <= value <= high:  # True is an int to isinstance
            return value
        if value is None and default is not REQUIRED:
            return default
        limits = f"from {low} to {high:,}" if high < WHOLE else f"of at least {low}"
        raise self.wrong(key, f"a whole number {limits}" if low > -WHOLE else "a whole number")

    def number(
        self, key: str, default: Any = REQUIRED, low: float = -math.inf, high: float = math.inf, above: bool = False
    ) -> float:
        """A finite number from `low` to `high`; with `above`, greater than `low`."""
        value = self.values.get(key)
        if value is None and default is not REQUIRED:
            return default
        try:
            found = math.nan if isinstance(value, (bool, str)) else float(value)
        except (TypeError, OverflowError):
            found = math.nan
        if not math.isfinite(found) or not low <= found <= high or (above and found == low):
            bounds = [f"{'above' if above else 'of at least'} {low:g}"] * (low > -math.inf)
            bounds += [f"of at most {high:g}"] * (high < math.inf)
            raise self.wrong(key, " ".join(["a finite number", " and ".join(bounds)]).strip())
        return found

    def choice(self, key: str, among: Iterable[str], default: Any = REQUIRED) -> str:
        wanted = f"one of {', '.join(among)}"
        value = self._field(key, default, str, wanted)
        if key in self and value not in among:
            raise self.wrong(key, wanted)
        return value

    def parsed(self, key: str) -> Any:
        """A value that may be there as JSON text, as no table has columns of any type."""
        value = self.values.get(key)
        try:
            return parse(value) if isinstance(value, str) and value.strip() else value
        except InvalidRecord as error:
            raise self.error(f"{self.path}{key}: {error.cause}") from error

    def items(self, key: str, default: Any = REQUIRED) -> list:
        """A list of anything."""
        return self._field(key, default, list, "a list")

    def texts(self, key: str, default: Any = REQUIRED) -> tuple[str, ...]:
        """A list of texts; one text is not taken for a list of its letters."""
        texts = self._field(key, default, list, "a list of texts")
        if not all(isinstance(item, str) for item in texts):
            raise self.wrong(key, "a list of texts")
        return tuple(texts)

    def record(self, key: str) -> "Record":
        """An object in this one; an absent one is empty."""
        value = self.values.get(key)
        return Record({} if value is None else value, self.source, f"{self.path}{key}.")

    def records(self, key: str, default: Any = REQUIRED, least: int = 0) -> list["Record"]:
        """A list of objects, `least` of them or more."""
        found = self.items(key, default)
        if len(found) < least:
            raise self.wrong(key, f"a list of at least {least} objects")
        return [Record(value, self.source, f"{self.path}{key}[{i}].") for i, value in enumerate(found)]
