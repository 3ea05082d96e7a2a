"""The work of the command `index`: builds an index folder from a corpus that need not fit into memory, changes an index
folder, or fills a Qdrant collection. After a kill, the same command goes on with the build.

A build works in the folder `.<name>.build` beside the index folder. It writes the passages there, then their vectors, a
block at a time, and makes the index from these vectors. Then the work folder takes the place of the index folder. A
block of vectors that is already on the disk is not encoded again.
"""

import contextlib
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from r3lite.core.config import UsageError
from r3lite.core.episode import Document
from r3lite.core.errors import R3LiteError, explained
from r3lite.core.files import (
    check_writable,
    move,
    names_in,
    read_record,
    read_text,
    sweep,
    write_bytes,
    write_json,
    write_jsonl,
)
from r3lite.devices.precision import resolve_device
from r3lite.retrieval import corpus, index, qdrant
from r3lite.retrieval.corpus import Passages, write_passages
from r3lite.retrieval.documents.folder import DocumentFolder, read_folder
from r3lite.retrieval.encoder import HASHING, Encoder, HashingEncoder, make_encoder, stored_name
from r3lite.retrieval.vectors import BLOCK, Estimate, VectorFile, build_vectors, choose, write_vectors
from r3lite.settings import DocumentSettings, IndexSettings
from r3lite.settings.common import budget_bytes

VECTORS_SO_FAR = "vectors.bin"  # the vectors of a build; once all are there, the index is made of them
ORIGIN = "build.json"  # what these vectors depend on: the corpus's fingerprint, their dtype and the encoder's settings


@dataclass(frozen=True)
class IndexBuild:
    """An index that is being built. Its passages are already written."""

    folder: Path  # where the index will be
    work: Path  # the work folder beside it
    passages: Passages
    fingerprint: str  # of the passages


def check_output(folder: str | Path) -> Path:
    """Returns the full path of a folder where an index may be written: it is new, empty, or an index and nothing else.

    Makes the folders above it, so that encoding, which may take hours, does not begin where nothing can be written.
    Raises R3LiteError if no index may be written there.
    """
    remedy = "Pass a new or empty folder as --output."
    with explained((OSError, ValueError), f"the index {folder} cannot be written", remedy, code="index-unwritable"):
        folder = Path(folder).resolve()  # ValueError: a name that no folder can have
        check_writable(folder.parent)
        if _old(folder).exists() and not folder.exists():
            move(_old(folder), folder)  # a kill came after the old index was put aside
    check_folder(folder)
    return folder


def check_folder(folder: Path) -> None:
    """Raises R3LiteError if a folder holds anything but an index, or cannot be replaced by an index."""
    remedy = "Pass a new or empty folder as --output."
    with explained(OSError, f"the index {folder} cannot be written", remedy, code="index-unwritable"):
        names = names_in(folder)
    if folder == Path.cwd() or folder.is_mount():  # an index is written beside the folder and takes its place
        raise R3LiteError(
            f"{folder} cannot be replaced by an index", "Pass a folder in it as --output.", code="folder-not-replaced"
        )
    unknown = names - index.INDEX_FILES - {VECTORS_SO_FAR, ORIGIN}
    foreign = {name for name in unknown if not index.VECTOR_FILES.fullmatch(name)}
    if foreign:
        raise R3LiteError(f"{folder} exists and is not an index: it holds {min(foreign)}", remedy, code="not-an-index")
    if names:
        with explained(R3LiteError, f"{folder} already exists", remedy, code="output-exists"):
            index.read_manifest(folder)


def _old(folder: Path) -> Path:
    """Returns where an index is put aside while the new one takes its place."""
    return folder.with_name(f".{folder.name}.old")


@contextlib.contextmanager
def open_build(folder: str | Path, documents: Iterable[Document]) -> Iterator[IndexBuild]:
    """Writes the passages into the work folder of an index, one at a time, and yields the build.

    After an error the work folder is removed, unless it has vectors: the next start goes on with them.
    """
    folder = check_output(folder)
    work = folder.with_name(f".{folder.name}.build")
    work.mkdir(exist_ok=True)
    sweep(work)
    try:
        fingerprint = write_passages(work, documents)
        none_deleted = np.empty(0, np.int64)
        work_passages = Passages(work, places=None, deleted=none_deleted, remedy="")
        with contextlib.closing(work_passages) as passages:
            yield IndexBuild(folder, work=work, passages=passages, fingerprint=fingerprint)
    finally:
        if not (work / VECTORS_SO_FAR).exists():
            shutil.rmtree(work, ignore_errors=True)


