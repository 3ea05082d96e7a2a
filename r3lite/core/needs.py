"""What settings need of others, without which they have no effect, so that the user must not set them.

It stands in the `needs` of a section, for its own settings, or of a command's settings, for what that command has no
use for. A setting without needs always works, or another check knows when: an algorithm names those that it reads.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from r3lite.core.config import Origin, Section, flag, flat, kinds_of, sections
from r3lite.core.errors import UsageError


class CommandSettings(dict):
    """Holds all settings of a command by name, also as attributes; None for those that it lacks.

    `command` is its name.
    """

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


@dataclass(frozen=True)
class Needs:
    """Says what settings of a section need of others in it.

    `names` are the settings with blanks between, or empty for all of the section but those in `but`. `met` tells of the
    section whether there is what they need, and `purpose` names that in the error. `harmful`: without it they would
    have an effect that is wrong, so that they may not stand at the top of a file for all commands either.
    """

    names: str
    purpose: str
    met: Callable[[Any], object]
    but: str = ""
    harmful: bool = False

    def concerns(self, name: str) -> bool:
        """Tells whether it is about a setting."""
        if self.names:
            return name in self.names.split()
        return name not in self.but.split()

    def is_met(self, section: Section, command_settings: CommandSettings) -> bool:
        """Tells whether there is what the settings need."""
        return bool(self.met(section))


@dataclass(frozen=True)
class NeedsOthers(Needs):
    """Says what settings need of other sections, too: `met` tells it of all settings of the command."""

    met: Callable[[CommandSettings], object]

    def is_met(self, section: Section, command_settings: CommandSettings) -> bool:
        return bool(self.met(command_settings))


def names_of(*sections: type[Section], but: str = "") -> str:
    """Returns the names of all settings of sections, but for some, with blanks between."""
    return " ".join(name for section in sections for name in kinds_of(section) if name not in but.split())


def check_used(command: str, config: Any) -> None:
    """Raises UsageError for a setting that the user has set and that would, beside the others, do nothing.

    Keys at the top of a TOML file are for all commands: those that this one has no use for are not asked of it, unless
    they would do harm. Nor are those of a run that is gone on with.
    """
    values = CommandSettings(flat(config), command=command)
    for section in sections(config).values():
        for name in vars(section):
            if name not in config.set_by_user or values[name] is None:
                continue
            for needs in _unmet(name, section, config, values):
                _refuse(name, needs, config.set_by_user[name], values)


def _unmet(name: str, section: Section, config: Any, values: CommandSettings) -> Iterator[Needs]:
    """Yields what a setting needs and does not have; what the command has to do decides first."""
    for needs in (*config.needs, *section.needs):
        if needs.concerns(name) and not needs.is_met(section, values):
            yield needs


def _refuse(name: str, needs: Needs, origin: Origin, values: CommandSettings) -> None:
    """Raises UsageError for a setting without effect, unless it may stand where the user has set it."""
    if origin is Origin.TABLE and values.resume:
        return
    hint = ""
    if origin is Origin.SHARED:
        if not needs.harmful:
            return
        hint = f" (in {values.config} it may stand in the table of another command)"
    cause = f"{flag(name)} is {values[name]}, but has no effect here: it needs {needs.purpose}{hint}"
    raise UsageError(cause, code="setting-unused")
