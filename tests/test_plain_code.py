"""How densely the code is written: tokens a line, tuple assignments, names that say nothing, class names used twice.

The counters notice packed code; they are no goal. A line that has to be read twice is wrong at any count.
"""

import ast
import io
import tokenize
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.test_core_path import LAYOUT, core_path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "r3lite"
TOKENS_A_LINE = 9.0
TUPLE_ASSIGNMENTS = 5  # per 1,000 lines
EMPTY_NAMES = 0.005  # of all bindings
# fmt: off
EMPTY = {
    "made", "found", "kept", "given", "said", "some", "own", "asked", "now", "then", "usual", "known", "chosen",
    "most", "least", "again", "apart", "wide", "there", "twice", "mine", "whole", "fit", "written", "begun", "held",
    "many", "few", "other", "others", "rest", "left", "more", "shown", "told", "seen", "began", "ended", "before",
    "after", "same", "what", "how",
}
# fmt: on


@dataclass(frozen=True)
class Density:
    """Counts of one or more files. Comments, docstrings and layout are no tokens; a line is one that has a token."""

    tokens: int = 0
    lines: int = 0
    tuple_assignments: int = 0
    bindings: int = 0
    empty_names: int = 0

    def __add__(self, other: "Density") -> "Density":
        return Density(*(count + other_count for count, other_count in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple[int, ...]:
        return (self.tokens, self.lines, self.tuple_assignments, self.bindings, self.empty_names)


def density(source: str) -> Density:
    """The counts of a Python source text. Names of functions count as bindings, too."""
    tokens = 0
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        docstring = token.type == tokenize.STRING and token.line.lstrip().startswith(('"""', 'r"""'))
        if token.type in LAYOUT or docstring:
            continue
        tokens += 1
        lines.update(range(token.start[0], token.end[0] + 1))
    nodes = list(ast.walk(ast.parse(source)))
    assignments = [node for node in nodes if isinstance(node, ast.Assign)]
    tuples = [a for a in assignments if isinstance(a.targets[0], ast.Tuple) and isinstance(a.value, ast.Tuple)]
    names = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    names += [node.arg for node in nodes if isinstance(node, ast.arg)]
    names += [node.name.strip("_") for node in nodes if isinstance(node, ast.FunctionDef)]
    empty = [name for name in names if name in EMPTY]
    return Density(tokens, len(lines), len(tuples), len(names), len(empty))


def check(files: list[Path]) -> None:
    counts = {path: density(path.read_text(encoding="utf-8")) for path in files}
    total = sum(counts.values(), Density())
    by_density = sorted(counts, key=lambda path: counts[path].tokens / max(1, counts[path].lines))
    densest = [str(path.relative_to(PACKAGE)) for path in by_density[-10:]]
    assert total.tokens / total.lines <= TOKENS_A_LINE, densest
    assert 1000 * total.tuple_assignments / total.lines <= TUPLE_ASSIGNMENTS
    with_empty_names = {str(path.relative_to(PACKAGE)): c.empty_names for path, c in counts.items() if c.empty_names}
    assert total.empty_names / total.bindings <= EMPTY_NAMES, with_empty_names


def test_the_counters_count():
    lines = [
        '"""A docstring."""',
        "# a comment",
        "a, b = 1, 2",
        "found = (",
        "    a,",
        ")",
        "def f(most):",
        "    return most",
    ]
    counts = density("\n".join(lines))
    assert counts == Density(tokens=21, lines=6, tuple_assignments=1, bindings=5, empty_names=2)


def test_the_core_path_is_plain():
    check([PACKAGE / name for name in core_path()])


def test_the_package_is_plain():
    check(sorted(PACKAGE.rglob("*.py")))


def test_names_elsewhere_say_what_they_are():
    folders = ("bench", "checkpoints", "data", "examples", "tests")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    counts = {path: density(path.read_text(encoding="utf-8")) for path in files}
    total = sum(counts.values(), Density())
    with_empty_names = {str(path.relative_to(ROOT)): c.empty_names for path, c in counts.items() if c.empty_names}
    assert total.empty_names / total.bindings <= EMPTY_NAMES, with_empty_names


def test_a_class_name_is_used_once():
    places = Counter()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        places.update(
            node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        )
    assert {name: count for name, count in places.items() if count > 1} == {}