def replaces_index(build: IndexBuild, encoder: Encoder) -> bool:
    """Returns True if the folder has an index already.

    Raises R3LiteError if that index is of another corpus, encoder or style.
    """
    folder = build.folder
    remedy = "Pass another --output, or delete that index first."
    if not (folder / index.MANIFEST).exists():
        return False
    manifest = index.read_manifest(folder)
    for key in ("encoder", "style"):
        existing = manifest.text(key, None)
        if key == "encoder":
            existing = stored_name(existing)
        requested = encoder.settings.get(key, "plain")  # the hashing encoder has no style
        if existing != requested:
            raise R3LiteError(
                f"{folder} holds an index with {key} {existing}, not {requested}", remedy, code="index-setting-differs"
            )
    if manifest.text("fingerprint") != build.fingerprint:
        raise R3LiteError(
            f"{folder} holds an index of another corpus, or of an older version of this one",
            remedy,
            code="index-corpus-differs",
        )
    return True


def encode(build: IndexBuild, encoder: Encoder, kind: str) -> int:
    """Writes the vectors that cannot be reused from an earlier start of this build; returns how many are reused.

    The vectors have the same bytes whether or not there was a kill. Raises R3LiteError if the earlier vectors are of
    other passages, another encoder or another dtype, or if a vector is not finite.
    """
    file = VectorFile(build.work / VECTORS_SO_FAR, encoder.dimension, kind)
    reused = _cut_to_reusable(build, encoder, file)
    for vectors in index.encoded(encoder, build.passages, reused):
        file.append(vectors)
    return reused


def _cut_to_reusable(build: IndexBuild, encoder: Encoder, file: VectorFile) -> int:
    """Cuts the file of an earlier start of this build to the vectors that can be reused; returns their number.

    If the file is complete, all its vectors can be reused; otherwise only those of whole blocks, because a block is
    encoded as one. Without an earlier start, records what the vectors depend on. Raises R3LiteError if the earlier
    vectors depend on something else.
    """
    origin = {"fingerprint": build.fingerprint, "numbers": file.type.name} | encoder.settings
    path = build.work / ORIGIN
    if not len(file) or not path.exists():
        file.path.unlink(missing_ok=True)
        write_json(path, origin)
        return 0
    remedy = f"Repeat the earlier command, pass another --output, or delete {build.work} to start over."
    earlier_origin = read_record(path, remedy).values
    for key in {**earlier_origin, **origin}:
        if earlier_origin.get(key) != origin.get(key):
            part = {"fingerprint": "corpus", "numbers": "--index-type"}.get(key, key)
            raise R3LiteError(
                f"{build.work} holds an unfinished build of {build.folder} with another {part}",
                remedy,
                code="unfinished-build-differs",
            )
    n = len(build.passages)
    reusable = len(file)
    if reusable != n:
        reusable = reusable // BLOCK * BLOCK
    file.cut(reusable)
    if reusable:
        # The last of these vectors is encoded again: it differs if the encoder has other weights now.
        last = reusable - 1
        recomputed = encoder.encode_passages([build.passages[last]], lambda count: None)
        if not index.same_vectors(recomputed, file.read(last, 1)):
            raise R3LiteError(
                f"{build.work} was started with another {origin['encoder']}: the vectors differ",
                remedy,
                code="build-encoder-differs",
            )
    return reusable


def write_index(build: IndexBuild, encoder: Encoder, estimate: Estimate) -> int:
    """Makes the index from the vectors and moves it to its place; returns the size of its file of vectors in bytes."""
    folder = build.folder
    work = build.work
    n = len(build.passages)
    file = VectorFile(work / VECTORS_SO_FAR, encoder.dimension, estimate.kind)
    write_vectors(build_vectors(estimate.kind, file), work / index.VECTORS)
    probes = np.concatenate([file.read(place, 1) for place in index.probe_places(n)])
    write_bytes(work / index.PROBES, probes.astype("<f4").tobytes())
    if isinstance(encoder, HashingEncoder):
        encoder.save(work)  # its words, which its vectors depend on
    manifest = {
        "version": index.VERSION,
        "passages": n,
        "fingerprint": build.fingerprint,
        "kind": estimate.kind,
        "probed": n,  # the number of passages when the probes were written
        "files": {index.VECTORS: index.digest(work / index.VECTORS)},
    }
    write_json(work / index.MANIFEST, manifest | encoder.settings)
    build.passages.close()
    _replace(folder, work)
    for name in (VECTORS_SO_FAR, ORIGIN):
        with contextlib.suppress(OSError):
            (folder / name).unlink()
    return (folder / index.VECTORS).stat().st_size


def _replace(folder: Path, work: Path) -> None:
    """Moves the work folder to the place of the index folder; restores the old index if that fails."""
    old = _old(folder)
    shutil.rmtree(old, ignore_errors=True)
    try:
        if folder.exists():
            move(folder, old)
        move(work, folder)
    finally:
        if old.exists() and not folder.exists():
            move(old, folder)  # the new index is not in its place
        shutil.rmtree(old, ignore_errors=True)


