"""The folder of a BERT that encodes or scores texts: where it is, its tokenizer, its batches.

Owns what encoders and rerankers share; the network is in `models/bert.py`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Encoding, Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from r3lite.core.errors import R3LiteError, explained
from r3lite.core.files import read_record
from r3lite.core.records import Record, Source
from r3lite.models.weights import resolve_folder
from r3lite.protocols.tokenizer_files import check_ids, library_errors

SHORTEST, LONGEST = 3, 512  # tokens of a text: [CLS], a word and [SEP]; and the most
REMEDY = "Copy the model's files from their source."


def model_folder(name: str, flag: str, instead: str) -> Path:
    """The folder of a model that `flag` names; `instead` is what to do without it, in the error."""
    remedy = f"Check the name and the connection, or pass {flag} FOLDER with the model's files. {instead}"
    with explained(R3LiteError, flag, remedy):
        return resolve_folder(name)


def optional(path: Path) -> Record:
    """The JSON object of a file that a folder may lack; an empty one then."""
    return read_record(path, REMEDY) if path.exists() else Record({}, Source(str(path), REMEDY))


def longest(folder: Path) -> int:
    """The most tokens of a text, up to LONGEST: sentence-transformers wrote it into sentence_bert_config.json, and
    since 5.4 writes it as the limit of the tokenizer."""
    config = optional(folder / "sentence_bert_config.json")
    if "max_seq_length" in config:
        return min(config.whole("max_seq_length", low=SHORTEST), LONGEST)
    # One that has no limit names 1e30.
    return int(min(optional(folder / "tokenizer_config.json").number("model_max_length", LONGEST, SHORTEST), LONGEST))


def text_tokenizer(path: Path, max_length: int, rows: int) -> Tokenizer:
    """The tokenizer of a folder, cutting at `max_length` tokens, [CLS] and [SEP] (or <s> and </s>) among them.

    Of a pair of texts it cuts the longer one. Its ids have `rows` in the embedding.
    """
    definition = read_record(path, REMEDY)
    with library_errors(path):
        tokenizer = Tokenizer.from_str(json.dumps(definition.values))
    check_ids(definition, tokenizer)
    if (last := max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)) >= rows:
        raise R3LiteError(f"{path} has token ids up to {last}, and the model's embedding {rows} rows", REMEDY)
    if tokenizer.num_special_tokens_to_add(is_pair=False) != 2:
        raise R3LiteError(f"{path} does not put a text between [CLS] and [SEP]", REMEDY)
    tokenizer.enable_truncation(max_length)  # published files often carry other limits
    tokenizer.no_padding()
    return tokenizer


@dataclass(frozen=True)
class Batch:
    """Texts, or pairs of texts, of like length, padded on the right."""

    rows: list[int]  # which texts they are
    tokens: Tensor  # [B, T]
    real: Tensor  # [B, T], False at padding
    segments: Tensor  # [B, T], 1 at the second text of a pair


def batches(encodings: list[Encoding], size: int, device: str) -> Iterator[Batch]:
    """All texts, the longest first, `size` at a time: batches are of like length, so that little is padding."""
    order = sorted(range(len(encodings)), key=lambda i: -len(encodings[i].ids))
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        tokens, segments, real = (
            pad_sequence([torch.tensor(getattr(encodings[i], part)) for i in rows], batch_first=True).to(device)
            for part in ("ids", "type_ids", "attention_mask")
        )
        yield Batch(rows, tokens, real.bool(), segments)
