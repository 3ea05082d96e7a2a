"""The troubleshooting page quotes messages as the code has them."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"


def messages() -> list[str]:
    return re.findall(r"^\*\*`(.+)`\*\*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def texts_of(source: Path) -> list[str]:
    """The texts of a file; in f-strings `...` stands for what is filled in."""
    literals = []
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            literals.append("".join(v.value if isinstance(v, ast.Constant) else "..." for v in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            literals.append(node.value)
    return literals


def test_every_message_is_one_of_the_codes_own():
    texts = [text for source in (ROOT / "r3lite").rglob("*.py") for text in texts_of(source)]
    quoted = messages()
    assert len(quoted) > 20
    for message in quoted:
        pattern = re.compile(".*".join(map(re.escape, message.split("..."))), re.DOTALL)
        assert any(pattern.search(text) for text in texts), f"no error says: {message}"
