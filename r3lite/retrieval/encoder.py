"""Encoders: they turn queries and passages into vectors whose inner product is the similarity.

Owns the conventions of published encoders (prefixes, pooling, lengths) and the hashing TF-IDF encoder; knows nothing of
FAISS. Vectors are float32 [N, dimension] of length 1.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from huggingface_hub import try_to_load_from_cache

from r3lite.episode import Document
from r3lite.errors import R3LiteError
from r3lite.files import read_record, read_text, within, write_json
from r3lite.models.bert import load_bert
from r3lite.records import Record, Source
from r3lite.retrieval.bert_folder import LONGEST, REMEDY, SHORTEST, Batch, batches, model_folder, optional, wordpiece

HASHING = "hashing"
PREFIXES = {"e5": ("query: ", "passage: "), "plain": ("", "")}
MODULES = ("Transformer", "Pooling", "Normalize")  # of sentence-transformers, which BertEncoder computes


class Encoder(Protocol):
    """What an index needs of an encoder. `advance(n)` is told of every n passages that are done."""

    dimension: int
    settings: dict  # what makes vectors comparable; stored with an index and compared when it is opened

    def encode_queries(self, queries: list[str]) -> np.ndarray: ...

    def encode_passages(self, documents: list[Document], advance: Callable[[int], object]) -> np.ndarray: ...

    def save(self, folder: Path) -> None:
        """Writes what must be kept beside the vectors."""


def make_encoder(
    name: str, style: str, documents: Iterable[Document], device: str = "cpu", batch_size: int = 32
) -> Encoder:
    """The encoder for a new index of `documents`. `style` is e5, plain or auto (e5 if the name says so)."""
    if name == HASHING:
        return HashingEncoder.fit(map(passage_text, documents))
    return BertEncoder(name, style_of(name) if style == "auto" else style, device, batch_size)


def reopen_encoder(name: str, style: str, folder: Path, device: str = "cpu", batch_size: int = 32) -> Encoder:
    """The encoder of an index that is kept in `folder`, for its queries and for passages that are added."""
    return HashingEncoder.load(folder) if name == HASHING else BertEncoder(name, style, device, batch_size)


def known_dimension(name: str) -> int | None:
    """The dimensions of an encoder that is on this machine, without loading it; None if it is not here."""
    if name == HASHING:
        return HashingEncoder.DIMENSION
    path = Path(name) / "config.json" if Path(name).is_dir() else try_to_load_from_cache(name, "config.json")
    return read_record(Path(path), REMEDY).whole("hidden_size", low=1) if isinstance(path, (str, Path)) else None


def style_of(name: str) -> str:
    """e5 for intfloat/e5-base-v2, multilingual-e5-small, ./my_e5/ and their kind; plain otherwise."""
    return "e5" if "e5" in re.split(r"[^a-z0-9]+", Path(name).name.lower()) else "plain"


def passage_text(document: Document) -> str:
    return f"{document.title} {document.text}" if document.title else document.text


class BertEncoder:
    """A BERT sentence encoder: masked mean of the last hidden states, scaled to length 1.

    With style e5 queries and passages get the prefixes that E5 was trained with (arXiv 2212.03533); with style plain,
    such as all-MiniLM-L6-v2, none.
    """

    def __init__(self, name: str, style: str, device: str = "cpu", batch_size: int = 32):
        folder = model_folder(name, "--encoder", "--encoder hashing needs no download.")
        _check_pooling(folder)
        self.model = load_bert(folder, device=device)
        self.device, self.batch_size = device, batch_size
        self.query_prefix, self.passage_prefix = PREFIXES[style]
        self.dimension = self.model.config.hidden_size
        config = optional(folder / "sentence_bert_config.json")
        self.lower = config.flag("do_lower_case", False)
        length = config.whole("max_seq_length", LONGEST, low=SHORTEST)
        length = min(length, LONGEST, self.model.config.max_position_embeddings)
        self.tokenizer = wordpiece(folder / "tokenizer.json", length, self.model.config.vocab_size)
        self.settings = {"encoder": name, "style": style, "max_length": length, "dimension": self.dimension}

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        return self._encode([self.query_prefix + q for q in queries], lambda n: None)

    def encode_passages(self, documents: list[Document], advance: Callable[[int], object]) -> np.ndarray:
        return self._encode([self.passage_prefix + passage_text(d) for d in documents], advance)

    def save(self, folder: Path) -> None:
        pass

    def encode_tokens(self, texts: list[str]) -> list[np.ndarray]:
        """The last hidden states [T, C] of each text's tokens, [CLS] and [SEP] among them; texts get no prefix."""
        found: list[np.ndarray] = [np.empty(0)] * len(texts)
        for batch, hidden in self._hidden(texts):
            for row, states, length in zip(batch.rows, hidden.cpu().numpy(), batch.real.sum(1).tolist()):
                found[row] = states[:length]
        return found

    def _encode(self, texts: list[str], advance: Callable[[int], object]) -> np.ndarray:
        """Vectors [N, C] of N texts."""
        out = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for batch, hidden in self._hidden(texts):
            mean = (hidden * batch.real[..., None]).sum(1) / batch.real.sum(1, keepdim=True)  # [B, C]
            out[batch.rows] = torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()
            advance(len(batch.rows))
        return out

    @torch.inference_mode()
    def _hidden(self, texts: list[str]) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Batches of texts with their last hidden states [B, T, C]."""
        encodings = self.tokenizer.encode_batch([t.lower() for t in texts] if self.lower else texts)
        for batch in batches(encodings, self.batch_size, self.device):
            yield batch, self.model(batch.tokens, batch.real).float()


def _check_pooling(folder: Path) -> None:
    """Raises R3LiteError if vectors are made in another way than by the mean over tokens."""
    path, pooling = folder / "modules.json", "1_Pooling"
    if path.exists():
        listed = Record({"modules": within(path, REMEDY, read_text(path, REMEDY))}, Source(str(path), REMEDY))
        for module in listed.records("modules"):
            kind = module.text("type").rpartition(".")[2]
            if kind not in MODULES:
                raise module.error(f"{module.path}type is {kind}, not one of {', '.join(MODULES)}")
            if kind == "Transformer" and (place := module.text("path", "", blank=True)):
                raise module.error(f"{module.path}path is {place}; the Transformer must be in the folder itself")
            pooling = module.text("path") if kind == "Pooling" else pooling
        if Path(pooling).name != pooling or pooling == "..":
            raise listed.error(f"the folder {pooling} of Pooling is not in the encoder's")
    config = optional(folder / pooling / "config.json")
    modes = [key for key in config.values if key.startswith("pooling_mode_") and config.flag(key, False)]
    mode = config.text("pooling_mode", "mean")
    averages = config.flag("pooling_mode_mean_tokens", True)
    if mode != "mean" or not averages or set(modes) - {"pooling_mode_mean_tokens"}:
        raise R3LiteError(
            f"the encoder {folder} does not average its tokens ({pooling}/config.json)",
            "Use one that does, such as intfloat/e5-base-v2 or sentence-transformers/all-MiniLM-L6-v2.",
        )


class HashingEncoder:
    """TF-IDF over words, projected to a fixed number of dimensions by hashing: no download, the same everywhere.

    Each word has `HASHES` signed places of the vector (sparse Johnson-Lindenstrauss, arXiv 1012.1577): with only one,
    two names that share a place are one name; with several they share a part of their weight at most. Words that the
    corpus does not have count nothing.
    """

    DIMENSION, HASHES, VERSION = 2048, 4, 1
    FILE = "words.json"

    def __init__(self, frequencies: dict[str, int], passages: int):
        """`frequencies`: in how many of the corpus's `passages` each word occurs."""
        self.frequencies, self.passages = frequencies, passages
        self.dimension = self.DIMENSION
        self.settings = {
            "encoder": HASHING, "version": self.VERSION, "hashes": self.HASHES, "dimension": self.DIMENSION
        }  # fmt: skip
        self.word_ids = {word: i for i, word in enumerate(frequencies)}
        counts = np.fromiter(frequencies.values(), dtype=np.float64, count=len(frequencies))
        self.idf = np.log((1 + passages) / (1 + counts)) + 1
        # blake2b and not hash(): the same in every process. 4 bytes a place: 31 bits of position, one of sign.
        digests = b"".join(hashlib.blake2b(w.encode(), digest_size=4 * self.HASHES).digest() for w in frequencies)
        numbers = np.frombuffer(digests, dtype="<u4").reshape(-1, self.HASHES)
        self.places = (numbers >> 1) % self.DIMENSION  # [words, HASHES]
        self.signs = 1.0 - 2.0 * (numbers & 1)  # [words, HASHES]

    @classmethod
    def fit(cls, texts: Iterable[str]) -> "HashingEncoder":
        frequencies, passages = Counter(), 0
        for text in texts:
            frequencies.update(dict.fromkeys(words(text), 1))
            passages += 1
        return cls(dict(frequencies), passages)

    @classmethod
    def load(cls, folder: Path) -> "HashingEncoder":
        kept = read_record(folder / cls.FILE, "Build the index again.")
        passages, frequencies = kept.whole("passages"), kept.record("frequencies")
        return cls({word: frequencies.whole(word, low=1, high=passages) for word in frequencies.values}, passages)

    def save(self, folder: Path) -> None:
        write_json(folder / self.FILE, {"passages": self.passages, "frequencies": self.frequencies})

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        return self._encode(queries)

    def encode_passages(self, documents: list[Document], advance: Callable[[int], object]) -> np.ndarray:
        out = self._encode([passage_text(d) for d in documents])
        advance(len(documents))
        return out

    def _encode(self, texts: list[str]) -> np.ndarray:
        """Vectors [N, DIMENSION] of N texts; zero where a text has no known word."""
        rows, ids, times = [], [], []
        for row, text in enumerate(texts):
            for word, count in Counter(words(text)).items():
                if word in self.word_ids:
                    rows.append(row)
                    ids.append(self.word_ids[word])
                    times.append(count)
        rows, ids = np.array(rows, dtype=np.int64), np.array(ids, dtype=np.int64)
        weights = (1 + np.log(np.array(times, dtype=np.float64))) * self.idf[ids]
        flat = rows[:, None] * self.DIMENSION + self.places[ids]  # [words of all texts, HASHES]
        signed = weights[:, None] * self.signs[ids]
        out = np.bincount(flat.ravel(), signed.ravel(), minlength=len(texts) * self.DIMENSION)
        out = out.reshape(len(texts), self.DIMENSION)
        norms = np.linalg.norm(out, axis=1, keepdims=True)
        return (out / np.where(norms > 0, norms, 1)).astype(np.float32)


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
