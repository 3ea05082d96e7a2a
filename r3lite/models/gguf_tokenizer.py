"""The byte-level BPE tokenizer of a GGUF file as `tokenizer.json`, and llama.cpp's names of how texts are split."""

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from r3lite.core.errors import R3LiteError
from r3lite.core.records import WHOLE, Record, shown
from r3lite.models.gguf_files import Header

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# By llama.cpp's name, the parts of a pre-tokenizer: its type, and the setting that matters.
SPLITS = {
    "qwen2": (("Split", QWEN), ("ByteLevel", False)),
    "llama-bpe": (("Split", QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")), ("ByteLevel", False)),
    "smollm": (("Digits", True), ("ByteLevel", True)),
    "gpt-2": (("ByteLevel", True),),
}
PARTS = {
    "Split": lambda pattern: pre_tokenizers.Split(Regex(pattern), "isolated"),
    "Digits": lambda apart: pre_tokenizers.Digits(individual_digits=apart),
    "ByteLevel": lambda splits: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits),
}
ALIASES = {"deepseek-r1-qwen": "qwen2", "llama3": "llama-bpe", "llama-v3": "llama-bpe"}
WHOLE_FIRST = "llama-bpe"  # a piece that is a token is not merged from its bytes: ignore_merges
FOLDER = "Use the model's folder with safetensors files and tokenizer.json."


def split_of(definition: Record) -> str | None:
    """llama.cpp's name of how a `tokenizer.json` splits texts; None if it has none of SPLITS."""
    part = definition.record("pre_tokenizer")
    parts = part.records("pretokenizers") if part.values.get("type") == "Sequence" else [part]
    found = tuple(_essence(part.values) for part in parts)
    name = next((name for name, known in SPLITS.items() if known == found), None)
    whole = definition.record("model").flag("ignore_merges", False)
    return name if whole == (name == WHOLE_FIRST) else None


def _essence(part: dict[str, Any]) -> tuple[str, Any]:
    if part.get("type") == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
        return "Split", (part.get("pattern") or {}).get("Regex")
    if part.get("type") == "ByteLevel" and not part.get("add_prefix_space"):
        return "ByteLevel", part.get("use_regex", True)
    return part.get("type", ""), part.get("individual_digits")


def ends(header: Header) -> dict[str, Any]:
    """The ids that begin and end a text, as `config.json` and `generation_config.json` have them."""
    ids = {kind: token_id(header, kind) for kind in ("bos", "eos", "eot")}
    last = [id for id in dict.fromkeys((ids["eos"], ids["eot"])) if id is not None]
    found = {"bos_token_id": ids["bos"], "eos_token_id": last[0] if len(last) == 1 else last or None}
    return {name: id for name, id in found.items() if id is not None}


def token_id(header: Header, kind: str) -> int | None:
    """The id of a special token; None if the file has none, or one that no token has, which llama.cpp ignores, too."""
    name = f"tokenizer.ggml.{kind}_token_id"
    if name not in header.fields:
        return None
    id = header.fields.whole(name, low=-WHOLE)
    count = len(header.fields.items("tokenizer.ggml.tokens", []))
    return id if 0 <= id < count else None


def files(header: Header) -> dict[str, dict[str, Any]]:
    """The files of the tokenizer, by name; R3LiteError names one that is not byte-level BPE of SPLITS."""
    fields = header.fields
    model, pre = fields.text("tokenizer.ggml.model", None), fields.text("tokenizer.ggml.pre", None)
    split = ALIASES.get(pre, pre)
    if model != "gpt2" or split not in SPLITS:
        what = f"{shown(model)} (tokenizer.ggml.model)"
        if model == "gpt2":
            what = f"split as {shown(pre)} (tokenizer.ggml.pre)"
        known = ", ".join([*SPLITS, *ALIASES])
        raise R3LiteError(
            f"{header.path}: the tokenizer is {what}; supported is byte-level BPE of {known}",
            FOLDER,
            code="gguf-tokenizer-unsupported",
        )
    tokens, merges = (fields.texts(f"tokenizer.ggml.{name}", ()) for name in ("tokens", "merges"))
    kinds = fields.items("tokenizer.ggml.token_type", [])
    if not (tokens and merges and len(kinds) == len(tokens)):
        raise R3LiteError(
            f"{header.path} lacks its tokens, their types or their merges", FOLDER, code="gguf-tokenizer-incomplete"
        )

    def token(kind: str) -> str | None:
        id = token_id(header, kind)
        return None if id is None else tokens[id]

    bos = token("bos") if fields.flag("tokenizer.ggml.add_bos_token", split == "llama-bpe") else None
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
        backend = _backend(tokens, kinds, merges, split)
        if pre == "qwen2":
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


def _backend(tokens: Sequence[str], kinds: list[int], merges: Sequence[str], split: str) -> Backend:
    """The tokenizer. Tokens that text is not merged to are added ones; those of no use are left out."""
    used = {id: token for id, token in enumerate(tokens) if kinds[id] != UNUSED and token != f"[PAD{id}]"}
    added = [id for id in used if kinds[id] in (CONTROL, USER_DEFINED)]
    vocabulary = {token: id for id, token in used.items() if kinds[id] not in (CONTROL, USER_DEFINED)}
    # The tokenizers library numbers added tokens on from the vocabulary; one with another number must be in it.
    if added != list(range(len(vocabulary), len(used))):
        vocabulary = {token: id for id, token in used.items()}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    backend = Backend(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=split == WHOLE_FIRST))
    parts = [PARTS[kind](setting) for kind, setting in SPLITS[split]]
    backend.pre_tokenizer = parts[0] if len(parts) == 1 else pre_tokenizers.Sequence(parts)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(used[id], normalized=False, special=kinds[id] == CONTROL) for id in added])
    return backend
