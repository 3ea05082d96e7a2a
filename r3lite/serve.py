"""Serves a trained model: a web page and an HTTP API, also OpenAI-compatible, for several users and adapters."""

import socket
import time

from r3lite.core import command
from r3lite.core.errors import extra
from r3lite.core.listening import listen, token_of, url_of
from r3lite.settings import ServeConfig

# By mode: what to pass if what `LiveAnswers.notes` says of this mode is not wanted.
ADVICE = {
    "chat": "to chat with the model as it was before, pass --adapters NAME=RUN,base --chat-adapter base",
    "reasoning": "to search there, too, pass --retrieving-modes reasoning,search",
    "search": "for steps, pass --adapter RUN, or --steps on",
}


def check_extra() -> None:
    """Raises R3LiteError if the packages of the extra `serve` are not installed."""
    with extra("serve", "serving"):
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401


def serve(config: ServeConfig) -> None:
    """Serves the model until it is interrupted."""
    check_extra()
    token = token_of(config.server.host)
    # Listens before the model is loaded, so that a port in use is reported at once.
    with listen(config.server.host, config.server.port) as listening:
        answer_requests(config, listening, token)


def answer_requests(config: ServeConfig, listening: socket.socket, token: str | None) -> None:
    """Loads the model and answers requests at a listening socket until a signal arrives.

    Ctrl-C then raises KeyboardInterrupt, SIGTERM raises Terminated.
    """
    import uvicorn

    from r3lite.assembly.answering import open_retriever
    from r3lite.assembly.answering_live import LiveAnswers
    from r3lite.serving import app, http
    from r3lite.serving.desk import Desk
    from r3lite.serving.worker import AnsweringThread

    retrieve, finder = open_retriever(config, gives_up=False)
    answering = LiveAnswers(config, retrieve, finder)
    answering.warm_up()
    modes = ", ".join(f"{mode} by {adapter}" for mode, adapter in answering.modes.items())
    print(f"serving {modes}\n{url_of(listening)}  (Ctrl-C stops)", flush=True)
    for mode, note in answering.notes.items():
        print(f"{note}; {ADVICE[mode]}", flush=True)
    desk = Desk(AnsweringThread(answering), config.limits, config.modes, time.monotonic)
    settings = uvicorn.Config(
        app.build_app(desk, config.server, config.limits, token),
        http=http.Connection,
        lifespan="on",
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_graceful_shutdown=config.server.drain_seconds,
    )
    uvicorn.Server(settings).run(sockets=[listening])


def plan(config: ServeConfig) -> str:
    """Checks what the command checks, and returns the memory that the model takes, for `--dry-run`."""
    from r3lite.assembly.answering import check_retriever
    from r3lite.assembly.answering_live import plan_lanes

    check_extra()
    token_of(config.server.host)  # raises R3LiteError if other machines can reach the host and no token is set
    check_retriever(config)
    memory = plan_lanes(config)
    return f"\nMemory, for episodes of {config.lengths.max_length} tokens\n{memory.table()}"


main = command.Command("serve", ServeConfig(), work=serve, plan=plan)

if __name__ == "__main__":
    raise SystemExit(main())
