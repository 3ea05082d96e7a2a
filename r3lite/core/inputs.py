"""Finds files and folders that the user has named, but that are missing or wrong, before any work begins."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3lite.core.config import Origin, flag, flat, input_path, kinds_of, name_and_path, sections
from r3lite.core.errors import R3LiteError
from r3lite.core.files import shipped, similar_path


@dataclass(frozen=True)
class WrongInput:
    """Says what is wrong with an input: it does not exist, or is not what it should be."""

    cause: str
    remedy: str  # InputPath.remedy; empty: this is no error before the work begins


def check_inputs(config: Any) -> None:
    """Raises R3LiteError for a wrong input whose setting has a remedy (InputPath.remedy).

    Otherwise the error would come only after a model is loaded or planned.
    """
    for wrong_input in wrong_inputs(config):
        if wrong_input.remedy:
            raise R3LiteError(wrong_input.cause, wrong_input.remedy, code="input-absent")


def wrong_inputs(config: Any) -> Iterator[WrongInput]:
    """Yields each input that does not exist, or exists but is not what it should be (InputPath.fault).

    Only inputs that the user has set for this command are looked at, and not those at the top of a TOML file, which are
    for all commands.
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
                path = entry
                if path_trait.has_names:
                    _, path = name_and_path(entry)
                if path_trait.is_name(path):
                    continue
                if exists_or_shipped(path):
                    fault = path_trait.fault(path)
                else:
                    fault = f": no such {path_trait.noun}{similar_path(path)}"
                if fault:
                    yield WrongInput(f"{flag(name)} {path}{fault}", path_trait.remedy)


def exists_or_shipped(path: str) -> bool:
    """Tells whether a path exists in the current folder, or among the files shipped with r3lite, such as prompts."""
    return Path(path).exists() or shipped(path).exists()
