"""Settings: frozen dataclasses, and how a command line, a TOML file and a preset become one.

A command's settings are a frozen dataclass of sections; a section is a frozen dataclass of scalars. The flag of a
field is its name, its help is the string under it, its bounds and traits stand in its type. Later wins: default,
preset, TOML file, command line. In a TOML file a key stands at the top (for every command that has it) or in a table
named after a command; the `config.toml` of a run is such a file.
"""

import argparse
import ast
import dataclasses
import enum
import functools
import inspect
import itertools
import json
import math
import textwrap
import tomllib
import types
import typing
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from r3lite.core.errors import R3LiteError, nearest
from r3lite.core.files import read_text, shipped


class UsageError(Exception):
    """A bad flag, key or value: one line, exit status 2."""


@dataclass(frozen=True)
class Bounds:
    """Inclusive limits of a number, or exclusive below with `above`."""

    low: float | None = None
    high: float | None = None
    above: float | None = None

    def check(self, name: str, value: float) -> None:
        if self.low is not None and value < self.low:
            raise UsageError(f"{name} is {value}; it must be at least {self.low}")
        if self.above is not None and value <= self.above:
            raise UsageError(f"{name} is {value}; it must be greater than {self.above}")
        if self.high is not None and value > self.high:
            raise UsageError(f"{name} is {value}; it must be at most {self.high}")


class Trait(enum.Enum):
    """What is true of some settings. It stands in the annotation, as bounds do; `settings_with` finds it."""

    FREE = "a resumed run may change it, as it changes no number"
    JUDGED = "it pays for what only a judge can say"
    BARE = "it may stand on the command line without its flag"


@dataclass(frozen=True)
class Required:
    """A setting with this trait, or one of `instead`, must be given except in a dry run; `hint` says what to pass."""

    hint: str
    instead: tuple[str, ...] = ()


T = TypeVar("T")
Free = Annotated[T, Trait.FREE]
Judged = Annotated[T, Trait.JUDGED]
MOST = 10**9  # beyond it, sums and products of settings overflow; no use needs as much
Count = Annotated[int, Bounds(low=1, high=MOST)]
Whole = Annotated[int, Bounds(low=0, high=MOST)]
Tokens = Annotated[int, Bounds(low=1, high=1 << 20)]  # more than any model takes
Positive = Annotated[float, Bounds(above=0, high=MOST)]
NonNegative = Annotated[float, Bounds(low=0, high=MOST)]
Fraction = Annotated[float, Bounds(low=0, high=1)]


class Section:
    """Base of every group of settings; its docstring's first line is the group's heading in `--help`."""

    # A choice's name -> a value of it -> settings that come with it, unless they are given.
    implied: typing.ClassVar[dict[str, dict[str, dict[str, Any]]]] = {}

    def check(self) -> None:
        """Raises UsageError if its settings contradict each other; called when all sources are read."""


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass, by field name."""
    docs = {}
    for base in reversed(cls.__mro__):
        if base is object or not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for node, following in itertools.pairwise(body):
            match node, following:
                case ast.AnnAssign(), ast.Expr(ast.Constant(text)):
                    docs[node.target.id] = " ".join(text.split())
    return docs


def sections(config: Any) -> dict[str, Any]:
    """Section name -> section instance of a command's settings."""
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}


def flat(config: Any) -> dict[str, Any]:
    """Every setting of a command, by its name."""
    return {f.name: getattr(s, f.name) for s in sections(config).values() for f in dataclasses.fields(s)}


