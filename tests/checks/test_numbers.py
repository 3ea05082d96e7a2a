"""The checks of a pass: sound code passes them, and each fails if what it looks at is broken."""

import pytest
import torch

from r3lite.checks import numbers, sample
from r3lite.checks.finding import closeness
from r3lite.checks.sample import CPU
from r3lite.devices.precision import DTYPES, Precision
from r3lite.models import causal_lm, kv_cache, nf4, offload
from r3lite.models.projections import Nf4Linear
from r3lite.rollout.sampling import Sampler

EXACT = Precision(torch.float32, CPU)
CHECKS = [
    numbers.logits,
    numbers.logits_in_dtype,
    numbers.cached_decode,
    numbers.sampler,
    numbers.nf4_weights,
    numbers.offload,
]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_sound_device_passes(check, dtype):
    finding = check(Precision(DTYPES[dtype], CPU))
    assert finding.state == ("skipped" if check is numbers.logits_in_dtype and dtype == "fp32" else "ok"), finding


def failed(finding) -> bool:
    return finding.state == "failed" and bool(finding.message) and bool(finding.remedy)


def test_logits_fail_without_rotary_positions(monkeypatch):
    monkeypatch.setattr(causal_lm, "rotate_", lambda x, heads, cos, sin: x)
    assert failed(numbers.logits(EXACT))


def test_logits_fail_that_are_not_the_cpus(monkeypatch):
    """By 0.002, in one of 650 places: TF32 is off by more, in all of them."""
    model, rows = sample.tiny(EXACT), sample.sentences()
    assert numbers.against_the_cpu(model, rows, CPU, "").state == "ok"
    exact = model.logits

    def off(hidden):
        logits = exact(hidden)
        logits[2, 7, 9] += 0.002
        return logits

    monkeypatch.setattr(model, "logits", off)
    finding = numbers.against_the_cpu(model, rows, CPU, "")
    assert failed(finding) and "TF32" in finding.remedy


@pytest.mark.parametrize("size", [0.9, float("nan")])
def test_logits_in_16_bits_fail_that_are_not_the_cpus(monkeypatch, size):
    make_tiny = sample.tiny

    def broken(precision, adapted=False):
        model = make_tiny(precision, adapted)
        if precision.dtype != torch.float32:
            model.model.layers[1].mlp.down_proj.weight.mul_(size)
        return model

    monkeypatch.setattr(numbers, "tiny", broken)
    assert failed(numbers.logits_in_dtype(Precision(torch.bfloat16, CPU)))


def test_a_cache_fails_whose_documents_see_what_comes_after_them(monkeypatch):
    masks = kv_cache.StretchMasks.of

    def all_seen(self, *arguments):
        return [None if mask is None else torch.zeros_like(mask) for mask in masks(self, *arguments)]

    monkeypatch.setattr(kv_cache.StretchMasks, "of", all_seen)
    assert failed(numbers.cached_decode(EXACT))


def test_a_cache_fails_whose_steps_see_the_slots_of_others(monkeypatch):
    make = kv_cache.Decode.__init__

    def seeing_all(self, cache, positions, used, padding=None, lengths=()):
        make(self, cache, positions, used, padding, [used] * len(lengths))  # where each row reads its own slots

    make_mask = kv_cache.Decode._mask
    monkeypatch.setattr(kv_cache.Decode, "__init__", seeing_all)
    monkeypatch.setattr(kv_cache.Decode, "_mask", lambda self, *key: torch.zeros_like(make_mask(self, *key)))
    assert failed(numbers.cached_decode(EXACT))
    assert failed(numbers.cached_decode(Precision(torch.bfloat16, CPU)))  # in 16 bits alone it would not show


def test_graphs_are_skipped_without_cuda_and_pass_if_they_do_the_work_again():
    def replayed(work):
        result = work()
        return lambda: result.copy_(work()), result

    assert numbers.graphs(EXACT).state == "skipped"
    assert numbers.graphs(EXACT, replayed).state == "ok"


def stale(work):
    """Right when it is captured; what it gives never changes."""
    result = work()
    return lambda: None, result


