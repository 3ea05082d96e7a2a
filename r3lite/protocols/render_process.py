"""The program that renders chat templates: a process of its own, so that a template has a bound on time and memory.

Jinja's sandbox keeps a template from Python's objects, but not from computing for hours or from filling the memory. So
`rendering.py` starts this file as a program and ends the program when it takes too long. The program reads requests and
writes replies, each a JSON object on a line. It imports nothing of r3lite, so that it starts fast.

The first line that it reads has `path`, the folders of Python's modules, and the limits: `memory` in bytes, `seconds`
of the processor for a request, and `characters` of a rendered text. Its first reply is the line `ready`. A request has
the `source` of a template, `variables` (null: the template is compiled, but not rendered) and `day`, the date that the
template's clock shows (null: it has no clock). A reply has the `text`, or an `error` and its `message`.
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
    """Returns the reply to a request; `characters` is the limit of the text."""
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
    """The filter `tojson` as transformers has it, whose arguments are in another order than Jinja's."""
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
    """Lets the system end this process after `seconds` more of processor time, where the platform can.

    The command, too, ends a process that takes too long, but it cannot do so if it was killed itself.
    """
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        usage = resource.getrusage(resource.RUSAGE_SELF)
        used_seconds = int(usage.ru_utime + usage.ru_stime) + 1
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (used_seconds + seconds, hard))


if __name__ == "__main__":
    main()
