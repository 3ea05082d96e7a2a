"""Regular expressions of the package mean the same in every Python that it supports."""

import ast
from pathlib import Path

from re import _constants, _parser  # isort: skip

PACKAGE = Path(__file__).parent.parent / "r3lite"
# Those of Python 3.11.0 to 3.11.4 match wrongly (gh-100061, gh-106052).
WRONG = {_constants.POSSESSIVE_REPEAT, _constants.ATOMIC_GROUP}


def operations(parsed) -> set:
    """All operations of a parsed pattern, nested ones too."""
    result = set()
    for part in parsed:
        if isinstance(part, _parser.SubPattern | tuple | list):
            result |= operations(part)
        elif isinstance(part, _constants._NamedIntConstant):
            result.add(part)
    return result


def patterns(file: Path) -> list[str]:
    """The texts of a file that are the first argument of a function of `re`; none with variables is among them."""
    calls = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    texts = []
    for call in calls:
        is_of_re = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "re"
        if is_of_re and call.args and isinstance(call.args[0], ast.Constant):
            texts.append(call.args[0].value)
    return texts


def test_no_pattern_has_possessive_quantifiers_or_atomic_groups():
    """With them, on Debian 12's Python 3.11.2, no word was made whole that a line of a PDF splits."""
    assert operations(_parser.parse(r"a(?:(b++)|c)")) & WRONG and operations(_parser.parse(r"(?>a)b")) & WRONG
    texts = [(file.name, text) for file in sorted(PACKAGE.rglob("*.py")) for text in patterns(file)]
    assert len(texts) > 20
    assert [(name, text) for name, text in texts if operations(_parser.parse(text)) & WRONG] == []
