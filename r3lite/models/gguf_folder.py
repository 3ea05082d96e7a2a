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

from r3lite.core.cache import CACHE
from r3lite.core.errors import R3LiteError, reason
from r3lite.core.files import GGUF_POINTER, PART, check_regular, naming_gguf, write_json
from r3lite.core.records import REQUIRED, shown
from r3lite.models import gemma, gguf_tokenizer
from r3lite.models.causal_lm import CausalLM
from r3lite.models.config_file import read_config
from r3lite.models.gguf_files import ARCHITECTURES, EMBEDDING, GEMMA3, REMEDY, ROPE, Header
from r3lite.models.layer_kinds import FULL, SLIDING
from r3lite.models.rotary import RopeScaling, divisor_factors, rotary_divisors

LAYOUT = 2  # version of the folders that are made here: a folder of another version is not used
# For each architecture, the class in transformers and the model_type.
CLASSES = {
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "llama": ("LlamaForCausalLM", "llama"),
    GEMMA3: ("Gemma3ForCausalLM", "gemma3_text"),
}
SIZES = {
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length", "head_dim": "attention.key_length",
}  # fmt: skip
NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
THETA = "rope.freq_base"
EPS = "attention.layer_norm_rms_epsilon"
ROTATED_SIZE = "rope.dimension_count"
VALUE_SIZE = "attention.value_length"
READ = {*SIZES.values(), THETA, EPS, ROTATED_SIZE, VALUE_SIZE, "vocab_size"}  # any other key changes the network
WINDOW = "attention.sliding_window"
SCALING_TYPE = "rope.scaling.type"
SCALING_FACTOR = "rope.scaling.factor"
READ_OF_GEMMA3 = READ | {WINDOW, SCALING_TYPE, SCALING_FACTOR}
FOLDER = "Use the model's folder with safetensors files."
# The scaling of Llama 3.1 and later. A file does not have these numbers, only the factors of the divisors that follow
# from them.
LOW_FREQ_FACTOR = 1.0
HIGH_FREQ_FACTOR = 4.0
ORIGINAL_LENGTH = 8192


def of(path: Path) -> Path:
    """Returns the folder of a file, made if it is not in the cache; R3LiteError if the file cannot be used."""
    check_regular(path, "Pass a model folder or a GGUF file.")
    status = path.stat()
    path = path.resolve()
    identity = repr((LAYOUT, str(path), status.st_size, status.st_mtime_ns))
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    folder = Path(CACHE).expanduser() / f"{path.stem}-gguf-{key}"
    if folder.is_dir():
        return folder
    header = Header(path)
    files = {"config.json": _config(header), **gguf_tokenizer.files(header)}
    tensors = header.published()
    files[GGUF_POINTER] = {"file": str(path), "tensors": tensors}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{folder.name}.",
            suffix=PART,
            dir=folder.parent,
            ignore_cleanup_errors=True,
        ) as temporary:
            for name, content in files.items():
                write_json(Path(temporary, name), content)
            shapes = {name: tuple(tensor["shape"]) for name, tensor in tensors.items()}
            _check(path, Path(temporary), shapes)
            os.chmod(temporary, 0o755)
            # Another process may have made the same folder in the meantime: then that one is used.
            with contextlib.suppress(OSError if folder.is_dir() else ()):
                os.rename(temporary, folder)
    except OSError as error:
        raise R3LiteError(
            f"{folder} cannot be written: {reason(error)}",
            "Check disk space and permissions.",
            code="gguf-cache-unwritable",
        ) from error
    return folder


def _check(
    path: Path,
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
) -> None:
    """Raises R3LiteError, naming the file, unless a folder's model can be made of tensors of these shapes.

    The check is made before the folder is in the cache: later, errors would name the folder instead of the file.
    """
    with naming_gguf(folder):
        config = read_config(folder)
    last = f"model.layers.{config.num_hidden_layers - 1}.input_layernorm.weight"
    if last not in shapes:  # checked first: a thousand layers take a while to lay out
        raise R3LiteError(f"{path}: missing tensor {last}", REMEDY, code="gguf-tensor-missing")
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in CausalLM(config).state_dict().items()}
    missing = expected.keys() - shapes
    unexpected = shapes.keys() - expected
    if missing:
        raise R3LiteError(f"{path}: missing tensor {min(missing)}", FOLDER, code="gguf-tensor-missing")
    if unexpected:
        raise R3LiteError(f"{path}: unexpected tensor {min(unexpected)}", FOLDER, code="gguf-tensor-unexpected")
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise R3LiteError(
                f"{path}: {name} has shape {list(shapes[name])}, not {list(shape)}", FOLDER, code="gguf-shape"
            )


