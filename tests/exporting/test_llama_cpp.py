"""Exported GGUF files in llama.cpp itself, by the package xllamacpp: greedy text is that of r3lite.

Models are random, with the real tokenizer of Qwen2.5, or real ones, whose folders or GGUF files environment variables
name: R3LITE_SMOLLM2 SmolLM2-135M-Instruct, R3LITE_GEMMA3 Gemma 3 270M.
"""

import gzip
import json
import os
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend

from r3lite.core.files import shipped
from r3lite.datasets.qa import read_questions
from r3lite.exporting import gguf as exporting
from r3lite.models import gguf_folder, lora
from r3lite.models.kv_cache import KVCache, Prefill
from r3lite.models.weights import load_model, resolve_folder
from tests.gguf_models import LLAMA3, TEXTS, write_gguf, write_model, write_tokenizer

llama = pytest.importorskip("xllamacpp", reason="needs the package xllamacpp (extra bench)")
pytest.importorskip("gguf", reason="needs the extra gguf")
pytestmark = pytest.mark.slow  # llama.cpp reads a file for seconds
TOKENS = 16


def prompts() -> list[str]:
    """30 prompts: chats, and texts that tokenizers split in different ways."""
    questions = [question.text for question in read_questions(str(shipped("data", "world", "test.jsonl")))][:26]
    chats = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in questions]
    return chats + [text.replace("e\u0301", "é") for text in TEXTS]  # llama.cpp does not compose letters


def served(path: Path, adapter: Path | None = None):
    """llama.cpp with a file, in fp32."""
    params = llama.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.verbosity = 1024, 1, 0, -1
    params.warmup = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if adapter:
        params.lora_adapters = [llama.CommonAdapterLoraInfo(str(adapter), 1.0)]
    return llama.Server(params)


@torch.no_grad()
def greedy(model, ids: list[int], ends: set[int]) -> list[int]:
    cache = KVCache.of(model, 1)
    context = Prefill(cache, [(0, ids)])
    generated = []
    hidden = model(context.tokens, context)
    while len(generated) < TOKENS:
        generated.append(model.logits(hidden[0, -1]).argmax().item())
        if generated[-1] in ends:
            break
        hidden = model(torch.tensor([generated[-1:]]), cache.decode(1))
    return generated


def check(model, folder: Path, server, texts: list[str]) -> None:
    """llama.cpp sees the tokens that the tokenizer gives, and writes after each text what r3lite does."""
    tokenizer = Backend.from_file(str(folder / "tokenizer.json"))
    ends = {tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>", "<eos>", "<end_of_turn>")}
    for text in texts:
        reply = server.handle_completions(
            {"prompt": text, "n_predict": TOKENS, "temperature": 0, "cache_prompt": False}
        )
        ids = tokenizer.encode(text).ids
        assert reply["usage"]["prompt_tokens"] == len(ids), text
        assert reply["choices"][0]["text"] == tokenizer.decode(greedy(model, ids, ends)), text


@pytest.fixture
def real_vocabulary(shared, tmp_path):
    def make(kind: str) -> Path:
        folder = write_model(tmp_path / "source", kind, vocab_size=151_936)
        packed = (shared / "tokenizers/qwen2.5/tokenizer.json.gz").read_bytes()
        (folder / "tokenizer.json").write_bytes(gzip.decompress(packed))
        settings = (shared / "tokenizers/qwen2.5/tokenizer_config.json").read_text(encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(settings, encoding="utf-8")
        return folder

    return make


@pytest.mark.parametrize("kind", ["qwen2", "qwen2-untied", "qwen3"])
def test_the_real_vocabulary_of_qwen(real_vocabulary, tmp_path, kind):
    folder = real_vocabulary(kind)
    path = write_gguf(folder, tmp_path / "out" / "model.gguf")
    check(load_model(folder, torch.float32, "cpu"), folder, served(path), prompts())


@pytest.mark.parametrize(
    ("kind", "split", "bos"),
    [
        ("llama", "smollm", False),
        ("llama3", "llama-bpe", True),
        ("mistral", "gpt-2", False),
        ("qwen3", "qwen2", False),
        ("granite", "smollm", False),
        ("smollm3", "llama-bpe", False),
        ("lfm2", "llama-bpe", True),
        ("qwen35", "qwen35", False),
        ("gemma3", "gemma", True),
        ("gemma3-linear", "gemma", True),
    ],
)
def test_families_and_splits(tmp_path, kind, split, bos):
    """Llama's rope is scaled from a short length on: with the published one the prompts are too short to show it."""
    scaled = {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16}} if kind == "llama3" else {}
    folder = write_model(tmp_path / "source", kind, **scaled)
    write_tokenizer(folder, split, bos=bos)
    path = write_gguf(folder, tmp_path / "out" / "model.gguf")
    texts = [*prompts(), " ".join(prompts()[:4]), "नमस्ते, हिन्दी"]
    check(load_model(folder, torch.float32, "cpu"), folder, served(path), texts)


@pytest.mark.parametrize(
    ("kind", "split"),
    [("qwen3", "qwen2"), ("llama3", "smollm"), ("lfm2", "smollm"), ("qwen35", "qwen35"), ("gemma3", "gemma")],
)
def test_an_adapter_alone(tmp_path, kind, split):
    folder = write_model(tmp_path / "source", kind, split)
    path = write_gguf(folder, tmp_path / "out" / "model.gguf")
    model = load_model(folder, torch.float32, "cpu")
    lora.add_adapter(model, "a", 4, 8.0)
    for parameter in lora.adapter_parameters(model, "a").values():
        parameter.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(1))
    exporting.write_adapter(model, "a", tmp_path / "adapter" / "adapter.gguf", "fp32", "test")
    lora.set_adapter(model, "a")
    check(model, folder, served(path, tmp_path / "adapter" / "adapter.gguf"), prompts())


@pytest.mark.parametrize(("variable", "model_type"), [("R3LITE_SMOLLM2", "llama"), ("R3LITE_GEMMA3", "gemma3_text")])
def test_real_weights(tmp_path, monkeypatch, variable, model_type):
    if not (named := os.environ.get(variable)):
        pytest.skip(f"needs real weights: {variable} names their folder or GGUF file")
    monkeypatch.setattr(gguf_folder, "CACHE", str(tmp_path / "cache"))
    folder = resolve_folder(named)
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] == model_type
    path = write_gguf(folder, tmp_path / "out" / "model.gguf")
    check(load_model(folder, torch.float32, "cpu"), folder, served(path), prompts())
