"""What the files of a BERT's folder say: how an encoder makes vectors of its last hidden states, as
sentence-transformers has it, the tokenizer, and batches of tokenized texts; shared by encoders and rerankers.

The network is in `models/bert.py`.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Encoding, Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from r3lite.core.episode import Document
from r3lite.core.errors import R3LiteError, explained
from r3lite.core.files import read_record, read_text, within
from r3lite.core.records import Record, Source
from r3lite.models.bert import MODEL_TYPES
from r3lite.models.weights import resolve_folder
from r3lite.protocols.tokenizer_files import check_ids, library_errors

SHORTEST, LONGEST = 3, 512  # tokens of a text: [CLS], a word and [SEP]; and the most
REMEDY = "Copy the model's files from their source."
MODULES = ("Transformer", "Pooling", "Normalize")  # of sentence-transformers, which BertEncoder computes
POOLINGS = {"mean": "mean", "cls": "cls", "lasttoken": "last"}  # which it computes, by their names there
FLAGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "lasttoken"}
# The names of prompts, of which the first that is there is taken, as `encode_query` and `encode_document` do.
QUERY, PASSAGE = ("query",), ("document", "passage", "corpus")
# Prefixes of queries and passages: those that E5 was trained with (arXiv 2212.03533), none, or those of the folder.
PREFIXES = {"e5": ("query: ", "passage: "), "plain": ("", "")}
OWN = "own"
STYLES = (*PREFIXES, OWN)


@dataclass(frozen=True)
class Conventions:
    """Of one folder."""

    folder: Path
    pooling: str  # mean: over all tokens; cls: the first; last: the last one
    prefixes: tuple[str, str] | None  # of queries and of passages; None: the folder names none
    max_length: int
    lower: bool
    other: str | None  # why BertEncoder does not compute these vectors; None if it does

    def styled(self, style: str, name: str) -> tuple[str, tuple[str, str]]:
        """The style and its prefixes; auto: own if the folder names prompts, else e5 if the encoder's name says so."""
        if style == "auto":
            style = OWN if self.prefixes else style_of(name)
        if style == OWN and self.prefixes is None:
            raise R3LiteError(f"--encoder-style is own, but {name} has no prompts", "Remove --encoder-style.")
        return style, self.prefixes if style == OWN else PREFIXES[style]


def style_of(name: str) -> str:
    """e5 for intfloat/e5-base-v2, multilingual-e5-small, ./my_e5/ and their kind; plain otherwise."""
    return "e5" if "e5" in re.split(r"[^a-z0-9]+", Path(name).name.lower()) else "plain"


def passage_text(document: Document) -> str:
    """A passage as encoders, rerankers and BM25 read it."""
    return f"{document.title} {document.text}" if document.title else document.text


def read_conventions(name: str) -> Conventions:
    """The conventions of an encoder, a folder or a hub id. What it does not say is as sentence-transformers takes it.

    Raises R3LiteError if a file is not of the form that it has.
    """
    folder = model_folder(name, "--encoder", "--encoder hashing needs no download.")
    foreign, place = _modules(folder)
    pooling = optional(folder / place / "config.json")
    mode = _pooling(pooling)
    config = optional(folder / "sentence_bert_config.json")
    model = read_record(folder / "config.json", REMEDY).text("model_type", "none")
    reasons = [f"its model_type is {model}"] * (model not in MODEL_TYPES)
    reasons += [f"it has a module {kind}" for kind in foreign]
    reasons += [f"it uses {mode} pooling"] * (mode not in POOLINGS)
    reasons += ["it excludes its prompts from pooling"] * (not pooling.flag("include_prompt", True))
    reasons += ["it has processing_kwargs"] * ("processing_kwargs" in config)
    prefixes, lower = _prefixes(optional(folder / "config_sentence_transformers.json")), "do_lower_case"
    other = reasons[0] if reasons else None
    return Conventions(folder, POOLINGS.get(mode, mode), prefixes, longest(folder), config.flag(lower, False), other)


def _modules(folder: Path) -> tuple[list[str], str]:
    """The kinds of modules that are not among MODULES, and the folder of Pooling."""
    path, pooling, foreign = folder / "modules.json", "1_Pooling", []
    if not path.exists():
        return foreign, pooling
    listed = Record({"modules": within(path, REMEDY, read_text(path, REMEDY))}, Source(str(path), REMEDY))
    for module in listed.records("modules"):
        kind = module.text("type").rpartition(".")[2]
        foreign += [kind] * (kind not in MODULES)
        if kind == "Transformer" and (place := module.text("path", "", blank=True)):
            raise module.error(f"{module.path}path is {place}; it must be empty for a Transformer")
        pooling = module.text("path") if kind == "Pooling" else pooling
    if Path(pooling).name != pooling or pooling == "..":
        raise listed.error(f"the path of Pooling, {pooling}, is not in the encoder's folder")
    return foreign, pooling


def _pooling(config: Record) -> str:
    """How tokens are pooled: a name, or in older files a flag for each kind, of which all that are set count."""
    if "pooling_mode" in config:
        return config.text("pooling_mode")
    kinds = [key for key in config.values if key.startswith("pooling_mode_") and config.flag(key, False)]
    if config.flag("pooling_mode_mean_tokens", True) and "pooling_mode_mean_tokens" not in kinds:
        kinds.append("pooling_mode_mean_tokens")
    return " and ".join(FLAGS.get(kind, kind.removeprefix("pooling_mode_")) for kind in kinds) or "nothing"


def _prefixes(config: Record) -> tuple[str, str] | None:
    """The prompts of queries and passages; without one of its own each gets the default one, if there is any."""
    if "prompts" not in config:
        return None
    prompts = config.record("prompts")
    default = config.text("default_prompt_name", None) if config.values.get("default_prompt_name") else None
    chosen = [next((n for n in names if n in prompts), default) for names in (QUERY, PASSAGE)]
    query, passage = (prompts.text(name, blank=True) if name else "" for name in chosen)
    return (query, passage) if query or passage else None


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
        raise R3LiteError(f"{path} has token ids up to {last}, but the model's embedding has {rows} rows", REMEDY)
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
        parts = [[torch.tensor(getattr(encodings[i], p)) for i in rows] for p in ("ids", "attention_mask", "type_ids")]
        tokens, real, segments = (pad_sequence(part, batch_first=True).to(device) for part in parts)
        yield Batch(rows, tokens, real.bool(), segments)
