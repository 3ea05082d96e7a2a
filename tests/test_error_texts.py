"""All texts of errors stand in error_texts.json by their codes, so that a better sentence changes one line of it.

python -m tests.test_error_texts        # writes the file again, after a sentence was changed
"""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SNAPSHOT = Path(__file__).parent / "error_texts.json"
BASES = {"R3LiteError", "UsageError"}
Scope = dict[str, ast.expr]  # the last value of each name that is assigned to


def error_classes(trees: list[ast.Module]) -> set[str]:
    """The names of the two exceptions and of all that inherit from them."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = set(BASES)
    while True:
        children = {c.name for c in classes if any(isinstance(b, ast.Name) and b.id in names for b in c.bases)}
        if children <= names:
            return names
        names |= children


def text_of(node: ast.expr, scope: Scope) -> str:
    """The text that an expression makes, with `{}` for each value that is known only when it runs."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, scope) + text_of(node.right, scope)
    if isinstance(node, ast.Name) and node.id in scope:
        without_name = {name: value for name, value in scope.items() if name != node.id}
        return text_of(scope[node.id], without_name)
    return "{}"


def constructions(node: ast.AST, scope: Scope, names: set[str]) -> Iterator[tuple[ast.Call, Scope]]:
    """The calls of the classes `names` below a node in their order, each with the values of names at that place."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from constructions(child, dict(scope), names)
            continue
        if isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Name):
            scope[child.targets[0].id] = child.value
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id in names and child.args:
            yield child, scope
        yield from constructions(child, scope, names)


def texts() -> dict[str, list[str]]:
    """The texts of the package by code. A code that is known only when it runs is that of another error."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "r3lite").rglob("*.py"))]
    names = error_classes(trees)
    by_code: dict[str, set[str]] = {}
    for tree in trees:
        for call, scope in constructions(tree, {}, names | {"explained"}):
            code = next((keyword.value for keyword in call.keywords if keyword.arg == "code"), None)
            if isinstance(code, ast.Constant):
                arguments = call.args[1:] if call.func.id == "explained" else call.args
                text = "\n".join(text_of(argument, scope) for argument in arguments)
                by_code.setdefault(code.value, set()).add(text)
    return {code: sorted(by_code[code]) for code in sorted(by_code)}


def test_the_texts_of_errors_are_those_of_the_snapshot():
    assert texts() == json.loads(SNAPSHOT.read_text(encoding="utf-8")), "see the top of this file"


def test_codes_are_short_and_say_one_thing():
    for code, variants in texts().items():
        words = code.split("-")
        assert code == code.lower() and 1 <= len(words) <= 5, code
        assert len(variants) <= 8, code


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(texts(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
