"""`python -m r3lite`: lists the commands. `python -m r3lite X ...` and `r3lite X ...` are `python -m r3lite.X ...`.

`r3lite rl` is `r3lite ppo`.
"""

import ast
import importlib
import sys
from pathlib import Path

from r3lite.core.command_names import ALIASES, COMMANDS
from r3lite.core.environment import ignore_output
from r3lite.core.errors import nearest


def summary(name: str) -> str:
    """Returns the first line of the docstring of a command's file, without importing it, which may take seconds."""
    source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)).splitlines()[0]


def listing() -> str:
    """Returns the usage and the commands with a line each."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary(name)}" for name in COMMANDS]
    lines += [f"  {alias:<{width}}  Is another name of {name}." for alias, name in ALIASES.items()]
    return "\n".join(["usage: r3lite COMMAND [--setting VALUE ...]", "", *lines, "", "See r3lite COMMAND --help."])


def main(argv: list[str] | None = None) -> int:
    """Runs the command that the first argument names, and returns its exit status."""
    if argv is None:
        argv = sys.argv[1:]
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        try:
            print(listing(), flush=True)
        except BrokenPipeError:
            ignore_output()
            return 1
        return 0
    name = ALIASES.get(name, name)
    if name not in COMMANDS:
        choices = ", ".join(COMMANDS) + nearest(name, COMMANDS)
        print(f"r3lite: unknown command {name!r}; choose from {choices}", file=sys.stderr)
        return 2
    return importlib.import_module(f"r3lite.{name}").main(argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
