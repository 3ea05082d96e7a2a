"""Encoders: they turn queries and passages into vectors whose inner product is the similarity.

Knows nothing of FAISS. Vectors are float32 [N, dimension], of length 1 unless the encoder was trained for dot products.
"""

import hashlib
import os
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
    TextBatch,
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
    """What an index needs of an encoder. `advance(n)` is called each time that n more passages are encoded."""

    dimension: int
    settings: dict  # on which vectors depend; stored with an index and compared when it is opened

    def encode_queries(self, queries: list[str]) -> np.ndarray: ...

    def encode_passages(self, documents: list[Document], advance: Callable[[int], object]) -> np.ndarray: ...


class HashingEncoder:
    """TF-IDF over words, projected to a fixed number of dimensions by hashing: no download, the same everywhere.

    Each word has `HASHES` signed places of the vector (sparse Johnson-Lindenstrauss, arXiv 1012.1577). With one place
    a word, two names that fall on the same place could not be told apart; with several, they share only a part of
    their weight. Words that are not in the corpus are ignored.
    """

    DIMENSION = 2048
    HASHES = 4
    FILE = "words.json"

    def __init__(self, frequencies: dict[str, int], passages: int):
        """Takes the `frequencies` of words: in how many of the corpus's `passages` each occurs."""
        self.frequencies = frequencies
        self.passages = passages
        self.dimension = self.DIMENSION
        self.settings = {
            "encoder": HASHING,
            "hashes": self.HASHES,
            "dimension": self.DIMENSION,
            "text_form": TEXT_FORM,
        }
        self.word_ids = {word: i for i, word in enumerate(frequencies)}
        counts = np.fromiter(frequencies.values(), dtype=np.float64, count=len(frequencies))
        self.idf = np.log((1 + passages) / (1 + counts)) + 1  # smoothed, as scikit-learn's TfidfVectorizer computes it
        # blake2b and not hash(), which differs between processes. A place takes 4 bytes: 31 bits of position, 1 sign.
        size = 4 * self.HASHES
        digests = [hashlib.blake2b(word.encode(), digest_size=size).digest() for word in frequencies]
        numbers = np.frombuffer(b"".join(digests), dtype="<u4")
        numbers = numbers.reshape(-1, self.HASHES)
        self.places = (numbers >> 1) % self.DIMENSION  # [words, HASHES]
        self.signs = 1.0 - 2.0 * (numbers & 1)  # [words, HASHES]

    @classmethod
    def fit(cls, texts: Iterable[str]) -> "HashingEncoder":
        """Returns the encoder for a corpus of these texts."""
        frequencies: Counter[str] = Counter()
        passages = 0
        for text in texts:
            frequencies.update(dict.fromkeys(words(text), 1))
            passages += 1
        return cls(dict(frequencies), passages)

    @classmethod
    def load(cls, folder: Path) -> "HashingEncoder":
        """Returns the encoder of an index folder. Raises R3LiteError if its file is damaged."""
        record = read_record(folder / cls.FILE, "Build the index again.")
        passages = record.whole("passages")
        counts = record.record("frequencies")
        frequencies = {word: counts.whole(word, low=1, high=passages) for word in counts.values}
        return cls(frequencies, passages)

    def save(self, folder: Path) -> None:
        """Writes the file from which `load` makes the encoder."""
        content = {"passages": self.passages, "frequencies": self.frequencies}
        write_json(folder / self.FILE, content)

    def encode_passages(
        self,
        documents: list[Document],
        advance: Callable[[int], object],
    ) -> np.ndarray:
        vectors = self.encode_queries([passage_text(document) for document in documents])
        advance(len(documents))
        return vectors

    def encode_queries(self, texts: list[str]) -> np.ndarray:
        """Returns vectors [N, DIMENSION] of N texts, which may be queries or passages. A text without a word of the
        corpus has the vector 0."""
        counts = []  # (index of the text, id of the word, how many times the text has it)
        for row, text in enumerate(texts):
            for word, times in Counter(words(text)).items():
                if word in self.word_ids:
                    counts.append((row, self.word_ids[word], times))
        table = np.array(counts, dtype=np.int64).reshape(-1, 3)
        rows, ids, times = table.T
        weights = (1 + np.log(times)) * self.idf[ids]  # [pairs of a text and a word]
        cells = rows[:, None] * self.DIMENSION + self.places[ids]  # [pairs, HASHES]
        signed = weights[:, None] * self.signs[ids]
        size = len(texts) * self.DIMENSION
        sums = np.bincount(cells.ravel(), signed.ravel(), minlength=size)
        vectors = sums.reshape(len(texts), self.DIMENSION)
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)


