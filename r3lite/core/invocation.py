"""How a command line, a TOML file and a preset become the settings of one invocation.

Later wins: default, preset, index and run of the adapter (inherited.py), TOML file, command line. In a TOML file a key
is at the top (for every command that has it) or in a table named after a command; the `config.toml` of a run is such a
file.
"""

import argparse
import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from r3lite.core.command_names import COMMANDS
from r3lite.core.config import ANY, Alias, Kind, Origin, Section, Trait, field_docs, flag, flat, kinds_of, sections
from r3lite.core.errors import UsageError, nearest
from r3lite.core.files import load_toml, shipped
from r3lite.core.inherited import inherited_settings

SHORT_HELP = 60  # lines at most of --help
# Where to write, what to resume and when to leave belong to one start of a run.
OF_ONE_START = ("output", "resume", "stop_after")


def all_settings() -> set[str]:
    """Returns the names of the settings of all commands: a preset may hold keys that only some commands have."""
    names = set()
    classes = Section.__subclasses__()
    while classes:
        cls = classes.pop()
        names |= {field.name for field in dataclasses.fields(cls)}
        classes += cls.__subclasses__()
    return names


def check_texts(values: dict[str, Any], where: str = "") -> None:
    """Raises UsageError for a text that is empty, or that no file can have as its name or keep in UTF-8."""
    for name, value in values.items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                _check_text(f"{where}{flag(name)}", text)


def _check_text(name: str, text: str) -> None:
    if not text:
        raise UsageError(f"{name} is empty; is a shell variable unset? (`none` unsets a setting)", code="setting-empty")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise UsageError(f"{name} is {text!a}, which contains NUL or bytes that are not UTF-8", code="setting-not-text")


def with_values(config: Any, values: dict[str, Any], where: str = "") -> Any:
    """Returns `config` with some settings replaced, read and checked; `where` names the source in an error."""
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
    """Holds the settings that a TOML file has for one command: those at its top, for all commands, and its table's."""

    shared: dict[str, Any] = dataclasses.field(default_factory=dict)
    table: dict[str, Any] = dataclasses.field(default_factory=dict)
    other_tables: tuple[str, ...] = ()  # names of the tables of other commands that have settings

    @property
    def values(self) -> dict[str, Any]:
        """Returns the settings of both; those of the table win."""
        return self.shared | self.table


def read_toml(path: Path, command: str, allowed: Collection[str]) -> FileSettings:
    """Returns the settings that a TOML file holds for one command, whose own table may hold only `allowed` ones."""
    content = load_toml(path)
    # `index` is a setting and a command: a table is the command's.
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

    TOML has no null. An unset key is written as "none": left out, it would take a preset's value again. Unset
    settings of OF_ONE_START are left out.
    """
    lines = [f"# resolved settings of: python -m r3lite.{command}", f"[{command}]"]
    for name, value in flat(config).items():
        if name in ("config", "dry_run"):
            continue
        if value is None:
            if name in OF_ONE_START:
                continue
            value = "none"
        # With this separator for objects, JSON is valid TOML, but for DEL.
        text = json.dumps(value, ensure_ascii=False, separators=(", ", " = "))
        text = text.replace("\x7f", "\\u007f")
        lines.append(f"{name} = {text}")
    return "\n".join(lines) + "\n"


def flags_by_user(config: Any, names: Iterable[str]) -> list[str]:
    """Returns the flags of those settings in `names` that the user has set, for a command that has them, too."""
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
    def error(self, message: str):
        raise UsageError(message, code="toml-damaged")


class _HelpAction(argparse.Action):
    """Prints the help and exits: of the settings that most people set, or with `all` of all settings."""

    def __init__(self, option_strings: list[str], dest: str, texts: Callable[[bool], str], **options: Any):
        """`texts` returns the short help, or with True the help of all settings."""
        super().__init__(option_strings, dest, nargs="?", metavar="all", **options)
        self.texts = texts

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        if values not in (None, "all"):
            raise UsageError(f"--help is {values!r}; pass all, or nothing", code="unknown-choice")
        print(self.texts(values == "all"), end="")
        parser.exit()


def help_text(command: str, default: Any, every: bool) -> str:
    """Returns the help of every setting, or without `every` of those that most people set (Trait.BASIC).

    A help of at most SHORT_HELP lines is whole in both cases.
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
                plain_kind = dataclasses.replace(kind, traits=())
                sentence = docs[name].partition(". ")[0]
                _add_setting(group, name, plain_kind, value=getattr(section, name), help_text=sentence)
    parser.epilog = f"--help all shows all {len(flat(default))} settings, by subject."
    return parser.format_help()


