"""GGUF files, llama.cpp's format of one file a model: their keys, and their tensors one by one under published names.

Owns the names and the order of rows that llama.cpp gives the tensors of a Llama or a Qwen, for reading and for export.
Files are read and dequantized by the package `gguf` (extra gguf). It takes seconds for a vocabulary, so what it finds
is kept in the folder that `gguf_folder` makes.
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
ARCHITECTURES = ("qwen2", "qwen3", "llama")  # llama: also Mistral
REMEDY = "Download the file again."
TYPES = "Use a file in Q4_0 to Q8_0, K-quants, F16, BF16 or F32."
EMBEDDING, HEAD, ROPE = "token_embd.weight", "output.weight", "rope_freqs.weight"
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
MOST_READS = 1 << 22  # of a header: a vocabulary and its merges take a million
TILE = 1 << 20  # numbers dequantized at once
SAMPLED = 64  # rows by which two matrices are compared
SAME = 0.5  # most that two precisions of one matrix differ, in parts of its norm; matrices of their own: 1.4


def published_name(name: str) -> str:
    """What checkpoints call a tensor of a GGUF file; a name that is not known stays as it is."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name, re.ASCII)
    if not found or found[2] not in NAMES:
        return name
    layer, path, kind = found.groups()
    return f"model.layers.{layer}.{NAMES[path]}.{kind}" if layer else f"{NAMES[path]}.{kind}"


def gguf_name(name: str) -> str:
    """What a GGUF file calls a tensor, or a layer, of a checkpoint."""
    layer, path, kind = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?([\w.]+?)(\.weight|\.bias)?", name).groups("")
    theirs = next(gguf for gguf, ours in NAMES.items() if ours == path)
    return f"blk.{layer}.{theirs}{kind}" if layer else f"{theirs}{kind}"


