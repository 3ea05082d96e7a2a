"""Every flag that a text of the package names is one: of a command, or of another program that the text names too."""

import ast
import re
from pathlib import Path

import r3lite.settings  # noqa: F401 (its sections are what there is)
from r3lite.core.config import Alias, Section, flag, kinds_of
from r3lite.core.invocation import all_settings

PACKAGE = Path(__file__).parents[2] / "r3lite"
# Of torchrun, vLLM, llama.cpp, llama-gguf-split, TensorBoard and nvidia-smi; and that every command has.
OTHERS = {
    "--nproc-per-node", "--enable-lora", "--max-lora-rank", "--logprobs-mode", "--max-model-len", "--lora", "--merge",
    "--jinja", "--chat-template-file", "--logdir", "--query-gpu", "--id", "--help", "--setting",
}  # fmt: skip


def texts_of(source: Path) -> list[str]:
    """The texts of a file that are no docstrings of functions or modules, each part of an f-string for itself."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    owners = (ast.Module, ast.FunctionDef, ast.ClassDef)
    docs = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, owners) and ast.get_docstring(node)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docs)
    return [node.value for node in constants if isinstance(node.value, str)]


def flags_of(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", text))


def known_flags() -> set[str]:
    """Of all settings, with other programs' names of them, and with --no- for those that are on by default."""

    def subclasses(cls: type) -> list[type]:
        return [descendant for sub in cls.__subclasses__() for descendant in (sub, *subclasses(sub))]

    kinds = [kind for cls in subclasses(Section) for kind in kinds_of(cls).values()]
    names = all_settings() | {trait.name for kind in kinds for trait in kind.traits if isinstance(trait, Alias)}
    return {flag(name) for name in names} | {"--no-worked-example"}


def test_every_flag_that_a_text_names_exists():
    named: dict[str, set[str]] = {}
    for source in PACKAGE.rglob("*.py"):
        for flag_name in (flag_name for text in texts_of(source) for flag_name in flags_of(text)):
            named.setdefault(flag_name, set()).add(source.relative_to(PACKAGE).as_posix())
    assert len(named) > 100
    assert {name: where for name, where in named.items() if name not in known_flags() | OTHERS} == {}
