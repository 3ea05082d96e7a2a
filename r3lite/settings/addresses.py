"""Addresses of servers, and the services that search the web."""

import re
from urllib.parse import urlsplit

from r3lite.core.errors import UsageError

SERVICES = ("exa", "duckduckgo")  # services that search the web


def is_server(place: str) -> bool:
    """Tells whether a retriever's place is the address of a server or one of SERVICES, and not an index folder."""
    return "://" in place or place in SERVICES


def collection_server(address: str) -> str | None:
    """Returns the HTTP address of the server of a Qdrant collection; None if `address` is not that of a collection.

    The address of a collection begins with qdrant:// or qdrant+https://.
    """
    for scheme, http in (("qdrant://", "http://"), ("qdrant+https://", "https://")):
        if address.startswith(scheme):
            return http + address.removeprefix(scheme)
    return None


def check_address(setting: str, address: str, example: str) -> None:
    """Raises UsageError unless an address is that of an HTTP server and has no password.

    The error calls the address `setting` and does not quote it, because it may hold a password.
    """

    def wrong(problem: str) -> UsageError:
        return UsageError(f"{setting} {problem}; pass one such as {example}", code="bad-address")

    try:
        parts = urlsplit(address)
        host = parts.hostname
        parts.port  # noqa: B018  (raises ValueError if the port is wrong)
    except ValueError:  # a wrong IPv6 address or port
        raise wrong("is not an address") from None
    if parts.username is not None or parts.password is not None:
        raise wrong("contains a user or password, which would be written to files and messages")
    if parts.query or parts.fragment:
        raise wrong("contains a query or fragment, which would be written to files and messages")
    if parts.scheme not in ("http", "https") or not host or re.search(r"[\s\x00-\x1f\\]", address):
        raise wrong("is not an http or https address")
