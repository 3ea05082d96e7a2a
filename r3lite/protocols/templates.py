"""Prompt files: text with placeholders in braces."""

import re
from pathlib import Path

from r3lite.config import shipped
from r3lite.errors import R3LiteError


def read_template(name: str, placeholder: str, optional: tuple[str, ...] = ()) -> str:
    """The text of a prompt file that has `placeholder` once and no other but the `optional` ones."""
    path = Path(name) if Path(name).exists() else shipped(name)
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error
        raise R3LiteError(f"prompt file {name} cannot be read: {reason}", "Name a UTF-8 text file.") from error
    found = re.findall(r"\{(\w+)\}", text)
    if found.count(placeholder) != 1 or set(found) - {placeholder, *optional}:
        allowed = ", ".join(f"{{{other}}}" for other in optional)
        raise R3LiteError(
            f"prompt file {path} has the placeholders {found or 'none'}",
            f"It must hold {{{placeholder}}} exactly once"
            + (f", may hold {allowed}," if allowed else "")
            + " and no other word in braces.",
        )
    return text
