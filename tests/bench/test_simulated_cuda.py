"""The simulated device: what it refuses and what it counts, held against PyTorch's rules and figures worked by hand."""

import subprocess
import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bench.simulated_cuda import GIB, SimulatedCuda
from bench.simulation.streams import Unordered
from r3lite.rollout.sampling import Sampler

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a real card is here: its tests are those marked gpu")
CUDA = torch.device("cuda", 0)
KIB = 1024


@pytest.fixture
def card():
    with SimulatedCuda() as card:
        yield card


def done(card: SimulatedCuda, work) -> dict:
    """What the device did, without what is 0."""
    before = card.so_far()
    work()
    found = (card.so_far() - before).report()
    return {name: value for name, value in found.items() if value}


def kernels(card: SimulatedCuda, work) -> dict[str, int]:
    return done(card, work).get("operators", {})


def moved(card: SimulatedCuda, work) -> tuple[int, int]:
    found = done(card, work)
    return found.get("read", 0), found.get("written", 0)


# Where tensors are


def test_what_is_made_of_tensors_of_the_device_is_there(card):
    x = torch.ones(2, 3, device="cuda")
    w = nn.Parameter(torch.ones(3).to("cuda"))
    made = [x, w, x[0], x.T, x.detach(), x + 1, x.half(), x.new_zeros(2), torch.zeros_like(x), x.split(1)[0], (x @ w)]
    made += [torch.cat((x, x)), x.sum(), x.max(-1).values, F.dropout(x), torch.where(x > 0, x, 0), x.to(torch.int64)]
    made += [torch.tensor([1, 2], device="cuda"), torch.as_tensor([1], device="cuda"), torch.arange(3, device="cuda")]
    made += [torch.ones(2).cuda(), torch.ones(2).to(x), torch.ones(2).to("cuda:0", torch.half), F.pad(x, (0, 1))]
    assert [t.device for t in made] == [CUDA] * len(made) and all(t.is_cuda for t in made)
    assert x.to("cuda") is x and x.to(torch.half).dtype == torch.half


def test_what_is_not_asked_for_is_not_there(card):
    x = torch.ones(2, 3, device="cuda")
    made = [
        torch.ones(2),
        torch.tensor([1]),
        x.cpu(),
        x.to("cpu"),
        torch.zeros_like(x, device="cpu"),
        torch.ones(1) + 1,
    ]
    assert {t.device.type for t in made} == {"cpu"} and not any(t.is_cuda for t in made)
    assert torch.ones(2, device="meta").device.type == "meta"
    y = torch.zeros(2, 3)
    assert y.copy_(x) is y and y.device.type == "cpu" and y.sum() == 6


def test_modules_and_gradients_are_where_their_parameters_are(card):
    layer = nn.Linear(3, 2).to("cuda")
    layer(torch.ones(4, 3, device="cuda")).sum().backward()
    assert layer.weight.device == layer.weight.grad.device == layer.bias.grad.device == CUDA
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    optimizer.step()
    assert {t.device for state in optimizer.state.values() for t in state.values()} == {CUDA}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gradient_that_autograd_copies_stays_where_it_is(card, device):
    """An expanded gradient is copied in C++, which asks for memory of the CPU: it does not see the label."""
    x = torch.ones(3, device=device, requires_grad=True)
    x.sum().backward()
    assert x.grad.device.type == device


# What is refused


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, y: x + y,
        lambda x, y: y.mul_(x),
        lambda x, y: x @ y,
        lambda x, y: torch.cat((x, y)),
        lambda x, y: x.index_select(0, y.long()[0]),
        lambda x, y: x.gather(0, y.long()),
        lambda x, y: torch.where(y > 0, x, x),
        lambda x, y: F.embedding(y.long(), x),
        lambda x, y: F.scaled_dot_product_attention(x[None], x[None], x[None], y),
        lambda x, y: torch.add(x, x, out=y),
        lambda x, y: x.index_put_((y.long()[0],), y),
        lambda x, y: nn.Linear(3, 3)(x),
        lambda x, y: torch.stack([x[0, 0], y[0, 0]]),
    ],
)
def test_an_operator_does_not_mix_devices(card, mix):
    x, y = torch.zeros(3, 3, device="cuda"), torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cpu"):
        mix(x, y)


def test_what_cuda_takes_of_the_host(card):
    x, host = torch.zeros(3, 3, device="cuda"), torch.tensor(2.0)
    assert (x + host).tolist() == [[2.0] * 3] * 3 and torch.where(x > 0, x, host).device == CUDA
    x[0, 0] = host
    x[torch.tensor([1])] = 1
    assert x[torch.tensor([0, 1])].tolist() == [[2, 0, 0], [1, 1, 1]]
    x[:2, :2] = torch.ones(2, 2)
    assert x.masked_fill(x > 0, host).sum() == 2 * 5


