"""How a command line, a TOML file and a preset become the settings of one invocation.

Each source wins over those before it: the defaults, the preset, the index and the adapter's run (inherited.py), the
TOML file, the command line. In a TOML file a key is at the top, for every command that has it, or in a table named
after a command. The `config.toml` of a run is such a file.
"""

import argparse
import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from r3lite.core.command_names import COMMANDS
from r3lite.core.config import ANY, Alias, Kind, Origin, Section, Trait, field_docs, flag, flat, kinds_of, sections
from r3lite.core.errors import UsageError, nearest
from r3lite.core.files import load_toml, shipped
from r3lite.core.inherited import InheritedSetting, inherited_settings

# A negative number as a value of a setting; argparse itself takes -1e-3 for a flag.
NEGATIVE_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$", re.IGNORECASE)
SHORT_HELP = 60  # the most lines that --help shows without being shortened
# Settings that hold for one start of a run, and not when it is resumed. `to_toml` leaves them out if they are unset.
OF_ONE_START = ("output", "resume", "stop_after")


def all_settings() -> set[str]:
    """Returns the names of the settings of all commands. A preset may hold keys that only some commands have."""
    names = set()
    classes = Section.__subclasses__()
    while classes:
        cls = classes.pop()
        names |= {field.name for field in dataclasses.fields(cls)}
        classes += cls.__subclasses__()
    return names


def check_texts(values: dict[str, Any], where: str = "") -> None:
    """Raises UsageError for a text among settings that is empty, or cannot be the name of a file or be saved in UTF-8.

    `where` begins the error, such as `preset tiny: `.
    """
    for name, value in values.items():
        parts = value if isinstance(value, list) else [value]
        for text in parts:
            if isinstance(text, str):
                _check_text(f"{where}{flag(name)}", text)


def _check_text(name: str, text: str) -> None:
    if not text:
        raise UsageError(f"{name} is empty; is a shell variable unset? (`none` unsets a setting)", code="setting-empty")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise UsageError(f"{name} is {text!a}, which contains NUL or bytes that are not UTF-8", code="setting-not-text")


def with_values(config: Any, values: dict[str, Any], where: str = "") -> Any:
    """Returns `config` with the settings in `values`, converted to their types and checked.

    Names that the command lacks are ignored. `where` begins an error, such as `preset tiny: `.
    """
    check_texts(values, where)
    changes = {}
    for section_name, section in sections(config).items():
        kinds = kinds_of(type(section))
        of_section = {
            name: kinds[name].convert(f"{where}{name}", value) for name, value in values.items() if name in kinds
        }
        changes[section_name] = dataclasses.replace(section, **of_section)
    return dataclasses.replace(config, **changes)


@dataclasses.dataclass(frozen=True)
class FileSettings:
    """The settings that a TOML file has for one command."""

    shared: dict[str, Any] = dataclasses.field(default_factory=dict)  # at the top of the file, for all commands
    table: dict[str, Any] = dataclasses.field(default_factory=dict)  # in the command's table
    other_tables: tuple[str, ...] = ()  # names of the tables of other commands that have settings

    @property
    def values(self) -> dict[str, Any]:
        """Returns all settings for the command; those of its table win over those at the top."""
        return self.shared | self.table


def read_toml(path: Path, command: str, allowed: Collection[str]) -> FileSettings:
    """Returns the settings that a TOML file holds for one command.

    Raises UsageError for an unknown table, and for an unknown key. In the command's own table, the known keys are those
    in `allowed`; elsewhere they are the settings of all commands.
    """
    content = load_toml(path)
    # `index` is both a setting and a command. If its value is a table, it is the command.
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    shared = {key: value for key, value in content.items() if key not in tables}
    for table in tables:
        if table not in COMMANDS:
            raise UsageError(f"{path}: unknown table [{table}]{nearest(table, COMMANDS)}", code="unknown-table")
    known_names = all_settings()
    _check_keys(shared, known_names, where=f"{path}")
    for table, values in tables.items():
        names = allowed if table == command else known_names
        _check_keys(values, names, where=f"{path}", table=table)
    other_tables = tuple(table for table, values in tables.items() if values and table != command)
    return FileSettings(shared, tables.get(command, {}), other_tables)


