"""The tokenizer of Qwen2.5, ours and that of transformers, from the shared folder."""

import gzip

import pytest

from r3lite.protocols.tokenizer import Tokenizer


@pytest.fixture(scope="package")
def qwen_folder(shared, tmp_path_factory):
    folder, source = tmp_path_factory.mktemp("qwen-tokenizer"), shared / "tokenizers" / "qwen2.5"
    (folder / "tokenizer.json").write_bytes(gzip.decompress((source / "tokenizer.json.gz").read_bytes()))
    (folder / "tokenizer_config.json").write_bytes((source / "tokenizer_config.json").read_bytes())
    return folder


@pytest.fixture(scope="package")
def qwen(qwen_folder):
    return Tokenizer.load(qwen_folder)


@pytest.fixture(scope="package")
def reference(qwen_folder):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(qwen_folder)
