"""Reads the files of a BERT's folder: the tokenizer, and sentence-transformers' description of how vectors are made of
the last hidden states. Makes batches of tokenized texts. Encoders and rerankers share this module.

The network is in `models/bert.py`.
"""

import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Encoding, Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from r3lite.core.episode import Document
from r3lite.core.errors import R3LiteError, explained
from r3lite.core.files import parse_at_place, read_record, read_text
from r3lite.core.records import Record, Source, shown
from r3lite.models.bert import MODEL_TYPES
from r3lite.models.weights import resolve_folder
from r3lite.protocols.tokenizer_files import check_ids, library_errors

TEXT_FORM = "NFKC"  # the normalization form of Unicode
SHORTEST = 3  # the lowest limit on the tokens of a text: room for [CLS], one token and [SEP]
LONGEST = 512  # the highest limit
REMEDY = "Copy the model's files from their source."
MODULES = ("Transformer", "Pooling", "Normalize")  # of sentence-transformers: those that BertEncoder computes
# The poolings that BertEncoder computes, by their names in sentence-transformers.
POOLINGS = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
# The same poolings, by the flags that older files have.
POOLING_FLAGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
}
# Names of prompts. The first one that the folder has is taken, as sentence-transformers' `encode_query` and
# `encode_document` do.
QUERY_PROMPTS = ("query",)
PASSAGE_PROMPTS = ("document", "passage", "corpus")
ENCODER_MODALITY = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
RERANKER_MODALITY = {"text": {"method": "forward", "method_output_name": "logits"}}
# The keys of each module's file, each with the values that are supported. An empty list: any value, since the key is
# read here or has no effect. An encoder with another key or value is left to sentence-transformers; a reranker with one
# is refused.
KEYS_OF_MODULES: dict[str, dict[str, list]] = {
    "Transformer": {
        "max_seq_length": [], "do_lower_case": [], "transformer_task": ["feature-extraction"],
        "modality_config": [ENCODER_MODALITY], "module_output_name": ["token_embeddings"],
        "unpad_inputs": [True, False],
    },
    "CrossEncoder": {
        "max_seq_length": [], "do_lower_case": [False], "transformer_task": ["sequence-classification"],
        "modality_config": [RERANKER_MODALITY], "module_output_name": ["scores"], "unpad_inputs": [True, False],
    },
    "Pooling": {
        "embedding_dimension": [], "word_embedding_dimension": [], "pooling_mode": [], "include_prompt": [],
        **{f"pooling_mode_{kind}": [] for kind in (
            "cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken",
        )},
    },
    "Normalize": {"module_input_name": ["sentence_embedding"], "module_output_name": ["sentence_embedding"]},
}  # fmt: skip
ENCODER = "SentenceTransformer"  # `model_type` of config_sentence_transformers.json
CROSS_ENCODER = "CrossEncoder"
OF_BOTH = ("model_type", "__version__", "prompts", "default_prompt_name")  # keys of that file for both kinds
KEYS_OF_MODEL_FILE = {
    ENCODER: (*OF_BOTH, "similarity_fn_name", "truncate_dim"),
    CROSS_ENCODER: (*OF_BOTH, "activation_fn", "keep_in_fp32_modules"),
}
# The prefixes of queries and of passages, by style. Those of e5 and e5-instruct are the ones that these models were
# trained with (arXiv 2212.03533 and 2402.05672); TASK is from the model cards. In the style OWN, texts get the prompts
# of the encoder's folder.
TASK = "Given a web search query, retrieve relevant passages that answer the query"
PREFIXES = {
    "e5": ("query: ", "passage: "),
    "e5-instruct": (f"Instruct: {TASK}\nQuery: ", ""),
    "plain": ("", ""),
}
OWN = "own"
STYLES = (*PREFIXES, OWN)


