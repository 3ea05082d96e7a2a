"""Builds a FAISS index of corpora or of a folder of documents, for `--index` of the other commands, and changes one."""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from r3lite.core import command
from r3lite.core.config import UsageError
from r3lite.settings import Common, DocumentSettings, IndexSettings
from r3lite.settings.common import budget_bytes
from r3lite.settings.retrieval import collection_server

if TYPE_CHECKING:
    from r3lite.core.episode import Document
    from r3lite.retrieval.documents.folder import Folder
    from r3lite.retrieval.encoder import Encoder

UNKNOWN = 768  # dimensions that a dry run counts with if the encoder is not on this machine


@dataclass(frozen=True)
class IndexConfig:
    """Encodes the passages of --documents or --corpus and writes them, their vectors and a manifest into the folder
    --output. What it left out of --documents is told, and all of it is in skipped.jsonl there. After a kill the same
    command goes on where it was. --add and --delete change an index that is there. With --output
    qdrant://host:6333/collection they are written into that collection of a Qdrant server (extra qdrant).

    Other commands search it with --index FOLDER and the same --encoder. Training retrieves on the CPU in any case;
    only here the encoder may use a GPU.
    """

    common: Common = Common()
    index: IndexSettings = IndexSettings()
    chunking: DocumentSettings = DocumentSettings()


def work(config: IndexConfig) -> None:
    from r3lite.core.files import sole_writer
    from r3lite.retrieval.building import check_output

    settings, output = config.index, config.common.output
    check(config)
    if settings.edits:
        if not output:
            raise UsageError("--output is missing: the folder of the index to change")
        with sole_writer(output, folder=False):
            edit(config, Path(output))
        return
    if not (settings.documents or settings.corpus):
        raise UsageError("--documents or --corpus is missing: a folder, or a JSONL file of passages (id, title, text)")
    if collection_server(output or ""):
        fill(config, output)
        return
    output = output or time.strftime("runs/index-%Y%m%d-%H%M%S")
    check_output(output)  # before the encoding, which may take hours
    with sole_writer(output, folder=False):  # the folder itself is replaced
        build(config, output)


def check(config: IndexConfig) -> None:
    """Raises UsageError if settings of cutting are given with passages that are cut already."""
    cuts = config.index.documents or (config.index.add and Path(config.index.add).is_dir())
    if not cuts and (given := [n for n, v in vars(config.chunking).items() if v != vars(DocumentSettings())[n]]):
        name = given[0].replace("_", "-")
        raise UsageError(f"--{name} is about --documents; passages of JSONL files are taken as they are: leave it out")


def build(config: IndexConfig, output: str) -> None:
    from r3lite.core.files import write_jsonl
    from r3lite.retrieval import building, index
    from r3lite.retrieval.index_size import choose

    settings = config.index
    documents, folder = passages_of(config)
    with building.gathered(output, documents) as made:
        device = device_of(settings)
        encoder = encoder_of(settings, made.passages, device)
        if building.replaces(made, encoder):
            print(f"replacing   the index of the same corpus in {output}")
        budget, count = budget_bytes(settings.memory_budget), len(made.passages)
        chosen = choose(settings.index_type, count, encoder.dimension, budget)
        print(f"index       {chosen.told()}", flush=True)
        start = time.perf_counter()
        kept = building.encode(made, encoder, chosen.kind)
        encoded = time.perf_counter()
        size = building.finish(made, encoder, chosen)
    if folder:
        write_jsonl(Path(output) / index.SKIPPED, folder.skipped_rows())
    style = f", style {encoder.settings['style']}" if "style" in encoder.settings else ""
    seconds, before = encoded - start, f"; {kept} had been encoded before" if kept else ""
    print(f"passages    {count}")
    print(f"encoder     {settings.encoder}{style}, {encoder.dimension} dimensions")
    print(f"encoded in  {seconds:.1f} s on {device}, {(count - kept) / max(seconds, 1e-9):.0f} passages/s{before}")
    print(f"indexed in  {time.perf_counter() - encoded:.1f} s, {size / (1 << 20):.1f} MiB")
    print(f"written to  {output}")


