"""A GGUF file as a model folder: `config.json` and the tokenizer's files, made of its keys and kept in the cache.

The weights stay where they are: `core.files.GGUF_POINTER` in the folder says where each tensor is, and `gguf_files`
reads them.
"""

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from r3lite.core.errors import R3LiteError
from r3lite.core.files import GGUF_POINTER, PART, check_regular, write_json
from r3lite.core.records import shown
from r3lite.models import gguf_tokenizer
from r3lite.models.causal_lm import RopeScaling, divisors, stretch
from r3lite.models.gguf_files import ARCHITECTURES, EMBEDDING, REMEDY, ROPE, Header

CACHE = "~/.cache/r3lite"
LAYOUT = 2  # of what is made here: a folder of another is not used
CLASSES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
SIZES = {
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length", "head_dim": "attention.key_length",
}  # fmt: skip
ROOT, EPS, TURNED, VALUES = "rope.freq_base", "attention.layer_norm_rms_epsilon", "rope.dimension_count", "value_length"
READ = {*SIZES.values(), ROOT, EPS, TURNED, f"attention.{VALUES}", "vocab_size"}  # other keys change what is computed
FOLDER = "Use the model's folder with safetensors files."
# Of Llama 3.1 and later. A file has what these make of each divisor, and not the numbers themselves.
LOW, HIGH, ORIGINAL = 1.0, 4.0, 8192


def of(path: Path) -> Path:
    """The folder of a file, made if it is not in the cache; R3LiteError if the file cannot be used."""
    check_regular(path, "Pass a model folder or a GGUF file.")
    status, path = path.stat(), path.resolve()
    key = hashlib.sha256(repr((LAYOUT, str(path), status.st_size, status.st_mtime_ns)).encode()).hexdigest()[:16]
    folder = Path(CACHE).expanduser() / f"{path.stem}-gguf-{key}"
    if folder.is_dir():
        return folder
    header = Header(path)
    files = {"config.json": _config(header), **gguf_tokenizer.files(header)}
    files[GGUF_POINTER] = {"file": str(path), "tensors": header.published()}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        how = {"prefix": f".{folder.name}.", "suffix": PART, "dir": folder.parent}
        with tempfile.TemporaryDirectory(**how, ignore_cleanup_errors=True) as made:
            for name, content in files.items():
                write_json(Path(made, name), content)
            os.chmod(made, 0o755)
            with contextlib.suppress(OSError if folder.is_dir() else ()):
                os.rename(made, folder)
    except OSError as error:
        raise R3LiteError(f"{folder} cannot be written: {error}", "Check disk space and permissions.") from error
    return folder


def _config(header: Header) -> dict[str, Any]:
    """What `config.json` says of the model; what it cannot say is refused by the key's name."""
    keys, path, architecture = header.keys, header.path, header.keys.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise R3LiteError(
            f"{path} has the architecture {shown(architecture)}",
            f"Supported architectures are {', '.join(ARCHITECTURES)} (Mistral is called llama).",
        )
    if keys.get("split.count", 1) != 1:
        raise R3LiteError(f"{path} is one part of a split model", "Join the parts with llama-gguf-split --merge.")
    unread = {name.removeprefix(f"{architecture}.") for name in keys if name.startswith(f"{architecture}.")} - READ
    for name in sorted(unread):
        if header.size_of(name) not in (0, 0.0, False, "none"):
            raise R3LiteError(f"{path}: {architecture}.{name} is {shown(header.size_of(name))}, unsupported", FOLDER)
    if EMBEDDING not in header.tensors:
        raise R3LiteError(f"{path} has no tensor {EMBEDDING}", REMEDY)
    sizes = {ours: header.size_of(theirs) for ours, theirs in SIZES.items()}
    if wrong := [SIZES[name] for name, size in sizes.items() if not isinstance(size, int | None)]:
        raise R3LiteError(f"{path}: {architecture}.{wrong[0]} differs from layer to layer", FOLDER)
    if not sizes["head_dim"] and sizes["hidden_size"] and sizes["num_attention_heads"]:
        sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    for name in (TURNED, f"attention.{VALUES}"):
        if header.size_of(name, sizes["head_dim"]) != sizes["head_dim"]:
            raise R3LiteError(f"{path}: {architecture}.{name} is not the head size, {sizes['head_dim']}", FOLDER)
    theta, eps = (float(f"{header.size_of(name, default):.7g}") for name, default in ((ROOT, 10_000.0), (EPS, 1e-6)))
    scaling = {"rope_scaling": _scaling(header, sizes["head_dim"], theta)} if ROPE in header.tensors else {}
    return {
        "architectures": [CLASSES[architecture]],
        "model_type": architecture,
        "vocab_size": header.tensors[EMBEDDING].shape[0],
        **{name: size for name, size in sizes.items() if size is not None},
        "hidden_act": "silu",
        "rms_norm_eps": eps,
        "rope_theta": theta,
        "tie_word_embeddings": header.tied(),
        **scaling,
        **gguf_tokenizer.ends(header),
    }


def _scaling(header: Header, head_dim: int, theta: float) -> dict[str, Any]:
    """`rope_scaling` of Llama 3.1 and later, from what a file multiplies each divisor by."""
    found = header.tensors[ROPE][:]
    scaling = RopeScaling(round(found.max().item(), 4), LOW, HIGH, ORIGINAL)
    expected = stretch(divisors(head_dim, theta), scaling)
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-4):
        raise R3LiteError(f"{header.path}: {ROPE} is not that of Llama 3.1, 3.2 or 3.3", FOLDER)
    return {"rope_type": "llama3", **vars(scaling)}
