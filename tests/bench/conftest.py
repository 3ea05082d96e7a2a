"""What tests of the benches share: a small model folder, a simulated card."""

import shutil

import pytest

from bench.stress.simulated_cuda import SimulatedCuda
from r3lite.models.weights import resolve_folder

VOCABULARY = 1024


@pytest.fixture
def folder(small_model, write_folder, tmp_path) -> str:
    """A small model nearly all of whose tokens end a turn."""
    model = small_model(vocab_size=VOCABULARY)
    model_folder = write_folder(
        model, tmp_path / "model", eos_token_id=[*range(VOCABULARY - 8)], max_position_embeddings=4096
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_folder("tiny") / name, model_folder / name)
    return str(model_folder)


@pytest.fixture
def card():
    with SimulatedCuda() as card:
        yield card