@dataclass(frozen=True)
class _Kind:
    """What a field's annotation says: how to read it from text, how to check it, and its traits."""

    scalar: type
    optional: bool = False
    count: int | None = 1  # of values; None: any number of them, but one at least
    choices: tuple = ()
    bounds: Bounds | None = None
    traits: tuple[Trait | Required, ...] = ()

    @staticmethod
    def of(annotation: Any) -> "_Kind":
        if typing.get_origin(annotation) is Annotated:
            inner, *said = typing.get_args(annotation)
            kind = _Kind.of(inner)
            bounds = [x for x in said if isinstance(x, Bounds)]
            traits = tuple(x for x in said if isinstance(x, (Trait, Required)))
            return dataclasses.replace(kind, bounds=bounds[0] if bounds else kind.bounds, traits=kind.traits + traits)
        if typing.get_origin(annotation) in (typing.Union, types.UnionType):
            (inner,) = (a for a in typing.get_args(annotation) if a is not type(None))
            return dataclasses.replace(_Kind.of(inner), optional=True)
        if typing.get_origin(annotation) is Literal:
            return _Kind(str, choices=typing.get_args(annotation))
        if typing.get_origin(annotation) is tuple:
            inner, *others = typing.get_args(annotation)
            return dataclasses.replace(_Kind.of(inner), count=None if others == [...] else 1 + len(others))
        return _Kind(annotation)

    def convert(self, name: str, value: Any) -> Any:
        """A value from text or TOML as the field's type; raises UsageError."""
        if value is None or (self.optional and value in ("none", ["none"]) and "none" not in self.choices):
            return None
        if self.count != 1:
            items = [v.strip() for v in value.split(",") if v.strip()] if isinstance(value, str) else value
            if not isinstance(items, (list, tuple)):
                raise UsageError(f"{name} is {value!r}; it must be a list")
            if len(items) != (self.count or len(items) or 1):
                raise UsageError(f"{name} names {len(items)}; it must name {self.count or 'at least one'}")
            return tuple(dataclasses.replace(self, count=1).convert(name, v) for v in items)
        if self.choices:
            if value not in self.choices:
                raise UsageError(
                    f"{name} is {value!r}; choose from {', '.join(self.choices)}{nearest(str(value), self.choices)}"
                )
            return value
        if self.scalar is bool:
            if isinstance(value, bool):
                return value
            raise UsageError(f"{name} is {value!r}; it must be true or false")
        if self.scalar is str and not isinstance(value, str):
            raise UsageError(f"{name} is {value!r}; it must be text")
        try:
            if isinstance(value, bool) or (self.scalar is int and isinstance(value, float)):
                raise ValueError
            value = self.scalar(value)
            if self.scalar is float and not math.isfinite(value):
                raise ValueError  # nan passes every comparison with a bound
        except (TypeError, ValueError, OverflowError):
            # A type of settings says in its docstring what its values must be.
            wanted = {int: "a whole number", float: "a number"}.get(self.scalar) or self.scalar.__doc__.splitlines()[0]
            raise UsageError(f"{name} is {value!r}; it must be {wanted}") from None
        if self.bounds:
            self.bounds.check(name, value)
        return value


@functools.cache
def _kinds(cls: type) -> dict[str, _Kind]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: _Kind.of(hints[f.name]) for f in dataclasses.fields(cls)}


def settings_with(section: Section, trait: Trait) -> list[str]:
    """Names of a section's settings that have a trait."""
    return [name for name, kind in _kinds(type(section)).items() if trait in kind.traits]


def check_required(config: Any) -> None:
    """Raises UsageError for a setting that must be given and is not."""
    for section in sections(config).values():
        for name, kind in _kinds(type(section)).items():
            for trait in (trait for trait in kind.traits if isinstance(trait, Required)):
                if not any(flat(config).get(way) for way in (name, *trait.instead)):
                    raise UsageError(f"{flag(name)} is missing: {trait.hint}")


def all_settings() -> set[str]:
    """Names of the settings of all commands: a preset may hold keys that only some commands have."""

    def subclasses(cls: type) -> list[type]:
        return [found for sub in cls.__subclasses__() for found in (sub, *subclasses(sub))]

    return {f.name for cls in subclasses(Section) if dataclasses.is_dataclass(cls) for f in dataclasses.fields(cls)}


def check_texts(values: dict[str, Any], where: str = "") -> None:
    """Raises UsageError for a text that is empty, or that no file can have as its name or keep in UTF-8."""
    for name, value in ((name, x) for name, v in values.items() for x in (v if isinstance(v, list) else [v])):
        if value == "":
            raise UsageError(f"{where}{flag(name)} is empty; is a shell variable unset? (none takes a setting back)")
        if isinstance(value, str) and ("\0" in value or any("\ud800" <= c <= "\udfff" for c in value)):
            raise UsageError(f"{where}{flag(name)} is {value!a}: it holds a NUL, or bytes that are not UTF-8")


def with_values(config: Any, values: dict[str, Any], where: str = "") -> Any:
    """`config` with some settings replaced, read and checked; `where` names the source in an error."""
    check_texts(values, where)
    changed = {}
    for name, section in sections(config).items():
        kinds = _kinds(type(section))
        mine = {k: kinds[k].convert(f"{where}{k}", v) for k, v in values.items() if k in kinds}
        changed[name] = dataclasses.replace(section, **mine)
    return dataclasses.replace(config, **changed)


def load_toml(path: Path) -> dict[str, Any]:
    """The keys and tables of a TOML file."""
    try:
        return tomllib.loads(read_text(path, ""))
    except R3LiteError as error:
        raise UsageError(error.cause) from None
    except (ValueError, RecursionError) as error:  # no TOML, numbers of thousands of digits, deep nesting
        raise UsageError(f"{path} cannot be read: {error}") from None