class _ShortHelp(argparse.RawDescriptionHelpFormatter):
    """Gives the names of flags more room than argparse does, so that few of them need a line of their own."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=28)


def _heading(section_class: type[Section]) -> str:
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
    texts = functools.partial(help_text, command, default)
    parser.add_argument("-h", "--help", action=_HelpAction, texts=texts, help="show this help; all: of every setting")
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
        several = kind.count is not None and kind.count > 1
        group.add_argument(*flags, help=help_text, metavar=metavar, nargs="+" if several else None)
    if Trait.BARE in kind.traits:
        group.add_argument(name, nargs="?" if kind.count == 1 else "*", help=f"the same as {flag(name)}")


def _parse_flags(command: str, default: Any, argv: list[str]) -> dict[str, Any]:
    """Returns the settings that a command line has, by name."""
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
    """Returns a preset's settings with those that come with choices (Section.implied).

    They win over the preset's settings if the user's choice is not the preset's; otherwise the preset's settings win.
    """
    for section in sections(default).values():
        for name, table in section.implied.items():
            choice = by_user.get(name, preset.get(name))
            implied = {}
            if choice not in (None, "none"):
                implied = table.get(ANY, {})
            implied = table.get(str(choice), implied)
            if choice == preset.get(name):
                preset = implied | preset
            else:
                preset = preset | implied
    return preset


def resolve(command: str, default: Any, argv: list[str], table: str | None = None) -> Any:
    """Returns the settings of one invocation, which remember in `set_by_user` what the user has set.

    Later wins: the default, the preset, what the index and the adapter's run have, the TOML file, the command line.
    What a choice implies counts as the preset's. `table` names a TOML file's table, by default the command's.
    """
    flags = _parse_flags(command, default, argv)
    defaults = flat(default)
    from_file = FileSettings()
    path = flags.get("config")
    if path:
        allowed: Collection[str] = defaults
        if table not in (None, command):  # another command's table holds its own settings
            allowed = defaults.keys() | all_settings()
        from_file = read_toml(Path(path), table or command, allowed)
        if from_file.other_tables and not from_file.values:
            names = ", ".join(f"[{name}]" for name in from_file.other_tables)
            raise UsageError(
                f"{path} has no settings of {command}, only {names}: pass its adapter with --adapter, or a file with "
                f"[{table or command}]",
                code="config-of-other-command",
            )
    by_user = from_file.values | flags

    def as_user_has_set(usual: Any) -> Any:
        config = _with_source(usual, from_file.values, where=f"{path}: ")
        return _with_source(config, flags, where="")

    # A file may name a preset, and refines it. If the user names none, it is the preset of the adapter's run.
    preset_name = by_user.get("preset") or defaults["preset"]
    of_run = inherited_settings(as_user_has_set(default), explicit=by_user.keys()).get("preset")
    if of_run is not None and of_run.value in _presets():
        preset_name = of_run.value
    preset = _read_preset(preset_name, table or command)
    if by_user.get("format") not in (None, preset.get("format", defaults.get("format"))):
        # A preset's prompts are written for its own format.
        preset = {name: value for name, value in preset.items() if not name.endswith("_prompt")}
    preset = _with_implied(default, preset, by_user)

    by_preset = _with_source(default, preset, where=f"preset {preset_name}: ")
    inherited = inherited_settings(as_user_has_set(by_preset), explicit=by_user.keys())
    if of_run is not None and of_run.value != preset_name:  # the run's preset is none of this version's
        del inherited["preset"]
    usual = by_preset
    for place in dict.fromkeys(setting.place for setting in inherited.values()):
        of_place = {name: setting.value for name, setting in inherited.items() if setting.place == place}
        usual = with_values(usual, of_place, where=f"{place}: ")
    preset_values = flat(by_preset)
    values = flat(usual)
    places = {name: setting.place for name, setting in inherited.items() if values[name] != preset_values[name]}
    config = as_user_has_set(usual)
    return dataclasses.replace(config, set_by_user=_origins(usual, config, from_file, flags), inherited=places)


def _with_source(config: Any, values: dict[str, Any], where: str) -> Any:
    """Returns `config` with the values of one source. Its `epochs`, if any, unset an earlier source's `max_steps`."""
    if "epochs" in values:
        values = {"max_steps": None} | values
    return with_values(config, values, where)


def _origins(by_preset: Any, config: Any, from_file: FileSettings, flags: dict[str, Any]) -> dict[str, Origin]:
    """Returns where the user has set each setting that is not as in `by_preset`.

    The file of a run names every setting, so a name in a file does not show that the user asked for another value.
    """
    origins = dict.fromkeys(from_file.shared, Origin.SHARED)
    origins |= dict.fromkeys(from_file.table, Origin.TABLE)
    origins |= dict.fromkeys(flags, Origin.FLAG)
    preset_values = flat(by_preset)
    changed = [name for name, value in flat(config).items() if value != preset_values[name]]
    return {name: origins[name] for name in changed if name in origins}
