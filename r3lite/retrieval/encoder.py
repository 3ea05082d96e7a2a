"""Encoders: they turn queries and passages into vectors whose inner product is the similarity.

Knows nothing of FAISS. Vectors are float32 [N, dimension], of length 1 unless the encoder was trained for dot products.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from r3lite.core.episode import Document
from r3lite.core.errors import R3LiteError, explained, extra
from r3lite.core.files import read_record, write_json
from r3lite.devices.precision import DTYPES
from r3lite.models.bert import load_bert
from r3lite.retrieval import conventions
from r3lite.retrieval.conventions import (
    LONGEST,
    REMEDY,
    TEXT_FORM,
    Batch,
    batches,
    composed,
    passage_text,
    read_conventions,
)
from r3lite.settings import IndexSettings, RetrievalSettings

EncoderSettings = IndexSettings | RetrievalSettings  # both name an encoder, its style and its dtype
HASHING = "hashing"  # the name of HashingEncoder for --encoder
BLOCK = 16  # batches that sentence-transformers encodes between two updates of the bar


class Encoder(Protocol):
    """What an index needs of an encoder. `advance(n)` is called after every n passages that are done."""

    dimension: int
    settings: dict  # what makes vectors comparable; stored with an index and compared when it is opened

    def encode_queries(self, queries: list[str]) -> np.ndarray: ...

    def encode_passages(self, documents: list[Document], advance: Callable[[int], object]) -> np.ndarray: ...


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
        self.settings = {"encoder": HASHING, "version": self.VERSION}  # what its vectors depend on
        self.settings |= {"hashes": self.HASHES, "dimension": self.DIMENSION, "text_form": TEXT_FORM}
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

    def encode_passages(self, documents: list[Document], advance: Callable[[int], object]) -> np.ndarray:
        out = self.encode_queries([passage_text(d) for d in documents])
        advance(len(documents))
        return out

    def encode_queries(self, texts: list[str]) -> np.ndarray:
        """Vectors [N, DIMENSION] of N texts, passages as well as queries; zero where a text has no known word."""
        counted = ((row, *counts) for row, text in enumerate(texts) for counts in Counter(words(text)).items())
        known = [(row, self.word_ids[word], times) for row, word, times in counted if word in self.word_ids]
        rows, ids, times = np.array(known, dtype=np.int64).reshape(-1, 3).T
        weights = (1 + np.log(times)) * self.idf[ids]
        flat = rows[:, None] * self.DIMENSION + self.places[ids]  # [words of all texts, HASHES]
        signed = weights[:, None] * self.signs[ids]
        out = np.bincount(flat.ravel(), signed.ravel(), minlength=len(texts) * self.DIMENSION)
        out = out.reshape(len(texts), self.DIMENSION)
        norms = np.linalg.norm(out, axis=1, keepdims=True)
        return (out / np.where(norms > 0, norms, 1)).astype(np.float32)


def words(text: str) -> list[str]:
    return re.findall(r"\w+", composed(text).lower())


class FolderEncoder:
    """An encoder of a folder or hub id, whose texts get the prefixes of a style."""

    def __init__(self, name: str, style: str, batch_size: int):
        self.name, self.batch_size, self.found = name, batch_size, read_conventions(name)
        self.style, self.prefixes = self.found.styled(style, name)

    def describe(self, max_length: int, dimension: int, dtype: str) -> None:
        """Sets what the vectors depend on, as an index keeps it; what is as it always was before is left out."""
        self.dimension = dimension
        self.settings = {"encoder": self.name, "style": self.style, "max_length": max_length, "dimension": dimension}
        if dtype != "fp32":
            self.settings["dtype"] = dtype
        if self.found.is_dot:
            self.settings["similarity"] = "dot"
        if self.style == conventions.OWN:
            self.settings |= dict(zip(("query_prefix", "passage_prefix"), self.prefixes, strict=True))

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        return self._encode(queries, self.prefixes[0], lambda n: None)

    def encode_passages(self, documents: list[Document], advance: Callable[[int], object]) -> np.ndarray:
        return self._encode([passage_text(document) for document in documents], self.prefixes[1], advance)


class BertEncoder(FolderEncoder):
    """A BERT sentence encoder: the last hidden states of a text, pooled, cut and scaled as its folder says."""

    def __init__(self, name: str, style: str, device: str = "cpu", batch_size: int = 32, dtype: str = "fp32"):
        super().__init__(name, style, batch_size)
        found = self.found
        if found.other:
            remedy = "Use a BERT, such as intfloat/e5-base-v2 or sentence-transformers/all-MiniLM-L6-v2."
            raise R3LiteError(f"{found.folder} is not a supported BERT encoder: {found.other}", remedy)
        self.model, self.device = load_bert(found.folder, DTYPES[dtype], device), device
        config = self.model.config
        length = min(found.max_length, config.max_position_embeddings - config.first_position)
        self.tokenizer = conventions.text_tokenizer(found.folder / "tokenizer.json", length, config.vocab_size)
        self.describe(length, min(config.hidden_size, found.dimension or config.hidden_size), dtype)
        if found.pooling != "mean":  # which indexes of before have not
            self.settings["pooling"] = found.pooling

    def encode_tokens(self, texts: list[str]) -> list[np.ndarray]:
        """The last hidden states [T, C] of each text's tokens, [CLS] and [SEP] among them; texts get no prefix."""
        states: list[np.ndarray] = [np.empty(0)] * len(texts)
        for batch, hidden in self._hidden(texts):
            for row, of_row, length in zip(batch.rows, hidden.cpu().numpy(), batch.real.sum(1).tolist()):
                states[row] = of_row[:length]
        return states

    def _encode(self, texts: list[str], prefix: str, advance: Callable[[int], object]) -> np.ndarray:
        """Vectors [N, C] of N texts."""
        out = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for batch, hidden in self._hidden([prefix + text for text in texts]):
            pooled = pool(hidden, batch.real, self.found.pooling)
            if self.found.is_dot and self.found.is_normalized:
                pooled = torch.nn.functional.normalize(pooled, dim=-1)
            pooled = pooled[:, : self.dimension]
            if not self.found.is_dot:
                pooled = torch.nn.functional.normalize(pooled, dim=-1)
            out[batch.rows] = pooled.cpu().numpy()
            advance(len(batch.rows))
        return out

    @torch.inference_mode()
    def _hidden(self, texts: list[str]) -> Iterator[tuple[Batch, Tensor]]:
        """Batches of texts with their last hidden states [B, T, C]."""
        encodings = self.tokenizer.encode_batch([t.lower() for t in texts] if self.found.lower else texts)
        for batch in batches(encodings, self.batch_size, self.device):
            yield batch, self.model(batch.tokens, batch.real).float()


