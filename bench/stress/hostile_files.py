"""GGUF files whose header is not what it should be: keys of other types, ids, lengths, alignment, tensors elsewhere."""

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

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # by kind
TEXT = 8
LIST = 9
TEXTS = ("", "2", "x" * 5000, "\0", "é", "none", "llama", "gpt2", "{% for x in y %}", "a b", "\u202e")
# Keys with which a model of the same tensors may be another one.
MEANINGFUL = ("freq_base", "epsilon", "head_count", "tokenizer.", "context_length", "general.architecture", "length")
QUESTION = "Who wrote the book of 1901, and when? 漢字"


@dataclass
class Key:
    """A key of a header: its type in GGUF, and its value; of a list a pair of the items' type and the items."""

    name: str
    kind: int
    value: Any


@dataclass
class TensorInfo:
    """A tensor of a header."""

    name: str
    shape: list[int]  # as GGUF has it, the rows last
    kind: int
    offset: int


@dataclass
class GgufHeader:
    """A header that is written as it is, with numbers that may be wrong."""

    keys: list[Key]
    tensors: list[TensorInfo]
    magic: bytes = b"GGUF"
    version: int = 3
    more_keys: int = 0
    more_tensors: int = 0
    alignment: int = 32  # of the data
    text_growth: int = 0  # of the length that the first text has

    def encoded(self) -> bytes:
        """Returns the bytes before the data."""
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
            at = len(self.magic) + 20
            (size,) = struct.unpack("<Q", content[at : at + 8])
            content = content[:at] + struct.pack("<Q", (size + self.text_growth) % (1 << 64)) + content[at + 8 :]
        return content + b"\0" * (-len(content) % self.alignment)


def encoded_text(text: str | bytes) -> bytes:
    content = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(content)) + content


def encoded_value(kind: int, value: Any) -> bytes:
    """Returns a value of a type; what GGUF has no type for has no bytes."""
    if kind == TEXT:
        return encoded_text(value)
    if kind == LIST:
        item_kind, items = value
        parts = [struct.pack("<IQ", item_kind, len(items))]
        return b"".join((*parts, *(encoded_value(item_kind, item) for item in items)))
    return struct.pack(f"<{NUMBERS[kind]}", value) if kind in NUMBERS else b""


@st.composite
def values(draw: st.DrawFn, depth: int = 0) -> tuple[int, Any]:
    """Draws a type and a value of it."""
    kind = draw(st.sampled_from((*NUMBERS, TEXT, TEXT, *([LIST, LIST] if depth < 2 else []))))
    if kind == TEXT:
        return kind, draw(st.sampled_from(TEXTS))
    if kind == LIST:
        item_kind, item = draw(values(depth + 1))
        return kind, (item_kind, [item] * draw(st.sampled_from((0, 1, 2, 300))))
    return kind, draw(number_of(kind))


def number_of(kind: int) -> st.SearchStrategy[Any]:
    """Returns the strategy of the numbers of a type, its limits among them."""
    if kind == 7:
        return st.booleans()
    if kind in (6, 12):
        width = 32 if kind == 6 else 64
        return st.one_of(st.sampled_from((0.0, -1.0, 2.0, float("nan"), float("inf"))), st.floats(width=width))
    bits = struct.calcsize(NUMBERS[kind]) * 8
    is_signed = NUMBERS[kind].islower()
    low = -(1 << bits - 1) if is_signed else 0
    high = (1 << bits - is_signed) - 1
    return st.one_of(st.sampled_from((low, high, 0, 1, 2, 3)), st.integers(low, high))


