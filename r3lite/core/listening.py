"""Where servers listen: the socket, addresses that only this machine reaches, tokens, and limits of a connection.

The servers of answers, of retrievers and of rollouts share this file.
"""

import ipaddress
import os
import re
import socket
from dataclasses import dataclass

from r3lite.core.errors import R3LiteError, explained

# Names of environment variables. The first has the token that a server here asks for, and that `ppo` sends to
# --rollout-server. The second has the token that clients send to --retriever and --rerank, whose servers may belong to
# somebody else.
TOKEN = "R3LITE_TOKEN"
RETRIEVER_TOKEN = "R3LITE_RETRIEVER_TOKEN"
SHORTEST_TOKEN = 16  # characters
BACKLOG = 128  # the most connections that wait to be accepted; with 5, many of 64 clients had to wait a second


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of a server's connections, so that slow or many clients do not block the others."""

    # A request must arrive within `seconds` plus its size / `bytes_per_second`. The client must read the reply within a
    # time that is computed likewise from the reply's size.
    seconds: float = 30.0
    bytes_per_second: int = 64 << 10  # of the slowest link that is allowed for
    connections: int = 256  # the most at a time; further ones are refused
    poll_seconds: float = 1.0  # the time between checks whether a client that waits for its turn is still connected

    def seconds_for(self, size: int) -> float:
        """Returns the seconds in which `size` bytes must have been transferred."""
        return self.seconds + size / self.bytes_per_second


CONNECTION_LIMITS = ConnectionLimits()  # of all servers; tests have shorter ones


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach a host: 127.0.0.0/8, ::1 (also in brackets) or localhost."""
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return address.is_loopback


def host_of(header: str) -> str:
    """Returns the host of a Host header, without its port."""
    return re.sub(r":\d+$", "", header)


def token_in(name: str) -> str | None:
    """Returns the token in the environment variable `name`; None if the variable is not set, or blank.

    Raises R3LiteError if no header of HTTP can carry the token.
    """
    token = os.environ.get(name, "").strip()
    if not (token.isascii() and token.isprintable()):
        cause = f"{name} has characters that no HTTP header can carry"
        raise R3LiteError(
            cause, "Use letters and digits, such as the output of: openssl rand -hex 24", code="token-not-ascii"
        )
    return token or None


def token_of(host: str) -> str | None:
    """Returns the token that a server at `host` asks for; None if it asks for none, which only a loopback host may do.

    Raises R3LiteError if a token is needed and is not set, or is too short.
    """
    token = token_in(TOKEN)
    if token is None and not is_loopback(host):
        remedy = f"Set {TOKEN} to a secret, such as the output of: openssl rand -hex 24"
        raise R3LiteError(
            f"--host {host} can be reached from other machines, but {TOKEN} is not set", remedy, code="token-missing"
        )
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise R3LiteError(
            f"{TOKEN} is too short", f"It must have at least {SHORTEST_TOKEN} characters.", code="token-short"
        )
    return token


def bearer(name: str) -> dict[str, str]:
    """Returns the headers that send the token in the environment variable `name`; empty if it is not set."""
    token = token_in(name)
    return {"authorization": f"Bearer {token}"} if token else {}


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address; raises R3LiteError if it is taken, or not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    remedy = "Pass another --port or --host; --port 0 takes any free port."
    with explained(OSError, f"cannot listen on {host}, port {port}", remedy, code="cannot-listen"):
        return socket.create_server((host, port), family=family, backlog=BACKLOG)


def url_of(listening: socket.socket) -> str:
    """Returns the address of a socket that listens, such as http://[::1]:8000."""
    host, port = listening.getsockname()[:2]
    place = f"[{host}]" if ":" in host else host
    return f"http://{place}:{port}"