def pool(hidden: Tensor, real: Tensor, how: str) -> Tensor:
    """One state [B, C] of the hidden states [B, T, C] of texts that are padded on the right; `real` [B, T] is False at
    padding. `how` is mean, cls (the first token) or last."""
    if how == "cls":
        return hidden[:, 0]
    if how == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), real.sum(1) - 1]
    return (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True)


class SentenceEncoder(FolderEncoder):
    """An encoder of another network, such as ModernBERT and Qwen3-Embedding, by the package sentence-transformers
    (extra encoders).

    Code in a model folder is never run, and weights are read from safetensors.
    """

    def __init__(self, name: str, style: str, device: str = "cpu", batch_size: int = 32, dtype: str = "fp32"):
        super().__init__(name, style, batch_size)
        with extra("encoders", f"the encoder {name} ({self.found.other})", "Or use intfloat/e5-base-v2."):
            from sentence_transformers import SentenceTransformer
        how = {"use_safetensors": True, "dtype": DTYPES[dtype]}
        remedy, folder = "Check that all its files are there and the weights are safetensors.", str(self.found.folder)
        # Exception: whatever a library and a folder of a stranger come to.
        with explained(Exception, f"sentence-transformers cannot load the encoder {name}", remedy):
            self.model = SentenceTransformer(folder, device=device, local_files_only=True, model_kwargs=how)
        self.model.max_seq_length = length = min(self.model.max_seq_length or LONGEST, LONGEST)
        self.describe(length, self.model.get_embedding_dimension(), dtype)

    def _encode(self, texts: list[str], prefix: str, advance: Callable[[int], object]) -> np.ndarray:
        """Vectors [N, C] of N texts."""
        out, size = np.zeros((len(texts), self.dimension), dtype=np.float32), BLOCK * self.batch_size
        how = {"prompt": prefix, "batch_size": self.batch_size, "show_progress_bar": False}
        for start in range(0, len(texts), size):
            block = texts[start : start + size]
            out[start : start + size] = self.model.encode(block, **how)
            advance(len(block))
        if self.found.is_dot:
            return out
        # Here, in fp32: that package would do it in the model's precision.
        return out / np.maximum(np.linalg.norm(out, axis=1, keepdims=True), np.finfo(np.float32).tiny)


def make_encoder(
    settings: EncoderSettings, documents: Iterable[Document], device: str = "cpu", batch_size: int = 32
) -> Encoder:
    """The encoder of the settings for a new index of `documents`; its vectors are fp32 if it computes in bf16, too."""
    name = settings.encoder
    if name == HASHING:
        return HashingEncoder.fit(map(passage_text, documents))
    # Our own network if it computes what the folder's files say, else sentence-transformers.
    made = BertEncoder if read_conventions(name).other is None else SentenceEncoder
    return made(name, settings.encoder_style, device, batch_size, settings.encoder_dtype)


def known_dimension(name: str) -> int | None:
    """The dimensions of an encoder that is on this machine, without loading it; None if they are not known."""
    if name == HASHING:
        return HashingEncoder.DIMENSION
    config = _local(name, "config.json")
    if config is None:
        return None
    size = read_record(config, REMEDY).whole("hidden_size", None, low=1)
    cut = _local(name, "config_sentence_transformers.json")
    limit = read_record(cut, REMEDY).values.get("truncate_dim") if cut else None
    return min(size, limit) if size and isinstance(limit, int) else size


def _local(name: str, file: str) -> Path | None:
    """A file of a model that is on this machine."""
    from huggingface_hub import try_to_load_from_cache

    path = Path(name) / file
    if not Path(name).is_dir():
        cached = try_to_load_from_cache(name, file)
        return Path(cached) if isinstance(cached, str) else None
    return path if path.exists() else None
