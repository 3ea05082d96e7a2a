"""What a setting is: a field of a frozen dataclass, with its type, bounds, traits and help.

A command's settings are a frozen dataclass whose fields are sections. A section is a frozen dataclass whose fields are
settings: scalars, or tuples of scalars. A setting's flag is the name of the field, its help is the string under the
field, and its bounds and traits are in the field's annotation.
"""

import ast
import dataclasses
import enum
import functools
import inspect
import itertools
import math
import textwrap
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from r3lite.core.errors import UsageError, nearest


def flag(name: str) -> str:
    """Returns the flag of a setting, such as `--top-k` for `top_k`."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Bounds:
    """Limits of a number: `low` and `high` are inclusive, `above` is an exclusive lower limit."""

    low: float | None = None
    high: float | None = None
    above: float | None = None

    def check(self, name: str, value: float) -> None:
        if self.low is not None and value < self.low:
            raise UsageError(f"{name} is {value}; it must be at least {self.low}", code="below-least")
        if self.above is not None and value <= self.above:
            raise UsageError(f"{name} is {value}; it must be greater than {self.above}", code="not-above")
        if self.high is not None and value > self.high:
            raise UsageError(f"{name} is {value}; it must be at most {self.high}", code="beyond-most")


class Origin(enum.Enum):
    """Says where the user has set a setting."""

    FLAG = "on the command line"
    TABLE = "in the command's table of the file --config"
    SHARED = "at the top of the file --config, for all commands"


class Trait(enum.Enum):
    """A property that some settings have. It stands in the annotation of the setting's field."""

    FREE = "a resumed run may change it, as it does not change what the run computes"
    BARE = "it may stand on the command line without its flag"
    OF_INDEX = "unless it is set, it is that of the index"
    OF_RUN = "unless it is set, it is that of the run that wrote the adapter"
    BASIC = "most people set it: it is in --help, and not only in --help all"


@dataclass(frozen=True)
class Required:
    """The setting, or one of those named in `instead`, must be given, except in a dry run. `hint` says what to pass."""

    hint: str
    instead: tuple[str, ...] = ()


def never(text: str) -> bool:
    return False


def no_fault(path: str) -> str:
    return ""


@dataclass(frozen=True)
class InputPath:
    """The setting names files or folders that are read. A dry run tells which of them are missing."""

    noun: str = "file"  # what an error calls the file or folder
    remedy: str = ""  # what to pass instead; if it is not empty, a wrong path is an error before the work begins
    is_name: Callable[[str], bool] = never  # tells whether a value is no path, but a name such as that of a data set
    # Takes a path that exists; returns what an error says after the path, such as " has no adapter"; empty: no error.
    fault: Callable[[str], str] = no_fault
    has_names: bool = False  # values are NAME=PATH, see `name_and_path`


def name_and_path(entry: str) -> tuple[str, str]:
    """Returns the name and the path of NAME=PATH; if `entry` is only a path, the name is empty.

    The name ends at the first "=". If there is a slash before this "=", as in runs/lr=1e-4, `entry` is only a path.
    """
    name, equals, path = entry.partition("=")
    if not equals or "/" in name or "\\" in name:
        return "", entry
    return name.strip(), path.strip()


@dataclass(frozen=True)
class Alias:
    """Another name of the setting's flag, as other programs call it."""

    name: str


T = TypeVar("T")
Free = Annotated[T, Trait.FREE]
Basic = Annotated[T, Trait.BASIC]
OfIndex = Annotated[T, Trait.OF_INDEX]
OfRun = Annotated[T, Trait.OF_RUN]
MOST = 10**9  # with larger settings, their sums and products overflow; no run needs larger ones
Count = Annotated[int, Bounds(low=1, high=MOST)]
Whole = Annotated[int, Bounds(low=0, high=MOST)]
Tokens = Annotated[int, Bounds(low=1, high=1 << 20)]  # no model takes more tokens
Positive = Annotated[float, Bounds(above=0, high=MOST)]
NonNegative = Annotated[float, Bounds(low=0, high=MOST)]
Fraction = Annotated[float, Bounds(low=0, high=1)]
ANY = "any value"  # a key in Section.implied
# What a value of each type must be, as errors say it.
WANTED = {bool: "true or false", str: "text", int: "a whole number", float: "a number"}


@typing.dataclass_transform(frozen_default=True)
class Frozen:
    """Base of a section and of a command's settings: each class that derives from it is a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


class Section(Frozen):
    """Base of every group of settings; its docstring's first line is the group's heading in `--help`."""

    # implied[NAME][VALUE] has the settings, by name, that are implied if the setting NAME has this value. VALUE is a
    # text, or ANY for all values that have no entry here, except None and "none". A setting that the user sets is not
    # changed.
    implied: typing.ClassVar[dict[str, dict[str, dict[str, Any]]]] = {}
    needs: typing.ClassVar[tuple[Any, ...]] = ()  # `Needs`: conditions without which settings have no effect (needs.py)

    def check(self) -> None:
        """Raises UsageError if the settings contradict each other. Called after flags and files are read."""


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Returns the string under each field of a dataclass, by field name."""
    docs = {}
    for base in reversed(cls.__mro__):
        if base is object or not dataclasses.is_dataclass(base):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        for node, following in itertools.pairwise(tree.body[0].body):
            match node, following:
                case ast.AnnAssign(), ast.Expr(ast.Constant(text)):
                    docs[node.target.id] = " ".join(text.split())
    return docs


