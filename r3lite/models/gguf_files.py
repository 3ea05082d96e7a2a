"""GGUF files, llama.cpp's format of one file a model: their keys, and their tensors one by one under published names.

Owns the names, order of rows and shifts that llama.cpp gives the tensors of each family, for reading and for export.
Files are read and dequantized by the package `gguf` (extra gguf). The package takes seconds to read a vocabulary, so
what it finds is kept in the folder that `gguf_folder` makes.
"""

import math
import re
import struct
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from r3lite.core.errors import R3LiteError, extra
from r3lite.core.files import read_record
from r3lite.core.records import Record, Source

VERSIONS = (2, 3)
GEMMA3 = "gemma3"
QWEN35 = "qwen35"
ARCHITECTURES = ("qwen2", "qwen3", "llama", GEMMA3)  # architectures that can be read; llama: also Mistral
ZERO_CENTRED = (GEMMA3, QWEN35)  # architectures whose norms, except in linear attention, multiply by 1 + weight
LIKE_LLAMA = ("llama", "granite", "smollm3")  # architectures in which queries and keys are laid out as in `row_order`
REMEDY = "Download the file again."
TYPES = "Use a file in Q4_0 to Q8_0, K-quants, F16, BF16 or F32."
EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
ROPE = "rope_freqs.weight"
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
# Names that only one architecture has, or gives to other tensors.
LFM2_NAMES = {
    "token_embd_norm": "model.embedding_norm", "attn_norm": "operator_norm", "ffn_norm": "ffn_norm",
    "shortconv.in_proj": "conv.in_proj", "shortconv.conv": "conv.conv", "shortconv.out_proj": "conv.out_proj",
    "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2",
}  # fmt: skip
GEMMA3_NAMES = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
QWEN35_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d", "ssm_dt.bias": "linear_attn.dt_bias", "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
}  # fmt: skip
NAMES_OF = {
    "lfm2": NAMES | LFM2_NAMES,
    GEMMA3: NAMES | GEMMA3_NAMES,
    QWEN35: QWEN35_NAMES | NAMES,  # of two names of a tensor, `gguf_name` takes the first
}
MAX_READS = 1 << 22  # of a header: a vocabulary and its merges take a million
TILE = 1 << 20  # numbers dequantized at once
SAMPLED = 64  # rows by which two matrices are compared
MAX_DIFFERENCE = 0.5  # of two precisions of one matrix, in parts of its norm; unrelated matrices have 1.4


def published_name(name: str, architecture: str) -> str:
    """Returns the name that checkpoints give a tensor of a GGUF file; an unknown name stays as it is."""
    names = NAMES_OF.get(architecture, NAMES)
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name, re.ASCII)
    if not match or match[2] not in names:
        return name
    layer, path, kind = match.groups()
    prefix = f"model.layers.{layer}." if layer else ""
    return f"{prefix}{names[path]}.{kind}"


def gguf_name(name: str, architecture: str) -> str:
    """Returns the name that a GGUF file gives a tensor, or a layer, of a checkpoint."""
    match = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?([\w.]+?)(\.weight|\.bias)?", name)
    layer, path, kind = match.groups("")
    names = NAMES_OF.get(architecture, NAMES)
    theirs = next(gguf for gguf, ours in names.items() if ours == path)
    prefix = f"blk.{layer}." if layer else ""
    return f"{prefix}{theirs}{kind}"


def row_order(rows: int, heads: int) -> np.ndarray:
    """Returns, for each published row of a Llama's query or key weights, its row in GGUF [rows].

    In the architectures of LIKE_LLAMA, llama.cpp rotates neighbouring numbers of a head together; published Llamas
    rotate a number of the head's first half with one of its second half.
    """
    pairs = np.arange(rows).reshape(heads, -1, 2)
    return pairs.swapaxes(1, 2).reshape(-1)