def read_toml(path: Path, command: str, commands: tuple[str, ...], own: Collection[str]) -> dict[str, Any]:
    """The settings that a TOML file holds for one command, whose own table may hold only those in `own`."""
    loaded, known = load_toml(path), all_settings()
    # `index` is a setting and a command: a table is the command's.
    tables = {key: value for key, value in loaded.items() if isinstance(value, dict)}
    top = {key: value for key, value in loaded.items() if key not in tables}
    for table in tables:
        if table not in commands:
            raise UsageError(f"{path}: no command is named {table!r}{nearest(table, commands)}")
    for table, body in {"": top, **tables}.items():
        names, where = own if table == command else known, f" in [{table}]" if table else ""
        for key in body:
            if key not in names:
                raise UsageError(f"{path}: unknown key {key!r}{where}{nearest(key, names)}")
    return top | tables.get(command, {})


def to_toml(config: Any, command: str) -> str:
    """The resolved settings as a TOML file that `--config` reads back.

    TOML has no null. An unset key is written as "none": left out, it would take a preset's value again. Where to
    write, what to resume and when to leave belong to one start of the run, and are left out.
    """
    lines = [f"# resolved settings of: python -m r3lite.{command}", f"[{command}]"]
    for section in sections(config).values():
        for f in dataclasses.fields(section):
            value = getattr(section, f.name)
            if f.name in ("config", "dry_run") or (value is None and f.name in ("output", "resume", "stop_after")):
                continue
            # With this separator for objects, JSON is valid TOML, but for DEL.
            text = json.dumps("none" if value is None else value, ensure_ascii=False, separators=(", ", " = "))
            lines.append(f"{f.name} = " + text.replace("\x7f", "\\u007f"))
    return "\n".join(lines) + "\n"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UsageError(message)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def build_parser(command: str, default: Any) -> argparse.ArgumentParser:
    """The command line of a command, from its settings."""
    parser = _Parser(
        prog=f"python -m r3lite.{command}",
        usage=f"python -m r3lite.{command} [--setting VALUE ...]",
        description=inspect.cleandoc(type(default).__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for section in sections(default).values():
        cls = type(section)
        group = parser.add_argument_group(inspect.cleandoc(cls.__doc__).splitlines()[0].rstrip("."))
        docs, kinds = field_docs(cls), _kinds(cls)
        for f in dataclasses.fields(section):
            kind, value = kinds[f.name], getattr(section, f.name)
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
            text = docs[f.name].replace("%", "%%") + ("" if value in (None, "", False) else f" [{shown}]")
            if kind.scalar is bool:
                how = {"action": argparse.BooleanOptionalAction if value else "store_true"}
            else:
                metavar = ",".join(kind.choices) if kind.choices else {int: "N", float: "X"}.get(kind.scalar, "TEXT")
                how = {"metavar": metavar, "nargs": "+" if (kind.count or 1) > 1 else None}
            group.add_argument(flag(f.name), help=text, **how)
            if Trait.BARE in kind.traits:
                group.add_argument(f.name, nargs="?" if kind.count == 1 else "*", help=f"the same as {flag(f.name)}")
    return parser


def _with_implied(default: Any, preset: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """A preset's settings, and those that come with choices: over the preset's if `given` made another, else under."""
    for section in sections(default).values():
        for name, table in section.implied.items():
            choice = given.get(name, preset.get(name))
            comes = table.get(str(choice), {})
            preset = comes | preset if choice == preset.get(name) else preset | comes
    return preset


def resolve(command: str, default: Any, argv: list[str], commands: tuple[str, ...], table: str | None = None) -> Any:
    """The settings of one invocation: default, then preset, then TOML file, then command line.

    What a choice implies counts as the preset's. `table` names a TOML file's table, by default the command's."""
    parser, own, table = build_parser(command, default), flat(default), table or command
    given, rest = parser.parse_known_args(argv)
    if rest:
        raise UsageError(f"unknown argument {rest[0]}{nearest(rest[0].partition('=')[0], map(flag, own))}")
    given = vars(given)
    check_texts(given)
    # A file may name its preset, which it then refines.
    from_file = read_toml(Path(given["config"]), table, commands, own) if given.get("config") else {}
    preset = given.get("preset") or from_file.get("preset") or own["preset"]
    presets = sorted(p.stem for p in shipped("presets").glob("*.toml"))
    if preset not in presets:
        known = f"there are {', '.join(presets)}{nearest(str(preset), presets)}"
        raise UsageError(f"no preset is named {preset!r}; {known}")
    from_preset = read_toml(shipped("presets", f"{preset}.toml"), table, commands, all_settings())
    if (from_file | given).get("format") not in (None, from_preset.get("format", own.get("format"))):
        from_preset = {k: v for k, v in from_preset.items() if not k.endswith("_prompt")}  # written for its own format
    from_preset, config = _with_implied(default, from_preset, from_file | given), default
    sources = [(f"preset {preset}: ", from_preset), (f"{given.get('config')}: ", from_file)]
    for where, values in [*sources, ("", given | {"preset": preset})]:
        # Epochs replace the length in steps that an earlier source gave.
        length = {"max_steps": None} if "epochs" in values else {}
        config = with_values(config, length | values, where)
    return config