def words(text: str) -> list[str]:
    """Returns the words of a text in lower case."""
    return re.findall(r"\w+", composed(text).lower())


def stored_name(name: str) -> str:
    """Returns an encoder's name as an index keeps it: for a folder its absolute path, since commands start anywhere."""
    if name != HASHING and Path(name).is_dir():
        return os.path.abspath(name)
    return name


class FolderEncoder:
    """The base of encoders from a folder or hub id. Texts get the prefixes of a style. Subclasses define `_encode`."""

    def __init__(self, name: str, style: str, batch_size: int):
        self.name = name
        self.batch_size = batch_size
        self.conventions = read_conventions(name)
        self.style, self.prefixes = self.conventions.styled(style, name)  # prefixes of queries and of passages

    def _set_settings(self, max_length: int, dimension: int, dtype: str) -> None:
        """Sets the settings on which the vectors depend, as an index keeps them.

        A setting that older versions of r3lite did not have is left out if its value is the one that they used.
        """
        self.dimension = dimension
        self.settings = {
            "encoder": stored_name(self.name),
            "style": self.style,
            "max_length": max_length,
            "dimension": dimension,
        }
        if dtype != "fp32":
            self.settings["dtype"] = dtype
        if self.conventions.is_dot:
            self.settings["similarity"] = "dot"
        if self.style == conventions.OWN:
            self.settings["query_prefix"], self.settings["passage_prefix"] = self.prefixes

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        query_prefix, _ = self.prefixes
        return self._encode(queries, query_prefix, lambda n: None)

    def encode_passages(
        self,
        documents: list[Document],
        advance: Callable[[int], object],
    ) -> np.ndarray:
        _, passage_prefix = self.prefixes
        texts = [passage_text(document) for document in documents]
        return self._encode(texts, passage_prefix, advance)


class BertEncoder(FolderEncoder):
    """A BERT sentence encoder: the last hidden states of a text, pooled, cut and normalized as its folder says."""

    def __init__(
        self,
        name: str,
        style: str,
        device: str = "cpu",
        batch_size: int = 32,
        dtype: str = "fp32",
    ):
        super().__init__(name, style, batch_size)
        rules = self.conventions
        if rules.unsupported:
            remedy = "Use a BERT, such as intfloat/e5-base-v2 or sentence-transformers/all-MiniLM-L6-v2."
            raise R3LiteError(
                f"{rules.folder} is not a supported BERT encoder: {rules.unsupported}",
                remedy,
                code="encoder-unsupported",
            )
        self.model = load_bert(rules.folder, DTYPES[dtype], device)
        self.device = device
        config = self.model.config
        length = min(rules.max_length, config.max_position_embeddings - config.first_position)
        path = rules.folder / "tokenizer.json"
        self.tokenizer = conventions.text_tokenizer(path, max_length=length, rows=config.vocab_size)
        dimension = min(config.hidden_size, rules.dimension or config.hidden_size)
        self._set_settings(length, dimension, dtype)
        if rules.pooling != "mean":  # older indexes do not name their pooling, which is mean
            self.settings["pooling"] = rules.pooling

    def encode_tokens(self, texts: list[str]) -> list[np.ndarray]:
        """Returns for each text the last hidden states [T, C] of its tokens, with those of [CLS] and [SEP].

        Texts get no prefix.
        """
        states: list[np.ndarray] = [np.empty(0)] * len(texts)
        for batch, hidden in self._hidden(texts):
            lengths = batch.real.sum(1).tolist()
            for row, row_states, length in zip(batch.rows, hidden.cpu().numpy(), lengths):
                states[row] = row_states[:length]
        return states

    def _encode(
        self,
        texts: list[str],
        prefix: str,
        advance: Callable[[int], object],
    ) -> np.ndarray:
        """Returns vectors [N, C] of N texts."""
        rules = self.conventions
        vectors = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for batch, hidden in self._hidden([prefix + text for text in texts]):
            pooled = pool(hidden, batch.real, rules.pooling)
            # sentence-transformers normalizes before it cuts; for a cosine, the length must be 1 after the cut.
            if rules.is_dot and rules.is_normalized:
                pooled = torch.nn.functional.normalize(pooled, dim=-1)
            pooled = pooled[:, : self.dimension]
            if not rules.is_dot:
                pooled = torch.nn.functional.normalize(pooled, dim=-1)
            vectors[batch.rows] = pooled.cpu().numpy()
            advance(len(batch.rows))
        return vectors

    @torch.inference_mode()
    def _hidden(self, texts: list[str]) -> Iterator[tuple[TextBatch, Tensor]]:
        """Yields batches of texts with their last hidden states [B, T, C]."""
        if self.conventions.lower:
            texts = [text.lower() for text in texts]
        encodings = self.tokenizer.encode_batch(texts)
        for batch in batches(encodings, self.batch_size, self.device):
            yield batch, self.model(batch.tokens, batch.real).float()


