"""What every pass hands to attention is what PyTorch's memory-efficient kernel takes as it is.

On Turing cards no other fused kernel is left: what this one refuses is computed by the math kernel in O(T^2) memory,
without a word, and what it takes only after a copy is copied in every layer. The rules are those of PyTorch 2.10 to
2.13, in aten/src/ATen/native/transformers: sdp_utils_cpp.h and cuda/sdp_utils.cpp (what is refused), attention.cpp
(`preprocess_mask`: what is copied), cuda/mem_eff_attention/kernel_forward.h (`check_supported`: alignment).
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from r3lite.models.attention import CausalRows, StretchMasks
from r3lite.models.causal_lm import LayerKind
from r3lite.models.kv_cache import BLOCK, KVCache, Prefill
from r3lite.models.packing import GRANULE, Pack
from r3lite.models.rotary import Rope

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def faults(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, enable_gqa: bool) -> list[str]:
    """What keeps the memory-efficient kernel from taking an attention as it is; empty if nothing does."""
    reasons = []
    aligned = 16 // q.element_size()  # numbers in 16 bytes, which a tensor core loads at once
    tensors = {"queries": q, "keys": k, "values": v}
    for name, x in tensors.items():
        if x.dim() != 4 or x.dtype != q.dtype or x.shape[-1] != q.shape[-1] or not x.shape[2]:
            reasons.append(f"{name}: {tuple(x.shape)}, {x.dtype}")
        if x.stride(-1) != 1 or x.shape[-1] % aligned or x.storage_offset() % aligned:
            reasons.append(f"{name}: last dimension of {x.shape[-1]} at offset {x.storage_offset()}")
        if any(stride % aligned for stride, size in zip(x.stride()[:-1], x.shape) if size > 1):
            reasons.append(f"{name}: strides {x.stride()}")
    if enable_gqa or not q.shape[1] == k.shape[1] == v.shape[1]:
        reasons.append("grouped heads")
    if is_causal and (mask is not None or q.shape[2] != k.shape[2]):
        reasons.append("causal, and a mask or more keys than queries")
    if mask is None:
        return reasons
    expanded_shape = (*q.shape[:3], k.shape[2])  # what the mask is expanded to
    if mask.dtype != q.dtype or mask.requires_grad:
        reasons.append(f"mask: {mask.dtype} beside {q.dtype}")
    if mask.dim() not in (2, 4) or any(n not in (1, full) for n, full in zip(mask.shape[::-1], expanded_shape[::-1])):
        reasons.append(f"mask: {tuple(mask.shape)} for {expanded_shape}")
    if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]) or mask.storage_offset() % 8:
        reasons.append(f"mask: strides {mask.stride()} at offset {mask.storage_offset()}")
    return reasons


@pytest.fixture
def attended(monkeypatch):
    """What attention was called with: the faults of each call, and whether it had a mask."""
    calls, attention = [], F.scaled_dot_product_attention

    def record(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, enable_gqa=False, scale=None):
        calls.append((faults(q, k, v, attn_mask, is_causal, enable_gqa), attn_mask is not None))
        return attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    return calls


@pytest.fixture
def model(small_model):
    """Two layers with heads of 64, as Qwen2.5-0.5B has."""
    return small_model(hidden_size=256, num_hidden_layers=2)


def tokens(*shape: int) -> Tensor:
    return torch.randint(300, shape, generator=torch.Generator().manual_seed(0))


def rows_by_themselves(model) -> None:
    ids = tokens(2, 37)
    model(ids, CausalRows(ids))


def a_pack(model) -> None:
    """Rows with a common prefix and odd lengths, one of them alone."""
    ids = tokens(4, 3 * GRANULE + 7)
    ids[:3, : 2 * GRANULE] = ids[0, : 2 * GRANULE]
    rows = [row[:length].tolist() for row, length in zip(ids, (3 * GRANULE + 7, 2 * GRANULE + 1, 45, 29))]
    pack = Pack.of(rows, CPU)
    assert any(segment.ancestors for segment in pack.segments)
    model(pack.tokens, pack)


def a_cache(model) -> None:
    """Prompts of odd lengths, single tokens, documents after them, past the end of a block."""
    cache = KVCache.of(model, 3)
    for counts in ((5, 41, BLOCK - 2), (1, 1, 1), (13, 1, 30), (1, 1, 1)):
        if max(counts) == 1:
            model(tokens(3, 1), cache.decode(3))
        else:
            prefill = Prefill(cache, [(row, tokens(n).tolist()) for row, n in enumerate(counts)])
            model(prefill.tokens, prefill)
    assert max(cache.lengths) > BLOCK


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("run", "grad"),  # nothing is trained through a cache
    [(rows_by_themselves, False), (rows_by_themselves, True), (a_pack, False), (a_pack, True), (a_cache, False)],
)
def test_the_memory_efficient_kernel_takes_every_attention_as_it_is(model, attended, run, grad, dtype):
    model.to(dtype).model.embed_tokens.requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        run(model)
    assert [reasons for reasons, _ in attended if reasons] == []
    masked = [with_mask for _, with_mask in attended]
    assert any(masked) == (run is not rows_by_themselves) and len(masked) >= model.config.num_hidden_layers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("run", [rows_by_themselves, a_pack, a_cache])
@torch.no_grad()
def test_the_kernel_takes_attentions_with_a_window_as_they_are(small_model, attended, run, dtype):
    rope = Rope(10_000.0)
    kinds = (LayerKind(rope, window=13), LayerKind(None, window=20))
    model = small_model(hidden_size=256, num_hidden_layers=2, layer_kinds=kinds, attention_scale=0.3).to(dtype)
    run(model)
    assert [reasons for reasons, _ in attended if reasons] == [] and any(with_mask for _, with_mask in attended)


@pytest.mark.parametrize("window", [1, 2, 5, 8, 30])
@pytest.mark.parametrize(("start", "count"), [(0, 9), (3, 1), (8, 8), (13, 4)])
def test_a_window_counts_the_token_itself(start, count, window):
    (mask,) = StretchMasks([(start, count)]).of(window, torch.zeros(1))
    queries = range(start, start + count)
    visible = torch.tensor([[query - window < key <= query for key in range(start + count)] for query in queries])
    if mask is None:
        assert start == 0 and window >= count  # causal without a mask
        return
    assert torch.equal(mask == 0, visible) and torch.equal(mask == float("-inf"), ~visible)


@pytest.mark.parametrize("start", range(17))
@pytest.mark.parametrize("count", [1, 7, 8, 9])
def test_a_mask_of_any_width_is_causal_and_aligned(start, count):
    (mask,) = StretchMasks([(start, count)]).of(None, torch.zeros(1, dtype=torch.float16))
    if not start:
        assert mask is None
        return
    visible = torch.arange(start + count) <= start + torch.arange(count)[:, None]
    assert torch.equal(mask == 0, visible) and torch.equal(mask == float("-inf"), ~visible)
    assert mask.stride(0) % 8 == 0 and mask.stride(1) == 1 and mask.storage_offset() == 0


Q, K = torch.zeros(1, 4, 3, 64), torch.zeros(1, 4, 11, 64)
MASK = torch.zeros(3, 16)[:, :11]


def test_a_mask_as_it_should_be_has_no_fault():
    assert faults(Q, K, K, MASK, False, False) == []


@pytest.mark.parametrize(
    ("q", "k", "mask", "is_causal", "enable_gqa"),
    [
        (Q, K, torch.zeros(3, 11), False, False),  # as F.pad alone would make it
        (Q, K, torch.zeros(16, 3).t()[:, :11], False, False),
        (Q, K, torch.zeros(3, 24)[:, 3:14], False, False),
        (Q, K, MASK.half(), False, False),
        (Q, K, MASK > 0, False, False),
        (Q, K, torch.zeros(4, 3, 16)[..., :11], False, False),
        (Q, K, torch.zeros(1, 1, 16)[..., :11], False, False),
        (Q, K[:, :2], MASK, False, True),
        (Q, K, None, True, False),
        (Q, K.transpose(2, 3).contiguous().transpose(2, 3), MASK, False, False),
        (Q, torch.zeros(1, 4, 11, 66)[..., :64], MASK, False, False),
        (Q, torch.zeros(1, 4, 12, 64)[:, :, 0:0], MASK[:, :0], False, False),
        (torch.zeros(1, 4, 3, 65)[..., 1:], K, MASK, False, False),
        (Q[..., :30], K[..., :30], MASK, False, False),
    ],
)
def test_each_fault_is_found(q, k, mask, is_causal, enable_gqa):
    assert faults(q, k, k, mask, is_causal, enable_gqa)
