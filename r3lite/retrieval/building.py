"""What the command index does: builds an index folder of a corpus that need not fit into memory, changes one, or fills
a collection of a server. A build goes on after a kill.

The work is in `.<name>.build` beside the folder: the passages are written there, then their vectors, a block at a time;
of these the index is made, and the whole takes the folder's place. A block that is on the disk is not encoded again.
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
from r3lite.core.files import check_writable, move, names_in, read_record, read_text, sweep, write_json, write_jsonl
from r3lite.devices.precision import resolve_device
from r3lite.retrieval import corpus, index, qdrant
from r3lite.retrieval.corpus import Passages, write_passages
from r3lite.retrieval.documents.folder import Folder, read_folder
from r3lite.retrieval.encoder import HASHING, Encoder, HashingEncoder, make_encoder
from r3lite.retrieval.vectors import BLOCK, Estimate, VectorFile, build_vectors, choose, write_vectors
from r3lite.settings import DocumentSettings, IndexSettings
from r3lite.settings.common import budget_bytes

WAITING, PLAN = "vectors.bin", "build.json"  # vectors that wait for their index; what they are the vectors of


@dataclass(frozen=True)
class Gathered:
    """The passages of an index that is being built."""

    folder: Path  # that the index will be
    work: Path
    passages: Passages
    fingerprint: str


def check_output(folder: str | Path) -> Path:
    """The full path of the folder, where an index may be written: it is new, empty, or an index and nothing else.

    Makes the folders above it, so that encoding, which may take hours, does not begin where nothing can be written.
    """
    remedy = "Pass a new or empty folder as --output."
    with explained((OSError, ValueError), f"the index {folder} cannot be written", remedy):
        folder = Path(folder).resolve()  # ValueError: a name that no folder can have
        check_writable(folder.parent)
        if _old(folder).exists() and not folder.exists():
            move(_old(folder), folder)  # a kill came before the new index was in its place
        names = names_in(folder)
    if folder == Path.cwd() or folder.is_mount():  # an index is written beside the folder and takes its place
        raise R3LiteError(f"{folder} cannot be replaced by an index", "Pass a folder in it as --output.")
    if foreign := {n for n in names - index.OWN - {WAITING, PLAN} if not index.PARTS.fullmatch(n)}:
        raise R3LiteError(f"{folder} exists and is not an index: it holds {min(foreign)}", remedy)
    if names:
        with explained(R3LiteError, f"{folder} already exists", remedy):
            index.read_manifest(folder)
    return folder


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


@contextlib.contextmanager
def gathered(folder: str | Path, documents: Iterable[Document]) -> Iterator[Gathered]:
    """The passages, written one at a time where the index of `folder` is built.

    What is there stays at an error if it has vectors, which cost time: the next start goes on with them.
    """
    folder = check_output(folder)
    work = folder.with_name(f".{folder.name}.build")
    work.mkdir(exist_ok=True)
    sweep(work)
    try:
        fingerprint = write_passages(work, documents)
        with contextlib.closing(Passages(work, None, np.empty(0, np.int64), "")) as passages:
            yield Gathered(folder, work, passages, fingerprint)
    finally:
        if not (work / WAITING).exists():
            shutil.rmtree(work, ignore_errors=True)


def replaces(build: Gathered, encoder: Encoder) -> bool:
    """Whether the folder holds an index already; R3LiteError if of another corpus or encoder."""
    folder, remedy = build.folder, "Pass another --output, or delete that index first."
    if not (folder / index.MANIFEST).exists():
        return False
    kept = index.read_manifest(folder)
    for key, now in ((key, encoder.settings.get(key)) for key in ("encoder", "style")):
        if (then := kept.text(key, None)) != now:
            raise R3LiteError(f"{folder} holds an index with {key} {then}, not {now}", remedy)
    if kept.text("fingerprint") != build.fingerprint:
        raise R3LiteError(f"{folder} holds an index of another corpus, or of an older version of this one", remedy)
    return True


def encode(build: Gathered, encoder: Encoder, kind: str) -> int:
    """Writes the vectors that are not on the disk yet; returns how many there were.

    Blocks are the same after a kill as without one, and so are their bytes. R3LiteError if the vectors that are there
    are of other passages or another encoder.
    """
    waiting = VectorFile(build.work / WAITING, encoder.dimension, kind)
    kept = _kept(build, encoder, waiting)
    for vectors in index.encoded(encoder, build.passages, kept):
        waiting.append(vectors)
    return kept


def _kept(build: Gathered, encoder: Encoder, waiting: VectorFile) -> int:
    """Vectors of an earlier start of the same build that are used; what is behind their last whole block is cut off."""
    plan = {"fingerprint": build.fingerprint, "numbers": waiting.type.name} | encoder.settings
    path = build.work / PLAN
    if not len(waiting) or not path.exists():
        waiting.path.unlink(missing_ok=True)
        write_json(path, plan)
        return 0
    remedy = f"Repeat the earlier command, pass another --output, or delete {build.work} to start over."
    then = read_record(path, remedy).values
    if changed := [key for key in {**then, **plan} if then.get(key) != plan.get(key)]:
        what = {"fingerprint": "corpus", "numbers": "--index-type"}.get(changed[0], changed[0])
        raise R3LiteError(f"{build.work} holds an unfinished build of {build.folder} with another {what}", remedy)
    n = len(build.passages)
    rows = len(waiting) if len(waiting) == n else len(waiting) // BLOCK * BLOCK
    waiting.cut(rows)
    if 0 < rows < n:
        fresh = encoder.encode_passages([build.passages[rows - 1]], lambda count: None)
        if not index.same_vectors(fresh, waiting.read(rows - 1, 1)):
            raise R3LiteError(f"{build.work} was started with another {plan['encoder']}: the vectors differ", remedy)
    return rows


def finish(build: Gathered, encoder: Encoder, estimate: Estimate) -> int:
    """Makes the index of the vectors and puts it into its place; returns the bytes of its file."""
    folder, work, old = build.folder, build.work, _old(build.folder)
    waiting, n = VectorFile(work / WAITING, encoder.dimension, estimate.kind), len(build.passages)
    write_vectors(build_vectors(estimate.kind, waiting), work / index.VECTORS)
    np.concatenate([waiting.read(i, 1) for i in index.probed(n)]).astype("<f4").tofile(work / index.PROBES)
    if isinstance(encoder, HashingEncoder):
        encoder.save(work)  # its words, which its vectors depend on
    manifest = {"version": index.VERSION, "passages": n, "fingerprint": build.fingerprint, "kind": estimate.kind}
    manifest |= {"probed": n, "files": {index.VECTORS: index.digest(work / index.VECTORS)}} | encoder.settings
    write_json(work / index.MANIFEST, manifest)
    build.passages.close()
    shutil.rmtree(old, ignore_errors=True)
    try:
        if folder.exists():
            move(folder, old)
        move(work, folder)
    finally:
        if old.exists() and not folder.exists():
            move(old, folder)  # the new one did not come into its place
        shutil.rmtree(old, ignore_errors=True)
    for name in (WAITING, PLAN):
        with contextlib.suppress(OSError):
            (folder / name).unlink()
    return (folder / index.VECTORS).stat().st_size


def build(settings: IndexSettings, chunking: DocumentSettings, output: str) -> None:
    """Builds the index folder, in place of an index of the same passages."""
    documents, folder = passages_of(settings, chunking)
    with gathered(output, documents) as made:
        device = device_of(settings)
        encoder = make_encoder(settings, made.passages, device, settings.batch_size)
        if replaces(made, encoder):
            print(f"replacing   the index of the same corpus in {output}")
        count = len(made.passages)
        chosen = choose(settings.index_type, count, encoder.dimension, budget_bytes(settings.memory_budget))
        print(f"index       {chosen.summary()}", flush=True)
        start = time.perf_counter()
        kept = encode(made, encoder, chosen.kind)
        encoded = time.perf_counter()
        size = finish(made, encoder, chosen)
    if folder:
        skipped = (dict(zip(("path", "reason", "detail"), left_out, strict=True)) for left_out in folder.skipped)
        write_jsonl(Path(output) / index.SKIPPED, skipped)
    style = f", style {encoder.settings['style']}" if "style" in encoder.settings else ""
    seconds, before = encoded - start, f"; {kept} were already encoded" if kept else ""
    print(f"passages    {count}")
    print(f"encoder     {settings.encoder}{style}, {encoder.dimension} dimensions")
    print(f"encoded in  {seconds:.1f} s on {device}, {(count - kept) / max(seconds, 1e-9):.0f} passages/s{before}")
    print(f"indexed in  {time.perf_counter() - encoded:.1f} s, {size / (1 << 20):.1f} MiB")
    print(f"written to  {output}")


def fill(settings: IndexSettings, chunking: DocumentSettings, address: str) -> None:
    """Writes the passages into a Qdrant collection, in place of an index folder."""
    if settings.encoder == HASHING:
        raise UsageError("--encoder hashing does not work with Qdrant: pass a BERT")
    documents, _ = passages_of(settings, chunking)
    device = device_of(settings)
    encoder, start = make_encoder(settings, [], device, settings.batch_size), time.perf_counter()
    encoded, count = qdrant.fill(address, documents, encoder)
    print(f"written     {encoded} passages in {time.perf_counter() - start:.1f} s, encoded on {device}")
    print(f"passages    {count} in {address}")


def passages_of(settings: IndexSettings, chunking: DocumentSettings) -> tuple[Iterator[Document], Folder | None]:
    """The passages of --documents, with the folder that was read, or those of --corpus."""
    if not settings.documents:
        return corpus.stream_corpora(settings.corpus, settings.skip_bad_rows), None
    folder = read_folder(settings.documents, chunking)
    print(folder.summary(), flush=True)  # before the encoding, which may take hours
    return iter(folder.documents), folder


def device_of(settings: IndexSettings) -> str:
    # Hashing has no use for a device, and a run without a card should not be warned of it.
    return "cpu" if settings.encoder == HASHING else str(resolve_device(settings.device))


def edit(settings: IndexSettings, chunking: DocumentSettings, output: Path) -> None:
    """Deletes passages of an index folder, then adds some."""
    index.tidy(output, index.Folder(output).digests)
    sweep(output)
    if settings.delete:
        deleted, before = index.delete(output, ids_of(settings.delete))
        print(f"deleted     {deleted} passages" + (f"; {before} were deleted before" if before else ""))
    if settings.add:
        named = {"documents": settings.add} if Path(settings.add).is_dir() else {"corpus": (settings.add,)}
        documents = list(passages_of(replace(settings, **named), chunking)[0])
        there = index.load(output, settings, device_of(settings), settings.batch_size)
        added, known = index.add(output, there, documents)
        print(f"added       {added} passages" + (f"; skipped {known} that were already in the index" if known else ""))
    print(f"passages    {len(index.read_documents(output))} in {output}")


def ids_of(named: tuple[str, ...]) -> Iterator[str]:
    """The ids that are named, and those that stand in a file that is named as @FILE, one a line."""
    for name in named:
        if name.startswith("@"):
            yield from filter(None, read_text(name[1:], "@FILE must be a text file of ids.").splitlines())
        else:
            yield name
