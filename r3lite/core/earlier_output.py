"""Whether a command may go on with what an earlier start of it has left in an output."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from r3lite.core import run_files
from r3lite.core.config import Trait, flat, sections, settings_with
from r3lite.core.errors import R3LiteError
from r3lite.core.files import load_toml, names_in
from r3lite.core.invocation import with_values


def free_settings(config: Any) -> set[str]:
    """Returns the names of a command's settings that a resumed run may change."""
    return {name for section in sections(config).values() for name in settings_with(section, Trait.FREE)}


def changes(earlier: dict[str, Any], config: Any, free: Collection[str] = ()) -> str:
    """Returns the settings that are not those of an earlier run, with both values; empty if there are none.

    Left out are the settings that a resumed run may change, those in `free` and, if neither run has a judge, those of
    the judge. A setting that the earlier run's version of r3lite lacked is taken to have had its default.
    """
    current = _as_json(config)
    default = _as_json(type(config)())
    earlier = default | earlier
    fixed = earlier.keys() - free_settings(config) - set(free)  # `earlier` has all names, from `default`
    if earlier.get("judge") == current.get("judge") == "none":
        fixed = {name for name in fixed if not name.startswith("judge_")}
    changed = [name for name in sorted(fixed) if earlier[name] != current.get(name)]
    return ", ".join(f"{name} (was {earlier[name]}, is {current.get(name)})" for name in changed)


def _as_json(config: Any) -> dict[str, Any]:
    """Returns the settings as files have them, in which tuples are lists."""
    return json.loads(json.dumps(flat(config)))


def refuse_another_run(config_file: Path, command: str, config: Any, output: Path, free: Collection[str] = ()) -> None:
    """Raises R3LiteError unless `config_file` has the settings of this command, and they are those of `config`.

    `to_toml` has written this file in or beside the output. Settings that came with a later version of r3lite, and so
    are not in it, count as unchanged.
    """
    remedy = "Pass another --output; this one is not changed."
    table = load_toml(config_file).get(command)
    if not isinstance(table, dict):
        raise R3LiteError(
            f"{output} is not a run of {command}: {config_file} has no [{command}]", remedy, code="not-a-run"
        )
    earlier = _as_json(with_values(config, table, f"{config_file}: "))
    if changed := changes(earlier, config, free):
        cause = f"{output} is from another run of {command}: {changed}"
        raise R3LiteError(cause, f"Pass --config {config_file}. Or: {remedy}", code="other-run")


def refuse_other_inputs(earlier: dict[str, str], current: dict[str, str], remedy: str) -> None:
    """Raises R3LiteError if a fingerprint of what a run reads is not what it was when the run started.

    Both arguments have the fingerprints by the names of what is read. A name that only one of them has counts as
    unchanged, since earlier versions recorded fewer.
    """
    changed = [name for name, fingerprint in current.items() if earlier.get(name, fingerprint) != fingerprint]
    if changed:
        raise R3LiteError(
            f"what the run reads has changed since it started: {', '.join(changed)}", remedy, code="inputs-changed"
        )


def check_output(
    output: Path, command: str, config: Any, allowed: Collection[str] = (), free: Collection[str] = ()
) -> set[str]:
    """Returns the names in an output folder: none, or what an earlier start of this very run has left.

    Such a start has left at least its settings. Raises R3LiteError for anything else. `allowed` are the names of all
    that it may leave; if it is empty, any name is allowed.
    """
    names = names_in(output)
    if not names:
        return names
    foreign = names.difference(allowed)
    if run_files.CONFIG not in names or (allowed and foreign):
        cause = f"--output {output} is not an empty folder: it holds {min(foreign or names)}"
        raise R3LiteError(cause, f"Pass another folder, such as {output / command}.", code="output-not-empty")
    refuse_another_run(output / run_files.CONFIG, command, config, output, free)
    return names
