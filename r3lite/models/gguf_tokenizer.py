"""Makes `tokenizer.json` of the tokenizer of a GGUF file, which is byte-level BPE or Gemma's kind of SentencePiece.

Owns llama.cpp's names of the ways in which tokenizers split texts.
"""

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from r3lite.core.errors import R3LiteError
from r3lite.core.records import WHOLE, Record, shown
from r3lite.models.gguf_files import Header

# Types of tokens.
NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Marks, as of vowels in Hindi, belong to the letters before them.
QWEN35 = QWEN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
# By llama.cpp's name, the parts of a pre-tokenizer: its type, and the setting that matters.
SPLITS = {
    "qwen2": (("Split", QWEN), ("ByteLevel", False)),
    "qwen35": (("Split", QWEN35), ("ByteLevel", False)),
    "llama-bpe": (("Split", QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")), ("ByteLevel", False)),
    "smollm": (("Digits", True), ("ByteLevel", True)),
    "gpt-2": (("ByteLevel", True),),
}
PARTS = {
    "Split": lambda pattern: pre_tokenizers.Split(Regex(pattern), "isolated"),
    "Digits": lambda one_by_one: pre_tokenizers.Digits(individual_digits=one_by_one),
    "ByteLevel": lambda splits: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits),
}
ALIASES = {"deepseek-r1-qwen": "qwen2", "llama3": "llama-bpe", "llama-v3": "llama-bpe"}
NORMALIZED = ("qwen2", "qwen35")  # texts are brought into Unicode's form NFC; a file does not say so
IGNORES_MERGES = "llama-bpe"  # a piece that is a token is not merged from its bytes
# SentencePiece's BPE as in Gemma, without a space before a text: llama.cpp's names for it, and what `tokenizer.json`
# has of it.
SENTENCEPIECE = "llama"
SENTENCEPIECE_SPLIT = "default"
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
NO_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]  # tokens for the bytes of characters outside the vocabulary
FOLDER = "Use the model's folder with safetensors files and tokenizer.json."


def split_of(definition: Record) -> str | None:
    """Returns llama.cpp's name for the way in which a `tokenizer.json` splits texts.

    Returns None if this way is none of SPLITS, or if `ignore_merges` is set for another way than IGNORES_MERGES or not
    set for IGNORES_MERGES.
    """
    pre_tokenizer = definition.record("pre_tokenizer")
    parts = [pre_tokenizer]
    if pre_tokenizer.values.get("type") == "Sequence":
        parts = pre_tokenizer.records("pretokenizers")
    split = tuple(_essence(part.values) for part in parts)
    name = next((name for name, parts in SPLITS.items() if parts == split), None)
    ignores_merges = definition.record("model").flag("ignore_merges", False)
    if ignores_merges != (name == IGNORES_MERGES):
        return None
    return name


def is_sentencepiece(definition: Record) -> bool:
    """Returns whether a `tokenizer.json` is SentencePiece's BPE without a space before a text."""
    model = definition.record("model")
    return (
        model.flag("byte_fallback", False)
        and not model.flag("ignore_merges", False)
        and definition.values.get("normalizer") == SPACES
        and definition.values.get("pre_tokenizer") in (None, NO_SPLIT)  # NO_SPLIT finds no space left
    )


def merges_by_score(
    tokens: Sequence[str],
    kinds: Sequence[int],
    scores: Sequence[float],
) -> list[tuple[str, str]]:
    """Returns the merges of SentencePiece: all pairs of tokens that join to a token, whose score is their rank.

    The best score is first. Of merges with the same result, that with the longest left part is first, as in
    transformers.
    """
    present = set(tokens)
    scored_merges = []
    for token, kind, score in zip(tokens, kinds, scores, strict=True):
        if kind != NORMAL:
            continue
        for end in range(len(token) - 1, 0, -1):
            left = token[:end]
            right = token[end:]
            if left in present and right in present:
                scored_merges.append((score, left, right))
    scored_merges.sort(key=lambda merge: -merge[0])
    return [(left, right) for _, left, right in scored_merges]


def _essence(part: dict[str, Any]) -> tuple[str, Any]:
    """Returns the type of a part of a pre-tokenizer, and the setting that matters."""
    if part.get("type") == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
        return "Split", (part.get("pattern") or {}).get("Regex")
    if part.get("type") == "ByteLevel" and not part.get("add_prefix_space"):
        return "ByteLevel", part.get("use_regex", True)
    return part.get("type", ""), part.get("individual_digits")


def ends(header: Header) -> dict[str, Any]:
    """Returns the ids that begin and end a text, as `config.json` and `generation_config.json` have them."""
    ids = {}
    bos = token_id(header, "bos")
    if bos is not None:
        ids["bos_token_id"] = bos
    last_ids = []
    for kind in ("eos", "eot"):
        id = token_id(header, kind)
        if id is not None and id not in last_ids:
            last_ids.append(id)
    if last_ids:
        ids["eos_token_id"] = last_ids if len(last_ids) > 1 else last_ids[0]
    return ids


def token_id(header: Header, kind: str) -> int | None:
    """Returns the id of a special token; None, as in llama.cpp, if the file has no id or the id is not of a token."""
    name = f"tokenizer.ggml.{kind}_token_id"
    if name not in header.fields:
        return None
    id = header.fields.whole(name, low=-WHOLE)
    count = len(header.fields.items("tokenizer.ggml.tokens", []))
    return id if 0 <= id < count else None