@dataclass(frozen=True)
class Conventions:
    """How texts become vectors with the model of a folder, and how these are compared."""

    folder: Path
    pooling: str  # mean: over all tokens; cls: the first; last: the last one
    prefixes: tuple[str, str] | None  # of queries and of passages; None: the folder names none
    max_length: int  # tokens
    lower: bool  # True if texts become lower case
    dimension: int | None  # the number of dimensions that vectors are cut to; None: they are not cut
    is_normalized: bool  # True if the folder's modules make vectors of length 1, before they are cut
    is_dot: bool  # True if vectors are compared by their dot product, and not by their cosine
    unsupported: str | None  # why BertEncoder does not compute these vectors; None if it does

    def styled(self, style: str, name: str) -> tuple[str, tuple[str, str]]:
        """Returns the style and its prefixes, of queries and of passages.

        Style auto becomes own if the folder names prompts, else the style that fits the encoder's name.
        """
        if style == "auto":
            style = OWN if self.prefixes else style_of(name)
        if style == OWN and self.prefixes is None:
            raise R3LiteError(
                f"--encoder-style is own, but {name} has no prompts",
                "Remove --encoder-style.",
                code="encoder-without-prompts",
            )
        prefixes = self.prefixes if style == OWN else PREFIXES[style]
        return style, prefixes


def style_of(name: str) -> str:
    """Returns the style that fits the name of an encoder: e5 if e5 is one of its words (intfloat/e5-base-v2, ./my_e5/),
    e5-instruct if instruct is another (multilingual-e5-large-instruct), else plain."""
    words = re.split(r"[^a-z0-9]+", Path(name).name.lower())
    if "e5" not in words:
        return "plain"
    return "e5-instruct" if "instruct" in words else "e5"


def passage_text(document: Document) -> str:
    """Returns the text of a passage as encoders, rerankers and BM25 read it."""
    return f"{document.title} {document.text}" if document.title else document.text


def composed(text: str) -> str:
    """Returns a text in Unicode's form NFKC, in which equal words have equal characters.

    An accent may be a part of its letter or follow it, and there are ligatures and full-width forms. Code that compares
    words calls this function.
    """
    return unicodedata.normalize(TEXT_FORM, text)


def read_conventions(name: str) -> Conventions:
    """Returns the conventions of the encoder `name`, which is a folder or a hub id. Where its files say nothing, the
    defaults of sentence-transformers apply.

    Raises R3LiteError if there is no such encoder, or if one of its files is malformed.
    """
    folder = model_folder(name, "--encoder", "--encoder hashing needs no download.")
    module_folders, reasons = _modules(folder)
    transformer = read_optional(folder / "sentence_bert_config.json")
    pooling = read_optional(folder / module_folders.get("Pooling", "1_Pooling") / "config.json")
    module_files = {"Transformer": transformer, "Pooling": pooling}
    is_normalized = "Normalize" in module_folders
    if is_normalized:
        module_files["Normalize"] = read_optional(folder / module_folders["Normalize"] / "config.json")
    mode = _pooling(pooling)
    model_type = read_record(folder / "config.json", REMEDY).text("model_type", "none")
    if model_type not in MODEL_TYPES:
        reasons.insert(0, f"its model_type is {model_type}")
    if mode not in POOLINGS:
        reasons.append(f"it uses {mode} pooling")
    if not pooling.flag("include_prompt", True):
        reasons.append("it excludes its prompts from pooling")
    for kind, record in module_files.items():
        reasons += [f"it has {key}" for key in unknown_keys(kind, record)]
    settings = model_settings(folder, ENCODER)
    similarity = settings.choice("similarity_fn_name", ("cosine", "dot"), "cosine")
    dimension = settings.whole("truncate_dim", None, low=1)
    return Conventions(
        folder=folder,
        pooling=POOLINGS.get(mode, mode),
        prefixes=_prefixes(settings),
        max_length=max_tokens_of(folder),
        lower=transformer.flag("do_lower_case", False),
        dimension=dimension,
        is_normalized=is_normalized,
        # The dot product of vectors of length 1 that are not cut is their cosine.
        is_dot=similarity == "dot" and not (is_normalized and dimension is None),
        unsupported=reasons[0] if reasons else None,
    )


