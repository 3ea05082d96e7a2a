"""How a command line, a TOML file and a preset become the settings of one invocation.

Later wins: default, preset, TOML file, command line. In a TOML file a key is at the top (for every command that has it)
or in a table named after a command; the `config.toml` of a run is such a file.
"""

import argparse
import dataclasses
import inspect
import json
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from r3lite.core.config import ANY, Alias, Section, Trait, field_docs, flag, flat, kinds_of, sections
from r3lite.core.errors import R3LiteError, UsageError, nearest
from r3lite.core.files import read_text, shipped


def all_settings() -> set[str]:
    """Names of the settings of all commands: a preset may hold keys that only some commands have."""

    def subclasses(cls: type) -> list[type]:
        return [found for sub in cls.__subclasses__() for found in (sub, *subclasses(sub))]

    return {f.name for cls in subclasses(Section) for f in dataclasses.fields(cls)}


def check_texts(values: dict[str, Any], where: str = "") -> None:
    """Raises UsageError for a text that is empty, or that no file can have as its name or keep in UTF-8."""
    for name, value in ((name, x) for name, v in values.items() for x in (v if isinstance(v, list) else [v])):
        if value == "":
            raise UsageError(f"{where}{flag(name)} is empty; is a shell variable unset? (`none` unsets a setting)")
        if isinstance(value, str) and ("\0" in value or any("\ud800" <= c <= "\udfff" for c in value)):
            raise UsageError(f"{where}{flag(name)} is {value!a}, which contains NUL or bytes that are not UTF-8")


def with_values(config: Any, values: dict[str, Any], where: str = "") -> Any:
    """`config` with some settings replaced, read and checked; `where` names the source in an error."""
    check_texts(values, where)
    changed = {}
    for name, section in sections(config).items():
        kinds = kinds_of(type(section))
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
            raise UsageError(f"{path}: unknown table [{table}]{nearest(table, commands)}")
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
        docs, kinds = field_docs(cls), kinds_of(cls)
        for f in dataclasses.fields(section):
            kind, value = kinds[f.name], getattr(section, f.name)
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
            text = docs[f.name].replace("%", "%%") + ("" if value in (None, "", False) else f" [{shown}]")
            if kind.scalar is bool:
                how = {"action": argparse.BooleanOptionalAction if value else "store_true"}
            else:
                metavar = ",".join(kind.choices) if kind.choices else {int: "N", float: "X"}.get(kind.scalar, "TEXT")
                how = {"metavar": metavar, "nargs": "+" if (kind.count or 1) > 1 else None}
            others = [flag(trait.name) for trait in kind.traits if isinstance(trait, Alias)]
            group.add_argument(flag(f.name), *others, help=text, **how)
            if Trait.BARE in kind.traits:
                group.add_argument(f.name, nargs="?" if kind.count == 1 else "*", help=f"the same as {flag(f.name)}")
    return parser


def _with_implied(default: Any, preset: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """A preset's settings, and those that come with choices: over the preset's if `given` made another, else under."""
    for section in sections(default).values():
        for name, table in section.implied.items():
            choice = given.get(name, preset.get(name))
            comes = table.get(str(choice), {} if choice in (None, "none") else table.get(ANY, {}))
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
    names = own if table == command else own.keys() | all_settings()  # another command's table holds its own settings
    from_file = read_toml(Path(given["config"]), table, commands, names) if given.get("config") else {}
    preset = given.get("preset") or from_file.get("preset") or own["preset"]
    presets = sorted(p.stem for p in shipped("presets").glob("*.toml"))
    if preset not in presets:
        raise UsageError(f"unknown preset {preset!r}; choose from {', '.join(presets)}{nearest(str(preset), presets)}")
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
