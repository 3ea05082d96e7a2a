"""Lists, checks and adds procedures, and shows which one matches a question."""

from pathlib import Path
from typing import TYPE_CHECKING

from r3lite.core import command
from r3lite.core.episode import folded
from r3lite.core.errors import R3LiteError, UsageError
from r3lite.core.terminal import printable
from r3lite.settings import CommandConfig, ProcedureFileSettings, ProcedureSettings, RetrievalSettings

if TYPE_CHECKING:  # its libraries are loaded after the arguments are read, so that --help answers at once
    from r3lite.retrieval.procedures import Procedure

NO_MATCH = "no procedure matches: nothing would be inserted before the question"


class ProceduresConfig(CommandConfig):
    """Checks a JSON file of procedures and lists them: python -m r3lite.procedures --procedures mine.json

    --add adds the procedures of another file to it; --match shows which one matches a question, and why. Pass the file
    to ask, serve and evaluate as --procedures.
    """

    file: ProcedureFileSettings = ProcedureFileSettings()
    procedures: ProcedureSettings = ProcedureSettings()


def procedures(config: ProceduresConfig) -> None:
    """Checks the file of procedures, adds those of --add, and lists them or shows which one matches --match."""
    from r3lite.retrieval.procedures import read_procedures

    path = config.procedures.procedures
    added_path = config.file.add
    if path is None:
        raise UsageError(
            "--procedures is missing: pass a JSON file of procedures; docs/procedures.md shows one",
            code="procedures-missing",
        )
    procedures = []
    if Path(path).exists() or not added_path:
        procedures = read_procedures(path)
    if added_path and Path(path).is_dir():
        raise UsageError(
            f"--add writes into a file, and --procedures {path} is a folder: copy {added_path} into it",
            code="procedures-is-folder",
        )
    if added_path:
        procedures += add(path, procedures, added_path)
    if config.file.match:
        show_match(config)
        return
    for procedure in procedures:
        kind = f"{procedure.category}, " if procedure.category else ""
        print(printable(f"{procedure.name} ({kind}priority {procedure.priority:g}, steps: {len(procedure.steps)})"))
        print(printable(f"  {procedure.description}\n  triggers: {', '.join(procedure.triggers) or 'none'}"))
    print(f"procedures in {path}: {len(procedures)}, all valid")


def add(path: str, procedures: "list[Procedure]", added_path: str) -> "list[Procedure]":
    """Adds the procedures of `added_path` to the file `path`, which has `procedures`. Returns those that it adds.

    Raises R3LiteError if a name would be there twice.
    """
    from r3lite.core.files import write_text
    from r3lite.retrieval.procedures import read_procedures, to_json

    names = {folded(procedure.name) for procedure in procedures}
    added = read_procedures(added_path)
    for procedure in added:
        if folded(procedure.name) in names:
            raise R3LiteError(
                f"{path} already has a procedure named {procedure.name}",
                "Rename one of them.",
                code="procedure-name-twice",
            )
    write_text(path, to_json([*procedures, *added]))
    print(f"added {len(added)} to {path}")
    return added


def show_match(config: ProceduresConfig) -> None:
    """Prints the scores of each procedure for --match, and the one that would be inserted before this question."""
    from r3lite.retrieval.procedures import open_finder
    from r3lite.retrieval.setup import Setup

    encoder = config.file
    question = config.file.match
    settings = RetrievalSettings(
        encoder=encoder.encoder,
        encoder_style=encoder.encoder_style,
        encoder_dtype=encoder.encoder_dtype,
        retriever="none",
    )
    setup = Setup(settings, questions=[])
    finder = open_finder(config.procedures, lambda: setup.encoder)
    scores = finder.scores(question)
    if finder.vectors is None:
        cosines = ["-"] * len(scores)
    else:
        cosines = [f"{cosine:.3f}" for cosine in finder.cosines(question)]
    print(f"{'triggers':>8}  {'cosine':>6}  procedure")
    for procedure, score, cosine in zip(finder.procedures, scores, cosines, strict=True):
        print(printable(f"{score:>8.1f}  {cosine:>6}  {procedure.name}"))
    match = finder.find(question)
    print(printable(f"\n{match.text() if match else NO_MATCH}"))


main = command.Command("procedures", ProceduresConfig(), work=procedures)

if __name__ == "__main__":
    raise SystemExit(main())
