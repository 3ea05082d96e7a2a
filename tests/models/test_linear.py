"""Products: the same numbers by whichever kernel, and gradients wherever they are asked for."""

import pytest
import torch
import torch.nn.functional as F

from r3lite.models import linear as module
from r3lite.models.linear import BLOCK, MIN_PRODUCT, MIN_WEIGHT, MIN_WEIGHT_AVX2, STEP, linear

WIDTH = 512
TALL = MIN_WEIGHT // WIDTH  # rows of a weight that is just large enough


@pytest.fixture(autouse=True)
def avx512(monkeypatch):
    """The kernels are chosen as on a processor with AVX-512, whatever the tests run on."""
    monkeypatch.setattr(module, "ONLY_AVX2", False)


@pytest.fixture
def kernels():
    """The names of the operators that a function ran."""

    def ran(work) -> set[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            work()
        return {event.name for event in profiler.events()}

    return ran


def uses_onednn(names: set[str]) -> bool:
    return "mkldnn::_linear_pointwise" in names


def tensors(rows: int, tall: int = TALL, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    shapes = (rows, WIDTH), (tall, WIDTH), (tall,), (rows, tall)
    return [torch.randn(shape).to(dtype) for shape in shapes]


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, STEP + 3, BLOCK, 2 * BLOCK, 2 * BLOCK + 1, BLOCK + STEP + 3])
@pytest.mark.parametrize("also", ["nothing", "bias", "added"])
def test_rows_are_multiplied_as_in_double_precision(rows, also, kernels):
    x, weight, bias, added = tensors(rows)
    terms = {"nothing": {}, "bias": {"bias": bias}, "added": {"added": added}}[also]
    exact = x.double() @ weight.double().t() + sum(extra.double() for extra in terms.values())
    added_copy = added.clone()
    assert uses_onednn(kernels(lambda: linear(x, weight, **terms)))
    torch.testing.assert_close(linear(x, weight, **terms), exact.float(), rtol=1e-5, atol=1e-4)
    assert torch.equal(added, added_copy) and not linear(x, weight, **terms)._is_view()


@torch.no_grad()
def test_kernels_are_compiled_for_few_numbers_of_rows(monkeypatch):
    """oneDNN keeps one for each number that it meets."""
    _, weight, _, _ = tensors(1)
    met = set()
    multiply = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(
        torch.ops.mkldnn, "_linear_pointwise", lambda x, *arguments: met.add(len(x)) or multiply(x, *arguments)
    )
    for rows in range(1, 3 * BLOCK):
        assert len(linear(torch.zeros(rows, WIDTH), weight)) == rows
    assert met == {*range(1, STEP), *range(STEP, BLOCK + 1, STEP)}


@torch.no_grad()
def test_what_is_not_contiguous_is_multiplied_right():
    x, weight, _, _ = tensors(8)
    interleaved = torch.stack((x, x + 1), dim=-1)
    taller = torch.cat((weight, weight))
    torch.testing.assert_close(linear(interleaved[..., 0], taller[:TALL]), F.linear(x, weight), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(linear(x, weight.t().contiguous().t()), F.linear(x, weight), rtol=1e-5, atol=1e-4)


@torch.no_grad()
def test_many_rows_of_a_small_weight_are_work_enough(kernels):
    x, weight, bias, _ = tensors(MIN_PRODUCT // MIN_WEIGHT + 1, TALL - 1)
    assert uses_onednn(kernels(lambda: linear(x, weight, bias)))
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    "case",
    [
        tensors(0),
        tensors(7, TALL - 1),
        tensors(2, dtype=torch.bfloat16),
    ],
    ids=["no rows", "few rows of a small weight", "bf16"],
)
def test_all_else_is_what_pytorch_makes_of_it(case, kernels):
    x, weight, bias, added = case
    assert not uses_onednn(kernels(lambda: linear(x, weight, bias)))
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    assert torch.equal(linear(x, weight, added=added), torch.addmm(added, x, weight.t()))


@torch.no_grad()
@pytest.mark.parametrize(
    ("rows", "tall", "by_onednn"),
    [
        (1, MIN_WEIGHT_AVX2 // WIDTH, True),
        (BLOCK, MIN_WEIGHT_AVX2 // WIDTH, True),
        (BLOCK + 1, MIN_WEIGHT_AVX2 // WIDTH, False),
        (1, MIN_WEIGHT_AVX2 // WIDTH - 1, False),
        (BLOCK, TALL, False),
    ],
)
def test_with_avx2_alone_only_few_rows_of_a_large_weight_are_left_to_onednn(
    rows, tall, by_onednn, kernels, monkeypatch
):
    monkeypatch.setattr(module, "ONLY_AVX2", True)
    x, weight, bias, _ = tensors(rows, tall)
    assert uses_onednn(kernels(lambda: linear(x, weight, bias))) == by_onednn
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)
    transposed = weight.t().contiguous().t()  # as the product of a gradient reads it
    assert not uses_onednn(kernels(lambda: linear(x, transposed)))


def test_with_gradients_the_kernel_that_has_them_is_asked(kernels):
    x, weight, bias, _ = tensors(4)
    x.requires_grad_()
    linear(x, weight, bias).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(4, -1), rtol=1e-4, atol=1e-4)
    assert not uses_onednn(kernels(lambda: linear(x, weight, bias)))


@torch.no_grad()
def test_autocast_and_a_build_without_onednn_are_left_alone(monkeypatch, kernels):
    x, weight, _, _ = tensors(4)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):
        assert not uses_onednn(kernels(lambda: linear(x, weight)))
    monkeypatch.setattr(module.torch.backends.mkldnn, "is_available", lambda: False)
    assert not uses_onednn(kernels(lambda: linear(x, weight)))
