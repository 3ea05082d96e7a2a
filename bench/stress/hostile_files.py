"""GGUF files with a malformed header: keys of wrong types, wrong ids, lengths and alignment, misplaced tensors."""

import copy
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from hypothesis import strategies as st

from bench.stress.generated import ANSWERED, Example, Outcome, refusal
from r3lite.assembly.policy import check_lengths
from r3lite.core.errors import R3LiteError
from r3lite.core.records import shown
from r3lite.exporting import gguf as exporting
from r3lite.models import gguf_folder
from r3lite.models.weights import load_model, resolve_folder
from r3lite.protocols.tokenizer import Tokenizer

# Types of values in GGUF. Those of numbers have the format character of the module struct.
UINT32 = 4
INT32 = 5
FLOAT32 = 6
BOOL = 7
TEXT = 8
LIST = 9
UINT64 = 10
INT64 = 11
FLOAT64 = 12
NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", UINT32: "I", INT32: "i", FLOAT32: "f", BOOL: "?", UINT64: "Q", INT64: "q",
    FLOAT64: "d",
}  # fmt: skip
# Types of tensors in GGUF.
F16 = 1
BF16 = 30
COUNTS_SIZE = 20  # bytes between the magic and the first key: the version (4), the counts of tensors and keys (8 each)
TEXTS = ("", "2", "x" * 5000, "\0", "é", "none", "llama", "gpt2", "{% for x in y %}", "a b", "\u202e")
# Parts of the names of keys that change what a model computes. A file in which such a key is wrong may be read as
# another model.
MEANINGFUL = ("freq_base", "epsilon", "head_count", "tokenizer.", "context_length", "general.architecture", "length")
QUESTION = "Who wrote the book of 1901, and when? 漢字"


@dataclass
class Key:
    """A key of a header and its value."""

    name: str
    kind: int  # type of the value, such as UINT32
    value: Any  # of a list: the pair (type of the items, items)


@dataclass
class TensorInfo:
    """What a header says about a tensor."""

    name: str
    shape: list[int]  # in the order of GGUF: the number of rows comes last
    kind: int  # type of the numbers, such as F16
    offset: int  # bytes from the beginning of the data


@dataclass
class GgufHeader:
    """A GGUF header; it is written as it is, right or wrong."""

    keys: list[Key]
    tensors: list[TensorInfo]
    magic: bytes = b"GGUF"
    version: int = 3
    more_keys: int = 0  # by how many the written count of keys is too high
    more_tensors: int = 0  # by how many the written count of tensors is too high
    alignment: int = 32  # the data begin at a multiple of this many bytes
    text_growth: int = 0  # by how many bytes the written length of the first text is too high

    def encoded(self) -> bytes:
        """Returns the bytes of the file before the data of the tensors."""
        parts = [self.magic, struct.pack("<I", self.version)]
        counts = (len(self.tensors) + self.more_tensors, len(self.keys) + self.more_keys)
        parts += [struct.pack("<Q", count % (1 << 64)) for count in counts]
        for key in self.keys:
            parts += [encoded_text(key.name), struct.pack("<I", key.kind), encoded_value(key.kind, key.value)]
        for tensor in self.tensors:
            parts += [encoded_text(tensor.name), struct.pack("<I", len(tensor.shape))]
            parts += [struct.pack("<Q", size % (1 << 64)) for size in tensor.shape]
            parts.append(struct.pack("<IQ", tensor.kind % (1 << 32), tensor.offset % (1 << 64)))
        content = b"".join(parts)
        if self.text_growth:
            start = len(self.magic) + COUNTS_SIZE
            end = start + 8
            (size,) = struct.unpack("<Q", content[start:end])
            content = content[:start] + struct.pack("<Q", (size + self.text_growth) % (1 << 64)) + content[end:]
        return content + b"\0" * (-len(content) % self.alignment)


def encoded_text(text: str | bytes) -> bytes:
    """Returns a text in GGUF: its length and its bytes, which need not be UTF-8."""
    content = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(content)) + content


def encoded_value(kind: int, value: Any) -> bytes:
    """Returns a value in GGUF; b"" if there is no such type."""
    if kind == TEXT:
        return encoded_text(value)
    if kind == LIST:
        item_kind, items = value
        parts = [struct.pack("<IQ", item_kind, len(items))]
        return b"".join((*parts, *(encoded_value(item_kind, item) for item in items)))
    return struct.pack(f"<{NUMBERS[kind]}", value) if kind in NUMBERS else b""


@st.composite
def values(draw: st.DrawFn, depth: int = 0) -> tuple[int, Any]:
    """Draws a type and a value of this type; lists are nested at most twice."""
    kind = draw(st.sampled_from((*NUMBERS, TEXT, TEXT, *([LIST, LIST] if depth < 2 else []))))
    if kind == TEXT:
        return kind, draw(st.sampled_from(TEXTS))
    if kind == LIST:
        item_kind, item = draw(values(depth + 1))
        return kind, (item_kind, [item] * draw(st.sampled_from((0, 1, 2, 300))))
    return kind, draw(number_of(kind))


