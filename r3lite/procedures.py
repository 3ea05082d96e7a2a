"""Lists, checks and adds procedures, and shows which one matches a question."""

from pathlib import Path

from r3lite.core import command
from r3lite.core.episode import folded
from r3lite.core.errors import R3LiteError, UsageError
from r3lite.core.terminal import printable
from r3lite.settings import CommandConfig, ProcedureFileSettings, ProcedureSettings, RetrievalSettings

NONE = "no procedure matches: nothing would be inserted before the question"


class ProceduresConfig(CommandConfig):
    """Checks a JSON file of procedures and lists them: python -m r3lite.procedures --procedures mine.json

    --add adds the procedures of another file to it; --match shows which one matches a question, and why. Pass the file
    to ask, serve and evaluate as --procedures.
    """

    file: ProcedureFileSettings = ProcedureFileSettings()
    procedures: ProcedureSettings = ProcedureSettings()


def procedures(config: ProceduresConfig) -> None:
    from r3lite.core.files import write_text
    from r3lite.retrieval.procedures import read_procedures, to_json

    path, given = config.procedures.procedures, config.file
    if path is None:
        raise UsageError("--procedures is missing: pass a JSON file of procedures; docs/procedures.md shows one")
    found = [] if given.add and not Path(path).exists() else read_procedures(path)
    if given.add and Path(path).is_dir():
        raise UsageError(f"--add writes into a file, and --procedures {path} is a folder: copy {given.add} into it")
    if given.add:
        names = {folded(p.name) for p in found}
        more = read_procedures(given.add)
        if twice := [p.name for p in more if folded(p.name) in names]:
            raise R3LiteError(f"{path} already has a procedure named {twice[0]}", "Rename one of them.")
        found += more
        write_text(path, to_json(found))
        print(f"added {len(more)} to {path}")
    if given.match:
        show_match(config)
        return
    for procedure in found:
        kind = f"{procedure.category}, " if procedure.category else ""
        print(printable(f"{procedure.name} ({kind}priority {procedure.priority:g}, steps: {len(procedure.steps)})"))
        print(printable(f"  {procedure.description}\n  triggers: {', '.join(procedure.triggers) or 'none'}"))
    print(f"procedures in {path}: {len(found)}, all valid")


def show_match(config: ProceduresConfig) -> None:
    """Prints what each procedure scores, and the one that would stand before the question."""
    from r3lite.retrieval.procedures import open_finder
    from r3lite.retrieval.setup import Setup

    given = config.file
    settings = RetrievalSettings(
        encoder=given.encoder,
        encoder_style=given.encoder_style,
        encoder_dtype=given.encoder_dtype,
        retriever="none",
    )
    setup = Setup(settings, questions=[])
    finder = open_finder(config.procedures, lambda: setup.encoder)
    scores = finder.scores(given.match)
    cosines = ["-"] * len(scores) if finder.vectors is None else [f"{x:.3f}" for x in finder.cosines(given.match)]
    print(f"{'triggers':>8}  {'cosine':>6}  procedure")
    for procedure, score, cosine in zip(finder.procedures, scores, cosines, strict=True):
        print(printable(f"{score:>8.1f}  {cosine:>6}  {procedure.name}"))
    found = finder.find(given.match)
    print(printable(f"\n{found.text() if found else NONE}"))


main = command.Command("procedures", ProceduresConfig(), procedures).entry(__name__)