def pool(hidden: Tensor, real: Tensor, pooling: str) -> Tensor:
    """Returns one state of each text, [B, C], from the hidden states [B, T, C] of texts that are padded on the right.

    `real` [B, T] is False at padding. `pooling` is mean, cls (the first token) or last.
    """
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "last":
        rows = torch.arange(len(hidden), device=hidden.device)
        return hidden[rows, real.sum(1) - 1]
    sums = (hidden * real[..., None]).sum(1)
    return sums / real.sum(1, keepdim=True)


class SentenceEncoder(FolderEncoder):
    """An encoder that BertEncoder does not compute, such as ModernBERT or Qwen3-Embedding, run by the package
    sentence-transformers (extra encoders).

    Code in a model folder is never run, and weights are read from safetensors only.
    """

    def __init__(
        self,
        name: str,
        style: str,
        device: str = "cpu",
        batch_size: int = 32,
        dtype: str = "fp32",
    ):
        super().__init__(name, style, batch_size)
        with extra("encoders", f"the encoder {name} ({self.conventions.unsupported})", "Or use intfloat/e5-base-v2."):
            from sentence_transformers import SentenceTransformer
        remedy = "Check that all its files are there and the weights are safetensors."
        # Exception: the library may raise anything for the files of a stranger.
        with explained(
            Exception, f"sentence-transformers cannot load the encoder {name}", remedy, code="encoder-unloadable"
        ):
            self.model = SentenceTransformer(
                str(self.conventions.folder),
                device=device,
                local_files_only=True,
                model_kwargs={"use_safetensors": True, "dtype": DTYPES[dtype]},
            )
        length = min(self.model.max_seq_length or LONGEST, LONGEST)
        self.model.max_seq_length = length
        self._set_settings(length, self.model.get_embedding_dimension(), dtype)

    def _encode(
        self,
        texts: list[str],
        prefix: str,
        advance: Callable[[int], object],
    ) -> np.ndarray:
        """Returns vectors [N, C] of N texts."""
        vectors = np.zeros((len(texts), self.dimension), dtype=np.float32)
        size = BLOCK * self.batch_size
        for start in range(0, len(texts), size):
            block = texts[start : start + size]
            vectors[start : start + size] = self.model.encode(
                block,
                prompt=prefix,
                batch_size=self.batch_size,
                show_progress_bar=False,
            )
            advance(len(block))
        if self.conventions.is_dot:
            return vectors
        # Normalized here, in fp32: sentence-transformers would do so in the model's precision.
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.maximum(lengths, np.finfo(np.float32).tiny)


def make_encoder(
    settings: EncoderSettings,
    documents: Iterable[Document],
    device: str = "cpu",
    batch_size: int = 32,
) -> Encoder:
    """Returns the encoder of the settings. Only the hashing encoder reads `documents`: it is fitted to them.

    Vectors are fp32 even if the encoder computes in bf16.
    """
    name = settings.encoder
    if name == HASHING:
        return HashingEncoder.fit(map(passage_text, documents))
    # r3lite's own network if it computes what the folder's files say, else sentence-transformers.
    encoder_class = BertEncoder if read_conventions(name).unsupported is None else SentenceEncoder
    return encoder_class(
        name,
        style=settings.encoder_style,
        device=device,
        batch_size=batch_size,
        dtype=settings.encoder_dtype,
    )


def local_dimension(name: str) -> int | None:
    """Returns how many dimensions an encoder on this machine has, without loading it; None if that is not known."""
    if name == HASHING:
        return HashingEncoder.DIMENSION
    config = _local(name, "config.json")
    if config is None:
        return None
    size = read_record(config, REMEDY).whole("hidden_size", None, low=1)
    sentence_config = _local(name, "config_sentence_transformers.json")
    limit = None
    if sentence_config is not None:
        limit = read_record(sentence_config, REMEDY).values.get("truncate_dim")
    if size is None or not isinstance(limit, int):
        return size
    return min(size, limit)


def _local(name: str, file: str) -> Path | None:
    """Returns the path of a model's file if it is on this machine, else None."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.exists() else None
    try:
        cached = try_to_load_from_cache(name, file)
    except HFValidationError:  # no hub id, but the path of a folder that does not exist
        return None
    # Without a path, this is None, or an object that says that the hub has no such file.
    return Path(cached) if isinstance(cached, str) else None