def _check_keys(values: dict[str, Any], names: Collection[str], where: str, table: str = "") -> None:
    """Raises UsageError for a key that is not among the names of settings."""
    for key in values:
        if key not in names:
            in_table = f" in [{table}]" if table else ""
            raise UsageError(f"{where}: unknown key {key!r}{in_table}{nearest(key, names)}", code="unknown-key")


def to_toml(config: Any, command: str) -> str:
    """Returns the resolved settings as a TOML file that `--config` reads back.

    TOML has no null, so None is written as "none". If the key were left out, it would take a preset's value when the
    file is read. Settings of OF_ONE_START are left out if they are None.
    """
    lines = [f"# resolved settings of: python -m r3lite.{command}", f"[{command}]"]
    for name, value in flat(config).items():
        if name in ("config", "dry_run"):
            continue
        if value is None:
            if name in OF_ONE_START:
                continue
            value = "none"
        # With " = " between key and value, JSON is valid TOML, except for the character DEL.
        text = json.dumps(value, ensure_ascii=False, separators=(", ", " = "))
        text = text.replace("\x7f", "\\u007f")
        lines.append(f"{name} = {text}")
    return "\n".join(lines) + "\n"


def flags_by_user(config: Any, names: Iterable[str]) -> list[str]:
    """Returns flags and values that pass on to another command those of the settings `names` that the user has set."""
    values = flat(config)
    words = []
    for name in names:
        if name not in config.set_by_user:
            continue
        value = values[name]
        if isinstance(value, bool):
            words.append(flag(name) if value else flag(f"no_{name}"))
        elif isinstance(value, tuple):
            words += [flag(name), ",".join(map(str, value))]
        else:
            words += [flag(name), str(value)]
    return words


class _Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would print the error and exit, and reads -1e-3 as a number, not as a flag."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._negative_number_matcher = NEGATIVE_NUMBER

    def error(self, message: str):
        raise UsageError(message, code="argument-invalid")


class _HelpAction(argparse.Action):
    """Prints the help and exits: help for the settings that most people set, or with `all` for all settings."""

    def __init__(self, option_strings: list[str], dest: str, make_text: Callable[[bool], str], **options: Any):
        """`make_text(True)` returns the help of all settings, `make_text(False)` the short help."""
        super().__init__(option_strings, dest, nargs="?", metavar="all", **options)
        self.make_text = make_text

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        if values not in (None, "all"):
            raise UsageError(f"--help is {values!r}; pass all, or nothing", code="unknown-choice")
        print(self.make_text(values == "all"), end="")
        parser.exit()


def help_text(command: str, default: Any, every: bool) -> str:
    """Returns the help of a command: with `every` for all settings, else for those that most people set (Trait.BASIC).

    If the help for all settings has at most SHORT_HELP lines, it is returned in both cases.
    """
    whole_text = build_parser(command, default).format_help()
    if every or whole_text.count("\n") <= SHORT_HELP:
        return whole_text
    parser = _empty_parser(command, default)
    parser.formatter_class = _ShortHelp
    group = parser.add_argument_group("What most people set")
    for section in sections(default).values():
        section_class = type(section)
        docs = field_docs(section_class)
        for name, kind in kinds_of(section_class).items():
            if Trait.BASIC in kind.traits:
                kind_without_aliases = dataclasses.replace(kind, traits=())
                first_sentence = docs[name].partition(". ")[0]
                _add_setting(group, name, kind_without_aliases, value=getattr(section, name), help_text=first_sentence)
    parser.epilog = f"--help all shows all {len(flat(default))} settings, by subject."
    return parser.format_help()


class _ShortHelp(argparse.RawDescriptionHelpFormatter):
    """Gives flags more columns than argparse does, so that the help of most flags begins on the flag's line."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=28)


def _heading(section_class: type[Section]) -> str:
    """Returns the first line of a section's docstring, without the full stop."""
    return inspect.cleandoc(section_class.__doc__).splitlines()[0].rstrip(".")


