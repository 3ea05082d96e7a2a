"""What a server has before it loads a model: its packages, its token and the socket that it listens at."""

import os
import socket

from r3lite.core.errors import R3LiteError, explained, extra
from r3lite.settings import ListenSettings

TOKEN = "R3LITE_TOKEN"
SHORTEST_TOKEN = 16  # characters


def check_extra() -> None:
    """Raises R3LiteError if the packages of the extra are not installed."""
    with extra("serve", "serving"):
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401


def token_of(server: ListenSettings) -> str | None:
    """The token of the environment, without which a server that others can reach does not start."""
    token = os.environ.get(TOKEN, "").strip() or None
    if token is None and not server.on_loopback:
        remedy = f"Set {TOKEN} to a secret, such as the output of: openssl rand -hex 24"
        raise R3LiteError(f"--host {server.host} can be reached from other machines, but {TOKEN} is not set", remedy)
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise R3LiteError(f"{TOKEN} is too short", f"It must have at least {SHORTEST_TOKEN} characters.")
    return token


def listen(server: ListenSettings) -> socket.socket:
    """A socket at the address of the settings."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    remedy = "Pass another --port or --host; --port 0 takes any free port."
    with explained(OSError, f"cannot listen on {server.host}, port {server.port}", remedy):
        return socket.create_server((server.host, server.port), family=family)