def sections(config: Any) -> dict[str, Any]:
    """Returns the sections of a command's settings, by name."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if isinstance(value, Section)}


def flat(config: Any) -> dict[str, Any]:
    """Returns every setting of a command, by its name."""
    values = {}
    for section in sections(config).values():
        values |= vars(section)
    return values


@dataclass(frozen=True)
class Kind:
    """What the annotation of a setting says: how to read its value from text, how to check it, and its traits."""

    scalar: type  # of the value, or of each value of a tuple
    optional: bool = False  # the value may be None, which is written as `none`
    count: int | None = 1  # number of values: 1, that of a tuple, or None for a tuple of one or more
    choices: tuple = ()  # the only values allowed; empty: all
    bounds: Bounds | None = None
    traits: tuple[Trait | Required | Alias | InputPath, ...] = ()

    @staticmethod
    def of(annotation: Any) -> "Kind":
        """Returns the kind of a setting with this annotation."""
        origin = typing.get_origin(annotation)
        arguments = typing.get_args(annotation)
        if origin is Annotated:
            return Kind._annotated(arguments[0], arguments[1:])
        if origin in (typing.Union, types.UnionType):
            (inner,) = (argument for argument in arguments if argument is not type(None))
            return dataclasses.replace(Kind.of(inner), optional=True)
        if origin is Literal:
            return Kind(str, choices=arguments)
        if origin is tuple:
            count = None if arguments[1:] == (...,) else len(arguments)
            return dataclasses.replace(Kind.of(arguments[0]), count=count)
        return Kind(annotation)

    @staticmethod
    def _annotated(inner: Any, annotations: tuple) -> "Kind":
        """Returns the kind of `inner` with the bounds and traits that its annotations add."""
        kind = Kind.of(inner)
        bounds = next((x for x in annotations if isinstance(x, Bounds)), kind.bounds)
        traits = tuple(x for x in annotations if isinstance(x, (Trait, Required, Alias, InputPath)))
        return dataclasses.replace(kind, bounds=bounds, traits=kind.traits + traits)

    def convert(self, name: str, value: Any) -> Any:
        """Returns a value from the command line or TOML in the setting's type.

        Raises UsageError if the value is wrong; the error calls it `name`.
        """
        if value is None:
            return None
        # A setting that takes several values may have the value as a list.
        if self.optional and value in ("none", ["none"]) and "none" not in self.choices:
            return None
        if self.count != 1:
            return self._converted_list(name, value)
        if self.choices:
            if value not in self.choices:
                choices = ", ".join(self.choices) + nearest(str(value), self.choices)
                raise UsageError(f"{name} is {value!r}; choose from {choices}", code="unknown-choice")
            return value
        return self._converted_scalar(name, value)

    def _converted_list(self, name: str, value: Any) -> tuple:
        items = value
        if isinstance(value, str):
            items = [item.strip() for item in value.split(",") if item.strip()]
        if not isinstance(items, (list, tuple)):
            raise UsageError(f"{name} is {value!r}; it must be a list", code="not-a-list")
        if self.count is None and not items:
            raise UsageError(f"{name} has 0 values; it must have at least one", code="wrong-count")
        if self.count is not None and len(items) != self.count:
            raise UsageError(f"{name} has {len(items)} values; it must have {self.count}", code="wrong-count")
        kind_of_item = dataclasses.replace(self, count=1, optional=False)
        return tuple(kind_of_item.convert(name, item) for item in items)

    def _converted_scalar(self, name: str, value: Any) -> Any:
        try:
            # Each ValueError is turned into a UsageError below. First what Python would convert without an error:
            if isinstance(value, bool) != (self.scalar is bool):
                raise ValueError  # int(True) is 1, and bool("no") is True
            if self.scalar is str and not isinstance(value, str):
                raise ValueError  # str() takes anything
            if self.scalar is int and isinstance(value, float):
                raise ValueError  # int(1.5) is 1
            value = self.scalar(value)
            if self.scalar is float and not math.isfinite(value):
                raise ValueError  # nan passes every comparison with a bound
        except (TypeError, ValueError, OverflowError):
            # A class such as RewardEntry says in the first line of its docstring what its values must be.
            wanted = WANTED.get(self.scalar) or self.scalar.__doc__.splitlines()[0]
            raise UsageError(f"{name} is {value!r}; it must be {wanted}", code="wrong-type") from None
        if self.bounds:
            self.bounds.check(name, value)
        return value


@functools.cache
def kinds_of(cls: type) -> dict[str, Kind]:
    """Returns the kind of each setting of a section's class, by name."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: Kind.of(hints[field.name]) for field in dataclasses.fields(cls)}


def input_path(kind: Kind) -> InputPath | None:
    """Returns the InputPath among a setting's traits; None if the setting names no files."""
    return next((trait for trait in kind.traits if isinstance(trait, InputPath)), None)


def settings_with(section: Section, trait: Trait) -> list[str]:
    """Returns the names of a section's settings that have a trait."""
    return [name for name, kind in kinds_of(type(section)).items() if trait in kind.traits]


def check_required(config: Any) -> None:
    """Raises UsageError for a setting that must be given and is not."""
    values = flat(config)
    for section in sections(config).values():
        for name, kind in kinds_of(type(section)).items():
            for trait in kind.traits:
                if not isinstance(trait, Required):
                    continue
                is_given = any(values.get(alternative) for alternative in (name, *trait.instead))
                if not is_given:
                    missing = f"no {name} given" if Trait.BARE in kind.traits else f"{flag(name)} is missing"
                    raise UsageError(f"{missing}: {trait.hint}", code="setting-missing")
