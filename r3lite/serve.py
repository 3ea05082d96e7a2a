"""Serves a trained model: a web page and an HTTP API, also OpenAI-compatible, for several users and adapters."""

import time

from r3lite.core import command
from r3lite.core.errors import extra
from r3lite.core.listening import listen, token_of, url_of
from r3lite.settings import ServeConfig


def check_extra() -> None:
    """Raises R3LiteError if the packages of the extra are not installed."""
    with extra("serve", "serving"):
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401


def serve(config: ServeConfig) -> None:
    check_extra()
    token = token_of(config.server.host)
    with listen(
        config.server.host, config.server.port
    ) as listening:  # before the model is loaded, so that a port in use shows at once
        import uvicorn

        from r3lite.assembly.answering import open_retriever
        from r3lite.assembly.answering_live import LiveAnswers
        from r3lite.serving import app, http
        from r3lite.serving.desk import Desk
        from r3lite.serving.worker import AnsweringThread

        answering = LiveAnswers(config, *open_retriever(config, gives_up=False))
        answering.warm_up()
        message = ", ".join(f"{mode} by {adapter}" for mode, adapter in answering.modes.items())
        print(f"serving {message}\n{url_of(listening)}  (Ctrl-C stops)", flush=True)
        for note in answering.notes.values():
            print(f"{note}; to chat, add base to --adapters and pass --chat-adapter base", flush=True)
        desk = Desk(AnsweringThread(answering), config.limits, config.modes, time.monotonic)
        page = app.build_app(desk, config.server, config.limits, token)
        quiet = {"access_log": False, "log_level": "warning", "server_header": False, "proxy_headers": False}
        limits = {"ws": "none", "timeout_graceful_shutdown": config.server.drain_seconds}
        # Until a signal ends it: Ctrl-C is raised again as KeyboardInterrupt, SIGTERM as Terminated.
        server = uvicorn.Server(uvicorn.Config(page, http=http.Connection, lifespan="on", **quiet, **limits))
        server.run(sockets=[listening])


def plan(config: ServeConfig) -> str:
    from r3lite.assembly.answering_live import plan_lanes

    return f"\nMemory, for episodes of {config.lengths.max_length} tokens\n{plan_lanes(config).table()}"


main = command.Command("serve", ServeConfig(), serve, plan).entry(__name__)
