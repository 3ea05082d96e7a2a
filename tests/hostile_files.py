"""Reads files that were changed at random, in a process whose memory is watched; see test_hostile_files.py."""

import contextlib
import io
import json
import random
import re
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from r3lite import index as index_command
from r3lite.core.config import UsageError
from r3lite.core.errors import R3LiteError
from r3lite.core.files import shipped
from r3lite.core.invocation import read_toml
from r3lite.llm.gemini import GeminiService
from r3lite.llm.openai_compatible import OpenAIService
from r3lite.models import gguf_folder, lora
from r3lite.models.tensor_files import read_tensors, write_tensors
from r3lite.models.weights import load_model, resolve_folder
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.retrieval import index as indexes
from r3lite.retrieval.documents import READERS
from r3lite.retrieval.documents.section import Unreadable
from r3lite.settings import ProtocolSettings, RetrievalSettings
from tests.gguf_models import write_gguf, write_model

REFUSED = (R3LiteError, UsageError, Unreadable)  # all of which name the file or are told with it
TINY = resolve_folder("tiny")
OPENAI = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 3}}
GEMINI = {"candidates": [{"content": {"parts": [{"text": "x"}]}, "finishReason": "STOP"}], "usageMetadata": {}}
HTML = "<html><title>T</title><body><h1>A</h1><p>one &amp; &#65; <b>two</b></p><table><tr><td>3</td></tr></table>"
TEXT = {
    ".html": HTML, ".md": "---\ntitle: T\n---\n# A\n\none\n\n```\n# x\n```\nB\n===\n- two\n",
    ".csv": 'title;text\nA;"one\ntwo"\nB;three\n', ".jsonl": '{"title": "T", "text": "one"}\n{"a": [1, {"b": 2}]}\n',
    ".py": 'import a\n\nclass B:\n    """C."""\n\n    def d(self, e: int = 1) -> str:\n        return f"{e}"\n',
    ".txt": "One. Two!\n\nThree? " + "word " * 300,
}  # fmt: skip
CONFIG = 'seed = 3\nmodel = "tiny"\n[sft]\nmax_steps = 2\nlearning_rate = 1e-3\n[[ppo.rewards]]\nname = "chat"\n'
FORMAT = 'kind = "tags"\nthink = ["<t>", "</t>"]\nanswer = ["<a>", "</a>"]\nprompt = """\nGo: {question}"""\n'


