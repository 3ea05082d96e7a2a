"""The user's own words around the steps: prompt files with placeholders, checked and filled."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from r3lite.config import shipped
from r3lite.episode import Document
from r3lite.errors import R3LiteError
from r3lite.settings import ProtocolSettings


@dataclass(frozen=True)
class Prompts:
    """The texts of the prompt files: `init` has {question}, `step` has {documents} and may have {step}."""

    init: str
    step: str
    system: str | None = None  # None: the default of the model's chat markup

    @staticmethod
    def load(settings: ProtocolSettings) -> "Prompts":
        """The prompt files that the settings name; a relative path is looked up here, then among the shipped files."""
        init = _template(settings.init_prompt or "prompts/init_prompt.txt", "question")
        step = _template(settings.step_prompt or "prompts/step_prompt.txt", "documents", optional="step")
        return Prompts(init, step, settings.system_prompt)

    def opening(self, question: str) -> str:
        """The text that opens an episode."""
        return self.init.replace("{question}", question)

    def documents(self, documents: Sequence[Document], next_step: int) -> str:
        """The text that answers a query; `next_step` is the number of the step to be written next."""
        filled = {"documents": render_documents(documents), "step": str(next_step)}
        # One pass, so that a document that has a placeholder in it stays as it is.
        return re.sub(r"\{(documents|step)\}", lambda m: filled[m[1]], self.step)


def render_documents(documents: Sequence[Document]) -> str:
    """Numbered passages, one a line."""
    if not documents:
        return "(nothing was found)"
    return "\n".join(f"[{i}] {d.title}: {' '.join(d.text.split())}" for i, d in enumerate(documents, 1))


def _template(name: str, placeholder: str, optional: str | None = None) -> str:
    """The text of a prompt file that has `placeholder` once and no other but `optional`."""
    path = Path(name) if Path(name).exists() else shipped(name)
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error
        raise R3LiteError(f"prompt file {name} cannot be read: {reason}", "Name a UTF-8 text file.") from error
    found = re.findall(r"\{(\w+)\}", text)
    if found.count(placeholder) != 1 or set(found) - {placeholder, optional}:
        raise R3LiteError(
            f"prompt file {path} has the placeholders {found or 'none'}",
            f"It must hold {{{placeholder}}} exactly once"
            + (f", may hold {{{optional}}}," if optional else "")
            + " and no other word in braces.",
        )
    return text