def _empty_parser(command: str, default: Any) -> _Parser:
    """Returns the parser of a command without its settings; its help describes what the command does."""
    parser = _Parser(
        prog=f"python -m r3lite.{command}",
        usage=f"python -m r3lite.{command} [--setting VALUE ...]",
        description=inspect.cleandoc(type(default).__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        add_help=False,
    )
    return parser


def build_parser(command: str, default: Any) -> argparse.ArgumentParser:
    """Returns the parser of a command, with the flags of its settings."""
    parser = _empty_parser(command, default)
    make_text = functools.partial(help_text, command, default)
    parser.add_argument(
        "-h", "--help", action=_HelpAction, make_text=make_text, help="show this help; all: of every setting"
    )
    for section in sections(default).values():
        section_class = type(section)
        group = parser.add_argument_group(_heading(section_class))
        docs = field_docs(section_class)
        for name, kind in kinds_of(section_class).items():
            _add_setting(group, name, kind, value=getattr(section, name), help_text=docs[name])
    return parser


def _add_setting(group: argparse._ArgumentGroup, name: str, kind: Kind, value: Any, help_text: str) -> None:
    """Adds the flag of a setting to its section's group, with `value` as the default that the help names."""
    help_text = help_text.replace("%", "%%")
    if value not in (None, "", False):
        default = ",".join(map(str, value)) if isinstance(value, tuple) else value
        help_text += f" [{default}]"
    flags = [flag(name)]
    flags += [flag(trait.name) for trait in kind.traits if isinstance(trait, Alias)]
    if kind.scalar is bool:
        action = argparse.BooleanOptionalAction if value else "store_true"
        group.add_argument(*flags, help=help_text, action=action)
    else:
        metavar = {int: "N", float: "X"}.get(kind.scalar, "TEXT")
        if kind.choices:
            metavar = ",".join(kind.choices)
        arity = None
        if kind.count is not None and kind.count > 1:
            arity = "+"  # a fixed number of values; a list of any length is one comma-separated text
        group.add_argument(*flags, help=help_text, metavar=metavar, nargs=arity)
    if Trait.BARE in kind.traits:
        arity = "?" if kind.count == 1 else "*"
        group.add_argument(name, nargs=arity, help=f"the same as {flag(name)}")


def _parse_flags(command: str, default: Any, argv: list[str]) -> dict[str, Any]:
    """Returns the settings on a command line, by name, as text or lists of text; a flag without a value is a bool."""
    namespace, unknown = build_parser(command, default).parse_known_args(argv)
    if unknown:
        hint = "; a value stands after its flag, and a text of several words in quotation marks"
        if unknown[0].startswith("-"):
            word = unknown[0].partition("=")[0].lstrip("-")
            hint = nearest(word, (flag(name).lstrip("-") for name in flat(default)), prefix="--")
        raise UsageError(f"unknown argument {unknown[0]}{hint}", code="unknown-argument")
    flags = vars(namespace)
    check_texts(flags)
    return flags


def _read_preset(preset: str, table: str) -> dict[str, Any]:
    """Returns the settings that a built-in preset has for a command."""
    presets = _presets()
    if preset not in presets:
        raise UsageError(
            f"unknown preset {preset!r}; choose from {', '.join(presets)}{nearest(str(preset), presets)}",
            code="unknown-preset",
        )
    return read_toml(shipped("presets", f"{preset}.toml"), table, all_settings()).values


def _presets() -> list[str]:
    """Returns the names of the built-in presets."""
    return sorted(path.stem for path in shipped("presets").glob("*.toml"))


def _with_implied(default: Any, preset: dict[str, Any], by_user: dict[str, Any]) -> dict[str, Any]:
    """Returns a preset's settings and those that choices of the user or of the preset imply (Section.implied).

    What a choice of the preset implies loses against the preset's own settings. What another choice of the user implies
    wins over them.
    """
    for section in sections(default).values():
        for name, implied_by_value in section.implied.items():
            choice = by_user.get(name, preset.get(name))
            implied = {}
            if choice not in (None, "none"):
                implied = implied_by_value.get(ANY, {})
            implied = implied_by_value.get(str(choice), implied)
            if choice == preset.get(name):
                preset = implied | preset
            else:
                preset = preset | implied
    return preset


def resolve(command: str, default: Any, argv: list[str], table: str | None = None) -> Any:
    """Returns the settings of one invocation; `set_by_user` and `inherited` in them say where values come from.

    Each source wins over those before it: the default, the preset, the index and the adapter's run, the TOML file, the
    command line. What a choice implies counts as the preset's. `table` is the name of the table in a TOML file, by
    default the command's name.
    """
    flags = _parse_flags(command, default, argv)
    from_file = FileSettings()
    path = flags.get("config")
    if path:
        from_file = _read_config(path, command, default, table)
    by_user = from_file.values | flags

    def with_users_settings(config: Any) -> Any:
        config = _with_source(config, from_file.values, where=f"{path}: ")
        return _with_source(config, flags, where="")

    # If the user names no preset, on the command line or in the file, it is the preset of the adapter's run.
    defaults = flat(default)
    preset_name = by_user.get("preset") or defaults["preset"]
    preset_of_run = inherited_settings(with_users_settings(default), explicit=by_user.keys()).get("preset")
    if preset_of_run is not None and preset_of_run.value in _presets():
        preset_name = preset_of_run.value
    preset = _read_preset(preset_name, table or command)
    format_of_preset = preset.get("format", defaults.get("format"))
    if by_user.get("format") not in (None, format_of_preset):
        # A preset's prompts are written for its own format.
        preset = {name: value for name, value in preset.items() if not name.endswith("_prompt")}
    preset = _with_implied(default, preset, by_user)

    by_preset = _with_source(default, preset, where=f"preset {preset_name}: ")
    inherited = inherited_settings(with_users_settings(by_preset), explicit=by_user.keys())
    if preset_of_run is not None and preset_of_run.value != preset_name:  # this version has no preset of that name
        del inherited["preset"]
    before_user = _with_inherited(by_preset, inherited)
    config = with_users_settings(before_user)
    # Where inherited settings come from, except those that have the same value in the preset.
    preset_values = flat(by_preset)
    values = flat(before_user)
    places = {name: setting.place for name, setting in inherited.items() if values[name] != preset_values[name]}
    origins = _origins(before_user, config, from_file, flags)
    return dataclasses.replace(config, set_by_user=origins, inherited=places)


def _read_config(path: str, command: str, default: Any, table: str | None) -> FileSettings:
    """Returns the settings in the file --config; raises UsageError if it has settings of other commands only."""
    defaults = flat(default)
    allowed: Collection[str] = defaults
    if table not in (None, command):
        # The table is another command's, such as that of `sft` for `plan`. It may have settings that `command` lacks.
        allowed = defaults.keys() | all_settings()
    from_file = read_toml(Path(path), table or command, allowed)
    if from_file.other_tables and not from_file.values:
        names = ", ".join(f"[{name}]" for name in from_file.other_tables)
        raise UsageError(
            f"{path} has no settings of {command}, only {names}: pass its adapter with --adapter, or a file with "
            f"[{table or command}]",
            code="config-of-other-command",
        )
    return from_file


def _with_inherited(config: Any, inherited: dict[str, InheritedSetting]) -> Any:
    """Returns `config` with settings of an index and of adapters' runs; an error names the index or the adapters."""
    for place in dict.fromkeys(setting.place for setting in inherited.values()):
        of_place = {name: setting.value for name, setting in inherited.items() if setting.place == place}
        config = with_values(config, of_place, where=f"{place}: ")
    return config


def _with_source(config: Any, values: dict[str, Any], where: str) -> Any:
    """Returns `config` with the values of one source.

    If they have `epochs` and no `max_steps`, the `max_steps` of an earlier source, which would otherwise win, is unset.
    """
    if "epochs" in values:
        values = {"max_steps": None} | values
    return with_values(config, values, where)


def _origins(before_user: Any, config: Any, from_file: FileSettings, flags: dict[str, Any]) -> dict[str, Origin]:
    """Returns where the user has set each setting whose value in `config` is not that in `before_user`.

    The file of a run names every setting, so a name in a file does not show that the user asked for another value.
    """
    origins = dict.fromkeys(from_file.shared, Origin.SHARED)
    origins |= dict.fromkeys(from_file.table, Origin.TABLE)
    origins |= dict.fromkeys(flags, Origin.FLAG)
    earlier_values = flat(before_user)
    changed = [name for name, value in flat(config).items() if value != earlier_values[name]]
    return {name: origins[name] for name in changed if name in origins}