def pdf(stream: bytes, filters: bytes = b"/FlateDecode") -> bytes:
    """A PDF of one page with this content."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>"]
    objects += [b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 99 99] /Contents 4 0 R /Resources << >> >>"]
    objects += [b"<< /Length %d /Filter %s >>\nstream\n" % (len(stream), filters) + stream + b"\nendstream"]
    out, starts = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        starts.append(len(out))
        out += b"%d 0 obj\n" % number + content + b"\nendobj\n"
    table = b"xref\n0 5\n0000000000 65535 f \n" + b"".join(b"%010d 00000 n \n" % start for start in starts)
    return out + table + b"trailer << /Size 5 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % len(out)


def bomb(mib: int) -> bytes:
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(b" " * (1 << 20)) for _ in range(mib)) + packer.flush()


NUMBERS = (b"-1", b"1e400", b"4294967295", b"9223372036854775807", b"10" * 30, b"0", b"1.5")


def changed(content: bytes, count: int, generator: random.Random, within: int | None = None) -> Iterator[bytes]:
    """The content with some bytes replaced, cut, repeated, swapped or moved, mostly near its beginning."""
    for _ in range(count):
        end = min(len(content), within or len(content))
        at = (
            generator.randrange(max(end, 1)) if generator.random() < 0.5 else generator.randrange(max(min(end, 200), 1))
        )
        width = generator.choice((1, 1, 2, 4, 8, 8, 40))
        kind = generator.randrange(6)
        if kind == 0:
            yield content[:at] + generator.randbytes(width) + content[at + width :]
        elif kind == 1:
            yield content[:at]
        elif kind == 2:
            yield content[:at] + content[at : at + width] * generator.choice((2, 50)) + content[at + width :]
        elif kind == 3:
            yield content[:at] + generator.choice((b"\xff" * 8, b"\0" * 8, b"9" * 5000, b"[" * 300)) + content[at + 8 :]
        elif kind == 4:
            yield content[:at] + content[at + width :]
        else:
            digits = [match.span() for match in re.finditer(rb"\d+", content[:end])] or [(at, at)]
            start, stop = generator.choice(digits)
            number = generator.choice(
                (b"-1", b"1e400", b"4294967295", b"9223372036854775807", b"10" * 30, b"0", b"1.5")
            )
            yield content[:start] + number + content[stop:]


def tensors_of(header: dict | bytes, length: int | None = None, data: bytes = b"\0" * 64) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(dtype: str = "F32", shape=(4,), offsets=(0, 16)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


SIZES = [
    tensors_of({"a": tensor()}, 1 << 62), tensors_of({"a": tensor()}, 10**12), tensors_of({"a": tensor()}, 0),
    tensors_of({"a": tensor(shape=(1 << 40, 1 << 40))}), tensors_of({"a": tensor(shape=(-1,))}),
    tensors_of({"a": tensor(offsets=(0, 1 << 60))}), tensors_of({"a": tensor(offsets=(16, 0))}),
    tensors_of({"a": tensor(), "b": tensor(offsets=(8, 24))}), tensors_of({"a": tensor("F9")}),
    tensors_of({str(i): tensor(shape=(0,), offsets=(0, 0)) for i in range(50_000)}, data=b""),
    tensors_of(b'{"a":' + b"[" * 100_000), tensors_of(b" " * (1 << 24)), tensors_of({"__metadata__": {"x": 1}}),
    tensors_of({"x" * (1 << 20): tensor()}), tensors_of({}), b"", b"\0" * 8, b"\xff" * 8,
]  # fmt: skip
TEXTS_OF_TOML = [
    "a = " + "[" * 100_000, "a = " + "{b = " * 50_000, ".".join("a" * 9_000) + " = 1", "[" + ".".join("a" * 9_000),
    "[[a]]\n" * 20_000, "a = " + "9" * 100_000, "a = 1e999999999", "a = 0x" + "f" * 100_000, "a = 9999-99-99",
    "[" + ".".join("a" * 9_000) + "]", "a = nan", "ppo.x = 1",
    'a = "' + "\\u0041" * 50_000 + '"', 'a = """' + '"' * 100_000, "a = 1\r", "\ufeffa = 1", "a = 1\n" * 2, "# x\x00",
    "seed = [1]", "seed = {a = 1}", "sft = 3", "[sft.sft]", "[[sft]]", 'seed = "\\ud800"', "=", "a", "'' = 1",
]  # fmt: skip


class Watch:
    """Reads, and counts what came of it."""

    def __init__(self):
        self.tried = self.refused = 0
        self.slowest, self.wrong = 0.0, {}

    def read(self, name: str, case: str, read: Callable[[], object]) -> None:
        start, self.tried = time.process_time(), self.tried + 1
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                read()
        except REFUSED:
            self.refused += 1
        except BaseException as error:
            self.wrong[f"{name}: {case}"[:200]] = f"{type(error).__name__}: {error}"[:300]
        self.slowest = max(self.slowest, time.process_time() - start)


def peak_mib() -> float:
    status = Path("/proc/self/status")
    text = status.read_text(encoding="utf-8") if status.exists() else "VmHWM: 0 kB"
    return int(re.search(r"VmHWM:\s*(\d+)", text)[1]) / 1024