def wrong(work):
    result = work()
    return lambda: result.copy_(-work()), result


def lost(work):
    """Right when it is captured and once more, then not a number."""
    result, calls = work(), []
    return lambda: result.copy_(work() * (float("nan") if calls.append(1) or len(calls) == 3 else 1)), result


def refused(work):
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("capture", [stale, wrong, lost, refused])
def test_graphs_fail_that_give_other_numbers(capture):
    assert failed(numbers.graphs(EXACT, capture))


def test_a_sampler_fails_that_records_another_temperature(monkeypatch):
    monkeypatch.setattr(numbers, "Sampler", lambda temperature: Sampler(0.7))
    assert failed(numbers.sampler(EXACT))


def other_codes(weight):
    packed = NF4_QUANTIZE(weight)
    packed.codes[:2] ^= 1  # of 512 rows
    return packed


NF4_QUANTIZE, NF4_DEQUANTIZE = nf4.quantize, nf4.dequantize


def test_nf4_fails_whose_codes_are_not_the_cpus(monkeypatch):
    calls = []
    monkeypatch.setattr(nf4, "quantize", lambda w: (other_codes if calls else NF4_QUANTIZE)(calls.append(1) or w))
    assert failed(numbers.nf4_weights(EXACT))


def test_nf4_fails_whose_weights_are_not_as_defined(monkeypatch):
    monkeypatch.setattr(nf4, "dequantize", lambda w, dtype: NF4_DEQUANTIZE(w, dtype) + 1e-3)
    assert failed(numbers.nf4_weights(EXACT))


def test_nf4_fails_whose_products_are_not_of_its_weights(monkeypatch):
    forward = Nf4Linear.forward
    monkeypatch.setattr(Nf4Linear, "forward", lambda self, x: forward(self, x) * 1.001)
    assert failed(numbers.nf4_weights(EXACT))


def test_nf4_fails_that_quantizes_badly(monkeypatch):
    monkeypatch.setattr(nf4, "quantize", lambda w: NF4_QUANTIZE(w * 0.9))
    assert failed(numbers.nf4_weights(EXACT))


def test_offload_fails_that_gives_back_another_tensor(monkeypatch):
    monkeypatch.setattr(offload.Offload, "_fetch", lambda self: self.stack.pop(0))
    assert failed(numbers.offload(EXACT))


def test_offload_fails_that_changes_gradients(monkeypatch):
    gradients = numbers._gradients
    monkeypatch.setattr(
        numbers, "_gradients", lambda p, offloaded: gradients(p, offloaded) * (1.01 if offloaded else 1)
    )
    assert failed(numbers.offload(EXACT))


def test_what_is_not_a_number_is_not_close():
    ours, sound = torch.zeros(4), (torch.zeros(4), torch.zeros(4))
    assert closeness({torch.float32: sound, torch.float16: sound}).state == "ok"
    for off in (1.0, float("nan"), float("inf")):
        theirs = ours.clone()
        theirs[2] = off
        assert failed(closeness({torch.float32: (ours, theirs), torch.float16: sound}))
        assert failed(closeness({torch.float32: sound, torch.float16: (ours, theirs)}))


def test_the_recorded_entropy_is_that_of_the_shipped_model():
    """By hand: the mean of -log p of each token but the first, row by row, without padding."""
    model = sample.tiny(EXACT)
    losses = []
    with torch.no_grad():
        for row in sample.sentences():
            ids = torch.tensor([row])
            logits = model.logits(model(ids))[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none"))
    assert float(torch.cat(losses).mean()) == pytest.approx(numbers.ENTROPY, abs=1e-4)


def test_the_definition_of_nf4_by_hand():
    """A block of -2, 0 and 2 alone, and one of zeros: absmax values 2 and 0, of mean 1, so steps of 127 and -127."""
    weight = torch.zeros(1, 128)
    weight[0, :3] = torch.tensor([-2.0, 2.0, 0.0])
    packed = nf4.quantize(weight)
    dequantized = numbers._dequantized_by_hand(packed)
    assert torch.allclose(dequantized, weight, atol=1e-6)
