"""Builds an index folder of passages or changes one, or fills a collection of a server, and tells what came of it."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from r3lite.core.config import UsageError
from r3lite.core.episode import Document
from r3lite.core.files import read_text, sweep, write_jsonl
from r3lite.devices.precision import resolve_device
from r3lite.retrieval import building, corpus, editing, index, qdrant
from r3lite.retrieval.documents.folder import Folder, read_folder
from r3lite.retrieval.encoder import make_encoder
from r3lite.retrieval.index_size import choose
from r3lite.settings import DocumentSettings, IndexSettings
from r3lite.settings.common import budget_bytes


def build(settings: IndexSettings, chunking: DocumentSettings, output: str) -> None:
    """Builds the index folder, in place of an index of the same passages."""
    documents, folder = passages_of(settings, chunking)
    with building.gathered(output, documents) as made:
        device = device_of(settings)
        encoder = make_encoder(settings, made.passages, device, settings.batch_size)
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
        skipped = [{"path": path, "reason": reason, "detail": detail} for path, reason, detail in folder.skipped]
        write_jsonl(Path(output) / index.SKIPPED, skipped)
    style = f", style {encoder.settings['style']}" if "style" in encoder.settings else ""
    seconds, before = encoded - start, f"; {kept} had been encoded before" if kept else ""
    print(f"passages    {count}")
    print(f"encoder     {settings.encoder}{style}, {encoder.dimension} dimensions")
    print(f"encoded in  {seconds:.1f} s on {device}, {(count - kept) / max(seconds, 1e-9):.0f} passages/s{before}")
    print(f"indexed in  {time.perf_counter() - encoded:.1f} s, {size / (1 << 20):.1f} MiB")
    print(f"written to  {output}")


def fill(settings: IndexSettings, chunking: DocumentSettings, address: str) -> None:
    """Writes the passages into a Qdrant collection, in place of an index folder."""
    if settings.encoder == "hashing":
        raise UsageError("--encoder hashing weighs words by the corpus, which will be on the server: name a BERT")
    documents, _ = passages_of(settings, chunking)
    device = device_of(settings)
    encoder = make_encoder(settings, [], device, settings.batch_size)
    start = time.perf_counter()
    encoded, count = qdrant.fill(address, documents, encoder)
    seconds = time.perf_counter() - start
    print(f"written     {encoded} passages in {seconds:.1f} s, encoded on {device}")
    print(f"passages    {count} in {address}")


def passages_of(settings: IndexSettings, chunking: DocumentSettings) -> tuple[Iterator[Document], Folder | None]:
    """The passages of --documents, with the folder that was read, or those of --corpus."""
    if not settings.documents:
        return corpus.stream_corpora(settings.corpus, settings.skip_bad_rows), None
    folder = read_folder(settings.documents, chunking)
    print(folder.told(), flush=True)  # before the encoding, which may take hours
    return iter(folder.documents), folder


def device_of(settings: IndexSettings) -> str:
    # Hashing has no use for a device, and a run without a card should not be warned of it.
    return "cpu" if settings.encoder == "hashing" else str(resolve_device(settings.device))


def edit(settings: IndexSettings, chunking: DocumentSettings, output: Path) -> None:
    """Deletes passages of an index folder, then adds some."""
    editing.tidy(output, index.parts(index.read_manifest(output)))
    sweep(output)
    if settings.delete:
        print(f"deleted     {editing.delete(output, ids_of(settings.delete))} passages")
    if settings.add:
        named = {"documents": settings.add} if Path(settings.add).is_dir() else {"corpus": (settings.add,)}
        documents = list(passages_of(replace(settings, **named), chunking)[0])
        opened = index.load(output, settings, device_of(settings), settings.batch_size)
        added, known = editing.add(output, opened, documents)
        print(f"added       {added} passages" + (f"; {known} were there already" if known else ""))
    print(f"passages    {len(index.read_documents(output))} in {output}")


def ids_of(named: tuple[str, ...]) -> Iterator[str]:
    """The ids that are named, and those that stand in a file that is named as @FILE, one a line."""
    for name in named:
        if name.startswith("@"):
            yield from filter(None, read_text(name[1:], "--delete @FILE names a text file of ids.").splitlines())
        else:
            yield name
