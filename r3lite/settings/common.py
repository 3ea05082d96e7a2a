"""Settings that every command has."""

import re
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

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


def problem_of_address(address: str) -> str | None:
    """What is wrong with the address of a server, if anything is."""
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError:  # a bad IPv6 address or port
        return "is not an address"
    if parts.username is not None or parts.password is not None:
        return "holds a user or a password, which would stand in files and messages"
    if parts.query or parts.fragment:
        return "holds a query or a fragment, which would stand in files and messages"
    if parts.scheme not in ("http", "https") or not host or re.search(r"[\s\x00-\x1f\\]", address):
        return "is not an address of http or https"
    return None