def heads_of(
    name: str,
    architecture: str,
    heads: int,
    kv_heads: int,
) -> int:
    """Returns by how many heads the rows of a published tensor are reordered in GGUF; 0: not at all."""
    if architecture not in LIKE_LLAMA:
        return 0
    if ".q_proj." in name:
        return heads
    if ".k_proj." in name:
        return kv_heads
    return 0


def shift_of(name: str, architecture: str) -> float:
    """Returns what GGUF adds to a published tensor: 1 to norms that multiply by 1 + weight."""
    if architecture in ZERO_CENTRED and name.endswith("norm.weight") and "linear_attn" not in name:
        return 1.0
    return 0.0


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file. Its rows, all or some, are read as fp32."""

    path: str  # of the file
    name: str  # in the file
    kind: int  # GGML's type of its numbers
    shape: tuple[int, ...]
    start: int  # its first byte
    size: int  # its bytes
    heads: int = 0  # the number of heads by which its rows are reordered; 0: not at all
    shift: float = 0.0  # what was added to its numbers

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, order: np.ndarray | slice) -> Tensor:
        """Returns rows of a matrix, or numbers of a vector, by their indices, in the order of the indices."""
        import gguf

        kind = gguf.GGMLQuantizationType(self.kind)
        is_vector = len(self.shape) == 1
        outer, *inner = (1, *self.shape) if is_vector else self.shape
        file_rows = row_order(outer, self.heads) if self.heads else np.arange(outer)
        if not is_vector:
            file_rows = file_rows[order]
        dense = torch.empty(len(file_rows), math.prod(inner))
        height = max(1, TILE // dense.shape[1])
        try:
            for first in range(0, len(file_rows), height):
                # The file is mapped anew for each tile: what has been read of a mapping stays in memory.
                file = np.memmap(
                    self.path,
                    dtype=np.uint8,
                    mode="r",
                    offset=self.start,
                    shape=(outer, self.size // outer),
                )
                rows = np.array(file[file_rows[first : first + height]])
                tile = gguf.quants.dequantize(rows, kind)
                if self.shift:
                    tile = tile - np.float32(self.shift)
                dense[first : first + height] = torch.from_numpy(tile)
                del file, rows, tile
        except NotImplementedError as error:
            raise R3LiteError(
                f"{self.path}: {self.name} is in {kind.name}, which the package gguf cannot dequantize",
                TYPES,
                code="gguf-type-unsupported",
            ) from error
        if is_vector:
            return dense[0][order]
        return dense.view(-1, *inner)


class Header:
    """Keys and tensors of a file; R3LiteError if it is no GGUF, damaged or shorter than it says."""

    def __init__(self, path: Path):
        self.path = path
        with open(path, "rb") as file:
            start = file.read(8)
        if start[:4] != b"GGUF":
            raise R3LiteError(f"{path} is not a GGUF file", REMEDY, code="not-gguf")
        if len(start) == 8:
            (version,) = struct.unpack("<I", start[4:])
            if version not in VERSIONS:
                raise R3LiteError(
                    f"{path} is a GGUF file of version {version}",
                    "Use version 2 or 3, little-endian.",
                    code="gguf-version",
                )
        self.tensors: dict[str, GgufTensor] = {}
        try:
            reader = _reader()(path)
            self.keys = {name: field.contents() for name, field in reader.fields.items()}
            for tensor in reader.tensors:
                self.tensors[tensor.name] = GgufTensor(
                    path=str(path),
                    name=tensor.name,
                    kind=int(tensor.tensor_type),
                    shape=tuple(tensor.shape.tolist()[::-1]),
                    start=tensor.data_offset,
                    size=tensor.n_bytes,
                )
        except (ArithmeticError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
            raise R3LiteError(f"{path} is damaged or truncated ({error})", REMEDY, code="gguf-damaged") from error
        self.fields = Record(self.keys, Source(str(path), REMEDY))  # reads a key as a value of a given type
        end = reader.data_offset  # where the next tensor must begin
        for name, tensor in self.tensors.items():
            if not tensor.shape or not math.prod(tensor.shape):
                raise R3LiteError(f"{path} is damaged or truncated ({name} is empty)", REMEDY, code="gguf-damaged")
            if tensor.start != end:
                raise R3LiteError(
                    f"{path} is damaged or truncated ({name} begins at byte {tensor.start:,}, not {end:,})",
                    REMEDY,
                    code="gguf-damaged",
                )
            end += tensor.size + -tensor.size % int(reader.alignment)

    def tied(self) -> bool:
        """Returns True if embedding and head are one matrix, of which the file may have two precisions."""
        embedding = self.tensors.get(EMBEDDING)
        head = self.tensors.get(HEAD)
        if head is None or embedding is None or embedding.shape != head.shape:
            return head is None
        order = np.linspace(0, head.shape[0] - 1, min(SAMPLED, head.shape[0])).astype(int)
        embedding_rows = embedding[order]
        head_rows = head[order]
        difference = (embedding_rows - head_rows).norm()
        max_difference = 0 if embedding.kind == head.kind else MAX_DIFFERENCE
        return bool(difference <= max_difference * head_rows.norm())

    def size_of(self, name: str, default: Any = None) -> Any:
        """Returns the value of a key of the architecture, such as block_count."""
        return self.keys.get(f"{self.keys.get('general.architecture')}.{name}", default)

    def published(self) -> dict[str, dict[str, Any]]:
        """Returns the fields of each GgufTensor by its published name.

        Of a tied model, the larger of embedding and head stands under the embedding's name, and there is no head.
        """
        architecture = self.keys.get("general.architecture")
        heads = self.size_of("attention.head_count", 1)
        kv_heads = self.size_of("attention.head_count_kv", heads)
        fields = {}
        for gguf, tensor in self.tensors.items():
            name = published_name(gguf, architecture)
            reordered_heads = heads_of(name, architecture, heads=heads, kv_heads=kv_heads)
            if reordered_heads and tensor.shape[0] % (2 * reordered_heads):
                reordered_heads = 0  # the shape is refused later, against that of config.json
            shift = shift_of(name, architecture)
            fields[name] = asdict(replace(tensor, heads=reordered_heads, shift=shift))
        if HEAD in self.tensors and self.tied():
            embedding_name = published_name(EMBEDDING, architecture)
            embedding = fields[embedding_name]
            head = fields.pop(published_name(HEAD, architecture))
            fields[embedding_name] = max((embedding, head), key=lambda tensor: tensor["size"])
        fields.pop(ROPE, None)  # config.json has it
        return fields


def _reader() -> type:
    """Returns a subclass of gguf.GGUFReader that raises ValueError if a file ends early or its header is too long.

    The class of the package takes the missing bytes for empty values, and may never end.
    """
    with extra("gguf", "a GGUF model"):
        import gguf

    class Reader(gguf.GGUFReader):
        reads = 0

        def _get(self, offset, dtype, count=1, override_order=None):
            if self.reads == 0:
                # A slice of a memmap costs several times that of an array, and a vocabulary has 500,000 of them.
                self.data = self.data.view(np.ndarray)
            values = super()._get(offset, dtype, count, override_order)
            self.reads += 1
            if len(values) < count:
                raise ValueError("unexpected end")
            if self.reads > MAX_READS:
                raise ValueError(f"more than {MAX_READS:,} values")
            return values

    return Reader


class GgufTensors:
    """The tensors of a GGUF file, with the methods of an open safetensors file.

    `pointer` is the file GGUF_POINTER that `gguf_folder` writes.
    """

    def __init__(self, pointer: Path):
        with extra("gguf", "a GGUF model"):
            import gguf  # noqa: F401
        record = read_record(pointer, "Delete the folder; it will be rebuilt.").record("tensors")
        self._tensors = {name: GgufTensor(**fields) for name, fields in record.values.items()}

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name][:]

    def get_slice(self, name: str) -> GgufTensor:
        return self._tensors[name]
