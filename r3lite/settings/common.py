"""Settings that every command has."""

from dataclasses import dataclass
from typing import Annotated

from r3lite.config import Bounds, Free, Section


@dataclass(frozen=True)
class Common(Section):
    """General."""

    # Free, as its values have become those of the other settings.
    preset: Free[str] = "laptop-4gb"
    """name of a shipped set of defaults"""
    config: Free[str | None] = None
    """TOML file of settings, such as the config.toml of an earlier run"""
    output: Free[str | None] = None
    """folder or file to write; by default runs/<command>-<time>"""
    seed: Annotated[int, Bounds(low=0, high=2**63 - 1)] = 0
    """seed of every random stream"""
    dry_run: Free[bool] = False
    """print the resolved settings and exit"""
