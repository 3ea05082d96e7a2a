"""What a setting needs of other settings. If the need is not met, the setting has no effect, and a user who sets it
gets an error.

A section states the needs of its own settings in `needs`. The `needs` of a command's settings state what the command
asks of settings that it shares with other commands. A setting without needs always has an effect, or another check
decides whether it has: an algorithm names the settings that it reads.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from r3lite.core.config import Origin, Section, flag, flat, kinds_of, sections
from r3lite.core.errors import UsageError


class CommandSettings(dict):
    """Holds all settings of a command by name, also as attributes; an attribute that the command lacks is None.

    The entry `command` is the command's name.
    """

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


@dataclass(frozen=True)
class Needs:
    """A condition without which some settings of a section have no effect. It is about settings of the same section."""

    names: str  # the settings, separated by blanks; empty: all settings of the section except those in `but`
    purpose: str  # the condition, as the error says it after "it needs"
    met: Callable[[Any], object]  # takes the section; returns something true if the condition is met
    but: str = ""  # the settings that are left out if `names` is empty
    # A setting without effect would do harm. So it is an error even at the top of a TOML file, for all commands.
    harmful: bool = False

    def concerns(self, name: str) -> bool:
        """Tells whether a setting is one of those that need this condition."""
        if self.names:
            return name in self.names.split()
        return name not in self.but.split()

    def is_met(self, section: Section, command_settings: CommandSettings) -> bool:
        """Tells whether the condition is met; `command_settings` has all settings of the command."""
        return bool(self.met(section))


@dataclass(frozen=True)
class NeedsOthers(Needs):
    """A condition that is about settings of several sections: its `met` takes all settings of the command."""

    met: Callable[[CommandSettings], object]

    def is_met(self, section: Section, command_settings: CommandSettings) -> bool:
        return bool(self.met(command_settings))


def names_of(*sections: type[Section], but: str = "") -> str:
    """Returns the names of all settings of sections, except those in `but`, with blanks between."""
    return " ".join(name for section in sections for name in kinds_of(section) if name not in but.split())


def check_used(command: str, config: Any) -> None:
    """Raises UsageError for a setting that the user has set, but that has no effect with the other settings.

    Two cases are no error. Keys at the top of a TOML file are for all commands, so a command may ignore keys that it
    has no use for, unless they are `harmful`. And a resumed run takes the settings in its folder as they are, since an
    earlier version may have allowed them.
    """
    values = CommandSettings(flat(config), command=command)
    for section in sections(config).values():
        for name in vars(section):
            if name not in config.set_by_user or values[name] is None:
                continue
            for needs in _unmet(name, section, config, values):
                _refuse_unless_allowed(name, needs, config.set_by_user[name], values)


def _unmet(name: str, section: Section, config: Any, values: CommandSettings) -> Iterator[Needs]:
    """Yields the conditions of a setting that are not met: first the command's conditions, then its section's."""
    for needs in (*config.needs, *section.needs):
        if needs.concerns(name) and not needs.is_met(section, values):
            yield needs


def _refuse_unless_allowed(name: str, needs: Needs, origin: Origin, values: CommandSettings) -> None:
    """Raises UsageError for a setting without effect, unless one of the two cases of `check_used` applies."""
    if origin is Origin.TABLE and values.resume:
        return
    hint = ""
    if origin is Origin.SHARED:
        if not needs.harmful:
            return
        hint = f" (in {values.config} it may stand in the table of another command)"
    cause = f"{flag(name)} is {values[name]}, but has no effect here: it needs {needs.purpose}{hint}"
    raise UsageError(cause, code="setting-unused")
