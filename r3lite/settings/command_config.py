"""What the settings of all commands have in common: general ones, what the user has set, and how they are checked."""

from collections.abc import Mapping
from dataclasses import field

from r3lite.core.config import Frozen, Origin, sections
from r3lite.settings.common import Common
from r3lite.settings.uses import check_used


class CommandConfig(Frozen):
    """Holds what the settings of all commands begin with."""

    common: Common = Common()
    # Where each setting stood that the user has set to something else than the preset; `resolve` fills it.
    set_by_user: Mapping[str, Origin] = field(default_factory=dict, kw_only=True, compare=False)

    def check_settings(self, command: str) -> None:
        """Raises UsageError if settings contradict each other, or if one that the user has set would have no effect.

        `command` is the name of the command's table in a TOML file.
        """
        for section in sections(self).values():
            section.check()
        check_used(command, self)