def row_order(rows: int, heads: int) -> np.ndarray:
    """Which row of a Llama's query or key weights in GGUF is each published row [rows].

    llama.cpp rotates neighbours of a head there, and published Llamas its two halves.
    """
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def heads_of(name: str, architecture: str, heads: int, kv_heads: int) -> int:
    """By how many heads the rows of a published tensor are reordered in GGUF; 0: not at all."""
    if architecture != "llama":
        return 0
    return heads if ".q_proj." in name else kv_heads if ".k_proj." in name else 0


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file, of which some rows are read, as fp32."""

    path: str  # of the file
    name: str  # in it
    kind: int  # of its numbers in GGML
    shape: tuple[int, ...]
    start: int  # its first byte
    size: int  # its bytes
    heads: int = 0  # by which its rows are reordered; 0: not at all

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, order: np.ndarray | slice) -> Tensor:
        """Rows by number in the order that they are to have; a tile at a time."""
        import gguf

        kind = gguf.GGMLQuantizationType(self.kind)
        outer, *inner = self.shape if len(self.shape) > 1 else (1, *self.shape)
        numbers = row_order(outer, self.heads) if self.heads else np.arange(outer)
        chosen = numbers[order if len(self.shape) > 1 else slice(None)]
        dense = torch.empty(len(chosen), math.prod(inner))
        height = max(1, TILE // dense.shape[1])
        try:
            for at in range(0, len(chosen), height):  # mapped for each tile anew, since what is mapped is in memory
                file = np.memmap(self.path, np.uint8, "r", self.start, (outer, self.size // outer))
                tile = gguf.quants.dequantize(np.array(file[chosen[at : at + height]]), kind)
                dense[at : at + height] = torch.from_numpy(tile)
                del file, tile
        except NotImplementedError as error:
            raise R3LiteError(
                f"{self.path}: {self.name} is in {kind.name}, which the package gguf cannot dequantize",
                TYPES,
                code="gguf-type-unsupported",
            ) from error
        return dense.view(-1, *inner) if len(self.shape) > 1 else dense[0][order]


class Header:
    """Keys and tensors of a file; R3LiteError if it is no GGUF, damaged or shorter than it says."""

    def __init__(self, path: Path):
        self.path = path
        with open(path, "rb") as file:
            start = file.read(8)
        if start[:4] != b"GGUF":
            raise R3LiteError(f"{path} is not a GGUF file", REMEDY, code="not-gguf")
        if len(start) == 8 and (version := struct.unpack("<I", start[4:])[0]) not in VERSIONS:
            raise R3LiteError(
                f"{path} is a GGUF file of version {version}", "Use version 2 or 3, little-endian.", code="gguf-version"
            )
        try:
            reader = _reader()(path)
            self.keys = {name: field.contents() for name, field in reader.fields.items()}
            self.tensors = {
                t.name: GgufTensor(
                    str(path), t.name, int(t.tensor_type), tuple(t.shape.tolist()[::-1]), t.data_offset, t.n_bytes
                )
                for t in reader.tensors
            }
        except (ArithmeticError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
            raise R3LiteError(f"{path} is damaged or truncated ({error})", REMEDY, code="gguf-damaged") from error
        self.fields = Record(self.keys, Source(str(path), REMEDY))  # the keys by their types
        for name, tensor in self.tensors.items():
            if not tensor.shape or not math.prod(tensor.shape):
                raise R3LiteError(f"{path} is damaged or truncated ({name} is empty)", REMEDY, code="gguf-damaged")

    def tied(self) -> bool:
        """Whether embedding and head are one matrix, of which the file may have two precisions."""
        embedding, head = self.tensors.get(EMBEDDING), self.tensors.get(HEAD)
        if head is None or embedding is None or embedding.shape != head.shape:
            return head is None
        order = np.linspace(0, head.shape[0] - 1, min(SAMPLED, head.shape[0])).astype(int)
        one, other = embedding[order], head[order]
        most = 0 if embedding.kind == head.kind else SAME
        return bool((one - other).norm() <= most * other.norm())

    def size_of(self, name: str, default: Any = None) -> Any:
        """The value of a key of the architecture, such as block_count."""
        return self.keys.get(f"{self.keys.get('general.architecture')}.{name}", default)

    def published(self) -> dict[str, dict[str, Any]]:
        """The fields of each GgufTensor by its published name; without the head of a tied model."""
        architecture, heads = self.keys.get("general.architecture"), self.size_of("attention.head_count", 1)
        kv_heads = self.size_of("attention.head_count_kv", heads)
        found = {}
        for name, tensor in self.tensors.items():
            ours = published_name(name)
            turned = heads_of(ours, architecture, heads, kv_heads)
            uneven = turned and tensor.shape[0] % (2 * turned)  # refused with what config.json asks for
            found[ours] = asdict(replace(tensor, heads=0 if uneven else turned))
        if HEAD in self.tensors and self.tied():
            one, other = found[published_name(EMBEDDING)], found.pop(published_name(HEAD))
            found[published_name(EMBEDDING)] = max((one, other), key=lambda tensor: tensor["size"])  # the finer one
        found.pop(ROPE, None)  # config.json has it
        return found


def _reader() -> type:
    """gguf.GGUFReader, with an error if a file ends early: it takes what is missing for nothing and may never end."""
    with extra("gguf", "a GGUF model"):
        import gguf

    class Reader(gguf.GGUFReader):
        reads = 0

        def _get(self, offset, dtype, count=1, override_order=None):
            found, self.reads = super()._get(offset, dtype, count, override_order), self.reads + 1
            if len(found) < count or self.reads > MOST_READS:
                raise ValueError("unexpected end" if len(found) < count else f"more than {MOST_READS:,} values")
            return found

    return Reader


class GgufTensors:
    """The tensors of a file as those of a safetensors file are read; `pointer` is that of `gguf_folder`."""

    def __init__(self, pointer: Path):
        with extra("gguf", "a GGUF model"):
            import gguf  # noqa: F401
        found = read_record(pointer, "Delete the folder; it will be rebuilt.").record("tensors").values
        self._found = {name: GgufTensor(**fields) for name, fields in found.items()}

    def keys(self) -> list[str]:
        return list(self._found)

    def get_tensor(self, name: str) -> Tensor:
        return self._found[name][:]

    def get_slice(self, name: str) -> GgufTensor:
        return self._found[name]