def files(header: Header) -> dict[str, dict[str, Any]]:
    """Returns the files of the tokenizer, by name.

    Raises R3LiteError naming a tokenizer that is neither one of SPLITS nor Gemma's kind.
    """
    fields = header.fields
    model = fields.text("tokenizer.ggml.model", None)
    pre = fields.text("tokenizer.ggml.pre", None)
    split = ALIASES.get(pre, pre)
    is_sentencepiece = model == SENTENCEPIECE and not fields.flag("tokenizer.ggml.add_space_prefix", True)
    if not is_sentencepiece and (model != "gpt2" or split not in SPLITS):
        kind = f"{shown(model)} (tokenizer.ggml.model)"
        if model == "gpt2":
            kind = f"split as {shown(pre)} (tokenizer.ggml.pre)"
        supported = ", ".join([*SPLITS, *ALIASES])
        raise R3LiteError(
            f"{header.path}: the tokenizer is {kind}; supported are Gemma's and byte-level BPE of {supported}",
            FOLDER,
            code="gguf-tokenizer-unsupported",
        )
    tokens = fields.texts("tokenizer.ggml.tokens", ())
    kinds = fields.items("tokenizer.ggml.token_type", [])
    order_key = "tokenizer.ggml.scores" if is_sentencepiece else "tokenizer.ggml.merges"
    if not (tokens and fields.items(order_key, []) and len(kinds) == len(tokens)):
        raise R3LiteError(
            f"{header.path} lacks its tokens, their types or {order_key}", FOLDER, code="gguf-tokenizer-incomplete"
        )

    if not all(type(kind) is int for kind in kinds):
        raise fields.wrong("tokenizer.ggml.token_type", "a list of whole numbers")

    if is_sentencepiece:
        scores = fields.items(order_key)
        if len(scores) != len(tokens) or not all(type(score) is float for score in scores):
            raise fields.wrong(order_key, f"{len(tokens)} numbers")
        merges = merges_by_score(tokens, kinds, scores)
        split = None
    else:
        merges = [tuple(merge.split(" ", 1)) for merge in fields.texts(order_key)]

    def token(kind: str) -> str | None:
        id = token_id(header, kind)
        return None if id is None else tokens[id]

    bos = None
    if fields.flag("tokenizer.ggml.add_bos_token", is_sentencepiece or split == "llama-bpe"):
        bos = token("bos")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": header.size_of("context_length"),
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "add_bos_token": bool(bos),
        "clean_up_tokenization_spaces": False,
        "chat_template": fields.text("tokenizer.chat_template", None, blank=True),
    }
    try:
        backend = _backend(tokens, kinds=kinds, merges=merges, split=split, unknown=settings["unk_token"])
        if pre in NORMALIZED:
            backend.normalizer = normalizers.NFC()
        if bos:
            numbers = [(bos, tokens.index(bos))]
            backend.post_processor = TemplateProcessing(f"{bos} $A", f"{bos} $A {bos}:1 $B:1", numbers)
    except Exception as error:  # the Rust library raises bare Exception for every kind of fault
        raise R3LiteError(
            f"{header.path}: its tokenizer cannot be used: {error}", FOLDER, code="gguf-tokenizer-unusable"
        ) from error
    definition = json.loads(backend.to_str())
    return {"tokenizer.json": definition, "tokenizer_config.json": settings, "generation_config.json": ends(header)}


def _backend(
    tokens: Sequence[str],
    kinds: list[int],
    merges: list[tuple[str, ...]],
    split: str | None,
    unknown: str | None,
) -> Backend:
    """Returns the tokenizer; without a split it is SentencePiece's.

    Control tokens and tokens that a user defined become added tokens; unused tokens are left out.
    """
    used = {}
    added = []
    vocabulary = {}
    for id, token in enumerate(tokens):
        if kinds[id] == UNUSED or token == f"[PAD{id}]":
            continue
        used[id] = token
        if kinds[id] in (CONTROL, USER_DEFINED):
            added.append(id)
        else:
            vocabulary[token] = id
    # The tokenizers library numbers added tokens from the end of the vocabulary on. If a file numbers them otherwise,
    # they must be in the vocabulary, too.
    if split is None or added != list(range(len(vocabulary), len(used))):
        vocabulary = {token: id for id, token in used.items()}
    if split is None:
        backend = _sentencepiece(vocabulary, merges, unknown)
    else:
        bpe = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split == IGNORES_MERGES)
        backend = Backend(bpe)
        parts = [PARTS[kind](setting) for kind, setting in SPLITS[split]]
        backend.pre_tokenizer = parts[0] if len(parts) == 1 else pre_tokenizers.Sequence(parts)
        backend.decoder = decoders.ByteLevel()
    added_tokens = []
    for id in added:
        added_tokens.append(AddedToken(used[id], normalized=False, special=kinds[id] == CONTROL))
    backend.add_tokens(added_tokens)
    return backend


def _sentencepiece(
    vocabulary: dict[str, int],
    merges: list[tuple[str, ...]],
    unknown: str | None,
) -> Backend:
    """Returns a tokenizer of the kind that `is_sentencepiece` recognizes, without added tokens."""
    bpe = models.BPE(
        vocab=vocabulary,
        merges=merges,
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Backend(bpe)
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend
