"""Builds a FAISS index of a corpus or of a folder of documents, for `--index` of the other commands."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from r3lite import command
from r3lite.config import UsageError
from r3lite.settings import Common, DocumentSettings, IndexSettings


@dataclass(frozen=True)
class IndexConfig:
    """Encodes the passages of --documents or --corpus and writes them, their vectors and a manifest into the folder
    --output. What it left out of --documents is told, and all of it is in skipped.jsonl there.

    Other commands search it with --index FOLDER and the same --encoder. Training retrieves on the CPU in any case;
    only here the encoder may use a GPU.
    """

    common: Common = Common()
    index: IndexSettings = IndexSettings()
    chunking: DocumentSettings = DocumentSettings()


def build_index(config: IndexConfig) -> None:
    from r3lite.files import sole_writer
    from r3lite.retrieval.index import check_output

    if not (config.index.documents or config.index.corpus):
        raise UsageError("--documents or --corpus is missing: a folder, or a JSONL file of passages (id, title, text)")
    output = config.common.output or time.strftime("runs/index-%Y%m%d-%H%M%S")
    check_output(output)  # before the encoding, which may take hours
    with sole_writer(output, folder=False):  # the folder itself is replaced
        encode(config, output)


def encode(config: IndexConfig, output: str) -> None:
    from r3lite.devices.precision import resolve_device
    from r3lite.files import write_jsonl
    from r3lite.retrieval import index
    from r3lite.retrieval.corpus import read_corpus
    from r3lite.retrieval.documents.folder import read_folder
    from r3lite.retrieval.encoder import make_encoder

    settings = config.index
    if settings.documents:
        folder = read_folder(settings.documents, config.chunking)
        documents = folder.documents
        print(folder.told(), flush=True)  # before the encoding, which may take hours
    else:
        documents = read_corpus(settings.corpus, settings.skip_bad_rows)
    # Hashing has no use for a device, and a run without a card should not be warned of it.
    device = "cpu" if settings.encoder == "hashing" else str(resolve_device(settings.device))
    encoder = make_encoder(settings.encoder, settings.encoder_style, documents, device, settings.batch_size)
    if index.replaces(output, encoder, documents):
        print(f"replacing   the index of the same corpus in {output}")
    start = time.perf_counter()
    built = index.build(encoder, documents)
    seconds = time.perf_counter() - start
    built.save(output)
    if settings.documents:
        write_jsonl(Path(output) / index.SKIPPED, folder.skipped_rows())
    style = f", style {encoder.settings['style']}" if "style" in encoder.settings else ""
    print(f"passages    {len(documents)}")
    print(f"encoder     {settings.encoder}{style}, {encoder.dimension} dimensions")
    print(f"encoded in  {seconds:.1f} s on {device}, {len(documents) / max(seconds, 1e-9):.0f} passages/s")
    print(f"written to  {output}")


def main(argv: list[str] | None = None) -> int:
    return command.run("index", IndexConfig(), build_index, argv)


if __name__ == "__main__":
    sys.exit(main())
