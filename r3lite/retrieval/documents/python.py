"""Python sources: a section for each function, class and method, for the imports, and for the rest of the module.

Each passage begins with what it is, what its docstring says and where it is from, so that a question in words finds it:

    # method: Reader.close
    # Description: Closes the file.
    # File: src/reader.py
"""

import ast
import warnings
from collections.abc import Iterator

from r3lite.retrieval.documents.section import Section

DESCRIPTION = 200  # characters of a docstring
FUNCTIONS, IMPORTS = (ast.FunctionDef, ast.AsyncFunctionDef), (ast.Import, ast.ImportFrom)


def read(text: str, name: str) -> Iterator[Section]:
    """Every line of the file is in one section. A file that is not Python is a text."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")  # lines as Python counts them
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in other people's strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two at deep nesting
        yield Section(text)
        return
    lines, module = ["", *text.split("\n")], name.removesuffix(".py").replace("/", ".")
    taken = set().union(*(_span(node) for node in tree.body if isinstance(node, IMPORTS)))
    yield _section("imports", module, None, name, _joined(lines, taken))
    for node in tree.body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield from _definition(node, "", name, lines)
            taken |= _span(node)
    rest = set(range(1, len(lines))) - taken
    yield _section("module", module, tree, name, _joined(lines, rest))


def _definition(node: ast.stmt, outer: str, name: str, lines: list[str]) -> Iterator[Section]:
    """A function with all that is in it, or a class without its methods and inner classes, which follow it."""
    qualified, kind, inner = outer + node.name, "method" if outer else "function", []
    if isinstance(node, ast.ClassDef):
        kind, inner = "class", [child for child in node.body if isinstance(child, (*FUNCTIONS, ast.ClassDef))]
    own = _span(node).difference(*map(_span, inner))
    yield _section(kind, qualified, node, name, _joined(lines, own))
    for child in inner:
        yield from _definition(child, f"{qualified}.", name, lines)


def _span(node: ast.stmt) -> set[int]:
    """The numbers of a statement's lines, its decorators' among them."""
    start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
    return set(range(start, node.end_lineno + 1))


def _joined(lines: list[str], numbers: set[int]) -> str:
    return "\n".join(lines[number] for number in sorted(numbers))


def _section(kind: str, qualified: str, node: ast.AST | None, name: str, text: str) -> Section:
    said = " ".join(((node and ast.get_docstring(node)) or "").split())[:DESCRIPTION]
    head = f"# {kind}: {qualified}\n" + f"# Description: {said}\n" * bool(said) + f"# File: {name}\n\n"
    return Section(text, qualified, head)
