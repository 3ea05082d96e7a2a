"""Serves a trained model: a web page, an API of its own and OpenAI's, for several people and adapters at once."""

import os
import socket
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from r3lite.assembly.answering import open_retriever
from r3lite.core import command
from r3lite.core.config import UsageError
from r3lite.core.errors import R3LiteError
from r3lite.settings import (
    Common,
    LengthSettings,
    LimitSettings,
    MemorySettings,
    ModelSettings,
    ModeSettings,
    ProcedureSettings,
    ProtocolSettings,
    RetrievalSettings,
    SamplingSettings,
    ServerSettings,
    TruncationSettings,
)

if TYPE_CHECKING:  # torch and the web packages are loaded after the arguments are read, so that --help answers at once
    from r3lite.serving.asks import Answering

TOKEN = "R3LITE_TOKEN"
SHORTEST_TOKEN = 16  # characters


@dataclass(frozen=True)
class ServeConfig:
    """Serves a web page and an HTTP API: python -m r3lite.serve --adapters sft=runs/sft rl=runs/ppo --index my-index

    The page is at http://127.0.0.1:8000. POST /generate takes {"query": ..., "mode": chat, reasoning, search or auto};
    /v1/chat/completions is OpenAI's. Format, prompts, index and encoder are not taken from the adapters' runs: pass
    those that they were trained with. Ctrl-C or SIGTERM ends, after the answers under way.
    """

    common: Common = Common()
    server: ServerSettings = ServerSettings()
    modes: ModeSettings = ModeSettings()
    limits: LimitSettings = LimitSettings()
    model: ModelSettings = ModelSettings()
    memory: MemorySettings = MemorySettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    procedures: ProcedureSettings = ProcedureSettings()
    protocol: ProtocolSettings = ProtocolSettings()
    lengths: LengthSettings = LengthSettings()
    sampling: SamplingSettings = SamplingSettings(temperature=0.0)
    truncation: TruncationSettings = TruncationSettings()


def serve(config: ServeConfig) -> None:
    check_extra()
    token = token_of(config.server)
    if config.common.output:
        raise UsageError("--output has no use here, as no file is written")
    listening = listen(config.server)  # before the model is loaded, so that a port in use shows at once
    with listening:
        from r3lite.assembly.answering_live import LiveAnswers

        answering = LiveAnswers(config, *open_retriever(config))
        answering.warm_up()
        host, port = listening.getsockname()[:2]
        place = f"[{host}]" if ":" in host else host
        told = ", ".join(f"{mode} by {adapter}" for mode, adapter in answering.modes.items())
        print(f"serving {told}\nhttp://{place}:{port}  (Ctrl-C ends)", flush=True)
        run(config, answering, listening, token)


def check_extra() -> None:
    """Raises R3LiteError if the packages of the extra are not installed."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise R3LiteError(
            f"serving needs the package {error.name}, which is not installed",
            "Install it with: pip install 'r3lite[serve]'.",
        ) from error


def token_of(server: ServerSettings) -> str | None:
    """The token of the environment, without which a server that others can reach does not start."""
    token = os.environ.get(TOKEN, "").strip() or None
    if token is None and not server.on_loopback:
        raise R3LiteError(
            f"--host {server.host} can be reached by others, and {TOKEN} is not set",
            f"Set {TOKEN} to a secret of your own, such as the output of: openssl rand -hex 24",
        )
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise R3LiteError(f"{TOKEN} is too short", f"It takes {SHORTEST_TOKEN} characters at least.")
    return token


def listen(server: ServerSettings) -> socket.socket:
    """A socket at the address of the settings."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    try:
        return socket.create_server((server.host, server.port), family=family)
    except OSError as error:
        raise R3LiteError(
            f"nothing can listen at {server.host}, port {server.port}: {error.strerror or error}",
            "Pass another --port or --host; --port 0 takes any that is free.",
        ) from error


def run(config: ServeConfig, answering: "Answering", listening: socket.socket, token: str | None) -> None:
    """Answers requests until a signal ends it: Ctrl-C is raised again as KeyboardInterrupt, SIGTERM as Terminated."""
    import uvicorn

    from r3lite.serving.app import build_app
    from r3lite.serving.desk import Desk
    from r3lite.serving.worker import Worker

    desk = Desk(Worker(answering), config.limits, config.modes, time.monotonic)
    app = build_app(desk, config.server, config.limits, token)
    settings = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="on",
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=config.server.drain_seconds,
    )
    uvicorn.Server(settings).run(sockets=[listening])


def main(argv: list[str] | None = None) -> int:
    def plan(config: ServeConfig) -> str:
        from r3lite.assembly.answering_live import plan_lanes

        return f"\nMemory, for episodes of {config.lengths.max_length} tokens\n{plan_lanes(config).table()}"

    return command.run("serve", ServeConfig(), serve, argv, plan)


if __name__ == "__main__":
    sys.exit(main())
