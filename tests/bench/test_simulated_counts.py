"""What the simulated device counts: kernels, bytes, copies and waits, against figures worked by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bench.stress.simulated_cuda import SimulatedCuda
from r3lite.models.functions import rms_norm
from r3lite.rl.losses import sampling_metrics

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a real card is here: its tests are those marked gpu")
CUDA = torch.device("cuda", 0)
KIB = 1024


def done(card: SimulatedCuda, work) -> dict:
    """What the device did, without what is 0."""
    counts_before = card.so_far()
    work()
    report = (card.so_far() - counts_before).report()
    return {name: value for name, value in report.items() if value}


def kernels(card: SimulatedCuda, work) -> dict[str, int]:
    return done(card, work).get("operators", {})


def moved(card: SimulatedCuda, work) -> tuple[int, int]:
    report = done(card, work)
    return report.get("read", 0), report.get("written", 0)


# Kernels and bytes. x is [4, 8] in fp32, 128 bytes; w [8, 2], 64; their product [4, 2], 32.


def test_kernels_of_a_product_and_a_sum(card):
    x, w, b = (torch.ones(shape, device="cuda") for shape in ((4, 8), (8, 2), (2,)))
    report = done(card, lambda: x @ w + b)
    assert report == {
        "kernels": 2, "launches": 2, "read": (128 + 64) + (32 + 8), "written": 32 + 32,
        "operations": 2 * 4 * 8 * 2, "operators": {"mm": 1, "add": 1},
        "moved": {"mm": 128 + 64 + 32, "add": 32 + 8 + 32}, "computed": {"mm": 2 * 4 * 8 * 2},
    }  # fmt: skip


def test_views_and_allocations_are_no_kernels(card):
    x = torch.ones(4, 8, device="cuda")

    def look():
        torch.empty(3, device="cuda"), torch.empty_like(x), x.new_empty(2)
        x[1], x.T, x.view(-1), x.unsqueeze(0).expand(5, 4, 8), x.split(2), x.chunk(2), x.detach(), x.contiguous()
        x[:0].clone(), x.dim(), x.is_contiguous(), x.device

    assert done(card, look) == {}


@pytest.mark.parametrize(
    ("work", "bytes_read", "bytes_written"),
    [
        (lambda x: x.add_(1), 128, 128),
        (lambda x: x[0].mul_(2), 32, 32),
        (lambda x: x.fill_(1), 0, 128),
        (lambda x: x.zero_(), 0, 128),
        (lambda x: x.normal_(), 0, 128),
        (lambda x: x.clone(), 128, 128),
        (lambda x: x.half(), 128, 64),
        (lambda x: x.t().contiguous(), 128, 128),
        (lambda x: x[0].copy_(x[1]), 32, 32),
        (lambda x: x[:1].expand(3, 8).sum(-1), 32, 12),  # each number is fetched once
        (lambda x: torch.add(x, x, out=x[:]), 128, 128),
        (lambda x: torch.cat((x, x.clone())), 128 + 256, 128 + 256),
        (lambda x: x.sum(), 128, 4),
    ],
)
def test_bytes_that_a_kernel_moves(card, work, bytes_read, bytes_written):
    x = torch.ones(4, 8, device="cuda")
    assert moved(card, lambda: work(x)) == (bytes_read, bytes_written)


def test_bytes_of_what_picks_and_places_rows(card):
    """A table is not read as a whole: two rows of its 1,000 are. Indices are int64."""
    table, rows = torch.zeros(1000, 8, device="cuda"), torch.tensor([3, 5], device="cuda")
    assert moved(card, lambda: F.embedding(rows, table)) == (64 + 16, 64)
    assert moved(card, lambda: table.index_select(0, rows)) == (64 + 16, 64)
    assert moved(card, lambda: table[rows]) == (64 + 16, 64)
    assert moved(card, lambda: table.gather(0, rows[:, None])) == (8 + 16, 8)
    out = torch.empty(2, 8, device="cuda")
    assert moved(card, lambda: torch.index_select(table, 0, rows, out=out)) == (64 + 16, 64)
    indices = torch.tensor([1] * 500, device="cuda")  # of a table of 256 bytes, which is fetched once
    assert moved(card, lambda: table[:8].index_select(0, indices)) == (8 * 32 + 500 * 8, 500 * 32)
    values = torch.ones(2, 8, device="cuda")
    assert moved(card, lambda: table.index_put_((rows,), values)) == (64 + 16, 64)
    one = torch.ones(2, 1, device="cuda")
    assert moved(card, lambda: table[:2].scatter_add_(1, rows[:, None], one)) == (8 + 16 + 8, 8)


def test_a_product_that_is_added_in_place_has_the_operations_of_any(card):
    x, w, out = (torch.ones(shape, device="cuda") for shape in ((4, 8), (8, 2), (4, 2)))
    report = done(card, lambda: out.addmm_(x, w))
    assert (report["operations"], report["read"], report["written"]) == (2 * 4 * 8 * 2, 128 + 64 + 32, 32)


def test_an_operator_made_of_others_counts_as_those(card):
    x = torch.ones(4, 8, device="cuda")
    assert kernels(card, lambda: F.pad(x, (0, 1))) == {"fill_": 1, "copy_": 1}
    assert kernels(card, lambda: torch.zeros(3, device="cuda")) == {"zero_": 1}
    assert kernels(card, lambda: x.mul(2).sum()) == {"mul": 1, "sum": 1}
    # largest, its infinities set to 0 (3), difference, exp, sum, log, plus the largest
    assert sum(kernels(card, lambda: x.logsumexp(-1)).values()) == 9


def test_in_inference_mode_operators_are_the_same(card):
    """PyTorch does not take them apart there before it hands them on."""
    layer, x = nn.Linear(8, 2).to("cuda"), torch.ones(4, 8, device="cuda")
    with torch.inference_mode():
        assert kernels(card, lambda: layer(x)) == {"addmm": 1}
        assert kernels(card, lambda: layer(x[None])) == {"addmm": 1}
        counts_before = card.so_far()
        assert bool((x > 0).all())
        assert (card.so_far() - counts_before).waits.total() == 1


def test_what_is_one_kernel_on_cuda_is_one_here(card):
    x, weight = torch.ones(4, 8, device="cuda"), torch.ones(8, device="cuda")
    assert kernels(card, lambda: F.dropout(x, 0.5)) == {"dropout": 1}
    assert kernels(card, lambda: F.rms_norm(x, (8,), weight)) == {"rms_norm": 1}
    assert moved(card, lambda: F.rms_norm(x, (8,), weight)) == (128 + 32, 128)
    # r3lite's own: x, weight and grad in, out and 1 / rms [4, 1] out; and the other way round
    leaf = x.clone().requires_grad_()
    assert done(card, lambda: rms_norm(leaf, weight, 1e-6))["operators"] == {"r3lite.rms_norm": 1}
    assert moved(card, lambda: rms_norm(leaf, weight, 1e-6)) == (128 + 32, 128 + 16)
    y = rms_norm(leaf, weight, 1e-6)
    assert moved(card, lambda: torch.autograd.grad(y, [leaf], x)) == (128 + 128 + 32 + 16, 128)
    q = torch.ones(1, 2, 3, 4, device="cuda")
    report = done(card, lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    assert report["kernels"] == 1 and report["operations"] == 2 * 2 * (2 * 3 * 3 * 4)  # two products in two heads


def test_the_backward_pass_is_counted_by_hand_written_functions_too(card):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            assert grad.device == CUDA
            return grad * 2

    x, grad = torch.ones(3, device="cuda", requires_grad=True), torch.ones(3, device="cuda")
    assert kernels(card, lambda: Double.apply(x).backward(grad)) == {"mul": 2}
    y = Double.apply(x)
    assert kernels(card, lambda: torch.autograd.grad(y, [x], grad)) == {"mul": 1}


# Copies and waits


def test_copies_and_waits(card):
    x, host = torch.ones(2, device="cuda"), torch.ones(2)
    assert done(card, lambda: host.to("cuda")) == {
        "uploads": 1, "upload_bytes": 8, "waits": {"a copy to the device, outside r3lite": 1}
    }  # fmt: skip
    assert done(card, lambda: host.to("cuda", non_blocking=True)) == {"uploads": 1, "upload_bytes": 8}
    assert done(card, lambda: (torch.tensor([], device="cuda"), x[:0].cpu())) == {}
    down = {"downloads": 1, "download_bytes": 8}
    assert done(card, x.cpu) == done(card, x.tolist) == down | {"waits": {"a copy to the host, outside r3lite": 1}}
    assert done(card, lambda: x.to("cpu", non_blocking=True)) == down
    assert "waits" in done(card, lambda: host.copy_(x, non_blocking=True))  # CUDA waits: the memory is not pinned
    pinned = torch.empty(2, pin_memory=True)
    assert pinned.is_pinned() and host.pin_memory().is_pinned() and not host.is_pinned() and not x.is_pinned()
    assert done(card, lambda: pinned.copy_(x, non_blocking=True)) == down


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x[0].item(),
        lambda x: float(x.sum()),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
        lambda x: x.masked_select(x > 0),
        lambda x: x[[0, 1]],
        lambda x: torch.tensor([1], device="cuda"),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
        lambda x: torch.cuda.Event().synchronize(),
    ],
)
def test_the_host_waits_once(card, ask):
    x = torch.ones(3, device="cuda")
    counts_before = card.so_far()
    ask(x)
    assert (card.so_far() - counts_before).waits.total() == 1


def test_a_wait_tells_where_in_r3lite_it_happens(card):
    counts_before = card.so_far()
    sampling_metrics([torch.zeros(2, 3, device="cuda")], 0.2, 0.2)
    waits = (card.so_far() - counts_before).waits
    assert waits and {w.functions[0].partition(" ")[2] for w in waits} == {"sampling_metrics"}
    assert all(", rl/losses.py:" in str(w) for w in waits), [str(w) for w in waits]
