"""Settings that every command has, and how addresses and amounts of memory are read."""

import math
import re
from typing import Annotated, Any
from urllib.parse import urlsplit

from r3lite.core.config import Bounds, Free, Section, UsageError

# Bytes.
UNITS = {
    "GIB": 1 << 30,
    "MIB": 1 << 20,
    "GB": 10**9,
    "MB": 10**6,
}


class Common(Section):
    """General."""

    # Free, as its values have become those of the other settings.
    preset: Free[str] = "laptop-4gb"
    """name of a built-in set of defaults"""
    config: Free[str | None] = None
    """TOML file with settings, such as the config.toml of an earlier run"""
    output: Free[str | None] = None
    """folder or file to write; default: runs/<command>-<time>"""
    seed: Annotated[int, Bounds(low=0, high=2**63 - 1)] = 0
    """random seed"""
    dry_run: Free[bool] = False
    """print the resolved settings and exit"""


class Weighted(dict):
    """NAME=WEIGHT, or a table whose weight is 1 unless it is given: a dict, as files keep settings as JSON and TOML."""

    def __init__(self, entry: Any, key: str):
        """`key` is that of the name in the table."""
        if isinstance(entry, str):
            name, equals, weight = entry.rpartition("=")
            if equals:
                entry = {key: name.strip(), "weight": float(weight)}
            else:
                entry = {key: entry}
        super().__init__({key: "", "weight": 1.0} | dict(entry))

    def __repr__(self) -> str:
        text = f"{self['name']}={self['weight']:g}"
        parameters = [f"{key}={value!r}" for key, value in self.items() if key not in ("name", "weight")]
        if parameters:
            text += f" ({', '.join(parameters)})"
        return text


def check_address(setting: str, address: str, example: str) -> None:
    """Raises UsageError unless an address is that of a server. It is not quoted: it may hold a password."""

    def wrong(problem: str) -> UsageError:
        return UsageError(f"{setting} {problem}; pass one such as {example}", code="bad-address")

    try:
        parts = urlsplit(address)
        host = parts.hostname
        parts.port  # noqa: B018  (raises for a bad one)
    except ValueError:  # a bad IPv6 address or port
        raise wrong("is not an address") from None
    if parts.username is not None or parts.password is not None:
        raise wrong("contains a user or password, which would be written to files and messages")
    if parts.query or parts.fragment:
        raise wrong("contains a query or fragment, which would be written to files and messages")
    if parts.scheme not in ("http", "https") or not host or re.search(r"[\s\x00-\x1f\\]", address):
        raise wrong("is not an http or https address")


def budget_bytes(text: str, setting: str = "--vram-budget") -> int:
    """Returns the bytes of a budget such as 4GiB, 1300MiB or 3.5 GB; UsageError names the setting."""
    size = 0.0
    if amount := re.fullmatch(r"(\d+\.?\d*|\.\d+)(GIB|MIB|GB|MB)", text.upper().replace(" ", "")):
        size = float(amount[1]) * UNITS[amount[2]]
    if not 0 < size < math.inf:
        raise UsageError(
            f"{setting} {text} is not an amount of memory: write it as 4GiB or 1300MiB", code="bad-memory-size"
        )
    return int(size)
