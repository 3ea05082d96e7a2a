"""Builds or edits a FAISS index of a corpus or of a folder of documents, for --index of other commands."""

import time
from pathlib import Path

from r3lite.core import command
from r3lite.core.errors import UsageError
from r3lite.core.files import sole_writer
from r3lite.settings import CommandConfig, DocumentSettings, IndexSettings
from r3lite.settings.addresses import check_address, collection_server
from r3lite.settings.common import budget_bytes

ASSUMED_DIMENSION = 768  # of vectors, in the estimate of a dry run, if the encoder is not on this machine


class IndexConfig(CommandConfig):
    """Encodes the passages of --documents or --corpus and writes an index to the folder --output. Files of --documents
    that were skipped are listed in its skipped.jsonl. The same command continues an interrupted build. --add and
    --delete change an existing index. With --output qdrant://host:6333/collection, passages are written to a Qdrant
    server (extra qdrant).

    Other commands search the index with --index FOLDER and its encoder. They encode queries on the CPU; only
    this command uses the GPU.
    """

    index: IndexSettings = IndexSettings()
    chunking: DocumentSettings = DocumentSettings()


def work(config: IndexConfig) -> None:
    """Builds the index in --output, fills a Qdrant collection, or changes an index that is there."""
    # Imported after the arguments are read: FAISS and torch take seconds to load.
    from r3lite.retrieval import building

    settings = config.index
    output = config.common.output
    if settings.edits:
        if not output:
            raise UsageError("--output is missing: pass the folder of the index to edit", code="output-missing")
        with sole_writer(output, folder=False):
            building.edit(settings, config.chunking, Path(output))
        return
    if not (settings.documents or settings.corpus):
        raise UsageError(
            "--documents or --corpus is missing: pass a folder, or JSONL passages (id, title, text)",
            code="corpus-missing",
        )
    if fills_collection(output):
        building.fill(settings, config.chunking, output)
        return
    output = output or time.strftime("runs/index-%Y%m%d-%H%M%S")
    building.check_output(output)  # checked before the encoding, which may take hours
    with sole_writer(output, folder=False):  # the folder itself is replaced
        building.build_folder(settings, config.chunking, output)


def fills_collection(output: str | None) -> bool:
    """Tells whether an output is a Qdrant collection. Raises UsageError if its address is wrong."""
    server = collection_server(output or "")
    if server is None:
        return False
    check_address("the address of --output", server, "qdrant://host:6333/collection")
    return True


def plan(config: IndexConfig) -> str:
    """Checks --output, and returns an estimate of the index's size, for `--dry-run`. Does not load the encoder."""
    from r3lite.retrieval import building
    from r3lite.retrieval.corpus import count_lines
    from r3lite.retrieval.documents.folder import read_folder
    from r3lite.retrieval.encoder import local_dimension
    from r3lite.retrieval.vectors import choose

    settings = config.index
    in_collection = not settings.edits and fills_collection(config.common.output)
    if config.common.output and not (settings.edits or in_collection):
        building.check_folder(Path(config.common.output).resolve())
    if settings.documents:
        count = len(read_folder(settings.documents, config.chunking).documents)
    elif settings.corpus:
        count = sum(count_lines(path) for path in settings.corpus)
    else:
        return "For an estimate, pass --documents or --corpus."
    dimension = local_dimension(settings.encoder)
    assumption = ""
    if not dimension:
        dimension = ASSUMED_DIMENSION
        assumption = f" (assuming {dimension} dimensions, because the encoder is not on this machine)"
    if in_collection:  # the server decides what it keeps in memory
        return f"Estimate\n  {count:,} x {dimension}: {config.common.output} keeps them{assumption}"
    design = choose(
        kind=settings.index_type,
        passages=count,
        dimension=dimension,
        budget=budget_bytes(settings.memory_budget),
    )
    return f"Estimate\n  {design.summary()}{assumption}"


main = command.Command("index", IndexConfig(), work=work, plan=plan)

if __name__ == "__main__":
    raise SystemExit(main())