def test_a_tensor_of_the_device_is_no_array(card):
    x = torch.ones(3, device="cuda")
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        x.numpy()
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        __import__("numpy").asarray(x)
    assert x.cpu().numpy().sum() == 3


def test_a_generator_is_of_one_device(card):
    here, there = torch.Generator(), torch.Generator("cuda")
    assert (here.device.type, there.device.type) == ("cpu", "cuda")
    torch.rand(3, generator=here), torch.rand(3, device="cuda", generator=there)
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
        torch.rand(3, device="cuda", generator=here)
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator"):
        torch.rand(3, generator=there)


# Numbers


def steps(device: str) -> list[float]:
    """Losses of three optimizer steps with dropout, and a weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.SiLU(), nn.Dropout(0.3), nn.Linear(8, 9)).to(device)
    optimizer, ids = torch.optim.AdamW(model.parameters(), 0.1, fused=True), torch.arange(9, device=device)
    torch.manual_seed(1)  # of dropout, on both devices
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(ids), ids.flip(0))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, *model[1].weight[0].tolist()]


def test_numbers_are_those_of_the_cpu(card):
    assert steps("cuda") == steps("cpu")


def test_the_device_has_random_numbers_of_its_own(card):
    torch.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(4, device="cuda").tolist()
    torch.rand(100)  # of the host's stream
    second = torch.rand(4, device="cuda").tolist()
    torch.cuda.set_rng_state(state, 0)
    assert torch.rand(4, device="cuda").tolist() == first != second
    assert torch.rand(4, device="cuda").tolist() == second
    torch.manual_seed(7)
    with torch.random.fork_rng([0]):
        assert torch.rand(4, device="cuda").tolist() == first
    assert F.dropout(torch.ones(99, device="cuda"), 0.5).sum() > 0 and torch.rand(4).tolist() == first  # was not drawn


def test_fp16_with_autocast_and_a_scaler(card):
    layer = nn.Linear(4, 4).to("cuda")
    optimizer, scaler = torch.optim.AdamW(layer.parameters(), fused=True), torch.amp.GradScaler("cuda", 2.0**8)
    for gradient, expected in ((1.0, 2.0**8), (float("inf"), 2.0**7)):
        with torch.autocast("cuda", torch.float16):
            assert torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.float16
            out = layer(torch.ones(2, 4, device="cuda"))
        assert out.dtype == torch.float16
        scaler.scale(out.float().sum() * gradient).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == expected
    assert not torch.is_autocast_enabled("cuda")


# Kernels and bytes. x is [4, 8] in fp32, 128 bytes; w [8, 2], 64; their product [4, 2], 32.


def test_kernels_of_a_product_and_a_sum(card):
    x, w, b = (torch.ones(shape, device="cuda") for shape in ((4, 8), (8, 2), (2,)))
    found = done(card, lambda: x @ w + b)
    assert found == {
        "kernels": 2, "launches": 2, "read": (128 + 64) + (32 + 8), "written": 32 + 32,
        "operations": 2 * 4 * 8 * 2, "operators": {"mm": 1, "add": 1},
    }  # fmt: skip


def test_views_and_allocations_are_no_kernels(card):
    x = torch.ones(4, 8, device="cuda")

    def look():
        torch.empty(3, device="cuda"), torch.empty_like(x), x.new_empty(2)
        x[1], x.T, x.view(-1), x.unsqueeze(0).expand(5, 4, 8), x.split(2), x.chunk(2), x.detach(), x.contiguous()
        x[:0].clone(), x.dim(), x.is_contiguous(), x.device

    assert done(card, look) == {}


@pytest.mark.parametrize(
    ("work", "read", "written"),
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
def test_bytes_that_a_kernel_moves(card, work, read, written):
    x = torch.ones(4, 8, device="cuda")
    assert moved(card, lambda: work(x)) == (read, written)


def test_bytes_of_what_picks_and_places_rows(card):
    """A table is not read as a whole: two rows of its 1,000 are. Indices are int64."""
    table, rows = torch.zeros(1000, 8, device="cuda"), torch.tensor([3, 5], device="cuda")
    assert moved(card, lambda: F.embedding(rows, table)) == (64 + 16, 64)
    assert moved(card, lambda: table.index_select(0, rows)) == (64 + 16, 64)
    assert moved(card, lambda: table[rows]) == (64 + 16, 64)
    assert moved(card, lambda: table.gather(0, rows[:, None])) == (8 + 16, 8)
    values = torch.ones(2, 8, device="cuda")
    assert moved(card, lambda: table.index_put_((rows,), values)) == (64 + 16, 64)
    one = torch.ones(2, 1, device="cuda")
    assert moved(card, lambda: table[:2].scatter_add_(1, rows[:, None], one)) == (8 + 16 + 8, 8)


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
        before = card.so_far()
        assert bool((x > 0).all())
        assert (card.so_far() - before).waits.total() == 1


def test_what_is_one_kernel_on_cuda_is_one_here(card):
    x, weight = torch.ones(4, 8, device="cuda"), torch.ones(8, device="cuda")
    assert kernels(card, lambda: F.dropout(x, 0.5)) == {"dropout": 1}
    assert kernels(card, lambda: F.rms_norm(x, (8,), weight)) == {"rms_norm": 1}
    assert moved(card, lambda: F.rms_norm(x, (8,), weight)) == (128 + 32, 128)
    q = torch.ones(1, 2, 3, 4, device="cuda")
    found = done(card, lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    assert found["kernels"] == 1 and found["operations"] == 2 * 2 * (2 * 3 * 3 * 4)  # two products in two heads


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
    before = card.so_far()
    ask(x)
    assert (card.so_far() - before).waits.total() == 1


def test_a_wait_tells_where_in_r3lite_it_happens(card):
    before = card.so_far()
    Sampler()(torch.zeros(1, 5, device="cuda"), [0.5])
    found = (card.so_far() - before).waits
    assert found and {w.where[0].partition(" ")[2] for w in found} == {"Sampler.__call__"}
    assert all(str(w).startswith("a copy to the ") and ", rollout/sampling.py:" in str(w) for w in found)


# Graphs


def test_a_graph_does_again_what_was_captured_on_the_same_memory(card):
    x, total = torch.zeros(2, 3, device="cuda"), torch.zeros(2, 5, device="cuda")
    step = torch.tensor([1], device="cuda")
    graph, double = torch.cuda.CUDAGraph(), 2
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local"):
        assert torch.cuda.is_current_stream_capturing()
        y = F.pad(x * double + step, (1, 1))
        total.add_(y)
        total[:, 0] = torch.arange(2, device="cuda") + total[:, 1].clone()
    assert total.sum() == 0  # a capture changes nothing
    x.fill_(3)
    double = 100  # a number of the host is the capture's for ever
    for times in (1, 2):
        found = done(card, graph.replay)
        assert found["launches"] == 1 and found["kernels"] == len(graph.kernels) > 8
        assert y.tolist() == [[0, 7, 7, 7, 0]] * 2
        assert total.tolist() == [[7 * times + row, *[7 * times] * 3, 0] for row in range(2)]


@pytest.mark.parametrize(
    "bad", [lambda x: x.sum().item(), lambda x: x + torch.ones(3).to("cuda"), lambda x: x[x > 0], lambda x: x.cpu()]
)
def test_what_cannot_be_captured_is_refused(card, bad):
    x = torch.ones(3, device="cuda")
    with (
        pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        bad(x)
    assert not torch.cuda.is_current_stream_capturing()


def test_attention_and_random_numbers_can_be_captured(card):
    q, graph = torch.rand(1, 2, 3, 4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = F.scaled_dot_product_attention(F.dropout(q, 0.5), q, q)
    results = []
    for _ in range(2):
        graph.replay()
        results.append(out.cpu())
    assert not torch.equal(*results)


# Streams


def side_by_side(card, before=lambda s: None, after=lambda s: None, home=False):
    """A tensor of this stream is doubled on another one, and the result is read here."""
    other = torch.cuda.Stream(CUDA)
    x = torch.ones(3, device="cuda")
    before(other)
    with torch.cuda.stream(other):
        y = x * 2
    after(other)
    return x, y, other


def wait_for(other):
    other.wait_stream(torch.cuda.current_stream())


def let_wait(other):
    torch.cuda.current_stream().wait_stream(other)


def test_streams_that_wait_for_each_other(card):
    x, y, other = side_by_side(card, wait_for, let_wait)
    assert (x + y).tolist() == [3] * 3
    event = torch.cuda.Event()
    x.add_(1)
    event.record()
    other.wait_event(event)
    with torch.cuda.stream(other):
        x.add_(1)
        done_there = other.record_event()
    done_there.synchronize()  # the host waits, and so whatever it queues next comes after it
    assert x.tolist() == [3] * 3
    for tensor in (x, y):
        tensor.record_stream(other)
        tensor.record_stream(torch.cuda.current_stream())


def test_a_stream_that_does_not_wait_is_found(card):
    with pytest.raises(Unordered, match="may still be writing"):
        side_by_side(card)
    x, y, other = side_by_side(card, wait_for)
    with pytest.raises(Unordered, match="may still be writing"):
        y.sum()
    with pytest.raises(Unordered, match="may still be reading"):
        x.zero_()
    let_wait(other)


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_may_not_be_given_back_while_another_stream_uses_it(card, recorded):
    x, _y, other = side_by_side(card, wait_for)
    if recorded:
        x.record_stream(other)
    del x
    if recorded:
        torch.ones(1, device="cuda") + 1
    else:
        with pytest.raises(Unordered, match="record_stream is missing"):
            torch.ones(1, device="cuda") + 1
        card._misuse = None


def test_the_host_may_not_read_what_is_on_its_way(card):
    x, pinned = torch.ones(3, device="cuda"), torch.empty(3, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    for read in (pinned.sum, pinned.tolist, pinned.numpy, lambda: pinned.add_(1)):
        with pytest.raises(Unordered):
            read()
    torch.cuda.synchronize()
    assert pinned.tolist() == [1] * 3


# Memory


def test_memory_is_that_of_live_tensors(card):
    assert torch.cuda.mem_get_info() == (int(3.6 * GIB), 4 * GIB)
    x = torch.ones(KIB, device="cuda")
    y = x[:10] + 0
    assert (
        torch.cuda.memory_allocated() == 4 * KIB + 512
        and torch.cuda.mem_get_info()[0] == int(3.6 * GIB) - 4 * KIB - 512
    )
    del x, y
    assert torch.cuda.memory_allocated() == 0 and torch.cuda.max_memory_allocated() == 4 * KIB + 512
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0
    torch.ones(KIB)
    assert torch.cuda.max_memory_allocated() == 0


def test_what_a_process_may_not_have_it_does_not_get(card):
    x = torch.ones(KIB, KIB, device="cuda")  # 4 MiB
    torch.cuda.set_per_process_memory_fraction(10 / (4 * KIB), 0)  # of 4 GiB: 10 MiB
    y = x + 1
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory. Tried to allocate 4.00 MiB"):
        x + 1
    x.add_(1)
    del y
    assert (x + 1)[0, 0] == 3


def test_a_card_is_full_where_its_free_memory_ends():
    with SimulatedCuda(total=8 * GIB, free=KIB) as card, pytest.raises(torch.OutOfMemoryError):
        torch.ones(KIB, device="cuda")
    assert card.memory.live == 0


def test_memory_runs_out_when_it_is_told_to_once(card):
    x = torch.ones(3, device="cuda")
    card.run_out_of_memory(after=2)
    x + 1, x.add_(1), x.view(-1), x + 1
    with pytest.raises(torch.OutOfMemoryError):
        x + 1
    assert (x + 1).sum() == 9


# The card


def test_the_card_is_one_of_a_laptop(card):
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and not torch.cuda.is_initialized()
    properties = torch.cuda.get_device_properties(0)
    assert (properties.major, properties.minor, properties.total_memory) == (7, 5, 4 * GIB)
    assert not torch.cuda.is_bf16_supported(including_emulation=False) and torch.cuda.is_bf16_supported()
    torch.ones(1, device="cuda")
    assert torch.cuda.is_initialized()


def test_a_card_may_have_bf16():
    with SimulatedCuda(bf16=True):
        assert torch.cuda.is_bf16_supported(including_emulation=False)


def test_events_tell_the_time_that_bytes_take(card):
    x = torch.ones(64, 64, device="cuda")
    times = []
    for dtype in (torch.float32, torch.float16):
        a = x.to(dtype)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        a @ a
        end.record()
        times.append(start.elapsed_time(end))
    assert times[0] == pytest.approx(1000 * 2 * 64 * 64 * 4 / 192e9) and times[1] == pytest.approx(times[0] / 2)


def test_after_the_block_all_is_as_before():
    names = [(torch.Tensor, n) for n in ("device", "to", "tolist", "numpy")] + [(torch, "tensor"), (torch, "autocast")]
    before = [getattr(owner, name) for owner, name in names]
    with pytest.raises(KeyError), SimulatedCuda():
        x = torch.ones(3, device="cuda")
        raise KeyError
    assert [getattr(owner, name) for owner, name in names] == before and "device" not in vars(torch.Tensor)
    assert not torch.cuda.is_available() and x.device.type == "cpu"
    with SimulatedCuda() as card:  # what is kept from an earlier block, as caches do, is of the device still
        assert (x + torch.ones(3, device="cuda")).sum().item() == 6
    assert card.counts.operators == Counter(fill_=1, add=1, sum=1)


def test_a_module_is_run_as_python_does():
    command = [sys.executable, "-m", "bench.simulated_cuda", "-m", "r3lite.plan", "--model", "tiny", "--device", "cuda"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "context" in ran.stdout and '"kernels": 0' in ran.stderr