def fill(config: IndexConfig, address: str) -> None:
    """Writes the passages into a Qdrant collection, in place of an index folder."""
    from r3lite.retrieval import qdrant

    settings, defaults = config.index, IndexSettings()
    if settings.encoder == "hashing":
        raise UsageError("--encoder hashing weighs words by the corpus, which will be on the server: name a BERT")
    if (settings.index_type, settings.memory_budget) != (defaults.index_type, defaults.memory_budget):
        raise UsageError(f"{address} keeps vectors in its own way: leave --index-type and --memory-budget out")
    documents, _ = passages_of(config)
    device = device_of(settings)
    encoder = encoder_of(settings, [], device)
    start = time.perf_counter()
    encoded, count = qdrant.fill(address, documents, encoder)
    seconds = time.perf_counter() - start
    print(f"written     {encoded} passages in {seconds:.1f} s, encoded on {device}")
    print(f"passages    {count} in {address}")


def passages_of(config: IndexConfig) -> "tuple[Iterator[Document], Folder | None]":
    """The passages of --documents, with the folder that was read, or those of --corpus."""
    from r3lite.retrieval import corpus
    from r3lite.retrieval.documents.folder import read_folder

    settings = config.index
    if not settings.documents:
        return corpus.stream_corpora(settings.corpus, settings.skip_bad_rows), None
    folder = read_folder(settings.documents, config.chunking)
    print(folder.told(), flush=True)  # before the encoding, which may take hours
    return iter(folder.documents), folder


def encoder_of(settings: IndexSettings, passages: "Sequence[Document]", device: str) -> "Encoder":
    from r3lite.retrieval.encoder import make_encoder

    how = device, settings.batch_size, settings.encoder_dtype
    return make_encoder(settings.encoder, settings.encoder_style, passages, *how)


def device_of(settings: IndexSettings) -> str:
    from r3lite.devices.precision import resolve_device

    # Hashing has no use for a device, and a run without a card should not be warned of it.
    return "cpu" if settings.encoder == "hashing" else str(resolve_device(settings.device))


def edit(config: IndexConfig, output: Path) -> None:
    from r3lite.retrieval import corpus, editing, index
    from r3lite.retrieval.documents.folder import read_folder

    settings = config.index
    if settings.delete:
        print(f"deleted     {editing.delete(output, ids_of(settings.delete))} passages")
    if settings.add:
        if Path(settings.add).is_dir():
            folder = read_folder(settings.add, config.chunking)
            documents = folder.documents
            print(folder.told(), flush=True)
        else:
            documents = corpus.read_corpus(settings.add, settings.skip_bad_rows)
        device = device_of(settings)
        opened = index.load(
            output, settings.encoder, settings.encoder_style, device, settings.batch_size, settings.encoder_dtype
        )
        added, known = editing.add(output, opened, documents)
        print(f"added       {added} passages" + (f"; {known} were there already" if known else ""))
    print(f"passages    {len(index.read_documents(output))} in {output}")


def ids_of(named: tuple[str, ...]) -> Iterator[str]:
    """The ids that are named, and those that stand in a file that is named as @FILE, one a line."""
    from r3lite.core.files import read_text

    for name in named:
        if name.startswith("@"):
            yield from filter(None, read_text(name[1:], "--delete @FILE names a text file of ids.").splitlines())
        else:
            yield name


def plan(config: IndexConfig) -> str:
    """What the index would take, for a dry run, which does not load the encoder."""
    from r3lite.retrieval.documents.folder import read_folder
    from r3lite.retrieval.encoder import known_dimension
    from r3lite.retrieval.index_size import choose

    check(config)
    settings = config.index
    if settings.documents:
        count = len(read_folder(settings.documents, config.chunking).documents)
    elif settings.corpus:
        count = sum(count_lines(path) for path in settings.corpus)
    else:
        return "Nothing is estimated without --documents or --corpus."
    dimension = known_dimension(settings.encoder)
    assumed = "" if dimension else f" ({UNKNOWN} dimensions are assumed: the encoder is not on this machine)"
    chosen = choose(settings.index_type, count, dimension or UNKNOWN, budget_bytes(settings.memory_budget))
    return f"Estimate\n  {chosen.told()}{assumed}"


def count_lines(path: str) -> int:
    """Lines of a file that are not blank."""
    from r3lite.core.files import open_regular
    from r3lite.retrieval.corpus import REMEDY

    with open_regular(path, REMEDY) as file:
        return sum(1 for line in file if line.strip())


def main(argv: list[str] | None = None) -> int:
    return command.run("index", IndexConfig(), work, argv, plan)


if __name__ == "__main__":
    sys.exit(main())
