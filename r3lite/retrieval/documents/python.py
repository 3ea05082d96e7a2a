"""Python sources: a section for each function, class and method, for the imports, and for the rest of the module.

Each passage begins with its kind and name, its docstring and its file, so that a question in words finds it:

    # method: Reader.close
    # Description: Closes the file.
    # File: src/reader.py
"""

import ast
import warnings
from collections.abc import Iterator

from r3lite.retrieval.documents.section import DocumentSection

DESCRIPTION = 200  # characters of a docstring
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
IMPORTS = (ast.Import, ast.ImportFrom)


def read(text: str, name: str) -> Iterator[DocumentSection]:
    """Yields sections: every line of the file is in one. A file that is not Python is one text."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")  # lines as Python counts them
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about escapes in other people's strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two at deep nesting
        yield DocumentSection(text)
        return
    lines = ["", *text.split("\n")]  # counted from 1
    module = name.removesuffix(".py").replace("/", ".")
    imports: set[int] = set()
    for node in tree.body:
        if isinstance(node, IMPORTS):
            imports |= _span(node)
    yield _section("imports", module, docstring=None, file=name, text=_joined(lines, imports))
    module_lines = set(range(1, len(lines))) - imports
    for node in tree.body:
        if isinstance(node, DEFINITIONS):
            yield from _definition(node, "", file=name, lines=lines)
            module_lines -= _span(node)
    yield _section(
        "module",
        module,
        docstring=ast.get_docstring(tree),
        file=name,
        text=_joined(lines, module_lines),
    )


def _definition(node: ast.stmt, outer: str, file: str, lines: list[str]) -> Iterator[DocumentSection]:
    """Yields a function with all that is in it, or a class without its methods and inner classes, which follow it."""
    kind = "method" if outer else "function"
    inner: list[ast.stmt] = []
    if isinstance(node, ast.ClassDef):
        kind = "class"
        inner = [child for child in node.body if isinstance(child, DEFINITIONS)]
    qualified = outer + node.name
    numbers = _span(node).difference(*map(_span, inner))
    yield _section(
        kind,
        qualified,
        docstring=ast.get_docstring(node),
        file=file,
        text=_joined(lines, numbers),
    )
    for child in inner:
        yield from _definition(child, f"{qualified}.", file=file, lines=lines)


def _span(node: ast.stmt) -> set[int]:
    """Returns the numbers of a statement's lines, its decorators' among them."""
    decorators = getattr(node, "decorator_list", ())
    start = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return set(range(start, node.end_lineno + 1))


def _joined(lines: list[str], numbers: set[int]) -> str:
    return "\n".join(lines[number] for number in sorted(numbers))


def _section(kind: str, qualified: str, docstring: str | None, file: str, text: str) -> DocumentSection:
    head = f"# {kind}: {qualified}\n"
    # An escape such as "\ud83d" may be half of a surrogate pair, which no UTF-8 file takes.
    docstring = (docstring or "").encode(errors="replace").decode()
    description = " ".join(docstring.split())[:DESCRIPTION]
    if description:
        head += f"# Description: {description}\n"
    head += f"# File: {file}\n\n"
    return DocumentSection(text, title=qualified, head=head)