def _config(header: Header) -> dict[str, Any]:
    """Returns the values of `config.json`; raises R3LiteError, naming the key, for what has no place there."""
    path = header.path
    fields = header.fields
    architecture = fields.text("general.architecture", None)
    if architecture not in ARCHITECTURES:
        raise R3LiteError(
            f"{path} has the architecture {shown(architecture)}",
            f"Supported architectures are {', '.join(ARCHITECTURES)} (Mistral is called llama).",
            code="gguf-architecture",
        )
    if fields.whole("split.count", 1) != 1:
        raise R3LiteError(
            f"{path} is one part of a split model", "Join the parts with llama-gguf-split --merge.", code="gguf-split"
        )
    prefix = f"{architecture}."
    names = {key.removeprefix(prefix) for key in header.keys if key.startswith(prefix)}
    known_names = READ_OF_GEMMA3 if architecture == GEMMA3 else READ
    for name in sorted(names - known_names):
        value = header.size_of(name)
        if value not in (0, 0.0, False, "none"):
            raise R3LiteError(
                f"{path}: {architecture}.{name} is {shown(value)}, unsupported", FOLDER, code="gguf-size-unsupported"
            )
    if EMBEDDING not in header.tensors:
        raise R3LiteError(f"{path} has no tensor {EMBEDDING}", REMEDY, code="gguf-embedding-missing")
    sizes = _sizes(header, architecture)
    head_dim = sizes["head_dim"]
    for name in (ROTATED_SIZE, VALUE_SIZE):
        if header.size_of(name, head_dim) != head_dim:
            raise R3LiteError(
                f"{path}: {architecture}.{name} is not the head size, {head_dim}", FOLDER, code="gguf-head-size"
            )
    theta = _rounded(fields.number(f"{architecture}.{THETA}", 10_000.0, low=0, high=1e12, above=True))
    eps = _rounded(fields.number(f"{architecture}.{EPS}", 1e-6, low=0, high=1, above=True))
    if architecture == GEMMA3:
        network = _gemma3(header, sizes, theta)
    else:
        network = {"hidden_act": "silu", "rope_theta": theta}
    if ROPE in header.tensors:
        network["rope_scaling"] = _scaling(header, head_dim, theta)
    class_name, model_type = CLASSES[architecture]
    return {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": header.tensors[EMBEDDING].shape[0],
        **{name: size for name, size in sizes.items() if size is not None},
        "rms_norm_eps": eps,
        "tie_word_embeddings": header.tied(),
        **network,
        **gguf_tokenizer.ends(header),
    }


def _gemma3(
    header: Header,
    sizes: dict[str, int | None],
    theta: float,
) -> dict[str, Any]:
    """Returns what only the `config.json` of Gemma 3 says; what a file does not say, llama.cpp takes for granted."""
    fields = header.fields
    rope = {"rope_type": "default", "rope_theta": theta}
    scaling_type = fields.choice(f"{GEMMA3}.{SCALING_TYPE}", ("none", "linear"), "none")
    if scaling_type == "linear":
        rope["rope_type"] = scaling_type
        rope["factor"] = fields.number(f"{GEMMA3}.{SCALING_FACTOR}", low=1, high=1e6)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": gemma.attention_width(
            sizes["num_hidden_layers"],
            head_dim=sizes["head_dim"],
            hidden_per_head=sizes["hidden_size"] / sizes["num_attention_heads"],
        ),
        "sliding_window": fields.whole(f"{GEMMA3}.{WINDOW}", low=1),
        "sliding_window_pattern": gemma.PATTERN,
        "rope_parameters": {FULL: rope, SLIDING: {"rope_type": "default", "rope_theta": gemma.LOCAL_THETA}},
    }


def _sizes(header: Header, architecture: str) -> dict[str, int | None]:
    """Returns the sizes of `config.json`, as far as a file has them."""
    sizes = {}
    for ours, theirs in SIZES.items():
        if isinstance(header.size_of(theirs), list):
            raise R3LiteError(
                f"{header.path}: {architecture}.{theirs} differs from layer to layer", FOLDER, code="gguf-layers-differ"
            )
        default = REQUIRED if ours in NEEDED else None
        sizes[ours] = header.fields.whole(f"{architecture}.{theirs}", default, low=1)
    if sizes["head_dim"] is None:
        sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    return sizes


def _rounded(number: float) -> float:
    """Returns a number of fp32 with the digits that it was written with."""
    return float(f"{number:.7g}")


def _scaling(
    header: Header,
    head_dim: int,
    theta: float,
) -> dict[str, Any]:
    """Returns `rope_scaling` of Llama 3.1 and later, from the factors by which a file multiplies each divisor."""
    factors = header.tensors[ROPE][:]
    scaling = RopeScaling(
        factor=round(factors.max().item(), 4),
        low_freq_factor=LOW_FREQ_FACTOR,
        high_freq_factor=HIGH_FREQ_FACTOR,
        original_max_position_embeddings=ORIGINAL_LENGTH,
    )
    expected = divisor_factors(rotary_divisors(head_dim, theta), scaling)
    if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-4):
        raise R3LiteError(f"{header.path}: {ROPE} is not that of Llama 3.1, 3.2 or 3.3", FOLDER, code="gguf-rope")
    return {"rope_type": "llama3", **vars(scaling)}
