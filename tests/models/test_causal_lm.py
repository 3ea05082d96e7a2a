"""The network against transformers, and the KV cache against no cache."""

import subprocess
import sys

import pytest
import torch

from r3lite.models.kv_cache import BLOCK, KVCache, Prefill
from r3lite.models.weights import load_model, resolve_folder
from r3lite.protocols.tokenizer import Tokenizer

TOLERANCE = 1e-4


def reference(folder, dtype=torch.float32):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def prefilled(model, cache, parts) -> list[torch.Tensor]:
    """Gives the first rows of a cache their parts, of any lengths; the hidden states of each."""
    prefill = Prefill(cache, [(row, part.tolist()) for row, part in enumerate(parts)])
    hidden = model(prefill.tokens, prefill)[0]
    return list(hidden.split([len(part) for part in parts]))


def step(model, cache, ids) -> torch.Tensor:
    """Hidden states of one more token [B, 1] in each of the first rows."""
    decode = cache.decode(len(ids))
    hidden = model(ids, decode)
    return hidden


def tokens(model, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def parity(folder, lengths=(512, 411), every: int = 1) -> float:
    """The greatest difference of our logits from transformers' over the real tokens of padded rows.

    Only every n-th position counts where `every` is n: with a vocabulary of 151,936 the head takes most of the time.
    """
    model = load_model(folder, torch.float32, "cpu")
    ids = tokens(model, len(lengths), max(lengths))
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    places = torch.arange(max(lengths) - 1, -1, -every).flip(0)
    ours = model.logits(model(ids)[:, places])
    theirs = reference(folder)(input_ids=ids, attention_mask=real.long(), logits_to_keep=places).logits
    return (ours - theirs)[real[:, places]].abs().max().item()


@torch.no_grad()
def cache_error(model, prompts=(40, 25, 61), decoded=20, observation=100, every: int = 1) -> float:
    """The greatest difference of cached logits from uncached ones, over the vocabulary's every n-th token.

    Rows of different lengths are prefilled together, decoded token by token, given an observation (of different
    lengths again) and decoded on.
    """
    rows = len(prompts)
    observations = [observation - 13 * i for i in range(rows)]
    total = [p + decoded + o + decoded for p, o in zip(prompts, observations)]
    ids = tokens(model, rows, max(total))
    head = model.head_weight[::every]
    expected = model(ids) @ head.T  # what follows a row's end cannot change what precedes it
    cache, done, errors = KVCache.of(model, rows), [0] * rows, []
    for counts in [list(prompts), *[[1] * rows] * decoded, observations, *[[1] * rows] * decoded]:
        parts = [ids[i, start : start + count] for i, (start, count) in enumerate(zip(done, counts))]
        states = step(model, cache, torch.stack(parts)) if max(counts) == 1 else prefilled(model, cache, parts)
        for i, (start, count) in enumerate(zip(done, counts)):
            errors.append((states[i] @ head.T - expected[i, start : start + count]).abs().max())
        done = [start + count for start, count in zip(done, counts)]
    assert done == total and cache.lengths == total
    return torch.stack(errors).max().item()  # unlike Python's max, not blind to nan


def test_logits_equal_those_of_transformers(qwen_dir):
    assert parity(qwen_dir, every=16) <= TOLERANCE


@pytest.mark.slow
def test_logits_of_all_24_layers_equal_those_of_transformers(shared, tmp_path):
    make = shared / "tools" / "make_qwen_dir.py"
    subprocess.run([sys.executable, make, "0.5B", tmp_path, "--dtype", "float32"], check=True)
    assert parity(tmp_path) <= TOLERANCE
    assert cache_error(load_model(tmp_path, torch.float32, "cpu")) <= TOLERANCE


def test_the_shipped_checkpoint_loads_and_equals_transformers():
    folder = resolve_folder("tiny")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.size == load_model(folder, torch.float32, "cpu").config.vocab_size
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 16 * 2**20
    assert parity(folder, (120, 77)) <= TOLERANCE


@pytest.mark.parametrize("tied", [True, False])
def test_logits_with_biases_norms_and_either_head(small_model, write_folder, tmp_path, tied):
    """The 0.5B-shaped folder has biases of 0 and norms of 1, which hide whether they are used."""
    folder = write_folder(small_model(tie_word_embeddings=tied), tmp_path)
    assert parity(folder, (70, 70, 31)) <= TOLERANCE


def test_logits_in_bf16_are_as_close_as_bf16_allows(small_model, write_folder, tmp_path):
    folder = write_folder(small_model(), tmp_path)
    fp32_model = load_model(folder, torch.float32, "cpu")
    bf16_model = load_model(folder, torch.bfloat16, "cpu")
    ids = tokens(fp32_model, 2, 50)
    exact, ours = fp32_model.logits(fp32_model(ids)), bf16_model.logits(bf16_model(ids))
    theirs = reference(folder, torch.bfloat16)(input_ids=ids).logits
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).abs().mean() <= 1.2 * (theirs - exact).abs().mean()


def test_cached_equals_uncached(qwen_dir):
    assert cache_error(load_model(qwen_dir, torch.float32, "cpu"), every=16) <= TOLERANCE


def test_cached_equals_uncached_past_several_blocks(small_model):
    assert cache_error(small_model(), prompts=(BLOCK + 3, 5, 2 * BLOCK), observation=BLOCK + 30) <= TOLERANCE


@torch.no_grad()
def test_rows_that_are_swapped_and_left_out_keep_their_cache(small_model):
    """Finished rows move behind the ones that go on; the first rows of the cache must still be the right ones."""
    model = small_model()
    ids = tokens(model, 3, 12)
    expected = model(ids)
    cache = KVCache.of(model, 3)
    prefilled(model, cache, ids[:, :5])
    cache.swap(0, 2)
    hidden = prefilled(model, cache, ids[[2, 1], 5:9])  # row 0 waits in the last place
    assert torch.allclose(torch.stack(hidden), expected[[2, 1], 5:9], atol=1e-5)
    cache.swap(0, 2)
    hidden = step(model, cache, ids[[0, 1], [5, 9]][:, None])  # row 0 goes on at 5, row 1 at 9
    assert torch.allclose(hidden[:, 0], expected[[0, 1], [5, 9]], atol=1e-5)
    assert cache.lengths == [6, 10, 9]


def test_adapters_aside_the_base_runs_under_autocast_and_without_gradients(small_model):
    model = small_model()
    ids = tokens(model, 1, 9)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model(ids)
    assert torch.isfinite(hidden).all() and not hidden.requires_grad
    assert torch.nn.functional.cosine_similarity(hidden.float(), model(ids), dim=-1).min() > 0.99