@st.composite
def changed_header(draw: st.DrawFn, sound: GgufHeader) -> tuple[str, GgufHeader, bool]:
    """Draws a header that differs at one place: how, the header, and whether it may be that of another model."""
    header = copy.deepcopy(sound)
    place = draw(st.sampled_from(("key", "key", "key", "list", "list", "id", "tensor", "tensor", "alignment", "count")))
    if place == "tensor":
        return draw(changed_tensor(header))
    if place == "alignment":
        value = draw(st.sampled_from((0, 1, 3, 7, 8, 16, 64, 128, 1 << 31)))
        kind = draw(st.sampled_from((4, 4, 4, 5, 10, TEXT)))
        header.keys.append(Key("general.alignment", kind, str(value) if kind == TEXT else value % (1 << 31 | 1)))
        header.alignment = draw(st.sampled_from((1, 32, 64)))
        # Of a file that names another power of two than its data have, no reader can tell that they begin elsewhere.
        may_differ = kind == 4 and value in (1, 8, 16, 64, 128, 1 << 31)
        return f"alignment {value} as type {kind}, of the data {header.alignment}", header, may_differ
    if place == "count":
        field = draw(st.sampled_from(("version", "more_keys", "more_tensors", "text_growth", "magic")))
        value = draw(st.sampled_from((1, -1, 2, 1 << 20, 1 << 62, -(1 << 20))))
        if field == "version":
            value = draw(st.sampled_from((0, 1, 2, 4, 3 << 24, (1 << 32) - 1)))
        new = b"GGML" if field == "magic" else value
        setattr(header, field, new)
        return f"{field} {new}", header, False
    if place == "id":
        name = draw(st.sampled_from(("eos", "bos", "padding", "unknown", "eot")))
        kind = draw(st.sampled_from((4, 5, 10, 11)))
        value = draw(number_of(kind))
        key = f"tokenizer.ggml.{name}_token_id"
        header.keys = [each for each in header.keys if each.name != key] + [Key(key, kind, value)]
        return f"{key} {value}", header, True
    if place == "list":
        return draw(changed_list(header))
    key = draw(st.sampled_from(header.keys))
    change = draw(st.sampled_from(("value", "value", "value", "absent", "twice", "name")))
    may_differ = any(part in key.name for part in MEANINGFUL)
    if change == "absent":
        header.keys.remove(key)
    elif change == "twice":
        header.keys.append(key)
    elif change == "name":
        key.name = draw(st.sampled_from((key.name.upper(), key.name + ".x", "", b"\xff", "x" * 5000)))
    else:
        before = key.name
        key.kind, key.value = draw(values())
        return f"{before} {shown(key.value)} as type {key.kind}", header, may_differ
    return f"{shown(key.name)} {change}", header, may_differ


@st.composite
def changed_list(draw: st.DrawFn, header: GgufHeader) -> tuple[str, GgufHeader, bool]:
    """Draws a change of a list of the tokenizer."""
    key = draw(st.sampled_from([key for key in header.keys if key.kind == LIST]))
    kind, items = key.value
    items = list(items)
    at = draw(st.integers(0, len(items) - 1))
    change = draw(st.sampled_from(("shorter", "longer", "swapped", "same", "item", "type", "empty")))
    if change == "shorter":
        items.pop(at)
    elif change == "longer":
        items += [items[at]] * draw(st.sampled_from((1, 5000)))
    elif change == "swapped":
        items[at], items[0] = items[0], items[at]
    elif change == "same":
        items[at] = items[0]
    elif change == "empty":
        items = []
    elif change == "type":
        kind, item = draw(values(depth=2))
        items = [item] * len(items)
    elif kind == TEXT:
        items[at] = draw(st.sampled_from((*TEXTS, b"\xff\xfe", "x y z")))
    else:
        items[at] = draw(number_of(kind))
    key.value = (kind, items)
    return f"{key.name}[{at}] {change}, now {shown(items[-1:])}", header, True


@st.composite
def changed_tensor(draw: st.DrawFn, header: GgufHeader) -> tuple[str, GgufHeader, bool]:
    """Draws a change of a tensor's place, shape, type or name."""
    number = draw(st.integers(0, len(header.tensors) - 1))
    tensor = header.tensors[number]
    name = tensor.name
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
    is_half = tensor.kind in (1, 30)  # F16 and BF16 have the same size
    return f"{name} {change}", header, is_half


class Files:
    """Files of the tiny model with another header."""

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
        """Returns the logits [T, V] of a text, as commands read a file."""
        folder = resolve_folder(str(self.path))
        model = load_model(folder, torch.float32, torch.device("cpu"))
        tokenizer = Tokenizer.load(folder)
        check_lengths(folder, tokenizer.size, 64)
        ids = tokenizer.open_chat(QUESTION)
        with torch.no_grad():
            return model.logits(model(torch.tensor([ids])))[0]

    def judge(self, example: Example) -> Outcome:
        header, may_differ = example.content
        self.path.write_bytes(header.encoded() + self.data)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                logits = self.read()
        except R3LiteError as error:
            problem = refusal(str(error), str(self.path))
            if "/cache/" in str(error):
                return Outcome(problem.way, f"the error names the cached copy: {str(error)[:300]}")
            return problem
        is_same = logits.shape == self.logits.shape and torch.equal(logits, self.logits)
        problem = ""
        if not is_same and not may_differ:
            problem = "it is read as another model"
        return Outcome(ANSWERED, problem)

    def close(self) -> None:
        """Nothing is open."""


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
        tensors.append(TensorInfo(tensor.name, tensor.shape.tolist(), int(tensor.tensor_type), offset))
    return GgufHeader(keys, tensors)