def number_of(kind: int) -> st.SearchStrategy[Any]:
    """Returns a strategy for numbers of a type; it often draws the limits of the type."""
    if kind == BOOL:
        return st.booleans()
    if kind in (FLOAT32, FLOAT64):
        width = 32 if kind == FLOAT32 else 64
        return st.one_of(st.sampled_from((0.0, -1.0, 2.0, float("nan"), float("inf"))), st.floats(width=width))
    bits = struct.calcsize(NUMBERS[kind]) * 8
    is_signed = NUMBERS[kind].islower()
    lowest = -(1 << bits - 1) if is_signed else 0
    highest = (1 << bits - is_signed) - 1
    return st.one_of(st.sampled_from((lowest, highest, 0, 1, 2, 3)), st.integers(lowest, highest))


@st.composite
def changed_header(draw: st.DrawFn, sound: GgufHeader) -> tuple[str, GgufHeader, bool]:
    """Draws one change of a sound header.

    Returns a text about the change, the changed header, and whether the file may be read as another model.
    """
    header = copy.deepcopy(sound)
    part = draw(st.sampled_from(("key", "key", "key", "list", "list", "id", "tensor", "tensor", "alignment", "count")))
    if part == "tensor":
        return draw(changed_tensor(header))
    if part == "alignment":
        value = draw(st.sampled_from((0, 1, 3, 7, 8, 16, 64, 128, 1 << 31)))
        kind = draw(st.sampled_from((UINT32, UINT32, UINT32, INT32, UINT64, TEXT)))
        if kind == INT32:
            value = min(value, (1 << 31) - 1)
        header.keys.append(Key("general.alignment", kind, str(value) if kind == TEXT else value))
        header.alignment = draw(st.sampled_from((1, 32, 64)))
        # If the key has a power of two that is not the alignment of the data, a reader looks for the data at a wrong
        # offset, and cannot notice that.
        may_differ = kind == UINT32 and value in (1, 8, 16, 64, 128, 1 << 31)
        return f"alignment {value} as type {kind}, of the data {header.alignment}", header, may_differ
    if part == "count":
        field = draw(st.sampled_from(("version", "more_keys", "more_tensors", "text_growth", "magic")))
        value = draw(st.sampled_from((1, -1, 2, 1 << 20, 1 << 62, -(1 << 20))))
        if field == "version":
            value = draw(st.sampled_from((0, 1, 2, 4, 3 << 24, (1 << 32) - 1)))
        new_value = b"GGML" if field == "magic" else value
        setattr(header, field, new_value)
        return f"{field} {new_value}", header, False
    if part == "id":
        name = draw(st.sampled_from(("eos", "bos", "padding", "unknown", "eot")))
        kind = draw(st.sampled_from((UINT32, INT32, UINT64, INT64)))
        value = draw(number_of(kind))
        key = f"tokenizer.ggml.{name}_token_id"
        header.keys = [each for each in header.keys if each.name != key] + [Key(key, kind, value)]
        return f"{key} {value}", header, True
    if part == "list":
        return draw(changed_list(header))
    key = draw(st.sampled_from(header.keys))
    change = draw(st.sampled_from(("value", "value", "value", "absent", "twice", "name")))
    may_differ = any(text in key.name for text in MEANINGFUL)
    if change == "absent":
        header.keys.remove(key)
    elif change == "twice":
        header.keys.append(key)
    elif change == "name":
        key.name = draw(st.sampled_from((key.name.upper(), key.name + ".x", "", b"\xff", "x" * 5000)))
    else:
        key.kind, key.value = draw(values())
        return f"{key.name} {shown(key.value)} as type {key.kind}", header, may_differ
    return f"{shown(key.name)} {change}", header, may_differ


@st.composite
def changed_list(draw: st.DrawFn, header: GgufHeader) -> tuple[str, GgufHeader, bool]:
    """Draws one change of a list, such as the tokenizer's list of tokens; returns the same as `changed_header`."""
    key = draw(st.sampled_from([key for key in header.keys if key.kind == LIST]))
    kind, items = key.value
    items = list(items)
    index = draw(st.integers(0, len(items) - 1))
    change = draw(st.sampled_from(("shorter", "longer", "swapped", "same", "item", "type", "empty")))
    if change == "shorter":
        items.pop(index)
    elif change == "longer":
        items += [items[index]] * draw(st.sampled_from((1, 5000)))
    elif change == "swapped":
        items[index], items[0] = items[0], items[index]
    elif change == "same":
        items[index] = items[0]
    elif change == "empty":
        items = []
    elif change == "type":
        kind, item = draw(values(depth=2))
        items = [item] * len(items)
    elif kind == TEXT:
        items[index] = draw(st.sampled_from((*TEXTS, b"\xff\xfe", "x y z")))
    else:
        items[index] = draw(number_of(kind))
    key.value = (kind, items)
    return f"{key.name}[{index}] {change}, now {shown(items[-1:])}", header, True