def model_settings(folder: Path, kind: str) -> Record:
    """Returns the `config_sentence_transformers.json` of a folder, without its nulls; empty if there is no such file.

    Raises R3LiteError if the model is not of this `kind`, or if the file sets a key that KEYS_OF_MODEL_FILE lacks. A
    value that is false, 0 or empty sets nothing.
    """
    record = read_optional(folder / "config_sentence_transformers.json")
    values = {key: value for key, value in record.values.items() if value is not None}
    record = Record(values, record.source)
    record.choice("model_type", (kind,), kind)
    for key, value in values.items():
        if key not in KEYS_OF_MODEL_FILE[kind] and value:
            raise record.error(f"{key} is {shown(value)}, which r3lite does not support")
    return record


def unknown_keys(kind: str, record: Record) -> list[str]:
    """Returns the keys of a module's file that are not supported, or whose value is not."""
    supported = KEYS_OF_MODULES[kind]
    keys = []
    for key, value in record.values.items():
        if value is None:
            continue
        if key not in supported or (supported[key] and value not in supported[key]):
            keys.append(key)
    return keys


def _modules(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Returns the folders, relative to the encoder's, of the modules that BertEncoder computes, by their kinds; and the
    reasons why BertEncoder cannot compute the encoder: its other modules, and its modules with kwargs."""
    path = folder / "modules.json"
    places: dict[str, str] = {}
    reasons: list[str] = []
    if not path.exists():
        return places, reasons
    modules = parse_at_place(path, REMEDY, read_text(path, REMEDY))
    content = Record({"modules": modules}, Source(str(path), REMEDY))
    for module in content.records("modules"):
        kind = module.text("type").rpartition(".")[2]
        if kind not in MODULES:
            reasons.append(f"it has a module {kind}")
            continue
        if module.values.get("kwargs"):
            reasons.append(f"it has kwargs of its module {kind}")
        if kind == "Pooling":
            places[kind] = module.text("path")
        else:
            places[kind] = module.text("path", "", blank=True)
        if kind == "Transformer" and places[kind]:
            # `module.path` ends with a dot, and the key is named `path`.
            raise module.error(f"{module.path}path is {places[kind]}; it must be empty for a Transformer")
        is_plain_name = Path(places[kind]).name == places[kind] and places[kind] != ".."
        if places[kind] and not is_plain_name:
            raise content.error(f"the path of {kind}, {places[kind]}, is not in the encoder's folder")
    return places, reasons


def _pooling(config: Record) -> str:
    """Returns the name of the pooling of tokens, as sentence-transformers spells it.

    Older files have a flag for each kind instead of a name. Then the names of all flags that are set are joined by
    "and". The flag of mean counts as set unless it is false.
    """
    if "pooling_mode" in config:
        return config.text("pooling_mode")
    flags = [key for key in config.values if key.startswith("pooling_mode_")]
    kinds = [flag for flag in flags if config.flag(flag, False)]
    if config.flag("pooling_mode_mean_tokens", True) and "pooling_mode_mean_tokens" not in kinds:
        kinds.append("pooling_mode_mean_tokens")
    names = [POOLING_FLAGS.get(kind, kind.removeprefix("pooling_mode_")) for kind in kinds]
    return " and ".join(names) or "nothing"


def _prefixes(config: Record) -> tuple[str, str] | None:
    """Returns the prompts of queries and of passages; None if there is neither.

    Where one of the two is missing, the default prompt stands in for it, if there is one.
    """
    if "prompts" not in config:
        return None
    prompts = config.record("prompts")
    default = config.text("default_prompt_name", None)
    query = _prompt(prompts, QUERY_PROMPTS, default)
    passage = _prompt(prompts, PASSAGE_PROMPTS, default)
    return (query, passage) if query or passage else None


def _prompt(prompts: Record, names: tuple[str, ...], default: str | None) -> str:
    """Returns the first prompt of these names, else the one named `default`; empty if there is none."""
    name = next((name for name in names if name in prompts), default)
    return prompts.text(name, blank=True) if name else ""


def default_prompt(config: Record) -> str:
    """Returns the prompt that `default_prompt_name` names; empty if it names none."""
    name = config.text("default_prompt_name", None)
    return config.record("prompts").text(name, blank=True) if name else ""


def model_folder(name: str, flag: str, instead: str) -> Path:
    """Returns the folder of the model `name`, which was passed with `flag`; an error ends with the advice `instead`."""
    remedy = f"Check the name and the connection, or pass {flag} FOLDER with the model's files. {instead}"
    with explained(R3LiteError, flag, remedy, code="model-absent"):
        return resolve_folder(name)


def read_optional(path: Path) -> Record:
    """Returns the JSON object of a file; an empty one if there is no such file."""
    if not path.exists():
        return Record({}, Source(str(path), REMEDY))
    return read_record(path, REMEDY)


def max_tokens_of(folder: Path) -> int:
    """Returns the folder's limit on the tokens of a text, at most LONGEST.

    sentence-transformers before 5.4 writes this number into sentence_bert_config.json; since 5.4, it writes the number
    as the limit of the tokenizer.
    """
    config = read_optional(folder / "sentence_bert_config.json")
    if "max_seq_length" in config:
        return min(config.whole("max_seq_length", low=SHORTEST), LONGEST)
    tokenizer_config = read_optional(folder / "tokenizer_config.json")
    limit = tokenizer_config.number("model_max_length", LONGEST, SHORTEST)  # without a limit, files have 1e30
    return int(min(limit, LONGEST))


def text_tokenizer(path: Path, max_length: int, rows: int) -> Tokenizer:
    """Returns the tokenizer of a tokenizer.json. It cuts texts to `max_length` tokens, including [CLS] and [SEP] (or
    <s> and </s>).

    Of a pair of texts it cuts the longer one. Raises R3LiteError if a token id is beyond the `rows` of the embedding,
    or if the tokenizer does not put a text between two special tokens.
    """
    definition = read_record(path, REMEDY)
    with library_errors(path):
        tokenizer = Tokenizer.from_str(json.dumps(definition.values))
    check_ids(definition, tokenizer)
    last_id = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if last_id >= rows:
        raise R3LiteError(
            f"{path} has token ids up to {last_id}, but the model's embedding has {rows} rows",
            REMEDY,
            code="tokenizer-beyond-embedding",
        )
    if tokenizer.num_special_tokens_to_add(is_pair=False) != 2:
        raise R3LiteError(f"{path} does not put a text between [CLS] and [SEP]", REMEDY, code="tokenizer-not-bert")
    tokenizer.enable_truncation(max_length)  # published files often carry other limits
    tokenizer.no_padding()
    return tokenizer


@dataclass(frozen=True)
class TextBatch:
    """Texts, or pairs of texts, of similar length, padded on the right."""

    rows: list[int]  # the indices of these texts among all
    tokens: Tensor  # [B, T]
    real: Tensor  # [B, T], False at padding
    segments: Tensor  # [B, T], 1 at the second text of a pair


def batches(encodings: list[Encoding], size: int, device: str) -> Iterator[TextBatch]:
    """Yields all texts, the longest first, `size` at a time.

    The texts of a batch have similar lengths, so that there is little padding.
    """
    order = sorted(range(len(encodings)), key=lambda i: -len(encodings[i].ids))
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        real = _padded([encodings[i].attention_mask for i in rows], device)
        yield TextBatch(
            rows=rows,
            tokens=_padded([encodings[i].ids for i in rows], device),
            real=real.bool(),
            segments=_padded([encodings[i].type_ids for i in rows], device),
        )


def _padded(sequences: list[list[int]], device: str) -> Tensor:
    """Returns sequences of numbers as a tensor [B, T], padded by 0 on the right."""
    tensors = [torch.tensor(sequence) for sequence in sequences]
    return pad_sequence(tensors, batch_first=True).to(device)