def file_readers(folder: Path) -> Iterator[tuple[str, Path, Callable[[], object], int, int | None, list[bytes]]]:
    """Name, sound file, reader, how many changes, within how many bytes, and other contents."""
    gguf_folder.CACHE = str(folder / "cache")
    model = load_model(TINY, torch.float32, torch.device("cpu"))
    lora.add_adapter(model, "policy", 2, 4)
    lora.save_adapter(model, "policy", folder / "adapter", "tiny")
    weights = folder / "adapter" / "adapter_model.safetensors"

    def adapter() -> None:
        bare = load_model(TINY, torch.float32, torch.device("cpu"))
        lora.load_adapter(bare, "x", folder / "adapter", trainable=False)

    write_tensors(folder / "a.safetensors", {"a": torch.ones(3, 4), "b": torch.ones(5)}, {"x": "y"})
    yield "safetensors", folder / "a.safetensors", lambda: read_tensors(folder / "a.safetensors"), 150, 300, SIZES
    yield "adapter weights", weights, adapter, 10, 2000, SIZES[:6]
    yield "adapter config", folder / "adapter" / "adapter_config.json", adapter, 10, None, []
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tokenizer / name).write_bytes((TINY / name).read_bytes())

    def tokens() -> None:
        Tokenizer.load(tokenizer).encode("Who wrote it, and when? Oslo")

    yield "tokenizer.json", tokenizer / "tokenizer.json", tokens, 20, 4000, []
    yield "tokenizer_config.json", tokenizer / "tokenizer_config.json", tokens, 20, None, []
    source = write_model(folder / "source", "qwen2", "qwen2")
    path = write_gguf(source, folder / "out" / "model.gguf", "fp32")
    yield "GGUF", path, lambda: resolve_folder(str(path)), 30, 3000, [
        b"GGUF" + struct.pack("<IQQ", 3, 1 << count, 1 << keys) for count in (0, 20, 63) for keys in (0, 20, 63)
    ]  # fmt: skip


def index_readers(folder: Path) -> Iterator[tuple[str, Path, Callable[[], object], int, int | None, list[bytes]]]:
    corpus = shipped("data", "world", "corpus.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:40]
    (folder / "corpus.jsonl").write_text("".join(corpus), encoding="utf-8")
    index = folder / "index"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        flags = ["--encoder", "hashing", "--corpus", str(folder / "corpus.jsonl"), "--output", str(index)]
        assert index_command.main(flags) == 0

    def search() -> None:
        indexes.load(index, RetrievalSettings(encoder="hashing")).search(["Where is it?", "Oslo"], 3)

    for path in sorted(path for path in index.iterdir() if path.is_file()):
        yield f"index {path.name}", path, search, 15, None, [b"", b"{}", b"[]", b"\xff" * 100]


def main(folder: Path) -> None:
    watch, generator = Watch(), random.Random(0)
    readers = [*file_readers(folder), *index_readers(folder)]
    for _, _, read, *_ in readers:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            read()
    mib_before = peak_mib()
    for name, path, read, count, within, replacements in readers:
        sound = path.read_bytes()
        for number, content in enumerate([*replacements, *changed(sound, count, generator, within)]):
            path.write_bytes(content)
            watch.read(name, f"{number} {content[:60]!r}", read)
        path.write_bytes(sound)
        read()
    settings = ProtocolSettings(format=str(folder / "x.toml"))
    for name, text, read in (
        ("config", CONFIG, lambda: read_toml(folder / "x.toml", "sft", {"max_steps", "learning_rate"})),
        ("format", FORMAT, lambda: build_protocol(settings)),
    ):
        sound = text.encode()
        for number, content in enumerate([*(t.encode() for t in TEXTS_OF_TOML), *changed(sound, 150, generator)]):
            (folder / "x.toml").write_bytes(content)
            watch.read(name, f"{number} {content[:60]!r}", read)
    for suffix, text in TEXT.items():
        for number, content in enumerate(changed(text.encode(), 60, generator)):
            decoded = content.decode(errors="replace")
            watch.read(suffix, f"{number} {decoded[:60]!r}", lambda s=suffix, t=decoded: list(READERS[s](t, "x")))
    page = pdf(zlib.compress(b"BT /F1 12 Tf (Hello) Tj ET"))
    bombs = [pdf(bomb(300)), pdf(zlib.compress(bomb(300)), b"[/FlateDecode /FlateDecode]")]
    for number, content in enumerate([*bombs, *changed(page, 30, generator)]):
        watch.read("PDF", f"{number} {content[:60]!r}", lambda c=content: list(READERS[".pdf"](c, "x")))
    for service, reply in ((OpenAIService, OPENAI), (GeminiService, GEMINI)):
        reader = service.__new__(service)
        for number, content in enumerate(changed(json.dumps(reply).encode(), 100, generator)):
            body = content.decode(errors="replace")
            watch.read(service.__name__, f"{number} {body[:60]!r}", lambda r=reader, b=body: r.read_answer(b, 1.0, 9))
    print(json.dumps(vars(watch) | {"more_mib": round(peak_mib() - mib_before)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
