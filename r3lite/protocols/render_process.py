"""The program that renders chat templates: a process of its own, so that a template has a bound on time and memory.

Jinja's sandbox keeps a template from Python's objects, but not from computing for hours or from filling the memory. So
`rendering.py` starts this file as a program and ends it when it takes too long. The program reads requests and writes
replies, each a JSON object on a line. It imports nothing of r3lite, so that it starts fast.

The first line has `path`, where Python's modules are, and the limits: `memory` in bytes, `seconds` of the processor for
a request, and `characters` of a text; the reply to it says that the program is ready. A request has the `source` of a
template, `variables` (null: the template is only read) and perhaps a `day`, which its clock says. A reply has the
`text`, or an `error` and its `message`.
"""

import contextlib
import functools
import json
import signal
import sys
from datetime import date


def main() -> None:
    # Ctrl-C is for the command alone. This process ends after the command, when no more requests can come.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = json.loads(sys.stdin.readline())
    sys.path[:] = settings["path"]
    import jinja2.sandbox  # noqa: F401 - imported before the memory has a limit

    _limit_memory(settings["memory"])
    print("ready", flush=True)
    for line in sys.stdin:
        _limit_time(settings["seconds"])
        reply = _answer(json.loads(line), settings["characters"])
        print(json.dumps(reply), flush=True)


def _answer(request: dict, characters: int) -> dict[str, str]:
    """Returns the reply to a request."""
    try:
        template = _compiled(request["source"], request["day"])
        if request["variables"] is None:
            return {"text": ""}
        text = template.render(**request["variables"])
    except Exception as error:  # a template comes from a download: it may raise anything
        return {"error": type(error).__name__, "message": str(error)[:2000]}
    if len(text) > characters:
        return {"error": "TooLong", "message": f"it writes more than {characters:,} characters"}
    return {"text": text}


@functools.lru_cache(maxsize=16)
def _compiled(source: str, day: str | None):
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    if day:
        environment.globals["strftime_now"] = date.fromisoformat(day).strftime
    return environment.from_string(source)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Is the filter `tojson` of transformers, whose arguments are in another order than Jinja's."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _limit_memory(size: int) -> None:
    """Limits the memory of this process, where the platform can."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size, hard))


def _limit_time(seconds: int) -> None:
    """Ends this process when it has computed `seconds` from now on, where the platform can.

    The command ends a process that takes too long, but not if the command itself was killed.
    """
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        usage = resource.getrusage(resource.RUSAGE_SELF)
        used = int(usage.ru_utime + usage.ru_stime) + 1
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, hard))


if __name__ == "__main__":
    main()