def build_folder(settings: IndexSettings, chunking: DocumentSettings, output: str) -> None:
    """Builds the index folder `output`. An index of the same passages, encoder and style that is there is replaced.

    Raises R3LiteError if something else is there.
    """
    documents, folder = passages_of(settings, chunking, is_listed=True)
    with open_build(output, documents) as build:
        device = device_of(settings)
        encoder = _encoder(settings, build.passages, device)
        if replaces_index(build, encoder):
            print(f"replacing   the index of the same corpus in {output}")
        count = len(build.passages)
        estimate = choose(
            settings.index_type,
            passages=count,
            dimension=encoder.dimension,
            budget=budget_bytes(settings.memory_budget),
        )
        print(f"index       {estimate.summary()}", flush=True)
        start = time.perf_counter()
        reused = encode(build, encoder, estimate.kind)
        encoding_end = time.perf_counter()
        size = write_index(build, encoder, estimate)
    if folder:
        skipped = ({"path": path, "reason": reason, "detail": detail} for path, reason, detail in folder.skipped)
        write_jsonl(Path(output) / index.SKIPPED, skipped)
    style = f", style {encoder.settings['style']}" if "style" in encoder.settings else ""
    seconds = encoding_end - start
    rate = (count - reused) / max(seconds, 1e-9)
    note = f"; {reused} were already encoded" if reused else ""
    print(f"passages    {count}")
    print(f"encoder     {settings.encoder}{style}, {encoder.dimension} dimensions")
    print(f"encoded in  {seconds:.1f} s on {device}, {rate:.0f} passages/s{note}")
    print(f"indexed in  {time.perf_counter() - encoding_end:.1f} s, {size / (1 << 20):.1f} MiB")
    print(f"written to  {output}")


def _encoder(settings: IndexSettings, passages: Iterable[Document], device: str) -> Encoder:
    return make_encoder(settings, documents=passages, device=device, batch_size=settings.batch_size)


def fill(settings: IndexSettings, chunking: DocumentSettings, address: str) -> None:
    """Writes the passages into a Qdrant collection; no index folder is written."""
    if settings.encoder == HASHING:
        raise UsageError("--encoder hashing does not work with Qdrant: pass a BERT", code="hashing-with-qdrant")
    documents, _ = passages_of(settings, chunking)
    device = device_of(settings)
    encoder = _encoder(settings, [], device)
    start = time.perf_counter()
    encoded, count = qdrant.fill(address, documents, encoder)
    print(f"written     {encoded} passages in {time.perf_counter() - start:.1f} s, encoded on {device}")
    print(f"passages    {count} in {address}")


def passages_of(
    settings: IndexSettings,
    chunking: DocumentSettings,
    is_listed: bool = False,
) -> tuple[Iterator[Document], DocumentFolder | None]:
    """Returns the passages of --documents and what was read of that folder; or the passages of --corpus, and None.

    Prints a summary of the folder. `is_listed` tells whether the caller writes a list of the files that were skipped.
    """
    if not settings.documents:
        return corpus.stream_corpora(settings.corpus, settings.skip_bad_rows), None
    folder = read_folder(settings.documents, chunking)
    print(folder.summary(is_listed), flush=True)  # before the encoding, which may take hours
    return iter(folder.documents), folder


def device_of(settings: IndexSettings) -> str:
    """Returns the name of the encoder's device."""
    # Hashing has no use for a device, so `resolve_device` must not warn of an unused card.
    if settings.encoder == HASHING:
        return "cpu"
    return str(resolve_device(settings.device))


def edit(settings: IndexSettings, chunking: DocumentSettings, output: Path) -> None:
    """Deletes the passages of --delete from an index folder, then adds those of --add."""
    index.tidy(output, index.IndexFolder(output).digests)  # removes what a killed edit left
    sweep(output)
    if settings.delete:
        deleted, deleted_before = index.delete(output, ids_of(settings.delete))
        note = f"; {deleted_before} were deleted before" if deleted_before else ""
        print(f"deleted     {deleted} passages{note}")
    if settings.add:
        if Path(settings.add).is_dir():
            source = replace(settings, documents=settings.add)
        else:
            source = replace(settings, corpus=(settings.add,))
        documents, _ = passages_of(source, chunking)
        documents = list(documents)
        opened = index.load(
            output,
            settings,
            device=device_of(settings),
            batch_size=settings.batch_size,
        )
        added, skipped = index.add(output, opened, documents)
        note = f"; skipped {skipped} that were already in the index" if skipped else ""
        print(f"added       {added} passages{note}")
    print(f"passages    {len(index.read_documents(output))} in {output}")


def ids_of(entries: tuple[str, ...]) -> Iterator[str]:
    """Yields the ids of --delete. An entry is an id, or @FILE: the ids in that file, one a line."""
    for entry in entries:
        if entry.startswith("@"):
            lines = read_text(entry[1:], "@FILE must be a text file of ids.").splitlines()
            yield from filter(None, lines)
        else:
            yield entry
