"""GGUF files, llama.cpp's format of one file a model: their keys, and their tensors one by one under published names.

Owns the names and the order of rows that llama.cpp gives the tensors of a Llama or a Qwen, for reading and for export.
Numbers are dequantized by the package `gguf` (extra gguf). The header is read here, because the package takes half a
minute for a vocabulary and waits without end for a list that is said to be longer than the file.
"""

import functools
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from r3lite.core.errors import R3LiteError, extra

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, LIST = 8, 9
VERSIONS = (2, 3)
ARCHITECTURES = ("qwen2", "qwen3", "llama")  # llama: also Mistral
REMEDY = "The download may be incomplete: fetch the file again."
TYPES = "Use a file in Q4_0 to Q8_0, K-quants, F16, BF16 or F32."
EMBEDDING, HEAD, ROPE = "token_embd.weight", "output.weight", "rope_freqs.weight"
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
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
class Placed:
    """Where a tensor of a file is: its number type in GGML, shape, first byte and bytes."""

    kind: int
    shape: tuple[int, ...]
    start: int
    size: int


class Header:
    """Keys and tensors of a file; R3LiteError if it is no GGUF, damaged or shorter than it says."""

    def __init__(self, path: Path):
        self.path, self.size = path, path.stat().st_size
        with open(path, "rb") as self._file:
            if self._file.read(4) != b"GGUF":
                raise R3LiteError(f"{path} is not a GGUF file: it does not begin with GGUF", REMEDY)
            version, tensors, keys = self._numbers("IQQ")
            if version not in VERSIONS:
                raise R3LiteError(
                    f"{path} is a GGUF file of version {version}", "Versions 2 and 3 are read, little-endian."
                )
            self.keys = {self._text(): self._value(self._number("I")) for _ in range(self._count(keys, 12))}
            infos = [self._info() for _ in range(self._count(tensors, 24))]
            step = self.keys.get("general.alignment", 32)
            if not isinstance(step, int) or step < 1:
                raise self.damaged()
            begin = -(-self._file.tell() // step) * step
        self.tensors = {name: self._place(name, kind, shape, begin + offset) for name, kind, shape, offset in infos}
        del self._file

    def damaged(self) -> R3LiteError:
        return R3LiteError(f"{self.path} is damaged or truncated", REMEDY)

    def _take(self, size: int) -> bytes:
        data = self._file.read(size) if size <= self.size else b""
        if len(data) < size:
            raise self.damaged()
        return data

    def _numbers(self, form: str, count: int = 1) -> tuple:
        return struct.unpack("<" + form * count, self._take(struct.calcsize(f"<{form}") * count))

    def _number(self, form: str) -> Any:
        return self._numbers(form)[0]

    def _count(self, stated: int, least: int) -> int:
        """A number of things that take at least so many bytes each."""
        if stated * least > self.size:
            raise self.damaged()
        return stated

    def _text(self) -> str:
        return self._take(self._number("Q")).decode(errors="replace")

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == STRING:
            return self._text()
        if kind != LIST:
            raise self.damaged()
        kind, count = self._numbers("IQ")
        if kind in SCALARS:
            return list(self._numbers(SCALARS[kind], self._count(count, 1)))
        if kind != STRING:
            raise self.damaged()
        return [self._text() for _ in range(self._count(count, 8))]

    def _info(self) -> tuple[str, int, tuple[int, ...], int]:
        name, dimensions = self._text(), self._number("I")
        if dimensions > 4:
            raise self.damaged()
        shape = self._numbers("Q", dimensions)[::-1]  # a file's first dimension is the innermost
        return name, *self._numbers("I"), shape, *self._numbers("Q")

    def _place(self, name: str, kind: int, shape: tuple[int, ...], start: int) -> Placed:
        block, size = self._block(name, kind)
        numbers = math.prod(shape)
        if not numbers or shape[-1] % block or start + numbers // block * size > self.size:
            raise self.damaged()
        return Placed(kind, shape, start, numbers // block * size)

    def _block(self, name: str, kind: int) -> tuple[int, int]:
        """Numbers of a block, and its bytes."""
        import gguf

        try:
            return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise R3LiteError(
                f"{self.path}: {name} is of a type that the package gguf does not know ({kind})", TYPES
            ) from None

    def rows(self, name: str, order: np.ndarray | slice = slice(None)) -> Tensor:
        """Rows of a tensor, by number in the order that they are to have, as fp32; a tile at a time."""
        import gguf

        placed, kind = self.tensors[name], gguf.GGMLQuantizationType(self.tensors[name].kind)
        outer, *inner = placed.shape if len(placed.shape) > 1 else (1, *placed.shape)
        chosen = np.arange(outer)[order if len(placed.shape) > 1 else slice(None)]
        dense = torch.empty(len(chosen), math.prod(inner))
        height = max(1, TILE // dense.shape[1])
        try:
            for at in range(0, len(chosen), height):  # mapped for each tile anew, since what is mapped is in memory
                file = np.memmap(self.path, np.uint8, "r", placed.start, (outer, placed.size // outer))
                tile = gguf.quants.dequantize(np.array(file[chosen[at : at + height]]), kind)
                dense[at : at + height] = torch.from_numpy(tile)
                del file, tile
        except NotImplementedError as error:
            raise R3LiteError(
                f"{self.path}: {name} is in {kind.name}, which the package gguf does not dequantize", TYPES
            ) from error
        return dense.view(-1, *inner) if len(placed.shape) > 1 else dense[0][order]

    def tied(self) -> bool:
        """Whether embedding and head are one matrix, of which the file may have two precisions."""
        embedding, head = self.tensors.get(EMBEDDING), self.tensors.get(HEAD)
        if head is None or embedding is None or embedding.shape != head.shape:
            return head is None
        order = np.linspace(0, head.shape[0] - 1, min(SAMPLED, head.shape[0])).astype(int)
        one, other = self.rows(EMBEDDING, order), self.rows(HEAD, order)
        most = 0 if embedding.kind == head.kind else SAME
        return bool((one - other).norm() <= most * other.norm())

    def size_of(self, name: str, default: Any = None) -> Any:
        """The value of a key of the architecture, such as block_count."""
        return self.keys.get(f"{self.keys.get('general.architecture')}.{name}", default)


@functools.lru_cache(maxsize=2)
def _places(path: Path, size: int, changed: int) -> tuple[Header, dict[str, tuple[str, int]]]:
    """A file's header without its keys, and by published name each tensor's own name and the heads of its rows."""
    header = Header(path)
    architecture = header.keys.get("general.architecture")
    heads = header.size_of("attention.head_count", 1)
    kv_heads = header.size_of("attention.head_count_kv", heads)
    found = {}
    for name in header.tensors:
        ours = published_name(name)
        turned = heads_of(ours, architecture, heads, kv_heads)
        uneven = turned and header.tensors[name].shape[0] % (2 * turned)  # refused with what config.json asks for
        found[ours] = name, 0 if uneven else turned
    if HEAD in header.tensors and header.tied():
        finer = max((EMBEDDING, HEAD), key=lambda name: header.tensors[name].size)
        del found[published_name(HEAD)]
        found[published_name(EMBEDDING)] = finer, 0
    found.pop(ROPE, None)  # config.json has it
    header.keys = {}  # a vocabulary takes more memory than a layer
    return header, found


class GgufTensors:
    """The tensors of a file as those of a safetensors file are read, in fp32; without the head of a tied model."""

    def __init__(self, path: Path):
        with extra("gguf", "a GGUF model"):
            import gguf  # noqa: F401
        status = path.stat()
        self._header, self._found = _places(path, status.st_size, status.st_mtime_ns)

    def keys(self) -> list[str]:
        return list(self._found)

    def get_tensor(self, name: str) -> Tensor:
        return GgufRows(self._header, *self._found[name])[:]

    def get_slice(self, name: str) -> "GgufRows":
        return GgufRows(self._header, *self._found[name])


@dataclass(frozen=True)
class GgufRows:
    """A tensor of which some rows are read."""

    header: Header
    name: str
    heads: int

    def get_shape(self) -> list[int]:
        return list(self.header.tensors[self.name].shape)

    def __getitem__(self, rows: slice) -> Tensor:
        if not self.heads:
            return self.header.rows(self.name, rows)
        return self.header.rows(self.name, row_order(self.get_shape()[0], self.heads)[rows])
