"""Which of the files and folders that the user has named are not there: a mistyped name is told before any work."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3lite.core.config import Origin, flag, flat, input_path, kinds_of, name_and_path, sections
from r3lite.core.errors import R3LiteError
from r3lite.core.files import shipped, similar_path


@dataclass(frozen=True)
class MissingInput:
    """Says which input is missing, and what to do if that is an error at once (InputPath.remedy)."""

    cause: str
    remedy: str


def check_inputs(config: Any) -> None:
    """Raises R3LiteError for a missing input that would else be found only after a model is loaded or planned."""
    for missing in missing_inputs(config):
        if missing.remedy:
            raise R3LiteError(missing.cause, missing.remedy, code="input-absent")


def missing_inputs(config: Any) -> Iterator[MissingInput]:
    """Yields each input that does not exist, or exists but is not what it should be (InputPath.fault).

    Only inputs that the user has named for this command count, not those at the top of a file for all commands.
    """
    values = flat(config)
    for section in sections(config).values():
        for name, kind in kinds_of(type(section)).items():
            path_trait = input_path(kind)
            origin = config.set_by_user.get(name, Origin.SHARED)
            if path_trait is None or values[name] is None or origin is Origin.SHARED:
                continue
            entries = [values[name]] if kind.count == 1 else values[name]
            for entry in entries:
                path = name_and_path(entry)[1] if path_trait.has_names else entry
                if path_trait.named(path):
                    continue
                fault = f": no such {path_trait.noun}{similar_path(path)}"
                if exists(path):
                    fault = path_trait.fault(path)
                if fault:
                    yield MissingInput(f"{flag(name)} {path}{fault}", path_trait.remedy)


def exists(path: str) -> bool:
    """Tells whether a path exists, from here or among what travels with r3lite, such as its prompts."""
    return Path(path).exists() or shipped(path).exists()