@st.composite
def changed_tensor(draw: st.DrawFn, header: GgufHeader) -> tuple[str, GgufHeader, bool]:
    """Draws one change of a tensor's offset, shape, type or name; returns the same as `changed_header`."""
    number = draw(st.integers(0, len(header.tensors) - 1))
    tensor = header.tensors[number]
    name = tensor.name
    kind = tensor.kind
    change = draw(st.sampled_from(("offset", "offset", "shape", "type", "name", "absent", "twice", "order")))
    if change == "offset":
        tensor.offset += draw(st.sampled_from((1, -1, 32, -32, 4096, 1 << 40, -(1 << 20), (1 << 64) - 64)))
        change = f"offset {tensor.offset}"
    elif change == "shape":
        tensor.shape = draw(
            st.sampled_from(
                ([], [0], tensor.shape[::-1], [*tensor.shape, 1], [1, *tensor.shape], [1 << 63, 2], [1 << 32, 1 << 32],
                 [*tensor.shape[:-1], tensor.shape[-1] - 1], [*tensor.shape[:-1], tensor.shape[-1] * 2], [1] * 40)
            )
        )  # fmt: skip
        change = f"shape {tensor.shape}"
    elif change == "type":
        tensor.kind = draw(st.sampled_from((*range(42), 255, 1 << 31)))
        change = f"type {tensor.kind}"
    elif change == "name":
        tensor.name = draw(st.sampled_from(("", "x" * 5000, b"\xff", "blk.99.attn_q.weight", header.tensors[0].name)))
        change = f"name {shown(tensor.name)}"
    elif change == "absent":
        header.tensors.remove(tensor)
    elif change == "twice":
        header.tensors.append(tensor)
    else:
        header.tensors.reverse()
    # F16 and BF16 have the same size, so no reader can notice if one is taken for the other.
    may_differ = {kind, tensor.kind} == {F16, BF16}
    return f"{name} {change}", header, may_differ


class Files:
    """The attack of the kind `files`: GGUF files of the tiny model with a changed header."""

    def __init__(self, folder: Path):
        gguf_folder.CACHE = str(folder / "cache")
        source = resolve_folder("tiny")
        model = load_model(source, torch.float32, torch.device("cpu"))
        self.path = folder / "out" / "model.gguf"
        exporting.write(model, source, Tokenizer.load(source), self.path, weights="bf16", name="test")
        reader = gguf.GGUFReader(self.path)
        self.data = self.path.read_bytes()[reader.data_offset :]
        self.header = header_of(reader)
        assert self.path.read_bytes() == self.header.encoded() + self.data
        self.logits = self.read()

    @property
    def strategy(self) -> st.SearchStrategy[Example]:
        return changed_header(self.header).map(lambda drawn: Example(drawn[0], drawn[1:]))

    def read(self) -> torch.Tensor:
        """Returns the logits [T, V] of a question. The file is read in the same way as by commands."""
        folder = resolve_folder(str(self.path))
        model = load_model(folder, torch.float32, torch.device("cpu"))
        tokenizer = Tokenizer.load(folder)
        check_lengths(folder, tokenizer.size, 64)
        ids = tokenizer.open_chat(QUESTION)
        with torch.no_grad():
            return model.logits(model(torch.tensor([ids])))[0]

    def judge(self, example: Example) -> Outcome:
        """Writes a file with the changed header, and reads it: it must be refused, or have the same logits."""
        header, may_differ = example.content
        self.path.write_bytes(header.encoded() + self.data)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                logits = self.read()
        except R3LiteError as error:
            outcome = refusal(str(error), str(self.path))
            if "/cache/" in str(error):
                return Outcome(outcome.way, f"the error names the cached copy: {str(error)[:300]}")
            return outcome
        is_same = logits.shape == self.logits.shape and torch.equal(logits, self.logits)
        problem = ""
        if not is_same and not may_differ:
            problem = "it is read as another model"
        return Outcome(ANSWERED, problem)

    def close(self) -> None:
        """Does nothing: no file is open."""


def header_of(reader: gguf.GGUFReader) -> GgufHeader:
    """Returns the header of a file."""
    keys = []
    for name, field in reader.fields.items():
        if name.startswith("GGUF."):
            continue
        value = field.contents()
        kind = int(field.types[0])
        if kind == LIST:
            value = (int(field.types[-1]), value)
        keys.append(Key(name, kind, value))
    tensors = []
    for tensor in reader.tensors:
        offset = tensor.data_offset - reader.data_offset
        tensors.append(TensorInfo(tensor.name, tensor.shape.tolist(), kind=int(tensor.tensor_type), offset=offset))
    return GgufHeader(keys, tensors)
