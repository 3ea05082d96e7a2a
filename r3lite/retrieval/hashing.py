"""The encoder that needs no download: TF-IDF of hashed words. Vectors are float32 [N, dimension] of length 1."""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from r3lite.core.episode import Document
from r3lite.core.files import read_record, write_json
from r3lite.retrieval.conventions import passage_text

HASHING = "hashing"  # its name for --encoder


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
        self.settings |= {"hashes": self.HASHES, "dimension": self.DIMENSION}
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
    return re.findall(r"\w+", text.lower())
